"""Calibration records: measurements of one model, the meaning of each quality target, and where records are stored."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from chunkweave.config import ReuseConfig
from chunkweave.errors import DocumentError, UsageError
from chunkweave.ordering.arrangement import COUNTS_FILE
from chunkweave.planning.cost import COST_FILE, MEASURED_BY_ENGINE, MEASURED_BY_VLLM
from chunkweave.planning.method import changed, method_named, settings_changes, with_budget
from chunkweave.plugins import METHODS
from chunkweave.store.shared_folder import replace_file

logger = logging.getLogger(__name__)

CANDIDATES = ("cachecraft", "cacheblend", "query", "query:whole:late:stored")
"""Methods measured by default, as `make_contenders` reads them; each was the best in some setting."""


class Quality(StrEnum):
    """How close to full prefill of the same model an answer must be."""

    EXACT = "exact"
    """Equal to full prefill's KV: only exact prefixes are reused."""
    BALANCED = "balanced"
    FAST = "fast"

    @classmethod
    def parse(cls, text: Any) -> "Quality":
        """Parse a target's name.

        Raises:
            UsageError: no such target.
        """
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"unknown quality {text!r}; there are: {', '.join(cls)}") from None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest deviation of answers from full prefill, for the same model and prompt.

    Over the tokens of full prefill's own greedy continuation: at least the share `agreement` of them are the method's
    most likely token, and D_KL(full || method) is at most `kl` nats per token, both averaged over questions. None: no
    requirement.

    Raises:
        UsageError: a number out of range, or no requirement at all.
    """

    agreement: float | None
    kl: float | None

    def __post_init__(self) -> None:
        if self.agreement is not None and not 0.0 < self.agreement <= 1.0:
            raise UsageError(f"a target's top-1 agreement must be above 0 and at most 1, not {self.agreement:g}")
        if self.kl is not None and not 0.0 < self.kl < math.inf:
            raise UsageError(f"a target's KL must be above 0, not {self.kl:g}")
        if self.agreement is None and self.kl is None:
            raise UsageError("a target needs an agreement, a KL, or both")

    def __str__(self) -> str:
        agreement = [] if self.agreement is None else [f"top-1 agreement at least {self.agreement:.1%}"]
        return ", ".join([*agreement, *([] if self.kl is None else [f"KL at most {self.kl:g}"])])

    def met(self, agreement: float, kl: float) -> bool:
        """Whether an agreement and a divergence are within the bounds."""
        return (self.agreement is None or agreement >= self.agreement) and (self.kl is None or kl <= self.kl)

    def excess(self, point: "CurvePoint") -> float:
        """A point's deviation relative to the allowed one, at the pessimistic interval ends; within bounds up to 1."""
        disagreement = 0.0 if self.agreement is None else (1.0 - point.agreement_low) / max(1.0 - self.agreement, 1e-9)
        return max(disagreement, 0.0 if self.kl is None else point.kl_high / self.kl)


BOUNDS: dict[Quality, Bounds] = {Quality.BALANCED: Bounds(0.95, 0.05), Quality.FAST: Bounds(0.9, 0.1)}
"""The bounds of approximate qualities, unless the calibration sets others."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One method at one value of its parameter, over all questions of a calibration.

    `method` is written as in benchmarks, with settings after colons; `warm` says how its chunks were computed ahead.
    `kl` (nats) and `agreement` are means over questions of the mean over positions. `speedup` is the median over
    questions of full prefill's time to first token divided by this method's, in the same run. `recompute_fraction` is a
    mean. `_low` and `_high` are 95 % bootstrap percentiles over questions. A method without a parameter has value 0.
    """

    method: str
    value: float
    warm: str
    kl: float
    kl_low: float
    kl_high: float
    agreement: float
    agreement_low: float
    agreement_high: float
    speedup: float
    speedup_low: float
    speedup_high: float
    recompute_fraction: float


@dataclass(frozen=True, slots=True)
class Target:
    """What one quality means: for each method, the lowest value of its parameter within the bounds.

    `method` is the one of these that recomputes least; None if no method is within the bounds.
    """

    bounds: Bounds
    least: dict[str, float | None]
    method: str | None

    def __post_init__(self) -> None:
        if self.method is not None and self.least.get(self.method) is None:
            raise ValueError(f"{self.method} was chosen, but does not reach the target")


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """A finished calibration: measurements, how they were made, and the resulting targets.

    It applies to the model of `fingerprint` (weights and dtype), and to prompts like those of `dataset`. `dtype`
    includes the rounding of weights, if any. `references` are full prefill in slices (the deviation of arithmetic
    alone) and full KV reuse, for each way of warming chunks. Speed-ups were measured on `machine`; `commits` are the
    sources' when questions were measured, `commit` when the record was made.
    """

    fingerprint: str
    model: str
    dtype: str
    dataset: str
    dataset_digest: str
    questions: int
    chunks: int
    prompt_tokens: float
    new_tokens: int
    seed: int
    references: tuple[CurvePoint, ...]
    points: tuple[CurvePoint, ...]
    targets: dict[Quality, Target]
    device: str = ""
    threads: int = 0
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    commits: tuple[str, ...] = ()
    created: str = ""
    command: str = ""

    def spec(self, quality: Quality) -> str | None:
        """The method of a target, with its settings; None if no method reaches it (and for EXACT, which needs none)."""
        target = self.targets.get(quality)
        if target is None or target.method is None:
            return None
        value = target.least[target.method]
        return target.method if value is None else with_budget(target.method, value)

    def chosen(self, quality: Quality) -> tuple[CurvePoint, ...]:
        """The measured points that a target resolves to, one per way of warming chunks."""
        target = self.targets.get(quality)
        if target is None or target.method is None:
            return ()
        wanted = (target.method, target.least[target.method])
        return tuple(point for point in self.points if (point.method, point.value) == wanted)

    def nearest(self, quality: Quality) -> CurvePoint | None:
        """The point that exceeds a target's bounds least."""
        target = self.targets.get(quality)
        return None if target is None else min(self.points, key=target.bounds.excess, default=None)

    def as_dict(self) -> dict[str, Any]:
        """JSON-compatible values."""
        return asdict(self)

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse the result of `as_dict`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the data is no such record, or has unusable values.
        """
        targets = {Quality(name): _target_of(target) for name, target in data["targets"].items()}
        record = cls(
            **{
                **data,
                "references": tuple(CurvePoint(**point) for point in data["references"]),
                "points": tuple(CurvePoint(**point) for point in data["points"]),
                "targets": targets,
                "commits": tuple(data["commits"]),
            }
        )
        for quality in record.targets:
            spec = record.spec(quality)
            if spec is not None and method_named(spec) in METHODS.names:
                changed(ReuseConfig(), settings_changes(spec))  # raises for a value out of range
        return record


def _target_of(data: Mapping[str, Any]) -> Target:
    return Target(Bounds(**data["bounds"]), data["least"], data["method"])


def choose_target(points: Sequence[CurvePoint], bounds: Bounds) -> Target:
    """Resolve a target from the curves of some methods (Cache-Craft eq. 13, on a grid).

    A point is judged by the pessimistic ends of its intervals: lowest agreement, highest divergence. A value is within
    the bounds if both its point and the *fitted* curve are, so that one lucky point does not count; if chunks were
    warmed in several ways, it must be within the bounds for each. A method's result is its lowest such value. The
    chosen method recomputes least; among methods equal to the per cent, it deviates least.
    """
    least: dict[str, float | None] = {}
    costs: dict[str, tuple[float, float]] = {}
    for method in dict.fromkeys(point.method for point in points):
        method_points = [point for point in points if point.method == method]
        within = [
            _within([point for point in method_points if point.warm == warm], bounds)
            for warm in {p.warm for p in method_points}
        ]
        least[method] = value = min(set.intersection(*within), default=None)
        if value is not None:
            taken = [point for point in method_points if point.value == value]
            spent = max(point.recompute_fraction for point in taken)
            costs[method] = (round(spent, 2), max(point.kl for point in taken))
    return Target(bounds, least, min(costs, key=lambda method: costs[method], default=None))


def _within(points: Sequence[CurvePoint], bounds: Bounds) -> set[float]:
    """The values of one curve that are within the bounds."""
    curve = sorted(points, key=lambda point: point.value)
    agreements = rising_fit([point.agreement_low for point in curve])
    divergences = [-fit for fit in rising_fit([-point.kl_high for point in curve])]
    return {
        point.value
        for point, agreement, kl in zip(curve, agreements, divergences, strict=True)
        if bounds.met(agreement, kl) and bounds.met(point.agreement_low, point.kl_high)
    }


def rising_fit(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence closest to `values` in least squares (isotonic regression, by its min-max formula).

    More recomputation hardly makes answers worse, so falling measurements are treated as noise, and neighbours are
    averaged.

    >>> rising_fit([0.5, 0.75, 0.25, 1.0])
    [0.5, 0.5, 0.5, 1.0]
    """
    return [
        max(min(fmean(values[first : last + 1]) for last in range(place, len(values))) for first in range(place + 1))
        for place in range(len(values))
    ]


CALIBRATION_FILE = "chunkweave-calibration.json"
EVIDENCE_FILE = "evidence.json"
"""What a server learned from comparisons (`planning.evidence`)."""
PARTIAL_FILE = "chunkweave-calibration.partial.jsonl"
"""Exists beside the record while a calibration is unfinished."""

_FORMAT = 3


class OtherFormatError(DocumentError):
    """The calibration record has a format of another version of chunkweave."""


def record_path(cache_dir: Path | None, folder: Path | None, fingerprint: str) -> Path:
    """Path that `chunkweave calibrate` writes: in the cache folder if there is one, else beside the model.

    Raises:
        UsageError: no cache folder, and the model has no folder or one that cannot be written.
    """
    if cache_dir is not None:
        return cache_dir / fingerprint / CALIBRATION_FILE
    if folder is None:
        raise UsageError("the record of a model without a folder needs a cache folder: give --cache-dir")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the record cannot be written into {folder}: give --cache-dir")
    return folder / CALIBRATION_FILE


def stored_calibration(cache_dir: Path | None, folder: Path | None, fingerprint: str) -> CalibrationRecord | None:
    """The first record of this model: in the cache folder, beside the model, or shipped; None if there is none.

    Files that cannot be read, or have only records of other models, are logged and skipped.
    """
    folders = (cache_dir and cache_dir / fingerprint, folder)
    for path in (folder / CALIBRATION_FILE for folder in folders if folder is not None):
        if not path.exists():
            continue
        try:
            records = read_records(path)
        except DocumentError as error:
            logger.warning("%s; it is not used", error)
            continue
        record = next((candidate for candidate in records if candidate.fingerprint == fingerprint), None)
        if record is None:
            described = (
                ", ".join(f"{other_record.model} in {other_record.dtype}" for other_record in records) or "nothing"
            )
            logger.warning("%s is not used: made for other weights or another dtype (%s)", path, described)
        elif unknown := {method_named(t.method) for t in record.targets.values() if t.method} - {*METHODS.names}:
            logger.warning("%s is not used: it names methods that this version lacks: %s", path, ", ".join(unknown))
        else:
            return record
    return next((record for record in shipped_records() if record.fingerprint == fingerprint), None)


@cache
def shipped_records() -> tuple[CalibrationRecord, ...]:
    """The package's records, most of them of models whose weights are not in it, to be found by fingerprint."""
    paths = Path(str(files("chunkweave") / "assets")).glob(f"*/{CALIBRATION_FILE}")
    return tuple(record for path in sorted(paths) for record in read_records(path))


def read_records(path: Path) -> tuple[CalibrationRecord, ...]:
    """All records of a file: one per dtype in which its model was calibrated.

    Raises:
        OtherFormatError: another version of chunkweave wrote the file.
        DocumentError: the file cannot be read, or is no calibration record.
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
    """Add a record to a file atomically; it replaces one of the same fingerprint or dtype.

    Two dtypes are two fingerprints, and a machine's CPU decides which dtype it uses, so a file beside a model can hold
    both. A damaged file is replaced; one of another format is not.

    Raises:
        OtherFormatError: another version of chunkweave wrote the file.
        UsageError: the file cannot be written.
    """
    stored_records = existing_records(path)
    remaining = [
        stored for stored in stored_records if stored.fingerprint != record.fingerprint and stored.dtype != record.dtype
    ]
    data = {"format": _FORMAT, "records": [stored.as_dict() for stored in (*remaining, record)]}
    try:
        replace_file(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def existing_records(path: Path) -> tuple[CalibrationRecord, ...]:
    """The records already in a file; empty if there is none, or a damaged one, which is logged.

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


OWN_FILES = frozenset(
    {COST_FILE, MEASURED_BY_ENGINE, MEASURED_BY_VLLM, CALIBRATION_FILE, EVIDENCE_FILE, PARTIAL_FILE, COUNTS_FILE}
)
