"""The form of a `WeaveRequest` between the server and vLLM. No torch here."""

from collections.abc import Callable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from chunkweave.config import ReuseConfig
from chunkweave.conversation.weave_request import WeaveRequest
from chunkweave.errors import UsageError
from chunkweave.ordering.arrangement import Promotion
from chunkweave.planning.adaptive_methods import ContextMethod
from chunkweave.planning.calibration import CalibrationRecord
from chunkweave.planning.method_choice import (
    EXACT_METHODS,
    FIELD,
    Kept,
    MethodChooser,
    MethodRequest,
    checked_flag,
    checked_method,
    checked_whole,
    refuse_unknown_keys,
)
from chunkweave.prompt.contexts import MOST_CONTEXTS, MeanShare
from chunkweave.prompt.find_chunks import ChunkFinder, with_usable_views
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id, chunk_salt, is_neutral, neutral_id
from chunkweave.types import CacheUse, ChunkId, Span


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
        num_layers: int | None = None,
    ) -> "Defaults":
        """Read the keys that a request may also set. `record` is the model's calibration, if any.

        Layers that a method names are checked against the model's `num_layers`, if known.

        Raises:
            UsageError: a value is out of range or of the wrong type, or a quality without a record.
        """
        chooser = MethodChooser(_method_request(extra), ReuseConfig(), record, how_to_calibrate, num_layers)
        chooser.choose_usual()  # raise at start-up, not with every request
        return cls(chooser, _capture(extra, None))


def from_wire(
    params: Mapping[str, Any],
    token_ids: Sequence[int],
    *,
    fingerprint: str,
    salt: str,
    start: tuple[int, ...],
    defaults: Defaults,
) -> WeaveRequest:
    """Read a request's chunks and method, as `to_wire` writes them.

    `params` is the value of `FIELD`. `chunks` are `[start, stop]` token positions, each beginning where the one before
    ends. Tokens before them are the system part, after `start_tokens` leading tokens that belong to no chunk (default:
    those of `start` if the prompt begins with them, else none). Tokens after them are the question. `counts_as_request`
    false: the request does not count for eviction. The first `neutral` chunks are neutral passages. `promoted` and
    `continued` are indices of chunks, see `Promotion`. `mean` names the mean that the last chunk, which ends the
    prompt, is a share of (`MeanShare`). `at_least`: ratio or alpha may be raised to hide loading; default: if the
    method's text sets neither. `start` is the beginning of our own engine's prompts; chunks after it get the same ids
    as there.

    Raises:
        UsageError: the message says which field is wrong and why.
    """
    if not isinstance(params, Mapping):
        raise UsageError(f"{FIELD} must be an object such as {{'chunks': [[1, 120], [120, 260]]}}")
    refuse_unknown_keys(params, REQUEST_FIELDS)
    if checked_flag(params.get(FIND, False), FIND):
        raise UsageError(f"give either chunks or {FIND}, not both")
    spans = _chunks(params.get("chunks"), len(token_ids))
    options = _options(params, salt, defaults)
    first = params.get("start_tokens", len(start) if tuple(token_ids[: len(start)]) == start else 0)
    if not 0 <= checked_whole(first, "start_tokens") <= spans[0].start:
        raise UsageError(f"start_tokens must be between 0 and {spans[0].start}, where the first chunk begins")
    passages = checked_whole(params.get("neutral", 0), "neutral")
    if not 0 <= passages <= len(spans):
        raise UsageError(f"neutral must be between 0 and {len(spans)}, the number of chunks")
    salt = chunk_salt(salt, token_ids[:first], start)
    prompt = _prompt(token_ids, first, spans, partial(chunk_id, fingerprint, salt), passages)
    ids = [part.id for part in prompt.parts if part.kind is PartKind.CHUNK and part.id is not None]
    promoted, continued = (_numbered(params.get(name), name, ids) for name in _PROMOTION)
    mean = _mean(params.get("mean"))
    if mean is not None and (options["choice"].method != ContextMethod.name or prompt.parts[-1].id is None):
        raise UsageError(f"mean needs method {ContextMethod.name!r}, and a prompt that ends with its last chunk")
    if mean is not None and options["reads_only"]:
        raise UsageError(f"mean stores its last chunk: {CACHE} must be {CacheUse.USE}")
    promotion = Promotion(promoted, continued or frozenset())
    return WeaveRequest(prompt, promotion=promotion, mean=mean, **options)


def with_found_chunks(
    params: Mapping[str, Any],
    token_ids: Sequence[int],
    finder: ChunkFinder,
    *,
    fingerprint: str,
    salt: str,
    start: tuple[int, ...],
    defaults: Defaults,
) -> WeaveRequest | None:
    """Read the method of a request whose chunks `finder` finds in its prompt; None if it finds none.

    The other arguments are those of `from_wire`.

    Raises:
        UsageError: the message says which field is wrong and why.
    """
    refuse_unknown_keys(params, REQUEST_FIELDS)
    if unknown := sorted(params.keys() - SETTINGS - {FIND, CACHE, "counts_as_request", _AT_LEAST}):
        raise UsageError(f"{', '.join(unknown)} cannot be given with {FIND}")
    options = _options(params, salt, defaults)
    prompt = finder.prompt(token_ids, start, fingerprint=fingerprint, salt=salt)
    if all(part.id is None for part in prompt.parts):
        return None
    stores = not options["reads_only"]
    if stores:
        finder.add(prompt, start, fingerprint=fingerprint, salt=salt)
    weaves = options["choice"].method not in EXACT_METHODS
    return WeaveRequest(with_usable_views(prompt, weaves=weaves, stores=stores), **options)


def _options(params: Mapping[str, Any], salt: str, defaults: Defaults) -> dict[str, Any]:
    """The fields of a `WeaveRequest` that do not depend on its chunks."""
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("cache_salt must be valid Unicode: it has half of a surrogate pair") from error
    request = _method_request(params)
    choice = defaults.chooser.choose(request)
    kept = defaults.chooser.kept(choice, _capture(params, defaults.capture))
    reads_only = reads_only_of(params)
    return {
        "choice": choice,
        "kept": Kept(kv=False) if reads_only else kept,
        "raisable": checked_flag(params.get(_AT_LEAST, not request.sets_budget), _AT_LEAST),
        "counts_as_request": checked_flag(params.get("counts_as_request", True), "counts_as_request"),
        "reads_only": reads_only,
    }


def _prompt(
    token_ids: Sequence[int],
    first: int,
    chunks: Sequence[Span],
    id_of: Callable[[tuple[int, ...]], ChunkId],
    passages: int,
) -> Prompt:
    """The prompt's parts: `first` leading tokens, the system part, the chunks, the question.

    The first `passages` chunks are neutral ones.
    """

    def part(kind: PartKind, start: int, stop: int) -> PromptPart:
        ids = tuple(token_ids[start:stop])
        if kind not in (PartKind.SYSTEM, PartKind.CHUNK):
            return PromptPart(kind, ids)
        neutral = kind is PartKind.CHUNK and start < chunks[passages - 1].stop and passages > 0
        return PromptPart(kind, ids, neutral_id(id_of(ids)) if neutral else id_of(ids))

    edges = [
        (PartKind.START, 0, first),
        (PartKind.SYSTEM, first, chunks[0].start),
        *((PartKind.CHUNK, chunk.start, chunk.stop) for chunk in chunks),
        (PartKind.QUESTION, chunks[-1].stop, len(token_ids)),
    ]
    return Prompt(tuple(part(*edge) for edge in edges if edge[1] < edge[2]))


def to_wire(request: WeaveRequest) -> dict[str, Any] | None:
    """The connector's fields of a request, defaults left out; None if no part can be stored.

    What is stored of it is for the connector to say. If the client set no budget, ratio or alpha may be raised.
    """
    prompt = request.prompt
    mean = request.mean
    spans = [[span.start, span.stop] for _, span in _chunks_of(prompt)]
    if not spans:
        return None
    wire: dict[str, Any] = {
        "chunks": spans,
        "start_tokens": len(request.start),
        "method": request.choice.spec,
        _AT_LEAST: request.raisable,
    }
    if neutral := sum(part.id is not None and is_neutral(part.id) for part in prompt.parts):
        wire["neutral"] = neutral
    if not request.counts_as_request:
        wire["counts_as_request"] = False
    if request.reads_only:
        wire[CACHE] = str(CacheUse.READ)
    if mean is not None:
        wire["mean"] = {"group": mean.group, "of": mean.of, **({"anew": True} if mean.anew else {})}
    return wire | promotion_params(prompt, request.promotion)


def _chunks_of(prompt: Prompt) -> list[tuple[ChunkId, Span]]:
    """The chunks and turns of a prompt as vLLM stores them: the end of a turn belongs to the turn."""
    chunks: list[tuple[ChunkId, Span]] = []
    for part, span in zip(prompt.parts, prompt.spans(), strict=True):
        if part.kind is PartKind.TURN and part.in_place:
            chunk, turn = chunks.pop()
            chunks.append((chunk, Span(turn.start, span.stop)))
        elif part.kind in _STORED_KINDS and part.id is not None:
            chunks.append((part.id, span))
    return chunks


def promotion_params(prompt: Prompt, promotion: Promotion) -> dict[str, list[int]]:
    """The fields of a promotion, as indices of the prompt's chunks and turns; defaults are left out."""
    ids = [chunk for chunk, _ in _chunks_of(prompt)]

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
    method = checked_method(params["method"]) if "method" in params else None
    return MethodRequest.of(method, params.get("quality"))


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


def _mean(value: Any) -> MeanShare | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) - {"anew"} != {"group", "of"}:
        raise UsageError("mean must be an object such as {'group': 'a name', 'of': 4}")
    group = value["group"]
    count = checked_whole(value["of"], "mean.of")
    if not isinstance(group, str) or not 0 < len(group) <= _MOST_GROUP:
        raise UsageError(f"mean.group must be a text of at most {_MOST_GROUP} characters")
    if not 1 <= count <= MOST_CONTEXTS:
        raise UsageError(f"mean.of must be between 1 and {MOST_CONTEXTS}")
    return MeanShare(group, count, anew=checked_flag(value.get("anew", False), "mean.anew"))


_MOST_GROUP = 200


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

SETTINGS = frozenset({"method", "quality", "capture"})
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
