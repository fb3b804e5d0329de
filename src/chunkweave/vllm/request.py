"""What a request says about its chunks, made into the project's `Prompt`. Torch-free."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from chunkweave.chunking.identity import chunk_id
from chunkweave.chunking.prompt import PartKind, Prompt, PromptPart
from chunkweave.config import ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.planning.request_field import (
    FIELD,
    checked_method,
    checked_ratio,
    checked_whole,
    refuse_unknown_keys,
)
from chunkweave.types import ChunkId, Context, Span

__all__ = ["FIELD", "METHODS", "Defaults", "WeaveRequest", "parse"]

METHODS = ("prefix", "full-reuse", "epic", "random", "cacheblend")
"""Methods whose plans are one pass with rules on KV; what needs attention evidence is not here."""

SETTINGS = frozenset({"method", "recompute_ratio", "check_layers", "seed"})
"""What a request may say of the way it is woven, and the connector's extra config for those that do not."""

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

    The parts cover the prompt's tokens as the client sent them; what the model generates is not among them.
    """

    prompt: Prompt
    method: str
    reuse: ReuseConfig

    def stored_parts(self) -> Iterator[StoredPart]:
        """The parts that a store can hold, in prompt order."""
        prompt = self.prompt
        for part, span, context in zip(prompt.parts, prompt.spans(), prompt.contexts(), strict=True):
            if part.id is not None:
                yield StoredPart(part.id, part.token_ids, span, context)

    def salt(self, given: str | None) -> str:
        """What keeps this request's blocks apart in vLLM's prefix cache.

        Woven KV depends on all chunks of the prompt and on the method; so only a request with the same of both (and
        the same salt of its own) may take its blocks.
        """
        digest = hashlib.blake2b(digest_size=16)
        ids = [part.id or "" for part in self.prompt.parts]
        for text in (self.method, repr(self.reuse), *ids):
            digest.update(text.encode() + b"\0")
        return f"{given or ''}|{FIELD}-1:{digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request that does not say gets: the connector's extra config."""

    method: str = "prefix"
    reuse: ReuseConfig = field(default_factory=ReuseConfig)

    @classmethod
    def from_config(cls, extra: Mapping[str, Any]) -> "Defaults":
        """Read the keys that a request may set too.

        Raises:
            UsageError: a value is out of range or of the wrong type.
        """
        fields = {key: extra[key] for key in SETTINGS & extra.keys()}
        return cls(*_reuse(fields, cls()))


def parse(
    params: Mapping[str, Any],
    token_ids: Sequence[int],
    *,
    fingerprint: str,
    salt: str,
    bos: int | None,
    defaults: Defaults,
    num_layers: int | None = None,
) -> WeaveRequest:
    """A request's chunks and method.

    `params` is the value of `FIELD`: `chunks` are `[start, stop]` token positions, each beginning where the one before
    ends. What comes before them is the system part, after `start_tokens` tokens that belong to nobody (by default one
    if the prompt begins with `bos`, else none); what comes after them is the question. `num_layers` is the model's, if
    it is to be checked that it has the layers that are asked for.

    Raises:
        UsageError: the message says which field is wrong and why.
    """
    if not isinstance(params, Mapping):
        raise UsageError(f"{FIELD} must be an object such as {{'chunks': [[1, 120], [120, 260]]}}")
    refuse_unknown_keys(params, _KEYS)
    chunks = _chunks(params.get("chunks"), len(token_ids))
    default_start = int(bool(token_ids) and bos is not None and token_ids[0] == bos)
    start = params.get("start_tokens", default_start)
    if not 0 <= checked_whole(start, "start_tokens") <= chunks[0].start:
        raise UsageError(f"start_tokens must be between 0 and {chunks[0].start}, where the first chunk begins")
    method, reuse = _reuse(params, defaults)
    if num_layers is not None and reuse.check_layers[-1] >= num_layers:
        raise UsageError(f"layer {reuse.check_layers[-1]} is to be checked, but the model has {num_layers} layers")
    usual = () if bos is None else (bos,)
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
    return WeaveRequest(Prompt(tuple(part(*edge) for edge in edges if edge[1] < edge[2])), method, reuse)


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


def _reuse(params: Mapping[str, Any], defaults: Defaults) -> tuple[str, ReuseConfig]:
    method = checked_method(params.get("method", defaults.method), METHODS, "inside vLLM ")
    changed: dict[str, Any] = {}
    if "recompute_ratio" in params:
        changed["recompute_ratio"] = checked_ratio(params["recompute_ratio"])
    if "check_layers" in params:
        layers = params["check_layers"]
        if not isinstance(layers, list | tuple):
            raise UsageError("check_layers must be a list of layer numbers")
        changed["check_layers"] = tuple(checked_whole(layer, "check_layers") for layer in layers)
    if "seed" in params:
        changed["seed"] = checked_whole(params["seed"], "seed")
    return method, replace(defaults.reuse, **changed)
