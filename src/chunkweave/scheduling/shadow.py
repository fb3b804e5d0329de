"""The shadow check: which woven answers are held against full prefill, how far they strayed, and when that is too far.

Tensors are others' business (`engine.shadow`); this says when, keeps the figures, and is the switch.
"""

import logging
from collections import deque
from dataclasses import dataclass, replace
from math import ceil, inf, isnan
from threading import Lock

from chunkweave.planning.method_choice import MethodChoice
from chunkweave.settings import SERVERS, Place, configuration, setting

logger = logging.getLogger(__name__)

_REMEMBERED = 1000
_ENGINE = frozenset({Place.ENGINE})


@configuration(SERVERS)
@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """How often to check, how much room a check may take, and what makes weaving stop.

    A check prefills an answer's prompt in full and decodes the beginning of the answer again. Once `window` checks have
    been made, weaving is switched off if they stray too far. A server makes none unless `shadow_every` is set.
    """

    every: int = setting(
        100,
        "Check one in so many woven answers against full prefill, when idle; none: no checks.",
        name="shadow_every",
        defaults={Place.ENGINE: None, Place.VLLM: None},
        least=1,
    )
    window: int = setting(20, "Checks that are looked at together.", name="shadow_window", least=1)
    max_divergence: float | None = setting(
        None,
        "Switch weaving off above this mean divergence of first tokens, in nats; none: never.",
        name="shadow_max_divergence",
        above=0,
    )
    min_agreement: float | None = setting(
        None,
        "Switch weaving off where first tokens agree less often, a share; none: never.",
        name="shadow_min_agreement",
        above=0,
        most=1,
    )
    compared_tokens: int = setting(
        16, "Tokens of an answer that a check decodes again.", name="shadow_compared_tokens", places=_ENGINE, least=0
    )
    slice_tokens: int = setting(
        256, "Tokens of a prompt that a check prefills at once.", name="shadow_slice_tokens", places=_ENGINE, least=1
    )
    most_pending: int = setting(
        4,
        "Answers that may wait to be checked; further ones are dropped.",
        name="shadow_pending",
        places=_ENGINE,
        least=1,
    )
    beside: int = setting(
        0, "Requests that may be under way while a check goes on.", name="shadow_beside", places=_ENGINE, least=0
    )


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far one woven answer strayed from full prefill.

    `kl` is the Kullback-Leibler divergence of the first token's distribution, full prefill's from the woven one, in
    nats; infinite where either was no distribution. `agrees` says whether both have the same most likely token.
    The first `same_tokens` of `compared_tokens` of the answer are those that full prefill gives by greedy decoding.
    """

    kl: float
    agrees: bool
    same_tokens: int = 0
    compared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ShadowStats:
    """What the checks have found so far, and whether weaving is on.

    Of `woven` answers `sampled` were to be checked: they were `checked`, `dropped` for lack of room, `failed`, or still
    wait. `mean_kl` and `p99_kl` are of the last 1000 checks, `window_kl` and `window_agreement` of those that the
    switch looks at. `switched_off` counts how often weaving was switched off, `reason` says why it is off now.
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
    """Samples woven answers, sums up their checks, and switches weaving off where they stray. Thread-safe.

    Off is off: only `switch_on` (an operator's word) or a new process weaves again, since there is nothing left to
    check that could tell that things are better.
    """

    def __init__(self, config: ShadowConfig) -> None:
        """Nothing seen yet; weaving is on."""
        self.config = config
        self._lock = Lock()
        self._stats = ShadowStats()
        self._divergences: deque[float] = deque(maxlen=_REMEMBERED)
        self._window: deque[Divergence] = deque(maxlen=config.window)

    @property
    def stats(self) -> ShadowStats:
        """A snapshot."""
        with self._lock:
            found = sorted(self._divergences)
            if not found:
                return self._stats
            return replace(self._stats, mean_kl=_mean(found), p99_kl=found[ceil(0.99 * len(found)) - 1])

    @property
    def weaving(self) -> bool:
        """Whether approximate reuse is allowed."""
        return self._stats.weaving

    def allowed(self, choice: MethodChoice) -> MethodChoice:
        """The method that may answer: the one chosen, or the exact one while weaving is switched off."""
        return choice if self.weaving else choice.made_exact()

    def wants(self) -> bool:
        """A woven answer was given: whether it is to be checked. Every `every`th is."""
        with self._lock:
            self._count(woven=1)
            wanted = self._stats.woven % self.config.every == 0
            if wanted:
                self._count(sampled=1)
            return wanted

    def drop(self) -> None:
        """An answer that was to be checked will not be: there is no room, or no time."""
        with self._lock:
            self._count(dropped=1)

    def fail(self) -> None:
        """A check did not come to its end."""
        with self._lock:
            self._count(failed=1)

    def take(self, divergence: Divergence) -> None:
        """A check found this."""
        kl = inf if isnan(divergence.kl) else max(0.0, divergence.kl)  # a rounding error below 0 is none
        with self._lock:
            self._count(
                checked=1,
                agreed=int(divergence.agrees),
                same_tokens=divergence.same_tokens,
                compared_tokens=divergence.compared_tokens,
            )
            self._divergences.append(kl)
            self._window.append(replace(divergence, kl=kl))
            window_kl = _mean([one.kl for one in self._window])
            agreement = _mean([float(one.agrees) for one in self._window])
            self._stats = replace(self._stats, window_kl=window_kl, window_agreement=agreement)
            reason = self._too_far(window_kl, agreement)
        if reason is not None:
            self.switch_off(reason)

    def switch_off(self, reason: str) -> None:
        """Only exact prefixes are reused from now on; a second time is harmless."""
        with self._lock:
            if not self._stats.weaving:
                return
            self._stats = replace(self._stats, weaving=False, switched_off=self._stats.switched_off + 1, reason=reason)
        logger.error("weaving is switched off, answers reuse exact prefixes only: %s", reason)

    def switch_on(self) -> None:
        """Weave again, and judge by checks that are still to come; a second time is harmless."""
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
