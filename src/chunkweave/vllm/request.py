"""What a request says about its chunks, made into the project's `Prompt`. Torch-free."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from chunkweave.chunking.prompt import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.config import Combine, DeviationFactor, QueryConfig, ReuseConfig, WatchedLayers
from chunkweave.errors import UsageError
from chunkweave.planning.calibration import CalibrationRecord, Quality
from chunkweave.planning.method import METHODS, needs_profiles, reads_question
from chunkweave.planning.method_choice import (
    FIELD,
    MethodChoice,
    MethodChooser,
    MethodRequest,
    Why,
    checked_method,
    checked_ratio,
    checked_whole,
    refuse_unknown_keys,
)
from chunkweave.types import ChunkId, Context, Span

_TOLD = frozenset({"check_layers", "seed", "alpha", "focus", "query"})
"""What methods are told beside the ratio; a calibrated one has its own."""

SETTINGS = _TOLD | {"method", "quality", "recompute_ratio", "capture"}
"""What a request may say of the way it is woven, and the connector's extra config for those that do not."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request that does not say gets: the connector's extra config, and what a calibration found."""

    chooser: MethodChooser = field(default_factory=MethodChooser)
    capture: bool = False

    @classmethod
    def from_config(
        cls,
        extra: Mapping[str, Any],
        record: CalibrationRecord | None = None,
        how_to_calibrate: str = "chunkweave calibrate",
    ) -> "Defaults":
        """Read the keys that a request may set too. `record` is the model's calibration, if there is one.

        Raises:
            UsageError: a value is out of range or of the wrong type, or a quality without a record.
        """
        fields = {key: extra[key] for key in SETTINGS & extra.keys()}
        chooser = MethodChooser(_wish(fields), _told(fields, ReuseConfig()), record, how_to_calibrate)
        usual = chooser.choose(MethodRequest())
        return cls(chooser, _capture(fields, needs_profiles(usual.method, usual.reuse)))


def chosen(params: Mapping[str, Any], defaults: Defaults, num_layers: int | None) -> tuple[MethodChoice, bool]:
    """The method of a request with these fields, what it is told, and whether attention is captured for later ones.

    `num_layers` is the model's, if it is to be checked that it has the layers that are asked for.

    Raises:
        UsageError: the message says which field is wrong and why.
    """
    chooser = replace(defaults.chooser, reuse=_told(params, defaults.chooser.reuse))
    choice = chooser.choose(_wish(params))
    told = sorted(_TOLD & params.keys())
    if told and choice.why is Why.CALIBRATED:
        raise UsageError(f"{', '.join(told)} can only be given with a method: what was calibrated has its own")
    if num_layers is not None:
        _check_layers(choice.reuse, num_layers)
    return choice, _capture(params, defaults.capture or needs_profiles(choice.method, choice.reuse))


def told(reuse: ReuseConfig) -> dict[str, Any]:
    """The fields by which a request that names a method says the rest of `reuse`: the ratio, and what is unusual."""
    usual = ReuseConfig()
    unusual = {name for name in _TOLD if getattr(reuse, name) != getattr(usual, name)}
    return {name: _plain(getattr(reuse, name)) for name in ("recompute_ratio", *sorted(unusual))}


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, QueryConfig):
        return {name: _plain(one) for name, one in asdict(value).items()}
    return list(value) if isinstance(value, tuple) else value


def _wish(params: Mapping[str, Any]) -> MethodRequest:
    method = checked_method(params["method"], METHODS) if "method" in params else None
    ratio = checked_ratio(params["recompute_ratio"]) if "recompute_ratio" in params else None
    quality = params.get("quality")
    if quality is not None and not isinstance(quality, str):
        raise UsageError(f"unknown quality {quality!r}; there are: {', '.join(Quality)}")
    return MethodRequest.of(method, quality, ratio)


def _capture(params: Mapping[str, Any], usual: bool) -> bool:
    return _flag(params["capture"], "capture") if "capture" in params else usual


def _told(params: Mapping[str, Any], usual: ReuseConfig) -> ReuseConfig:
    changed: dict[str, Any] = {}
    if "recompute_ratio" in params:
        changed["recompute_ratio"] = checked_ratio(params["recompute_ratio"])
    if "check_layers" in params:
        changed["check_layers"] = _layers(params["check_layers"], "check_layers")
    if "seed" in params:
        changed["seed"] = checked_whole(params["seed"], "seed")
    if "alpha" in params:
        changed["alpha"] = _number(params["alpha"], "alpha")
    if "focus" in params:
        changed["focus"] = _flag(params["focus"], "focus")
    if "query" in params:
        changed["query"] = _query(params["query"], usual.query)
    return replace(usual, **changed)


def _query(given: Any, usual: QueryConfig) -> QueryConfig:
    if not isinstance(given, Mapping):
        raise UsageError("query must be an object such as {'tail': 4, 'layers': 'late'}")
    unknown = sorted(str(key) for key in given if key not in _QUERY)
    if unknown:
        raise UsageError(f"unknown fields of query: {', '.join(unknown)}; there are {', '.join(sorted(_QUERY))}")
    return replace(usual, **{key: _QUERY[key](value, f"query.{key}") for key, value in given.items()})


def _check_layers(reuse: ReuseConfig, num_layers: int) -> None:
    for layer, what in ((reuse.check_layers[-1], "checked"), (reuse.query.watched(num_layers)[-1], "watched")):
        if layer >= num_layers:
            raise UsageError(f"layer {layer} is to be {what}, but the model has {num_layers} layers")


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, not {value!r}")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise UsageError(f"{name} must be a number, not {value!r}") from error


def _layers(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name} must be a list of layer numbers")
    return tuple(checked_whole(layer, name) for layer in value)


def _one_of(kind: type[Combine] | type[DeviationFactor] | type[WatchedLayers]) -> Callable[[Any, str], Any]:
    def check(value: Any, name: str) -> Any:
        if not isinstance(value, str) or value not in list(kind):
            raise UsageError(f"{name} must be one of {', '.join(kind)}, not {value!r}")
        return kind(value)

    return check


def _watched(value: Any, name: str) -> Any:
    return _layers(value, name) if isinstance(value, list | tuple) else _one_of(WatchedLayers)(value, name)


def _tail(value: Any, name: str) -> int | None:
    return None if value is None else checked_whole(value, name)


_QUERY: Mapping[str, Callable[[Any, str], Any]] = {
    "tail": _tail,
    "layers": _watched,
    "over_heads": _one_of(Combine),
    "over_tokens": _one_of(Combine),
    "over_layers": _one_of(Combine),
    "factor": _one_of(DeviationFactor),
    "widen": _number,
    "first_tokens": checked_whole,
    "mixed_share": _number,
    "rounds": checked_whole,
}
"""The fields of `QueryConfig`, and what reads each."""


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
