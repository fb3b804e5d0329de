"""`h2o`: recompute the tokens that their chunk attended to most ("Prefill-H2O" of Cache-Craft §5.1.4)."""

from collections.abc import Sequence
from math import ceil

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import RATIO_BUDGET, one_pass, prefer_neutral, reuse_every_hit
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import Geometry, Scattered


class HeavyHitters:
    """Of every reused chunk the `ceil(recompute_ratio * tokens)` tokens that received most attention from its own.

    H2O keeps such tokens in a shrinking cache; Cache-Craft's baseline recomputes them. The attention was measured when
    the segment was computed. Without a profile the first tokens are recomputed, where attention sinks form.
    """

    name = "h2o"
    budget = RATIO_BUDGET
    needs_profiles = True

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses, question and the heavy hitters of the reused chunks."""
        parts = reuse_every_hit(lookup, prefer_neutral)
        records = {record.id: record for entry in lookup.parts for record in entry.variants}
        hitters = [
            position
            for part in parts
            if part.kv_source is KVSource.REUSED and part.segment is not None and len(part.fresh) < len(part.span)
            for position in Scattered(part.span.start, self._heaviest(records[part.segment])).positions()
        ]
        return one_pass(self.name, parts, hitters)

    def _heaviest(self, record: SegmentRecord) -> tuple[int, ...]:
        ranking: Sequence[int] = record.attention.by_received if record.attention else range(len(record))
        return tuple(ranking[: ceil(self._ratio * len(record))])


METHOD = HeavyHitters
