"""Prefix-aware greedy-dual-size with frequency: GDSF with the cost that a miss really has (RAGCache §5.1)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from chunkweave.store.eviction import AgedRanking, PathRequest, RankedPolicy
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId

DEFAULT_WINDOW = 100_000
"""Uses over which frequency is counted; the paper has a time window and does not say how long."""


def one_second_a_token(new: float, _cached: float) -> float:
    """The cost where none was measured: computing takes equally long behind anything."""
    return new


@dataclass(slots=True)
class _Statistics:
    """What is known of a node, stored or not: uses within the window, and its cost over the misses seen."""

    frequency: int = 0
    total_cost_s: float = 0.0
    misses: int = 0
    announced: bool = False


class PGDSFPolicy(RankedPolicy):
    """Evicts the least priority = clock + average cost * frequency (RAGCache §5.1, eq. 1 to 3, Algorithm 1).

    The average cost is the mean, over the requests that missed the segment, of T(cached, new) / new: seconds for each
    token that the request had to compute, with T from the profiled table (`CostModel.prefill`, bilinear).
    `frequency` counts the requests for the segment among the last `window` uses, whether it was stored then or not:
    what comes back after an eviction is as popular as before. `clock` is the greatest priority evicted so far from
    this tier; each tier has a policy, hence a clock, of its own. As in the paper a priority is set when the segment is
    asked for, so that a use that leaves the window lowers it at the next request only.

    Uses that no request announced (a segment in another context than the asked one) count when they happen. Coming in
    is no use: what is computed ahead of any request, or copied from another tier, was not asked for. Nodes that are
    neither stored nor used within the window are forgotten. All operations are O(log n), but for what `victim` passes
    over.
    """

    def __init__(
        self, prefill_s: Callable[[float, float], float] = one_second_a_token, window: int = DEFAULT_WINDOW
    ) -> None:
        """A policy for one tier.

        Args:
            prefill_s: seconds to compute `new` tokens behind `cached` ones; one a token if left out, which leaves
                recency and frequency.
            window: how many of the latest uses count.

        Raises:
            ValueError: the window holds no use.
        """
        if window < 1:
            raise ValueError(f"frequency needs a window of at least one use, not {window}")
        super().__init__(AgedRanking())
        self._prefill_s = prefill_s
        self._window = window
        self._latest: deque[SegmentId] = deque()
        self._known: dict[SegmentId, _Statistics] = {}

    def on_request(self, request: PathRequest) -> None:
        for segment in request.stored:
            self._use(segment).announced = True
        if not request.missing:
            return
        cost_s = self._prefill_s(request.new_tokens, request.cached_tokens) / request.new_tokens
        for segment in request.missing:
            node = self._use(segment)
            node.announced = True
            node.total_cost_s += cost_s
            node.misses += 1

    def on_insert(self, record: SegmentRecord) -> None:
        node = self._known.setdefault(record.id, _Statistics())
        node.announced = False
        self._rank(record, node)

    def on_hit(self, record: SegmentRecord) -> None:
        node = self._known.setdefault(record.id, _Statistics())
        if not node.announced:
            node = self._use(record.id)
        node.announced = False
        self._rank(record, node)

    def on_remove(self, segment: SegmentId) -> None:
        super().on_remove(segment)
        self._forget_unused(segment)

    def _use(self, segment: SegmentId) -> _Statistics:
        node = self._known.setdefault(segment, _Statistics())
        node.frequency += 1
        self._latest.append(segment)
        if len(self._latest) > self._window:
            oldest = self._latest.popleft()
            self._known[oldest].frequency -= 1
            if oldest != segment:
                self._forget_unused(oldest)
        return node

    def _forget_unused(self, segment: SegmentId) -> None:
        node = self._known.get(segment)
        if node is not None and not node.frequency and segment not in self._ranking:
            del self._known[segment]

    def _rank(self, record: SegmentRecord, node: _Statistics) -> None:
        self._ranking.rank(record.id, self._average_s(record, node) * max(1, node.frequency))

    def _average_s(self, record: SegmentRecord, node: _Statistics) -> float:
        if not node.misses:  # it was computed ahead of any request
            return self._prefill_s(len(record), 0.0) / len(record)
        return node.total_cost_s / node.misses


POLICY = PGDSFPolicy
