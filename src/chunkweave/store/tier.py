"""Where payloads (the tensors of segments) are kept. Implementations live in `chunkweave.tiers`."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

from chunkweave.types import SegmentId

PayloadT = TypeVar("PayloadT")


class Tier(Protocol[PayloadT]):
    """A keyed place for immutable payloads. The store owns the budget; a tier only holds and returns."""

    def put(self, segment: SegmentId, payload: PayloadT) -> None:
        """Keep `payload`, replacing one of the same id."""

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload, or None if the tier does not have it (a miss, never an error)."""

    def delete(self, segment: SegmentId) -> None:
        """Forget it; unknown ids are ignored."""

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes held for this id, 0 if it is not here."""

    def ids(self) -> Iterator[SegmentId]:
        """All ids held, in no order."""
