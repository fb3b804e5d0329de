"""Segments of a request that still waits, being read ahead of it."""

from types import TracebackType
from typing import Self

from chunkweave.store.lease import TieredLease
from chunkweave.tiers.preload import LayerLoader, LoadingSegment
from chunkweave.types import SegmentId


class Prefetch:
    """Pins a waiting request's segments and reads their first layers. Hand it to `Runner.prefill`, then close it.

    It helps as far as it goes: a plan that is made later takes from it what it still wants and reads the rest itself.
    """

    def __init__(self, lease: TieredLease, loader: LayerLoader) -> None:
        self._lease = lease
        self._loader = loader
        self._by_id = {SegmentId(segment.name): segment for segment in loader.segments}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its segments take once their first layers are in."""
        return sum(segment.nbytes for segment in self._loader.segments)

    def find(self, segment: SegmentId) -> LoadingSegment | None:
        """The segment on its way, if it is one of these."""
        return self._by_id.get(segment)

    def start_using(self) -> None:
        """The request's turn has come: read on without bound."""
        self._loader.release()

    def close(self) -> None:
        """Stop reading and unpin."""
        self._loader.close()
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
