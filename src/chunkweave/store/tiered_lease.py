"""The claim of one request on the segments that it uses, on every level that has them."""

from collections.abc import Iterable, Sequence
from typing import Self

from chunkweave.store.lease import Lease
from chunkweave.types import SegmentId


class TieredLease:
    """One lease a level; releases them all, on leaving a `with` block too. Abandoned, it pins nothing."""

    __slots__ = ("_leases", "_order")

    def __init__(self, order: Iterable[SegmentId], leases: Sequence[Lease]) -> None:
        self._order = tuple(order)
        self._leases = tuple(leases)

    @property
    def ids(self) -> tuple[SegmentId, ...]:
        """Segments pinned on some level, in the order asked for; empty after the release."""
        pinned = {segment for lease in self._leases for segment in lease.ids}
        return tuple(segment for segment in self._order if segment in pinned)

    def release(self) -> None:
        """Unpin everything. A second release is harmless."""
        for lease in self._leases:
            lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()
