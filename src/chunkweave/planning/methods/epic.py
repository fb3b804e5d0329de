"""`epic`: recompute the first tokens of every reused chunk, where attention sinks form (EPIC's LegoLink)."""

from math import ceil

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import RATIO_BUDGET, one_pass, prefer_neutral, reuse_every_hit, reused_spans
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry


class Epic:
    """The first `ceil(recompute_ratio * tokens)` tokens of every reused chunk are computed again.

    EPIC fixes a number of tokens a chunk; a ratio makes its budget comparable with the other methods'.
    """

    name = "epic"
    budget = RATIO_BUDGET

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses, question and the heads of the reused chunks."""
        parts = reuse_every_hit(lookup, prefer_neutral)
        heads = [
            position
            for span in reused_spans(parts)
            for position in range(span.start, span.start + ceil(self._ratio * len(span)))
        ]
        return one_pass(self.name, parts, heads)


METHOD = Epic
