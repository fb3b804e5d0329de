"""Which segments may not be evicted, because a live lease names them."""

from collections.abc import Iterable
from weakref import ref

from chunkweave.store.lease import Lease
from chunkweave.types import SegmentId


class Pins:
    """The leases of one store, referred to weakly. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self._leases: list[ref[Lease]] = []

    def lease(self, ids: Iterable[SegmentId]) -> Lease:
        """A new lease on `ids`; it pins them until it is released or collected."""
        lease = Lease(ids)
        self._leases = [ref(other) for other in (*self._live(), lease)]
        return lease

    def ids(self) -> set[SegmentId]:
        """Segments that some live lease names."""
        return {segment for lease in self._live() for segment in lease.ids}

    def forget(self, segment: SegmentId) -> None:
        """The segment is gone: leases on it do not pin one stored later under its id."""
        for lease in self._live():
            lease.forget(segment)

    def _live(self) -> list[Lease]:
        # Not a WeakSet: an object collected by another thread may change that while it is iterated over.
        return [lease for lease in (weak() for weak in self._leases) if lease is not None and lease.ids]
