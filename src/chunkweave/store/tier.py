"""Where payloads (the tensors of segments) are kept. Implementations live in `chunkweave.tiers`."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId

PayloadT = TypeVar("PayloadT")


class Tier(Protocol[PayloadT]):
    """A keyed place for immutable payloads. The store owns budget and policy; a tier only holds and returns.

    A tier that outlives the process (disk, remote) lists in `records` what it held when it was opened.
    """

    def put(self, record: SegmentRecord, payload: PayloadT) -> None:
        """Keep `payload` under `record.id`, replacing one of the same id.

        Raises:
            OSError: the tier cannot take it (a full disk, a server that is gone); nothing half-written stays.
        """

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload, or None if the tier does not have it (a miss, never an error).

        A payload from disk may read its layers when they are asked for (`chunkweave.kv.segment.SegmentSource`).
        """

    def delete(self, segment: SegmentId) -> None:
        """Forget it; unknown ids are ignored."""

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes that it takes here (after this tier's codec), 0 if it is not here."""

    def size_of(self, record: SegmentRecord, payload: PayloadT) -> int:
        """Bytes that it would take here."""

    def records(self) -> Iterator[SegmentRecord]:
        """Everything held, in no order; `nbytes` of each is what it takes here."""
