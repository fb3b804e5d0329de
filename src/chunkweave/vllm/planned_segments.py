"""The segments of one plan: pinned in the store, and read on a thread of their own where they lie in a slow tier."""

from collections.abc import Iterator

from chunkweave.kv.segment import SegmentKV, SegmentLost, SegmentSource
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.store.store import TieredStore
from chunkweave.tiers.preload import LayerLoader, LoadingSegment
from chunkweave.types import SegmentId


class PlannedSegments:
    """Where the KV of a plan comes from. Owned by the request that is woven by it; close it.

    Segments in memory are there at once. Others are read layer by layer, over all of them, as they are needed.
    """

    def __init__(self, store: TieredStore[SegmentSource], plan: Plan, num_layers: int) -> None:
        """Pin what the plan takes and begin to read.

        Raises:
            SegmentLost: a segment is not in the store any more.
        """
        self._num_layers = num_layers
        self._lease = store.lease(plan.segments())
        self._loader: LayerLoader | None = None
        try:
            found = dict(_found(store, plan))
        except BaseException:
            self._lease.release()
            raise
        slow = [(segment, source) for segment, source in found.items() if not isinstance(source, SegmentKV)]
        if slow:
            self._loader = LayerLoader(slow, num_layers)
            found |= {SegmentId(segment.name): segment for segment in self._loader.segments}
        self.sources = [(part.span, found[part.segment]) for part in plan.parts if part.segment is not None]
        """Each segment with the span that it goes to, in prompt order."""

    @property
    def layers_in(self) -> int:
        """How many of the first layers of every segment are in memory."""
        return min((segment.layers_in for segment in self._loading), default=self._num_layers)

    @property
    def complete(self) -> bool:
        """Whether every layer of every segment is in memory."""
        return self.layers_in == self._num_layers

    @property
    def failure(self) -> SegmentLost | None:
        """Why one will not come in; None as long as all may, or have."""
        return next((segment.failure for segment in self._loading if segment.failure is not None), None)

    def loaded(self) -> Iterator[tuple[SegmentId, SegmentKV]]:
        """What was read from a slow tier, as far as it came in whole."""
        for segment in self._loading:
            whole = segment.whole()
            if whole is not None:
                yield SegmentId(segment.name), whole

    def close(self) -> None:
        """Stop reading and unpin; a second time is harmless."""
        if self._loader is not None:
            self._loader.close()
        self._lease.release()

    @property
    def _loading(self) -> tuple[LoadingSegment, ...]:
        return () if self._loader is None else tuple(self._loader.segments)


def _found(store: TieredStore[SegmentSource], plan: Plan) -> Iterator[tuple[SegmentId, SegmentSource]]:
    exact = {part.segment for part in plan.parts if part.kv_source is KVSource.EXACT}
    for segment in plan.segments():
        source = store.get(segment, exact=segment in exact)
        if source is None:
            raise SegmentLost(segment, "it is not in the store any more")
        yield segment, source
