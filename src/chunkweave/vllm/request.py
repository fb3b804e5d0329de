"""What a request says about its chunks, made into the project's `Prompt`. Torch-free."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chunkweave.chunking.identity import chunk_id
from chunkweave.chunking.prompt import PartKind, Prompt, PromptPart
from chunkweave.config import ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.planning.attention_needs import reads_question
from chunkweave.planning.method_choice import MethodChoice
from chunkweave.planning.request_field import FIELD, checked_whole, refuse_unknown_keys
from chunkweave.types import ChunkId, Context, Span
from chunkweave.vllm.weave_settings import SETTINGS, Defaults, chosen

__all__ = ["FIELD", "Defaults", "WeaveRequest", "parse"]

_KEYS = SETTINGS | {"chunks", "start_tokens"}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that a store can hold: its id and tokens, where it stands, and the ids of what comes before it."""

    id: ChunkId
    token_ids: tuple[int, ...]
    span: Span
    context: Context


@dataclass(frozen=True, slots=True)
class WeaveRequest:
    """A prompt with its parts and how it is to be woven.

    The parts cover the prompt's tokens as the client sent them; what the model generates is not among them. With
    `capture` what newly computed chunks attend to is stored with them, for methods that score chunks by it.
    """

    prompt: Prompt
    choice: MethodChoice
    capture: bool = False

    @property
    def method(self) -> str:
        return self.choice.method

    @property
    def reuse(self) -> ReuseConfig:
        """What the method is told."""
        return self.choice.reuse

    def stored_parts(self) -> Iterator[StoredPart]:
        """The parts that a store can hold, in prompt order."""
        prompt = self.prompt
        for part, span, context in zip(prompt.parts, prompt.spans(), prompt.contexts(), strict=True):
            if part.id is not None:
                yield StoredPart(part.id, part.token_ids, span, context)

    def salt(self, given: str | None) -> str:
        """What keeps this request's blocks apart in vLLM's prefix cache.

        Woven KV depends on all chunks of the prompt and on the method, and with some methods on the question; so only a
        request with the same of these (and the same salt of its own) may take its blocks.
        """
        digest = hashlib.blake2b(digest_size=16)
        ids = [part.id or "" for part in self.prompt.parts]
        if reads_question(self.method, self.reuse):
            ids.append(repr(self.prompt.parts[-1].token_ids))
        for text in (self.method, repr(self.reuse), *ids):
            digest.update(text.encode() + b"\0")
        return f"{given or ''}|{FIELD}-1:{digest.hexdigest()}"


def parse(
    params: Mapping[str, Any],
    token_ids: Sequence[int],
    *,
    fingerprint: str,
    salt: str,
    bos: int | None,
    usual: tuple[int, ...] | None = None,
    defaults: Defaults,
    num_layers: int | None = None,
) -> WeaveRequest:
    """A request's chunks and method.

    `params` is the value of `FIELD`: `chunks` are `[start, stop]` token positions, each beginning where the one before
    ends. What comes before them is the system part, after `start_tokens` tokens that belong to nobody (by default those
    of `usual` if the prompt begins with them, else none); what comes after them is the question. `usual` is what the
    project's own engine begins prompts with (None: `bos`, if there is one); chunks behind it have the ids which that
    engine gives them. `num_layers` is the model's, if it is to be checked that it has the layers that are asked for.

    Raises:
        UsageError: the message says which field is wrong and why.
    """
    if not isinstance(params, Mapping):
        raise UsageError(f"{FIELD} must be an object such as {{'chunks': [[1, 120], [120, 260]]}}")
    refuse_unknown_keys(params, _KEYS)
    chunks = _chunks(params.get("chunks"), len(token_ids))
    usual = (() if bos is None else (bos,)) if usual is None else usual
    start = params.get("start_tokens", len(usual) if tuple(token_ids[: len(usual)]) == usual else 0)
    if not 0 <= checked_whole(start, "start_tokens") <= chunks[0].start:
        raise UsageError(f"start_tokens must be between 0 and {chunks[0].start}, where the first chunk begins")
    choice, capture = chosen(params, defaults, num_layers)
    if tuple(token_ids[:start]) != usual:
        # No context names what START holds; so that a chunk behind other tokens is no exact prefix here, its id does.
        salt = f"{salt}\0start:{','.join(map(str, token_ids[:start]))}"

    def part(kind: PartKind, first: int, stop: int) -> PromptPart:
        ids = tuple(token_ids[first:stop])
        stored = kind in (PartKind.SYSTEM, PartKind.CHUNK)
        return PromptPart(kind, ids, chunk_id(fingerprint, salt, ids) if stored else None)

    edges = [
        (PartKind.START, 0, start),
        (PartKind.SYSTEM, start, chunks[0].start),
        *((PartKind.CHUNK, chunk.start, chunk.stop) for chunk in chunks),
        (PartKind.QUESTION, chunks[-1].stop, len(token_ids)),
    ]
    return WeaveRequest(Prompt(tuple(part(*edge) for edge in edges if edge[1] < edge[2])), choice, capture)


def _chunks(given: Any, tokens: int) -> list[Span]:
    try:
        chunks = [Span(checked_whole(start, "chunks"), checked_whole(stop, "chunks")) for start, stop in given]
    except (TypeError, ValueError) as error:
        raise UsageError("chunks must be a list of [start, stop] token positions") from error
    if not chunks or not all(chunks):
        raise UsageError("chunks must name at least one chunk, and no empty one")
    if any(one.stop != other.start for one, other in pairwise(chunks)):
        raise UsageError("each chunk must begin where the one before it ends")
    if chunks[-1].stop > tokens:
        raise UsageError(f"the last chunk ends at {chunks[-1].stop}, but the prompt has {tokens} tokens")
    return chunks
