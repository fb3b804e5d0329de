"""What a tier may offer beyond the `Tier` protocol. The store looks for each and does without."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


@runtime_checkable
class SharedTier(Protocol):
    """A tier that other processes fill and empty too, so that its contents are learnt by asking."""

    def find(self, segments: Sequence[SegmentId]) -> Iterable[SegmentRecord]:
        """Records of those of `segments` that are held now; one round trip, under the tier's own deadline.

        Raises:
            OSError: the tier cannot be asked.
        """


class Described(Protocol):
    """What a payload from a shared tier says it is: read from the same bytes as the tensors."""

    @property
    def record(self) -> SegmentRecord:
        """The record that it was stored under."""


@runtime_checkable
class DescribedPayload(Protocol):
    """A payload that knows what it is, so that one which another process has replaced is noticed."""

    @property
    def header(self) -> Described:
        """What was stored with it."""


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
