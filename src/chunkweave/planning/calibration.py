"""Calibration records: what was measured of one model, what each quality target means by it, and where they lie."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from chunkweave.config import Combine, DeviationFactor, QueryConfig, ReuseConfig, WatchedLayers
from chunkweave.errors import DocumentError, UsageError
from chunkweave.planning.cost import COST_FILE
from chunkweave.planning.method import METHODS, parameter_of

logger = logging.getLogger(__name__)


_NO_METHODS = "capture"
"""The field of `ReuseConfig` that concerns no method: what an engine keeps of a prefill is its own affair."""


class Quality(StrEnum):
    """How close to full prefill's answers a request wants to be (DESIGN §5.6)."""

    EXACT = "exact"
    """Full prefill's KV: only exact prefixes are reused."""
    BALANCED = "balanced"
    FAST = "fast"

    @classmethod
    def parse(cls, text: Any) -> "Quality":
        """From its name.

        Raises:
            UsageError: there is no such target.
        """
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"unknown quality {text!r}; there are: {', '.join(cls)}") from None


SHARES: dict[Quality, float] = {Quality.BALANCED: 0.98, Quality.FAST: 0.95}
"""Share of full prefill's F1 that an approximate target keeps, unless the calibration sets another."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One method at one value of its parameter, over all questions of a calibration.

    `share` is its mean F1 over that of full prefill on the same questions. The ends of `f1` and of `share` (paired by
    question) are bootstrap percentiles. `recompute_fraction` is a mean.
    """

    method: str
    value: float
    f1: float
    f1_low: float
    f1_high: float
    share: float
    share_low: float
    share_high: float
    recompute_fraction: float


@dataclass(frozen=True, slots=True)
class Target:
    """What one quality target means: the least value of each method's parameter that keeps `share` of full's F1.

    `method` is, of those that reach it, the one that recomputes least; None if none does.
    """

    share: float
    least: dict[str, float | None]
    method: str | None

    def __post_init__(self) -> None:
        if self.method is not None and self.least.get(self.method) is None:
            raise ValueError(f"{self.method} is to be used, but does not reach the target")


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """A finished calibration: what was measured, how, and what came out.

    It holds for the model of `fingerprint` (weights and dtype) and says something about questions like those of
    `dataset`. `reuse` is the configuration of every method beside its parameter. `warm` is how the store was filled.
    """

    fingerprint: str
    model: str
    dtype: str
    dataset: str
    dataset_digest: str
    questions: int
    warm: str
    max_new_tokens: int
    seed: int
    full_f1: float
    reuse: ReuseConfig
    points: tuple[CurvePoint, ...]
    targets: dict[Quality, Target]
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    created: str = ""
    command: str = ""

    def config(self, quality: Quality) -> tuple[str, ReuseConfig] | None:
        """Method and its settings for a target; None if no method reaches it (and for EXACT, which needs none)."""
        target = self.targets.get(quality)
        if target is None or target.method is None:
            return None
        parameter, value = parameter_of(target.method), target.least[target.method]
        changes: dict[str, Any] = {} if parameter is None else {parameter: value}
        return target.method, replace(self.reuse, **changes)

    def point(self, quality: Quality) -> CurvePoint | None:
        """The measured point that a target resolves to."""
        target = self.targets.get(quality)
        if target is None or target.method is None:
            return None
        wanted = (target.method, target.least[target.method])
        return next((point for point in self.points if (point.method, point.value) == wanted), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        data = asdict(self)
        del data["reuse"][_NO_METHODS]
        return data

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is no such thing, or what it says cannot be used.
        """
        record = cls(
            **{
                **data,
                "reuse": _reuse_of(data["reuse"]),
                "points": tuple(CurvePoint(**point) for point in data["points"]),
                "targets": {Quality(name): Target(**target) for name, target in data["targets"].items()},
            }
        )
        for quality in record.targets:
            record.config(quality)
        return record


def _reuse_of(data: Mapping[str, Any]) -> ReuseConfig:
    """What was written of a configuration; JSON's lists and texts become what the fields hold."""
    usual = ReuseConfig()
    values = {name: type(getattr(usual, name))(value) for name, value in data.items() if name != "query"}
    return replace(usual, **values, query=_query_of(data.get("query", {})))


def _query_of(data: Mapping[str, Any]) -> QueryConfig:
    """The same of the part that is the method `query`'s."""
    kinds: dict[str, Any] = {
        "layers": tuple if isinstance(data.get("layers"), list) else WatchedLayers,
        "over_heads": Combine,
        "over_tokens": Combine,
        "over_layers": Combine,
        "factor": DeviationFactor,
    }
    return replace(QueryConfig(), **{name: kinds[name](v) if name in kinds else v for name, v in data.items()})


def choose_target(points: Sequence[CurvePoint], share: float) -> Target:
    """What a target of `share` means, given the curves of some methods (Cache-Craft eq. 13, on a grid).

    A method's least value is the cheapest one whose *fitted* share reaches the target, so that one lucky point does not
    count. Of the methods that reach it, the one that recomputes least is named; of equals, the first.
    """
    least: dict[str, float | None] = {}
    reached: list[CurvePoint] = []
    for method in dict.fromkeys(point.method for point in points):
        curve = sorted((point for point in points if point.method == method), key=lambda point: point.value)
        fitted = rising_fit([point.share for point in curve])
        found = next((point for point, fit in zip(curve, fitted, strict=True) if fit >= share), None)
        least[method] = found.value if found is not None else None
        reached += [found] if found is not None else []
    best = min(reached, key=lambda point: point.recompute_fraction, default=None)
    return Target(share, least, best.method if best is not None else None)


def rising_fit(values: Sequence[float]) -> list[float]:
    """The never-falling sequence closest to `values` in least squares (isotonic regression, by its min-max formula).

    More recomputation cannot truly make answers worse; where measured quality falls it is noise, and neighbours are
    averaged. The first value of an averaged run is never below its fit, so what the fit lets pass passed itself.

    >>> rising_fit([0.5, 0.75, 0.25, 1.0])
    [0.5, 0.5, 0.5, 1.0]
    """
    return [
        max(min(fmean(values[first : last + 1]) for last in range(place, len(values))) for first in range(place + 1))
        for place in range(len(values))
    ]


CALIBRATION_FILE = "chunkweave-calibration.json"
PARTIAL_FILE = "chunkweave-calibration.partial.jsonl"
"""Beside the record while a calibration is not finished."""

_FORMAT = 1


class OtherFormatError(DocumentError):
    """A calibration record of a version of chunkweave that writes them in another way."""


def record_path(cache_dir: Path | None, folder: Path | None, fingerprint: str) -> Path:
    """Where `chunkweave calibrate` writes: into the cache folder if there is one, else beside the model.

    Raises:
        UsageError: there is no place: no cache folder, and a model without a folder that can be written to.
    """
    if cache_dir is not None:
        return cache_dir / fingerprint / CALIBRATION_FILE
    if folder is None:
        raise UsageError("a model without a folder has its record in a cache folder: give --cache-dir")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the record cannot be written into {folder}: give --cache-dir")
    return folder / CALIBRATION_FILE


def stored_calibration(cache_dir: Path | None, folder: Path | None, fingerprint: str) -> CalibrationRecord | None:
    """The first record found for this model, in the cache folder (one's own data) or else beside the model; or None.

    A file that cannot be read, and one that only has records of other models, are logged and passed over.
    """
    folders = (cache_dir and cache_dir / fingerprint, folder)
    for path in (one / CALIBRATION_FILE for one in folders if one is not None):
        if not path.exists():
            continue
        try:
            records = read_records(path)
        except DocumentError as error:
            logger.warning("%s; it is not used", error)
            continue
        record = next((one for one in records if one.fingerprint == fingerprint), None)
        if record is None:
            others = ", ".join(f"{one.model} in {one.dtype}" for one in records) or "nothing"
            logger.warning("%s is not used: made for other weights or another dtype (%s)", path, others)
        elif unknown := {target.method for target in record.targets.values() if target.method} - {*METHODS}:
            logger.warning("%s is not used: it names methods that this version lacks: %s", path, ", ".join(unknown))
        else:
            return record
    return None


def read_records(path: Path) -> tuple[CalibrationRecord, ...]:
    """Every record of a file: one for each dtype that its model was calibrated in.

    Raises:
        OtherFormatError: another version of chunkweave wrote the file.
        DocumentError: it cannot be read, or holds something else.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise OtherFormatError(
                f"{path} is a calibration record of format {data['format']!r}; this version reads {_FORMAT}"
            )
        return tuple(CalibrationRecord.of_dict(record) for record in data["records"])
    except OSError as error:
        raise DocumentError(f"cannot read the calibration record {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DocumentError(
            f"{path} is no calibration record ({type(error).__name__}: {error}); make one with `chunkweave calibrate`"
        ) from error


def save_record(path: Path, record: CalibrationRecord) -> None:
    """Add a record to a file, whole or not at all; it replaces one of the same model or of the same dtype.

    Two dtypes are two fingerprints, and which one a machine computes in depends on its CPU: so a file beside a model
    can hold both. A damaged file is replaced, one of another version is not.

    Raises:
        OtherFormatError: another version of chunkweave wrote the file.
        UsageError: it cannot be written.
    """
    others = existing_records(path)
    kept = [one for one in others if one.fingerprint != record.fingerprint and one.dtype != record.dtype]
    data = {"format": _FORMAT, "records": [one.as_dict() for one in (*kept, record)]}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def existing_records(path: Path) -> tuple[CalibrationRecord, ...]:
    """What a new record will stand beside: nothing where there is no file, or a damaged one, which is logged.

    Raises:
        OtherFormatError: another version of chunkweave wrote the file.
    """
    if not path.exists():
        return ()
    try:
        return read_records(path)
    except OtherFormatError:
        raise
    except DocumentError as error:
        logger.warning("%s; it is replaced", error)
        return ()


OWN_FILES = frozenset({COST_FILE, CALIBRATION_FILE, PARTIAL_FILE})
