"""Parses a request's chunks and method into a `Prompt` and a method choice. No torch here."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise, takewhile
from typing import Any

from chunkweave.config import CaptureConfig, QueryConfig, ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.ordering.arrangement import Promotion
from chunkweave.planning.adaptive_methods import ContextMethod, promoted_length
from chunkweave.planning.calibration import CalibrationRecord
from chunkweave.planning.method import RATIO, reads_question, settings_changes
from chunkweave.planning.method_choice import (
    EXACT_METHODS,
    FIELD,
    Kept,
    MethodChoice,
    MethodChooser,
    MethodRequest,
    checked_flag,
    checked_whole,
    refuse_unknown_keys,
    refuse_untaken,
)
from chunkweave.prompt.contexts import MOST_CONTEXTS, MeanShare
from chunkweave.prompt.find_chunks import ChunkFinder
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id, chunk_salt, is_neutral, neutral_id
from chunkweave.settings import Place, read
from chunkweave.types import CacheUse, ChunkId, Context, Span


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that a store can hold: its id and tokens, its position, and the ids of the parts before it.

    Of an `exact_only` part only a segment on the exact prefix is reused.
    """

    id: ChunkId
    token_ids: tuple[int, ...]
    span: Span
    context: Context
    exact_only: bool = False


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
                yield StoredPart(part.id, part.token_ids, span, context, part.exact_only)

    def kept_parts(self, is_exact: Callable[[StoredPart], bool]) -> list[StoredPart]:
        """The parts that may be stored: with an exact method, chunks on the promoted exact path only.

        `is_exact` says whether an exact segment of a part is stored.
        """
        if self.mean is not None or self.reads_only:
            return []
        path, promoted = list(self.stored_parts()), self.promotion.kept
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
        if reads_question(self.method, self.reuse):
            ids.append(repr(self.prompt.parts[-1].token_ids))
        for text in (self.method, repr(self.reuse), *ids, *(["mean"] if self.mean is not None else [])):
            digest.update(text.encode() + b"\0")
        return f"{FIELD}-1:{digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults for request fields, from the connector's extra config and from a calibration."""

    chooser: MethodChooser = field(default_factory=MethodChooser)
    capture: bool | None = None

    @classmethod
    def from_config(
        cls,
        extra: Mapping[str, Any],
        record: CalibrationRecord | None = None,
        how_to_calibrate: str = "chunkweave calibrate",
    ) -> "Defaults":
        """Read the keys that a request may also set. `record` is the model's calibration, if any.

        Raises:
            UsageError: a value is out of range or of the wrong type, or a quality without a record.
        """
        request = _method_request(extra)
        reuse = ReuseConfig(capture=read(CaptureConfig, extra, Place.CONNECTOR))
        reuse = replace(_compared(extra, reuse), **request.parameters)
        chooser = MethodChooser(request, reuse, record, how_to_calibrate)
        chooser.choose_usual()  # raise at start-up, not with every request
        return cls(chooser, _capture(extra, None))


def parse(
    params: Mapping[str, Any],
    token_ids: Sequence[int],
    *,
    fingerprint: str,
    salt: str,
    start: tuple[int, ...],
    defaults: Defaults,
    num_layers: int | None = None,
) -> WeaveRequest:
    """Parse a request's chunks and method.

    `params` is the value of `FIELD`. `chunks` are `[start, stop]` token positions, each beginning where the one before
    ends. Tokens before them are the system part, after `start_tokens` leading tokens that belong to no chunk (default:
    those of `start` if the prompt begins with them, else none). Tokens after them are the question. `counts_as_request`
    false: the request does not count for eviction. The first `neutral` chunks are neutral passages. `promoted` and
    `continued` are indices of chunks, see `Promotion`. `mean` names the mean that the last chunk, which ends the
    prompt, is a share of (`MeanShare`). `at_least`: ratio or alpha may be raised to hide loading; default: if neither
    is given. `start` is the beginning of our own engine's prompts; chunks after it get the same ids as there. With
    `num_layers`, named layers are checked against the model.

    Raises:
        UsageError: the message says which field is wrong and why.
    """
    if not isinstance(params, Mapping):
        raise UsageError(f"{FIELD} must be an object such as {{'chunks': [[1, 120], [120, 260]]}}")
    refuse_unknown_keys(params, REQUEST_FIELDS)
    _refuse_broken(salt)
    if checked_flag(params.get(FIND, False), FIND):
        raise UsageError(f"give either chunks or {FIND}, not both")
    chunks = _chunks(params.get("chunks"), len(token_ids))
    passages = checked_whole(params.get("neutral", 0), "neutral")
    if not 0 <= passages <= len(chunks):
        raise UsageError(f"neutral must be between 0 and {len(chunks)}, the number of chunks")
    neutral = chunks[:passages]
    first = params.get("start_tokens", len(start) if tuple(token_ids[: len(start)]) == start else 0)
    if not 0 <= checked_whole(first, "start_tokens") <= chunks[0].start:
        raise UsageError(f"start_tokens must be between 0 and {chunks[0].start}, where the first chunk begins")
    choice, kept = chosen(params, defaults, num_layers)
    reads_only = reads_only_of(params)
    if reads_only:
        kept = Kept(kv=False)
    salt = chunk_salt(salt, token_ids[:first], start)

    def part(kind: PartKind, first: int, stop: int) -> PromptPart:
        ids = tuple(token_ids[first:stop])
        if kind not in (PartKind.SYSTEM, PartKind.CHUNK):
            return PromptPart(kind, ids)
        own = chunk_id(fingerprint, salt, ids)
        return PromptPart(kind, ids, neutral_id(own) if Span(first, stop) in neutral else own)

    edges = [
        (PartKind.START, 0, first),
        (PartKind.SYSTEM, first, chunks[0].start),
        *((PartKind.CHUNK, chunk.start, chunk.stop) for chunk in chunks),
        (PartKind.QUESTION, chunks[-1].stop, len(token_ids)),
    ]
    prompt = Prompt(tuple(part(*edge) for edge in edges if edge[1] < edge[2]))
    ids = [part.id for part in prompt.parts if part.kind is PartKind.CHUNK and part.id is not None]
    kept_over, continued = (_numbered(params.get(name), name, ids) for name in _PROMOTION)
    promotion = Promotion(kept_over, continued or frozenset())
    raisable, counts_as_request, mean = _raisable(params), _counts_as_request(params), _mean(params.get("mean"))
    if mean is not None and (choice.method != ContextMethod.name or prompt.parts[-1].id is None):
        raise UsageError(f"mean needs method {ContextMethod.name!r}, and a prompt that ends with its last chunk")
    if mean is not None and reads_only:
        raise UsageError(f"mean stores its last chunk: {CACHE} must be {CacheUse.USE}")
    return WeaveRequest(prompt, choice, kept, counts_as_request, promotion, raisable, mean, reads_only)


def parse_found(
    params: Mapping[str, Any],
    token_ids: Sequence[int],
    finder: ChunkFinder,
    *,
    fingerprint: str,
    salt: str,
    start: tuple[int, ...],
    defaults: Defaults,
    num_layers: int | None = None,
) -> WeaveRequest | None:
    """Parse the method of a request whose chunks `finder` finds in its prompt; None if it finds none.

    The other arguments are those of `parse`.

    Raises:
        UsageError: the message says which field is wrong and why.
    """
    refuse_unknown_keys(params, REQUEST_FIELDS)
    if unknown := sorted(params.keys() - SETTINGS - {FIND, CACHE, "counts_as_request", _AT_LEAST}):
        raise UsageError(f"{', '.join(unknown)} cannot be given with {FIND}")
    _refuse_broken(salt)
    choice, kept = chosen(params, defaults, num_layers)
    reads_only = reads_only_of(params)
    if reads_only:
        kept = Kept(kv=False)
    prompt = finder.prompt(token_ids, start, fingerprint=fingerprint, salt=salt)
    if all(part.id is None for part in prompt.parts):
        return None
    return WeaveRequest(
        prompt, choice, kept, _counts_as_request(params), Promotion(), _raisable(params), reads_only=reads_only
    )


def _raisable(params: Mapping[str, Any]) -> bool:
    sets_budget = RATIO in params or _method_request(params).sets_budget
    return checked_flag(params.get(_AT_LEAST, not sets_budget), _AT_LEAST)


def _counts_as_request(params: Mapping[str, Any]) -> bool:
    return checked_flag(params.get("counts_as_request", True), "counts_as_request")


def _refuse_broken(salt: str) -> None:
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("cache_salt must be valid Unicode: it has half of a surrogate pair") from error


def chosen(params: Mapping[str, Any], defaults: Defaults, num_layers: int | None) -> tuple[MethodChoice, Kept]:
    """The method of a request with these fields, and what it stores for later ones.

    Raises:
        UsageError: the message says which field is wrong and why.
    """
    chooser = replace(defaults.chooser, reuse=_compared(params, defaults.chooser.reuse))
    request = _method_request(params)
    choice = chooser.choose(request)
    fixed = sorted(_COMPARED & params.keys())
    if fixed and request.method is None and (request.quality is not None or chooser.usual.method is None):
        raise UsageError(f"{', '.join(fixed)} can only be given with a method that takes it")
    refuse_untaken(choice.method, fixed)
    if request.method is not None and (twice := sorted(settings_changes(request.method).keys() & {*fixed})):
        raise UsageError(f"method {request.method!r} sets {', '.join(twice)} already: leave out one of the two")
    layer = choice.reuse.check_layers[-1] if "check_layers" in choice.parameters else 0
    if num_layers is not None and layer >= num_layers:
        raise UsageError(f"check_layers has layer {layer}, but the model has {num_layers} layers")
    return choice, defaults.chooser.kept(choice, _capture(params, defaults.capture))


def weave_params(
    prompt: Prompt,
    choice: MethodChoice,
    promotion: Promotion | None,
    *,
    raisable: bool = False,
    mean: MeanShare | None = None,
) -> dict[str, Any] | None:
    """The connector's request fields for a prompt; None if no part can be stored."""
    spans = [
        [span.start, span.stop]
        for part, span in zip(prompt.parts, prompt.spans(), strict=True)
        if part.kind in _STORED_KINDS
    ]
    if not spans:
        return None
    start = sum(len(part) for part in prompt.parts if part.kind is PartKind.START)
    neutral = sum(part.id is not None and is_neutral(part.id) for part in prompt.parts)
    more: dict[str, Any] = {"neutral": neutral} if neutral else {}
    if promotion is not None:
        more |= promotion_params(prompt, promotion)
    if mean is not None:
        more["mean"] = {"group": mean.group, "of": mean.of, **({"anew": True} if mean.anew else {})}
    return {
        "chunks": spans,
        "start_tokens": start,
        "method": choice.method,
        **more,
        **to_params(choice, raisable=raisable),
    }


def to_params(choice: MethodChoice, *, raisable: bool = False) -> dict[str, Any]:
    """The fields with a method's parameters, in a request that names it.

    All are sent, defaults included, because the connector may have other defaults. Only `seed` is left out at its
    default, because the connector has its own setting. With `raisable` the values are minimums: the client set no
    budget.
    """
    value = dict(choice.parameters)
    if choice.reuse.seed == ReuseConfig().seed:
        value.pop("seed", None)
    return {**value, **({_AT_LEAST: True} if raisable else {})}


def promotion_params(prompt: Prompt, promotion: Promotion) -> dict[str, list[int]]:
    """The fields of a promotion, as indices of the prompt's chunks and turns; defaults are left out."""
    ids = [part.id for part in prompt.parts if part.kind in _STORED_KINDS]

    def numbers(of: Set[ChunkId]) -> list[int]:
        return [number for number, chunk in enumerate(ids) if chunk in of]

    promoted, continued = _PROMOTION
    value = {} if promotion.kept is None else {promoted: numbers(promotion.kept)}
    return {**value, **({continued: numbers(promotion.continued)} if promotion.continued else {})}


def _numbered(value: Any, name: str, chunks: Sequence[ChunkId]) -> frozenset[ChunkId] | None:
    """The chunks with the given indices; None if the field is missing."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name} must be a list of chunk numbers, not {value!r}")
    if len(value) > len(chunks):
        raise UsageError(f"{name} names {len(value)} chunks, and there are {len(chunks)}")
    numbers = [checked_whole(number, name) for number in value]
    if any(not 0 <= number < len(chunks) for number in numbers):
        raise UsageError(f"{name} must be chunk numbers from 0 to {len(chunks) - 1}")
    return frozenset(chunks[number] for number in numbers)


def _chunks(value: Any, tokens: int) -> list[Span]:
    if isinstance(value, Sized) and len(value) > max(tokens, 1):  # check before creating an object for each
        raise UsageError(f"{len(value)} chunks are named in a prompt of {tokens} tokens")
    try:
        chunks = [Span(checked_whole(start, "chunks"), checked_whole(stop, "chunks")) for start, stop in value]
    except (TypeError, ValueError) as error:
        raise UsageError("chunks must be a list of [start, stop] token positions") from error
    if not chunks or any(span.start >= span.stop for span in chunks):  # `len` of a span has an upper bound
        raise UsageError("chunks must name at least one chunk, and no empty one")
    if any(span.stop != next_span.start for span, next_span in pairwise(chunks)):
        raise UsageError("each chunk must begin where the one before it ends")
    if chunks[-1].stop > tokens:
        raise UsageError(f"the last chunk ends at {chunks[-1].stop}, but the prompt has {tokens} tokens")
    return chunks


def _method_request(params: Mapping[str, Any]) -> MethodRequest:
    return MethodRequest.of_fields(
        {name: value for name, value in params.items() if (name, value) != ("quality", None)}
    )


def reads_only_of(params: Mapping[str, Any]) -> bool:
    """Whether a request stores nothing.

    Raises:
        UsageError: the field is wrong.
    """
    value = params.get(CACHE, CacheUse.USE)
    if value not in (CacheUse.USE, CacheUse.READ):
        raise UsageError(f"{CACHE} must be {CacheUse.USE} or {CacheUse.READ}, not {str(value)[:40]!r}")
    return bool(value == CacheUse.READ)


def _capture(params: Mapping[str, Any], usual: bool | None) -> bool | None:
    return checked_flag(params["capture"], "capture") if "capture" in params else usual


def _compared(value: Mapping[str, Any], usual: ReuseConfig) -> ReuseConfig:
    """`usual` with the given fields of `_COMPARED`."""
    changed: dict[str, Any] = {}
    if "seed" in value:
        changed["seed"] = checked_whole(value["seed"], "seed")
    if "query" in value:
        changed["query"] = _query(value["query"], usual.query)
    return replace(usual, **changed)


def _mean(value: Any) -> MeanShare | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) - {"anew"} != {"group", "of"}:
        raise UsageError("mean must be an object such as {'group': 'a name', 'of': 4}")
    group, count = value["group"], checked_whole(value["of"], "mean.of")
    if not isinstance(group, str) or not 0 < len(group) <= _MOST_GROUP:
        raise UsageError(f"mean.group must be a text of at most {_MOST_GROUP} characters")
    if not 1 <= count <= MOST_CONTEXTS:
        raise UsageError(f"mean.of must be between 1 and {MOST_CONTEXTS}")
    return MeanShare(group, count, anew=checked_flag(value.get("anew", False), "mean.anew"))


_MOST_GROUP = 200


def _query(value_of_field: Any, usual: QueryConfig) -> QueryConfig:
    if not isinstance(value_of_field, Mapping):
        raise UsageError("query must be an object such as {'tail': 4, 'layers': 'late'}")
    query_fields = sorted(query_field.name for query_field in fields(QueryConfig))
    if unknown := sorted(
        str(key).encode("utf-8", "backslashreplace").decode() for key in value_of_field if key not in query_fields
    ):
        raise UsageError(f"unknown fields of query: {', '.join(unknown)}; there are {', '.join(query_fields)}")
    return replace(usual, **{name: _query_value(name, value) for name, value in value_of_field.items()})


def _query_value(name: str, value: Any) -> Any:
    """Parse a field of `QueryConfig` by the type of its default."""
    path, kind = f"query.{name}", type(getattr(QueryConfig(), name))
    if name == "tail" and value is None:
        return None
    if not issubclass(kind, StrEnum):
        return checked_whole(value, path)
    if not isinstance(value, str) or value not in list(kind):
        raise UsageError(f"{path} must be one of {', '.join(kind)}, not {value!r}")
    return kind(value)


_COMPARED = frozenset({"seed", "query"})
"""Fields of `ReuseConfig` that a request may set besides those of `MethodRequest`, to compare variants of methods."""

FIND = "find_chunks"
"""The field that says whether chunks are found in the prompt."""

CACHE = "cache"
"""The field of `reads_only`: `use` or `read`."""

_AT_LEAST = "at_least"
"""The field that says whether ratio and alpha may be raised."""

_PROMOTION = ("promoted", "continued")
"""The fields of a `Promotion`."""

_STORED_KINDS = (PartKind.CHUNK, PartKind.TURN)
"""Kinds of parts that are chunks to the connector."""

SETTINGS = _COMPARED | {"method", "quality", "recompute_ratio", "check_layers", "alpha", "focus", "capture"}
"""Fields about the method, in requests and, as defaults, in the connector's extra config."""

REQUEST_FIELDS = SETTINGS | {
    "chunks",
    "start_tokens",
    "counts_as_request",
    "neutral",
    "mean",
    FIND,
    CACHE,
    _AT_LEAST,
    *_PROMOTION,
}
"""All fields of a request."""
