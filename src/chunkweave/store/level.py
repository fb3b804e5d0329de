"""One level of the hierarchy: a segment store that survives its tier's failures."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic

from chunkweave.prompt.parts import PromptPart
from chunkweave.store.records import SegmentRecord
from chunkweave.store.tier import ClosableTier, DatedTier, PayloadT
from chunkweave.store.tier_store import SegmentStore
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)


class Level(Generic[PayloadT]):
    """A segment store with a name ("host", "disk", ...) that survives its tier's failures.

    A tier that raises `OSError` several times in a row is paused: nothing is found, read or written there for a while.
    Then it is tried again, and one more failure pauses it again. So is one whose layers come late as many times within
    the length of a pause: each read that hangs keeps a thread and its memory.
    """

    def __init__(
        self,
        name: str,
        store: SegmentStore[PayloadT],
        *,
        background: bool = False,
        patience: int = 3,
        pause_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A level in use, called `name` in reports; `patience` failures in a row pause it for `pause_s`.

        A `background` level has a slow tier: the background writer writes to it, requests do not. `clock` is monotonic.
        """
        self.name = name
        self.store = store
        self.background = background
        self._patience = patience
        self._pause_s = pause_s
        self._clock = clock
        self._failures_in_a_row = 0
        self._paused_until_s = float("-inf")
        self._late_s: deque[float] = deque(maxlen=patience)
        self.failures = 0
        """How many `OSError`s the tier has raised."""

    @property
    def available(self) -> bool:
        """Whether the level is in use now."""
        return self._clock() >= self._paused_until_s

    def record(self, segment: SegmentId) -> SegmentRecord | None:
        """The record of a stored segment; None while the level is paused."""
        return self.store.record(segment) if self.available else None

    def variants(self, part: PromptPart) -> tuple[SegmentRecord, ...]:
        """Segments for a part, most recently used first; none while the level is paused."""
        return self.store.variants(part) if self.available else ()

    def probe(self, segments: Sequence[SegmentId]) -> None:
        """Learn which of `segments` a shared tier holds. A failure is logged and counted."""
        if not segments or not self.available:
            return
        try:
            self.store.probe(segments)
        except OSError as error:
            self._failed(error)

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload; None if it is not stored, is lost, or cannot be read now."""
        if not self.available:
            return None
        try:
            payload = self.store.get(segment)
        except OSError as error:
            self._failed(error)
            return None
        if payload is not None:
            self._failures_in_a_row = 0
        return payload

    def insert(self, record: SegmentRecord, payload: PayloadT, *, wanted: Callable[[], bool]) -> bool:
        """`SegmentStore.insert`; failures are counted here too.

        Raises:
            OSError: the tier cannot take it.
        """
        try:
            stored = self.store.insert(record, payload, wanted=wanted)
        except OSError as error:
            self._failed(error)
            raise
        self._failures_in_a_row = 0
        return stored

    def try_insert(self, record: SegmentRecord, payload: PayloadT, wanted: Callable[[], bool]) -> bool:
        """`insert`, where a tier that is paused or fails is a tier that has no room."""
        try:
            return self.available and self.insert(record, payload, wanted=wanted)
        except OSError:
            return False  # counted and logged

    def stored_at_s(self, segment: SegmentId) -> float | None:
        """When a segment came into a tier that remembers it, in seconds since the epoch."""
        tier = self.store.tier
        return tier.stored_at_s(segment) if isinstance(tier, DatedTier) else None

    def close(self) -> None:
        """Give back what the tier holds open."""
        if isinstance(self.store.tier, ClosableTier):
            self.store.tier.close()

    def was_late(self) -> None:
        """Count a layer that did not come in time."""
        now = self._clock()
        self._late_s.append(now)
        if len(self._late_s) == self._patience and now - self._late_s[0] <= self._pause_s:
            self._late_s.clear()
            self._pause()

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        logger.warning("the %s tier failed: %s", self.name, error)
        if self._failures_in_a_row >= self._patience:
            self._pause()

    def _pause(self) -> None:
        self._paused_until_s = self._clock() + self._pause_s
        logger.warning("the %s tier is left alone for %.0f s", self.name, self._pause_s)
