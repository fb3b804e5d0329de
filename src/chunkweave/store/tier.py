"""The protocol of tiers, which hold payloads (the tensors of segments). Implementations: `chunkweave.tiers`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId

PayloadT = TypeVar("PayloadT")


class Tier(Protocol[PayloadT]):
    """A map from segment ids to immutable payloads. Budget and eviction belong to the store.

    `records` of a tier that outlives the process (disk, remote) lists what it held when it was opened.
    """

    def put(self, record: SegmentRecord, payload: PayloadT) -> None:
        """Store `payload` under `record.id`, replacing one with the same id.

        Raises:
            OSError: the tier cannot store it (a full disk, an unreachable server); no partial payload remains.
        """

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload, or None if the tier does not have it; a miss is not an error.

        A payload from disk may read its layers on demand (`chunkweave.kv.segment.SegmentSource`).
        """

    def delete(self, segment: SegmentId) -> None:
        """Delete a payload; unknown ids are ignored.

        Raises:
            OSError: the payload may still be there. The store does not use it, and tries again.
        """

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes that a stored payload takes after this tier's codec, 0 if it is not stored."""

    def size_of(self, record: SegmentRecord, payload: PayloadT) -> int:
        """Bytes that a payload would take after this tier's codec."""

    def records(self) -> Iterator[SegmentRecord]:
        """Records of all payloads, in no order; `nbytes` is the size after this tier's codec."""


@runtime_checkable
class SharedTier(Protocol):
    """A tier that other processes also change, so its contents must be queried."""

    def find(self, segments: Sequence[SegmentId]) -> Iterable[SegmentRecord]:
        """Records of those of `segments` that are stored; one round trip, within the tier's deadline.

        Raises:
            OSError: the tier cannot be queried.
        """


@runtime_checkable
class DatedTier(Protocol):
    """A tier that records when a segment was stored, so that ages survive the process."""

    def stored_at_s(self, segment: SegmentId) -> float | None:
        """Seconds since the epoch, or None if the segment is not stored."""


@runtime_checkable
class ClosableTier(Protocol):
    """A tier with connections or files to close."""

    def close(self) -> None:
        """Close them; the tier must not be used afterwards."""
