"""A prompt with its chunks and its reuse method: the one record of a request for both backends. No torch here."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from chunkweave.config import ReuseConfig
from chunkweave.ordering.arrangement import Promotion
from chunkweave.planning.adaptive_methods import promoted_length
from chunkweave.planning.method import reads_question
from chunkweave.planning.method_choice import EXACT_METHODS, FIELD, Kept, MethodChoice
from chunkweave.prompt.contexts import MeanShare
from chunkweave.prompt.parts import PartKind, Prompt, RunView
from chunkweave.types import ChunkId, Context, Span


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that a store can hold: its id and tokens, its position, and the ids of the parts before it.

    The other fields are those of `PromptPart`.
    """

    id: ChunkId
    token_ids: tuple[int, ...]
    span: Span
    context: Context
    in_place: bool = False
    view: RunView | None = None
    source: str = ""
    novel: bool = False


@dataclass(frozen=True, slots=True)
class WeaveRequest:
    """A prompt with its parts and its reuse method.

    The parts cover the prompt's tokens as sent by the client, without generated ones. `kept` says what is stored of
    newly computed chunks, `promotion` where exact prefixes may grow. Without `counts_as_request` (computed before a
    search has ended) it does not count for eviction. With `raisable` the client set no budget, so it may be raised to
    hide loading. With `mean` only the last part is stored, as one context's share of the mean. With `reads_only`
    nothing is stored, neither here nor where another request would find it in vLLM's own prefix cache, which it does
    not use.
    """

    prompt: Prompt
    choice: MethodChoice
    kept: Kept
    counts_as_request: bool = True
    promotion: Promotion = field(default_factory=Promotion)
    raisable: bool = False
    mean: MeanShare | None = None
    reads_only: bool = False

    @property
    def method(self) -> str:
        return self.choice.method

    @property
    def reuse(self) -> ReuseConfig:
        """The method's parameters."""
        return self.choice.reuse

    @property
    def start(self) -> tuple[int, ...]:
        """The leading tokens of the prompt that no store holds."""
        first = self.prompt.parts[0]
        return first.token_ids if first.kind is PartKind.START else ()

    def stored_parts(self) -> Iterator[StoredPart]:
        """The parts that a store can hold, in prompt order."""
        prompt = self.prompt
        for part, span, context in zip(prompt.parts, prompt.spans(), prompt.contexts(), strict=True):
            if part.id is not None:
                properties = (part.in_place, part.view, part.source, part.novel)
                yield StoredPart(part.id, part.token_ids, span, context, *properties)

    def kept_parts(self, is_exact: Callable[[StoredPart], bool]) -> list[StoredPart]:
        """The parts that may be stored: with an exact method, chunks on the promoted exact path only.

        `is_exact` says whether an exact segment of a part is stored.
        """
        if self.mean is not None or self.reads_only:
            return []
        path = list(self.stored_parts())
        promoted = self.promotion.kept
        if promoted is None or self.method not in EXACT_METHODS:
            return path
        head = len(path) - sum(part.kind is PartKind.CHUNK for part in self.prompt.parts)
        stored = sum(1 for _ in takewhile(is_exact, path[head:]))
        return path[: head + promoted_length([part.id in promoted for part in path[head:]], stored)]

    @property
    def salt(self) -> str:
        """The salt that separates this request's woven blocks in vLLM's prefix cache.

        Woven KV depends on all chunks of the prompt and on the method, and with some methods on the question; only a
        request equal in these may use its blocks.
        """
        digest = hashlib.blake2b(digest_size=16)
        ids = [part.id or "" for part in self.prompt.parts]
        if reads_question(self.choice.made):
            ids.append(repr(self.prompt.parts[-1].token_ids))
        for text in (self.method, repr(self.reuse), *ids, *(["mean"] if self.mean is not None else [])):
            digest.update(text.encode() + b"\0")
        return f"{FIELD}-1:{digest.hexdigest()}"
