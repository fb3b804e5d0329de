"""One level of the hierarchy: a named store over one tier, and whether that tier can be relied on just now."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic

from chunkweave.chunking.prompt import PromptPart
from chunkweave.store.records import SegmentRecord
from chunkweave.store.segment_store import SegmentStore
from chunkweave.store.shared import ClosableTier, DatedTier
from chunkweave.store.tier import PayloadT
from chunkweave.types import ChunkId, SegmentId

logger = logging.getLogger(__name__)


class Level(Generic[PayloadT]):
    """A segment store with a name ("host", "disk", ...) that survives its tier's failures.

    A tier that raises `OSError` several times in a row is left alone for a while: nothing is found, read or written
    here meanwhile. Then it is tried again, and one more failure pauses it anew.
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
        """A level in use.

        Args:
            name: what reports call it.
            store: records, budget and tier of this level.
            background: written to by the background writer, not by requests: its tier is slow.
            patience: failures in a row that pause it.
            pause_s: for how long.
            clock: seconds, monotonic.
        """
        self.name = name
        self.store = store
        self.background = background
        self._patience = patience
        self._pause_s = pause_s
        self._clock = clock
        self._failures_in_a_row = 0
        self._paused_until_s = float("-inf")
        self.failures = 0
        """`OSError`s of the tier since the level was made."""

    @property
    def available(self) -> bool:
        """Whether the level is in use now."""
        return self._clock() >= self._paused_until_s

    @property
    def probes(self) -> bool:
        """Whether segments not known here may be there all the same."""
        return self.available and self.store.probes

    def record(self, segment: SegmentId) -> SegmentRecord | None:
        """The record held here; None too while the level is paused."""
        return self.store.record(segment) if self.available else None

    def variants(self, part: PromptPart) -> tuple[SegmentRecord, ...]:
        """Segments for a part, most recently used first; none while the level is paused."""
        return self.store.variants(part) if self.available else ()

    def records(self) -> tuple[SegmentRecord, ...]:
        """All records held here; none while the level is paused."""
        return self.store.records() if self.available else ()

    def records_of(self, chunk: ChunkId) -> tuple[SegmentRecord, ...]:
        """All variants of a chunk held here; none while the level is paused."""
        return self.store.records_of(chunk) if self.available else ()

    def drop(self, segment: SegmentId) -> bool:
        """Evict a segment that nobody claims; False if it stays, as it does while the level is paused."""
        return self.available and self.store.drop(segment)

    def probe(self, segments: Sequence[SegmentId]) -> None:
        """Learn which of `segments` a shared tier holds. A failure is logged and counted."""
        if not segments or not self.available:
            return
        try:
            self.store.probe(segments)
        except OSError as error:
            self._failed(error)

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload, or None if it is not here, is lost, or cannot be read now."""
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

    def stored_at_s(self, segment: SegmentId) -> float | None:
        """When a segment came into a tier that remembers it, in seconds since the epoch."""
        tier = self.store.tier
        return tier.stored_at_s(segment) if isinstance(tier, DatedTier) else None

    def close(self) -> None:
        """Give back what the tier holds open."""
        if isinstance(self.store.tier, ClosableTier):
            self.store.tier.close()

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        logger.warning("the %s tier failed: %s", self.name, error)
        if self._failures_in_a_row >= self._patience:
            self._paused_until_s = self._clock() + self._pause_s
            logger.warning("the %s tier is left alone for %.0f s", self.name, self._pause_s)
