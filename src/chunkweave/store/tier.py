"""Where payloads (the tensors of segments) are kept. Implementations live in `chunkweave.tiers`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

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
        """Forget it; unknown ids are ignored.

        Raises:
            OSError: it may still be there; it is served no more as long as this tier is open.
        """

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes that it takes here (after this tier's codec), 0 if it is not here."""

    def size_of(self, record: SegmentRecord, payload: PayloadT) -> int:
        """Bytes that it would take here."""

    def records(self) -> Iterator[SegmentRecord]:
        """Everything held, in no order; `nbytes` of each is what it takes here."""


@runtime_checkable
class SharedTier(Protocol):
    """A tier that other processes fill and empty too, so that its contents are learnt by asking."""

    def find(self, segments: Sequence[SegmentId]) -> Iterable[SegmentRecord]:
        """Records of those of `segments` that are held now; one round trip, under the tier's own deadline.

        Raises:
            OSError: the tier cannot be asked.
        """


@runtime_checkable
class DatedTier(Protocol):
    """A tier that remembers when a segment came in, so that age survives the process."""

    def stored_at_s(self, segment: SegmentId) -> float | None:
        """Seconds since the epoch, or None if it is not held."""


@runtime_checkable
class ClosableTier(Protocol):
    """A tier with connections or files to give back."""

    def close(self) -> None:
        """Give them back; the tier is not used afterwards."""
