"""Which requests wait for parts that others compute. The scheduler's half decides, alone, for all ranks. Torch-free."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from chunkweave.scheduling.in_progress import PartsInProgress
from chunkweave.types import ChunkId, SegmentId

LEAST_SAVED_TOKENS = 64
"""Tokens that a wait must save: it costs two more steps, and each reads all weights. Assumed, not measured."""

_LATE = 4
"""A request stops waiting after so many times the time that is expected: the owner may be reading from a slow tier."""

_STEPS = 8
"""Steps whose time is remembered."""

Part = ChunkId | SegmentId
"""What a waiting request can use: a chunk computed in any context, or an exact segment."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Most tokens of a step that has both: those of vLLM's prefills, and those of weaves."""

    prefill_tokens: int = 2048
    weave_tokens: int = 256


@dataclass(slots=True)
class Computation:
    """What a request computes, from the first step in which it has blocks.

    `stops` says by part up to which position it has to compute until that part is stored. Below `computed` it has the
    KV. A weave that has not ended computes `weave_tokens` first, counted as through all layers, and brings the KV up to
    `woven_to`. `profiles` says that what the parts attend to is stored with them.
    """

    stops: Mapping[Part, int]
    computed: int = 0
    weave_tokens: int = 0
    woven_to: int = 0
    profiles: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part that is not stored. A request that has it from the store computes `tokens` fewer.

    Without it the request computes them in vLLM's prefill, or in its weave if they are `woven`.
    """

    part: Part
    tokens: int
    woven: bool = False


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What is computed before the parts are there: by which requests, in vLLM's prefills, and in weaves."""

    owners: frozenset[str]
    prefilled_tokens: int
    woven_tokens: int


@dataclass(slots=True)
class _Wait:
    """Since when a request waits, and how long for these owners."""

    since_s: float
    owners: frozenset[str] = frozenset()
    until_s: float = 0.0


class PartWaits:
    """Owns what requests compute, and since when others wait for it. Called from the scheduler's thread only.

    A request waits before it has blocks, for requests that have them. So the owner of a part never waits for a waiter.
    It asks again in every step: if the owner has ended, failed or was preempted, the first waiter that asks computes.
    """

    def __init__(
        self, pace: Pace | None = None, *, most_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A request waits at most `most_s`, for all its parts together, and less where less is expected."""
        self._pace = pace or Pace()
        self._most_s = most_s
        self._clock = clock
        self._parts = PartsInProgress[str]()
        self._running: dict[str, Computation] = {}
        """In the order in which they got blocks, which is the one in which vLLM prefills them and workers weave."""
        self._waits: dict[str, _Wait] = {}
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS)
        """When recent steps began, and their tokens."""
        self._took_s: tuple[float, float] | None = None
        """What a step and a token took lately; decoding and weaves are in it, and so are pauses."""

    def __len__(self) -> int:
        """How many parts are being computed."""
        return len(self._parts)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has begun to compute."""
        return request_id in self._running

    def begin(self, request_id: str, computation: Computation) -> None:
        """A request got blocks."""
        self._waits.pop(request_id, None)
        self._running[request_id] = computation
        self._parts.claim(request_id, computation.stops)

    def step(self, tokens: int) -> None:
        """A step begins that computes so many tokens."""
        now_s = self._clock()
        computed = sum(count for _, count in self._steps)
        if computed >= LEAST_SAVED_TOKENS:  # not of each step alone: vLLM may begin one before the last has ended
            since_s = now_s - self._steps[0][0]
            self._took_s = since_s / len(self._steps), since_s / computed
        self._steps.append((now_s, tokens))

    def progress(self, request_id: str, computed: int) -> None:
        """At the end of this step a request has its KV below a position."""
        if request_id in self._running:
            self._running[request_id].computed = computed

    def woven(self, request_id: str) -> None:
        """A weave has ended: what it computed is stored, and vLLM computes the rest."""
        if (one := self._running.get(request_id)) is not None:
            one.computed, one.weave_tokens = max(one.computed, one.woven_to), 0
            self._parts.drop(request_id, [part for part, stop in one.stops.items() if stop <= one.woven_to])

    def stored(self, request_id: str, parts: Iterable[Part]) -> None:
        """Parts that a request computed are stored, or could not be."""
        self._parts.drop(request_id, parts)

    def withhold(self, request_id: str) -> None:
        """Nothing of what a request computes may be stored any more."""
        self._parts.release(request_id)

    def end(self, request_id: str) -> None:
        """A request has ended, failed or lost its blocks."""
        self._waits.pop(request_id, None)
        self._running.pop(request_id, None)
        self._parts.release(request_id)

    def owner_of(self, part: Part, *, profiles: bool = False) -> str | None:
        """The request that began first to compute a part, with `profiles` if these are needed; None if there is none.

        >>> waits = PartWaits()
        >>> waits.begin("first", Computation({"chunk": 100}))
        >>> waits.owner_of("chunk"), waits.owner_of("chunk", profiles=True)
        ('first', None)
        """
        owners = self._parts.owners_of(part)
        return next((one for one in owners if self._running[one].profiles or not profiles), None)

    def waits(self, request_id: str, wanted: Iterable[Wanted], *, path: bool = False, profiles: bool = False) -> bool:
        """Whether a request is to wait for those of the parts that others compute; with `profiles`, if it needs these.

        Of a `path` no part is of use behind one that nobody computes.
        """
        if request_id in self._running or not self._parts:
            return False
        found: list[tuple[Wanted, str]] = []
        for one in wanted:
            if (owner := self.owner_of(one.part, profiles=profiles)) is not None:
                found.append((one, owner))
            elif path:
                break
        saved = sum(one.tokens for one, _ in found)
        if saved < LEAST_SAVED_TOKENS:
            return False
        ahead = self._ahead(found)
        woven = any(one.woven for one, _ in found)
        return self._is_sooner(saved, ahead, woven=woven) and self._is_in_time(request_id, ahead)

    def _ahead(self, found: Sequence[tuple[Wanted, str]]) -> _Ahead:
        until: dict[str, int] = {}
        for one, owner in found:
            until[owner] = max(until.get(owner, 0), self._running[owner].stops[one.part])
        prefilled = woven = queued = 0
        for name, running in self._running.items():
            queued += running.weave_tokens
            if name in until:
                woven = queued if running.weave_tokens else woven
                prefilled += max(0, until[name] - max(running.computed, running.woven_to))
        return _Ahead(frozenset(until), prefilled, woven)

    def _is_sooner(self, saved: int, ahead: _Ahead, *, woven: bool) -> bool:
        """Whether the owners' work takes less time than computing the parts once more.

        Requests share one device, and those that got blocks first are computed first, by vLLM and in the queue of
        weaves. So what the owners do by the time at which the request would have computed the parts itself delays it by
        nothing: all their prefills if it is prefilled, all weaves if it is woven, and of the other kind what fits into
        as many steps. It waits if what they do beyond that is at most what it saves.
        """
        if woven:
            steps = ceil(saved / self._pace.weave_tokens)
            return ahead.prefilled_tokens - steps * self._pace.prefill_tokens <= saved
        steps = ceil(saved / self._pace.prefill_tokens)
        return ahead.woven_tokens - steps * self._pace.weave_tokens <= saved

    def _is_in_time(self, request_id: str, ahead: _Ahead) -> bool:
        """Whether a request has not waited too long: several times what is expected of these owners, or `most_s`."""
        now_s = self._clock()
        wait = self._waits.setdefault(request_id, _Wait(now_s))
        if wait.owners != ahead.owners:
            wait.owners, wait.until_s = ahead.owners, now_s + self._late_s(ahead)
        return now_s <= min(wait.until_s, wait.since_s + self._most_s)

    def _late_s(self, ahead: _Ahead) -> float:
        """How long the owners may take: what they compute, and two steps around it, as recent steps took."""
        if self._took_s is None:
            return self._most_s
        step_s, token_s = self._took_s
        return _LATE * ((ahead.prefilled_tokens + ahead.woven_tokens) * token_s + 2 * step_s)
