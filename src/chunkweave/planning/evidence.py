"""What comparisons with full prefill say of reuse methods: which of them keep a quality's bounds on a server's traffic.

The unit is the answer: its tokens are correlated. A method is taken for a quality once a betting test (Waudby-Smith and
Ramdas, 2024) has rejected that its mean agreement is at most the bound, and another one that its mean divergence is at
least the bound. All methods of a quality share one error level; what a proven one no longer needs is passed on to the
next cheaper one (fallback procedure, Wiens 2003). The tests hold after any number of answers.
"""

import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log, log1p, sqrt
from pathlib import Path
from threading import Lock
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.planning.calibration import BOUNDS, Bounds, Quality
from chunkweave.store.shared_folder import replace_file

logger = logging.getLogger(__name__)

LEARNED = ("query:whole:late:ratio=0.3", "query:whole:late:ratio=0.15", "query:whole:late:ratio=0.05", "full-reuse")
"""Methods that a server learns about, the costliest first. None of them reads attention profiles."""

LEVEL = 0.05
"""Probability that, for a quality, any method outside its bounds is ever taken."""

_MOST_TENANTS = 1000
_LEAST_OTHERS = 30
"""Above half of all answers, a tenant's count for its own decision only, once the others have given this many."""
_HOPELESS_AFTER, _HOPELESS_EVERY = 60, 20
"""A method that is far outside all bounds after so many answers is compared with one in so many."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One answer's deviation from full prefill: means over its compared tokens.

    `agreement` is the share of tokens with the same most likely token; `kl` is the divergence D_KL(full || method) in
    nats, at most 1 for each token.
    """

    agreement: float
    kl: float

    @property
    def values(self) -> tuple[float, float]:
        """Agreement and 1 - KL: both from 0 to 1, and the larger, the better."""
        return self.agreement, 1 - min(1.0, max(0.0, self.kl))


@dataclass(slots=True)
class BettingTest:
    """A test of "the mean of values in [0, 1] is at most `bound`", which a large capital rejects.

    The capital is multiplied by 1 + bet (value - bound). Its expectation does not grow while the mean is at most the
    bound, so it reaches 1 / level with a probability of at most `level` (Ville's inequality). The bet is that of
    approximate GRAPA: optimal for mean and variance of the values so far, which start with answers `typical` of a
    usable method, so that the first ones count.
    """

    bound: float
    typical: float
    log_capital: float = 0.0
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        """The mean of the values so far; 0 without any."""
        return self.total / self.count if self.count else 0.0

    def take(self, value: float) -> None:
        """Take a value; it must not depend on the test's state."""
        count = _TYPICAL_ANSWERS + self.count
        mean = (_TYPICAL_ANSWERS * self.typical + self.total) / count
        deviations = self.squares - 2 * mean * self.total + self.count * mean**2
        variance = (_TYPICAL_ANSWERS * _TYPICAL_VARIANCE + deviations) / count
        edge = mean - self.bound
        bet = min(max(0.0, edge / (variance + edge**2)), _MOST_BET / self.bound)
        self.log_capital += log1p(bet * (value - self.bound))
        self.count += 1
        self.total += value
        self.squares += value**2


_TYPICAL_ANSWERS = 100
_TYPICAL_VARIANCE = 0.01
_MOST_BET = 0.95


@dataclass(slots=True)
class DriftDetector:
    """Bets that the mean of values in [0, 1] has fallen below `bound`; the capital never falls below 1 (CUSUM).

    It alarms at a capital of e^`_ALARM`, and ends the alarm when all of it is lost.
    """

    bound: float
    log_capital: float = 0.0
    alarmed: bool = False

    def take(self, value: float) -> None:
        """Take a value."""
        self.log_capital += log1p(_DRIFT_BET * (self.bound - value))
        self.log_capital = min(max(0.0, self.log_capital), _ALARM)
        self.alarmed = self.log_capital >= _ALARM or (self.alarmed and self.log_capital > 0)


_DRIFT_BET = 1.4
_ALARM = 3.5


@dataclass(slots=True)
class _Case:
    """The evidence on one method for one quality: of agreement, and of 1 - KL."""

    tests: tuple[BettingTest, ...]
    detectors: tuple[DriftDetector, ...]
    proven: bool = False
    prior: bool = False
    drifted: bool = False

    @property
    def serves(self) -> bool:
        """Whether the method may serve: it is proven, or a record names it and its answers have not drifted."""
        return self.proven or (self.prior and not self.drifted)

    @property
    def log_capital(self) -> float:
        """The lesser capital: both hypotheses must be rejected."""
        return min(test.log_capital for test in self.tests)

    @property
    def answers(self) -> int:
        return self.tests[0].count

    @property
    def hopeless(self) -> bool:
        """Whether a mean is far below its bound."""
        return self.answers >= _HOPELESS_AFTER and any(
            test.mean + 3 * sqrt(max(test.squares / test.count - test.mean**2, 1e-4) / test.count) < test.bound
            for test in self.tests
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """A method that may serve, and whether that rests on a `prior` alone (a calibration record)."""

    method: str
    prior: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """How many answers were compared, and about how many a decision needs."""

    answers: int
    expected: int


_EXPECTED = 300
"""Answers to a decision at a true agreement of .97."""


@dataclass(eq=False)
class Evidence:
    """Comparisons of `methods`, the costliest first, and what they decide for each quality with bounds. Thread-safe.

    `priors` are methods that a calibration record names for a quality: they may serve until their answers drift.

    All tenants' answers count together, except those of a tenant whose own answers have drifted: it is answered
    exactly. Each tenant's share is limited to half.
    """

    methods: Sequence[str]
    priors: Mapping[Quality, str | None] = field(default_factory=dict)
    bounds: Mapping[Quality, Bounds] = field(default_factory=lambda: BOUNDS)

    def __post_init__(self) -> None:
        self._lock = Lock()
        self.taken_back = 0
        """How often a method was taken back because its answers had drifted."""
        self._rounds = 0
        self._by_tenant: Counter[str] = Counter()
        self._vetoes: OrderedDict[tuple[str, Quality, str], tuple[DriftDetector, ...]] = OrderedDict()
        self._cases = {(quality, method): self._new_case(quality) for quality in self.bounds for method in self.methods}
        for quality, prior in self.priors.items():
            if (case := self._cases.get((quality, prior or ""))) is not None:
                case.prior = True

    def take(self, compared: Mapping[str, Compared], tenant: str = "") -> None:
        """Take one answer's comparisons by method. Unknown methods are ignored."""
        with self._lock:
            self._rounds += 1
            others = self._by_tenant.total() - self._by_tenant[tenant]
            alone = others < _LEAST_OTHERS
            pooled = alone or self._by_tenant[tenant] <= others
            self._by_tenant[tenant] += pooled
            for (quality, method), case in self._cases.items():
                if method in compared:
                    values = compared[method].values
                    vetoed = self._veto(tenant, quality, method, values)
                    if pooled and (alone or not vetoed):
                        self._judge(quality, method, case, values)

    def decision(self, quality: Quality, tenant: str = "") -> Decision | None:
        """The cheapest method that may serve a tenant; None: only the exact one."""
        with self._lock:
            for method in reversed(self.methods):
                case = self._cases.get((quality, method))
                if case is None or not case.serves:
                    continue
                vetoes = self._vetoes.get((tenant, quality, method), ())
                if not any(detector.alarmed for detector in vetoes):
                    return Decision(method, not case.proven)
        return None

    @property
    def learns(self) -> bool:
        """Whether it compares methods that no record names."""
        return not set(self.methods) <= set(self.priors.values())

    def drifted(self, quality: Quality) -> bool:
        """Whether a record names a method for this quality, and its answers were found outside the bounds."""
        prior = self.priors.get(quality)
        return prior is not None and self._cases[quality, prior].drifted

    def wanted(self) -> list[str]:
        """The methods to compare with the next answer."""
        with self._lock:
            every = self._rounds % _HOPELESS_EVERY == 0
            return [
                method
                for method in self.methods
                if every or not all(self._cases[quality, method].hopeless for quality in self.bounds)
            ]

    def progress_for(self, quality: Quality, tenant: str) -> Progress | None:
        """`progress`, if all answers are this tenant's: otherwise it would count requests of others."""
        alone = self._by_tenant.total() == self._by_tenant[tenant]
        return self.progress(quality) if alone else None

    def progress(self, quality: Quality) -> Progress:
        """How far the method that is nearest to its proof is."""
        with self._lock:
            cases = [(case.log_capital / needed, case.answers) for case, needed in self._needed(quality)]
        share, answers = max(cases, default=(0.0, 0))
        expected = _EXPECTED if share <= 0 or answers < _HOPELESS_AFTER else answers / share
        return Progress(answers, max(answers + 1, round(expected / 10) * 10))

    def means(self) -> dict[str, tuple[int, float, float]]:
        """By method the number of compared answers, their mean agreement, and their mean divergence in nats."""
        with self._lock:
            cases = {method: self._cases[Quality.BALANCED, method].tests for method in self.methods}
        return {name: (agrees.count, agrees.mean, 1 - near.mean) for name, (agrees, near) in cases.items()}

    def shown(self) -> dict[str, Any]:
        """What was decided for each quality, and on what it rests, as JSON values; no tenant's name."""
        qualities = {}
        for quality in self.bounds:
            decided = self.decision(quality)
            rests = {} if decided is None else {"rests_on": "calibration" if decided.prior else "comparisons"}
            progress = asdict(self.progress(quality)) if decided is None else {}
            qualities[str(quality)] = {"method": None if decided is None else decided.method, **rests, **progress}
        measured = {
            method: {"answers": answers, "agreement": round(agreement, 4), "kl": round(kl, 4)}
            for method, (answers, agreement, kl) in self.means().items()
            if answers
        }
        return {**qualities, "methods": measured, "taken_back": self.taken_back}

    def load(self, path: Path | None) -> None:
        """Continue from a file that `save` wrote; a missing one changes nothing, a damaged one is logged.

        Cases of methods or bounds that are not its own are ignored.
        """
        if path is None or not path.exists():
            return
        restored = {}
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            for entry in state["cases"]:
                known = self._cases.get((Quality.parse(entry["quality"]), entry["method"]))
                tests = tuple(BettingTest(**test) for test in entry["tests"])
                if known is None or [test.bound for test in tests] != [test.bound for test in known.tests]:
                    continue
                detectors = tuple(DriftDetector(**detector) for detector in entry["detectors"])
                restored[Quality.parse(entry["quality"]), entry["method"]] = _Case(
                    tests, detectors, bool(entry["proven"]), known.prior, bool(entry["drifted"])
                )
            by_tenant = Counter({str(tenant): int(count) for tenant, count in state["tenants"].items()})
            self.taken_back = int(state["taken_back"])
        except (OSError, LookupError, TypeError, ValueError, AttributeError, UsageError) as error:
            logger.warning("%s cannot be read (%r): comparisons begin anew", path, error)
            return
        with self._lock:
            self._cases |= restored
            self._by_tenant = by_tenant

    def save(self, path: Path | None) -> None:
        """Write the state atomically, for `load`; an error is logged."""
        if path is None:
            return
        with self._lock:
            cases = [
                {"quality": quality, "method": name, **asdict(case)} for (quality, name), case in self._cases.items()
            ]
            state = {"taken_back": self.taken_back, "tenants": dict(self._by_tenant), "cases": cases}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(state), 0o600)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error.strerror or error)

    def _new_case(self, quality: Quality) -> _Case:
        limits = _limits(self.bounds[quality])
        return _Case(tuple(BettingTest(limit, (1 + limit) / 2) for limit in limits), _detectors(limits))

    def _judge(self, quality: Quality, method: str, case: _Case, values: Sequence[float]) -> None:
        for test, detector, value in zip(case.tests, case.detectors, values, strict=True):
            test.take(value)
            detector.take(value)
        if case.serves and any(detector.alarmed for detector in case.detectors):
            fresh = self._new_case(quality)
            self._cases[quality, method] = replace(fresh, detectors=case.detectors, prior=case.prior, drifted=True)
            self.taken_back += 1
            return
        for open_case, needed in self._needed(quality):
            if open_case is case and case.log_capital >= needed:
                case.proven = not any(detector.alarmed for detector in case.detectors)
                case.drifted &= not case.proven

    def _needed(self, quality: Quality) -> Iterator[tuple[_Case, float]]:
        """The cases that are not proven, each with the logarithm of the capital that proves it.

        Each method has half of the level that those before it have left: a cheaper one is hardly better.
        """
        level = 0.0
        for place, method in enumerate(self.methods):
            level += LEVEL / 2 ** min(place + 1, len(self.methods) - 1)
            case = self._cases[quality, method]
            if not case.proven:
                yield case, -log(level)
                level = 0.0

    def _veto(self, tenant: str, quality: Quality, method: str, values: Sequence[float]) -> bool:
        """Take a tenant's own answer; returns whether those before it spoke against the method for this tenant."""
        key = tenant, quality, method
        detectors = self._vetoes.setdefault(key, _detectors(_limits(self.bounds[quality])))
        self._vetoes.move_to_end(key)
        alarmed = any(detector.alarmed for detector in detectors)
        for detector, value in zip(detectors, values, strict=True):
            detector.take(value)
        while len(self._vetoes) > _MOST_TENANTS * len(self._cases):
            self._vetoes.popitem(last=False)
        return alarmed


def _limits(bounds: Bounds) -> tuple[float, float]:
    """The least values of agreement and 1 - KL that `bounds` allow."""
    return bounds.agreement or 0.01, 1 - (0.99 if bounds.kl is None else bounds.kl)


def _detectors(limits: Iterable[float]) -> tuple[DriftDetector, ...]:
    return tuple(map(DriftDetector, limits))
