"""The claim of one request on the segments that it uses."""

from collections.abc import Iterable
from typing import Self

from chunkweave.types import SegmentId


class Lease:
    """Pins segments until it is released; a context manager that releases on leaving.

    Leases are made by `SegmentStore.lease`. The store refers to them weakly: one that is dropped without
    a release (an abandoned stream, an interrupt at the wrong moment) pins nothing once it is collected.

    Releasing takes no lock and touches nothing of the store's, since it may run inside a finalizer, in the
    middle of one of the store's own changes. For the same reason pins are not counted in the store:
    a segment is pinned while some live lease names it.
    """

    __slots__ = ("__weakref__", "_ids", "_released")

    def __init__(self, ids: Iterable[SegmentId]) -> None:
        self._ids = tuple(ids)
        self._released = False

    @property
    def ids(self) -> tuple[SegmentId, ...]:
        """Segments pinned by this lease, in the order asked for; empty after the release."""
        return () if self._released else self._ids

    def release(self) -> None:
        """Unpin everything. A second release is harmless."""
        self._released = True

    def forget(self, segment: SegmentId) -> None:
        """For the store alone: the segment is gone, and one stored later under its id is not pinned by this."""
        self._ids = tuple(other for other in self._ids if other != segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()
