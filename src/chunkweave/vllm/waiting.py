"""Decides which requests wait for parts that others compute: in the scheduler, for all ranks. No torch here."""

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Generic, TypeVar

from chunkweave.scheduling.in_progress import PartInProgress, Stored, Wanted, saving_of
from chunkweave.types import ChunkId, Context

LEAST_SAVED_TOKENS = 64
"""Least tokens that a wait must save: it costs two more steps, each of which reads all weights. Assumed, not measured.
"""

_LATE = 4
"""A request stops waiting after this multiple of the expected time: the owner may be reading from a slow tier."""

_STEPS = 8
"""Number of recent steps whose time is kept."""


Owner = TypeVar("Owner", bound=Hashable)


class PartsInProgress(Generic[Owner]):
    """Records which request computes which parts. Called from one thread.

    A key names a part in the form that a waiting request can use: chunk and context for an exact path, a `ChunkId` for
    a chunk usable in any context.

    A request claims parts when it starts computing, and drops each when it is visible in the store. If a request with a
    claim never waits, every wait is for a running request, so no two requests wait for each other.

    >>> parts = PartsInProgress[str]()
    >>> parts.claim("first", ["a", "b"])
    >>> parts.claim("second", ["b"])
    >>> parts.owners_of("b")
    ('first', 'second')
    >>> parts.release("first")
    >>> parts.owners_of("a"), parts.owners_of("b")
    ((), ('second',))
    """

    def __init__(self) -> None:
        self._owners: dict[Hashable, dict[Owner, None]] = {}
        """By part, the requests that compute it, in the order of their claims."""
        self._keys: dict[Owner, set[Hashable]] = {}

    def __len__(self) -> int:
        """Number of parts in progress."""
        return len(self._owners)

    def claim(self, owner: Owner, keys: Iterable[Hashable]) -> None:
        """Record that `owner` computes these parts. A part may have several owners."""
        for key in keys:
            self._owners.setdefault(key, {})[owner] = None
            self._keys.setdefault(owner, set()).add(key)

    def owners_of(self, key: Hashable) -> tuple[Owner, ...]:
        """All requests that compute a part, earliest claim first."""
        return tuple(self._owners.get(key, ()))

    def drop(self, owner: Owner, keys: Iterable[Hashable]) -> None:
        """Record that `owner` has stored these parts, or will not. Keys that it does not hold are ignored."""
        held = self._keys.get(owner, set())
        for key in held.intersection(keys):
            held.discard(key)
            del self._owners[key][owner]
            if not self._owners[key]:
                del self._owners[key]
        if not held:
            self._keys.pop(owner, None)

    def release(self, owner: Owner) -> None:
        """Drop all claims of an owner that ended, failed or lost its KV. Other owners of a part keep theirs."""
        self.drop(owner, tuple(self._keys.get(owner, ())))

    def check(self) -> None:
        """Compare both indexes.

        Raises:
            AssertionError: they differ.
        """
        claims = {(owner, key) for owner, keys in self._keys.items() for key in keys}
        assert claims == {(owner, key) for key, owners in self._owners.items() for owner in owners}
        assert all(self._keys.values())
        assert all(self._owners.values())


@dataclass(frozen=True, slots=True)
class Pace:
    """Most tokens of a step that has both prefills (by vLLM) and weaves."""

    prefill_tokens: int = 2048
    weave_tokens: int = 256


@dataclass(frozen=True, slots=True)
class PartToStore:
    """A part that is stored once its request has computed up to position `stop`; `exact` as in `PartInProgress`."""

    chunk: ChunkId
    context: Context
    stop: int
    exact: bool


@dataclass(slots=True)
class Computation:
    """What a request computes, from the first step in which it has blocks.

    It has the KV below `computed`. An unfinished weave computes `weave_tokens` first (counted through all layers), and
    then has the KV up to `woven_to`. `profiles`: attention profiles are stored with the parts.
    """

    parts: Sequence[PartToStore] = ()
    computed: int = 0
    weave_tokens: int = 0
    woven_to: int = 0
    profiles: bool = False


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Tokens computed before some parts are stored: by vLLM's prefills, and by weaves."""

    prefilled_tokens: int
    woven_tokens: int

    @property
    def tokens(self) -> int:
        return self.prefilled_tokens + self.woven_tokens


@dataclass(slots=True)
class _Wait:
    """Start time of a request's wait, the owners of the chunks that it waits for, and its deadline."""

    since_s: float
    owners: dict[ChunkId, str] = field(default_factory=dict)
    until_s: float = 0.0


class PartWaits:
    """Records what requests compute, and which requests wait for it. Called from the scheduler's thread only.

    A request waits before it has blocks, for requests that have them, so the owner of a part never waits for a waiting
    request. A waiting request is checked in every step. If the owner has ended, failed or was preempted, the first
    waiting request that is checked computes the parts.
    """

    def __init__(
        self, pace: Pace | None = None, *, most_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A request waits at most `most_s` in total, and less if less is expected."""
        self._pace = pace or Pace()
        self._most_s = most_s
        self._clock = clock
        self._parts = PartsInProgress[str]()
        self._running: dict[str, Computation] = {}
        """In order of getting blocks, in which vLLM prefills them and workers weave."""
        self._waits: dict[str, _Wait] = {}
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS)
        """Start times and tokens of recent steps."""
        self._took_s: tuple[float, float] | None = None
        """Recent seconds per step and per token; includes decoding, weaves and pauses."""

    def __len__(self) -> int:
        """Number of chunks in progress that others may wait for."""
        return len(self._parts)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has started to compute."""
        return request_id in self._running

    def begin(self, request_id: str, computation: Computation) -> None:
        """Record that a request got blocks."""
        self._waits.pop(request_id, None)
        self._running[request_id] = computation
        self._parts.claim(request_id, (part.chunk for part in computation.parts))

    def step(self, tokens: int) -> None:
        """Record the start of a step that computes `tokens` tokens."""
        now_s = self._clock()
        computed = sum(count for _, count in self._steps)
        if computed >= LEAST_SAVED_TOKENS:  # not of each step alone: vLLM may begin one before the last has ended
            since_s = now_s - self._steps[0][0]
            self._took_s = since_s / len(self._steps), since_s / computed
        self._steps.append((now_s, tokens))

    def progress(self, request_id: str, computed: int) -> None:
        """Record that a request has its KV below a position at the end of this step."""
        if request_id in self._running:
            self._running[request_id].computed = computed

    def woven(self, request_id: str) -> None:
        """Record that a weave has ended: what it computed is stored, and vLLM computes the rest."""
        if (computation := self._running.get(request_id)) is not None:
            computation.computed, computation.weave_tokens = max(computation.computed, computation.woven_to), 0
            self._parts.drop(
                request_id, [part.chunk for part in computation.parts if part.stop <= computation.woven_to]
            )

    def stored(self, request_id: str, chunks: Iterable[ChunkId]) -> None:
        """Record that chunks computed by a request are stored before other weaves, or never."""
        self._parts.drop(request_id, chunks)

    def withhold(self, request_id: str) -> None:
        """Record that nothing computed by a request may be stored any more."""
        self._parts.release(request_id)

    def end(self, request_id: str) -> None:
        """Remove a request that ended, failed or lost its blocks."""
        self._waits.pop(request_id, None)
        self._running.pop(request_id, None)
        self._parts.release(request_id)

    def is_still_waiting(self, request_id: str) -> bool:
        """False when the wait timed out, an awaited request ended, or all awaited chunks are stored."""
        wait = self._waits.get(request_id)
        if wait is None or not self._is_in_time(wait) or not self._running.keys() >= set(wait.owners.values()):
            return False
        return any(owner in self._parts.owners_of(chunk) for chunk, owner in wait.owners.items())

    def waits(
        self, request_id: str, wanted: Wanted, stored: Stored, *, woven: Collection[ChunkId], profiles: bool = False
    ) -> bool:
        """Whether a request waits for parts that others compute; with `profiles`, only for parts with profiles.

        `woven` are the chunks that it would weave itself; vLLM would prefill the others.
        """
        if request_id in self._running or not self._parts:
            return False
        coming = self._coming(wanted, profiles=profiles)
        saving = saving_of(wanted, stored, (part for part, _ in coming.values()))
        if saving.tokens < LEAST_SAVED_TOKENS:
            return False
        ahead = self._ahead([coming[chunk] for chunk in saving.chunks])
        beside = self._beside(ahead, saving.tokens, woven=not saving.chunks.isdisjoint(woven))
        if not replace(saving, tokens_left=ahead.tokens).sooner(ahead.tokens, beside=beside):
            return False
        now_s = self._clock()
        wait = self._waits.setdefault(request_id, _Wait(now_s))
        owners = {chunk: coming[chunk][1] for chunk in saving.chunks}
        if not owners.items() <= wait.owners.items():
            wait.owners, wait.until_s = owners, min(now_s + self._late_s(ahead), wait.since_s + self._most_s)
        return self._is_in_time(wait)

    def _coming(self, wanted: Wanted, *, profiles: bool) -> dict[ChunkId, tuple[PartInProgress, str]]:
        """For each chunk, the part that is computed in the same context, or else the one that started first."""
        coming: dict[ChunkId, tuple[PartInProgress, str]] = {}
        for number, chunk in enumerate(wanted.chunks):
            candidates: list[tuple[PartToStore, str]] = []
            for owner in self._parts.owners_of(chunk):
                running = self._running[owner]
                if running.profiles or not profiles:
                    candidates += [(part, owner) for part in running.parts if part.chunk == chunk]
            context = tuple(wanted.chunks[:number])
            same = [candidate for candidate in candidates if candidate[0].exact and candidate[0].context == context]
            for part, owner in (same or candidates)[:1]:
                tokens_left = max(0, part.stop - self._running[owner].computed)
                coming[chunk] = PartInProgress(chunk, part.context, part.exact, tokens_left), owner
        return coming

    def _ahead(self, coming: Iterable[tuple[PartInProgress, str]]) -> _Ahead:
        tokens_left: dict[str, int] = {}
        for part, owner in coming:
            tokens_left[owner] = max(tokens_left.get(owner, 0), part.tokens_left)
        prefilled = woven = queued = 0
        for name, running in self._running.items():
            queued += running.weave_tokens
            if name in tokens_left:
                woven = queued if running.weave_tokens else woven
                prefilled += max(0, tokens_left[name] - max(0, running.woven_to - running.computed))
        return _Ahead(prefilled, woven)

    def _beside(self, ahead: _Ahead, saved: float, *, woven: bool) -> int:
        """Tokens that the owners compute until the request would have computed the parts itself.

        Requests that got blocks first are computed first, by vLLM and in the weave queue: all their prefills if this
        one is prefilled, all weaves if it is woven, and of the other kind what fits into as many steps.
        """
        prefill = self._pace.prefill_tokens
        weave = self._pace.weave_tokens
        if woven:
            return ahead.woven_tokens + min(ahead.prefilled_tokens, ceil(saved / weave) * prefill)
        return ahead.prefilled_tokens + min(ahead.woven_tokens, ceil(saved / prefill) * weave)

    def _is_in_time(self, wait: _Wait) -> bool:
        return self._clock() <= wait.until_s

    def _late_s(self, ahead: _Ahead) -> float:
        """Seconds allowed to the owners: their tokens and two more steps, at the pace of recent steps."""
        if self._took_s is None:
            return self._most_s
        step_s, token_s = self._took_s
        return _LATE * (ahead.tokens * token_s + 2 * step_s)
