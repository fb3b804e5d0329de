"""The shadow check: samples woven answers, compares them with full prefill, and switches weaving off.

No tensors here (see `engine.shadow`); this module samples, keeps statistics, and is the switch.
"""

import logging
from collections import deque
from dataclasses import dataclass, replace
from math import ceil, inf, isnan
from threading import Lock

from chunkweave.planning.method_choice import MethodChoice
from chunkweave.settings import SERVERS, SettingsGroup, setting

logger = logging.getLogger(__name__)

_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class ShadowConfig(SettingsGroup, places=SERVERS):
    """Shadow checks.

    A check prefills an answer's prompt in full and decodes the beginning of the answer again. After `window` checks,
    weaving is switched off if they deviate too far.
    """

    every: int | None = setting(
        None,
        "One in this many woven answers is compared with full prefill; none: no checks.",
        name="shadow_every",
        positive=True,
    )
    window: int = 20
    """Latest checks that the limits apply to."""
    max_divergence: float | None = None
    """Mean divergence of first tokens, in nats, above which weaving is switched off; none: never."""
    min_agreement: float | None = setting(
        None,
        "Share of equal first tokens below which weaving is switched off; none: never.",
        name="shadow_min_agreement",
        positive=True,
        most=1,
    )
    compared_tokens: int = 16
    """Tokens of an answer that a check decodes again."""
    slice_tokens: int = 256
    """Tokens of a prompt that a check prefills at once."""
    most_pending: int = 4
    """Maximum answers pending for a check; more are dropped."""
    beside: int = 0
    """Maximum active requests while a check runs."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Deviation of one woven answer from full prefill.

    `kl` is the Kullback-Leibler divergence of the first token's distribution, full prefill's from the woven one, in
    nats; infinite if either is no distribution. `agrees`: both have the same most likely token. The first `same_tokens`
    of the `compared_tokens` first tokens equal full prefill's greedy decoding.
    """

    kl: float
    agrees: bool
    same_tokens: int = 0
    compared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ShadowStats:
    """Results of the checks so far, and whether weaving is on.

    Of `woven` answers, `sampled` were selected: each was `checked`, `dropped` for lack of room, `failed`, or is
    pending. `mean_kl` and `p99_kl` cover the last 1000 checks, `window_kl` and `window_agreement` the checks that the
    limits apply to. `switched_off` counts how often weaving was switched off; `reason` says why it is off now.
    """

    woven: int = 0
    sampled: int = 0
    checked: int = 0
    dropped: int = 0
    failed: int = 0
    agreed: int = 0
    same_tokens: int = 0
    compared_tokens: int = 0
    mean_kl: float = 0.0
    p99_kl: float = 0.0
    window_kl: float = 0.0
    window_agreement: float = 1.0
    weaving: bool = True
    switched_off: int = 0
    reason: str = ""


class ShadowMonitor:
    """Samples woven answers, accumulates their checks, and switches weaving off when they deviate. Thread-safe.

    Only `switch_on` (by an operator) or a new process switches weaving on again: while it is off, there are no woven
    answers whose checks could show an improvement.
    """

    def __init__(self, config: ShadowConfig) -> None:
        """Start without data; weaving is on."""
        self.config = config
        self._lock = Lock()
        self._stats = ShadowStats()
        self._divergences: deque[float] = deque(maxlen=_REMEMBERED)
        self._window: deque[Divergence] = deque(maxlen=config.window)

    @property
    def stats(self) -> ShadowStats:
        """A snapshot."""
        with self._lock:
            divergences = sorted(self._divergences)
            if not divergences:
                return self._stats
            return replace(
                self._stats, mean_kl=_mean(divergences), p99_kl=divergences[ceil(0.99 * len(divergences)) - 1]
            )

    @property
    def weaving(self) -> bool:
        """Whether approximate reuse is allowed."""
        return self._stats.weaving

    def allowed(self, choice: MethodChoice) -> MethodChoice:
        """The method that may answer: `choice`, or the exact one while weaving is switched off."""
        return choice if self.weaving else choice.made_exact()

    def wants(self) -> bool:
        """Count a woven answer; returns whether to check it. Every `every`th is checked."""
        with self._lock:
            self._count(woven=1)
            wanted = self.config.every is not None and self._stats.woven % self.config.every == 0
            if wanted:
                self._count(sampled=1)
            return wanted

    def drop(self) -> None:
        """Count a sampled answer that is not checked, for lack of room or time."""
        with self._lock:
            self._count(dropped=1)

    def fail(self) -> None:
        """Count a check that failed."""
        with self._lock:
            self._count(failed=1)

    def take(self, divergence: Divergence) -> None:
        """Record the result of a check; may switch weaving off."""
        kl = inf if isnan(divergence.kl) else max(0.0, divergence.kl)  # rounding may give a value below 0
        with self._lock:
            self._count(
                checked=1,
                agreed=int(divergence.agrees),
                same_tokens=divergence.same_tokens,
                compared_tokens=divergence.compared_tokens,
            )
            self._divergences.append(kl)
            self._window.append(replace(divergence, kl=kl))
            window_kl = _mean([comparison.kl for comparison in self._window])
            agreement = _mean([float(comparison.agrees) for comparison in self._window])
            self._stats = replace(self._stats, window_kl=window_kl, window_agreement=agreement)
            reason = self._too_far(window_kl, agreement)
        if reason is not None:
            self.switch_off(reason)

    def switch_off(self, reason: str) -> None:
        """Reuse only exact prefixes from now on. Idempotent."""
        with self._lock:
            if not self._stats.weaving:
                return
            self._stats = replace(self._stats, weaving=False, switched_off=self._stats.switched_off + 1, reason=reason)
        logger.error("weaving is switched off; answers reuse exact prefixes only: %s", reason)

    def switch_on(self) -> None:
        """Switch weaving on again, and start a new window of checks. Idempotent."""
        with self._lock:
            if self._stats.weaving:
                return
            self._window.clear()
            self._stats = replace(self._stats, weaving=True, reason="", window_kl=0.0, window_agreement=1.0)
        logger.warning("weaving is switched on again")

    def _too_far(self, window_kl: float, agreement: float) -> str | None:
        config = self.config
        if len(self._window) < config.window:
            return None
        last = f"over the last {config.window} shadow checks"
        if config.max_divergence is not None and window_kl > config.max_divergence:
            return f"the mean divergence {last} is {window_kl:.3g} nats, above {config.max_divergence:g}"
        if config.min_agreement is not None and agreement < config.min_agreement:
            return f"first tokens agreed in {agreement:.0%} {last}, below {config.min_agreement:.0%}"
        return None

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
