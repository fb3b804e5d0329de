"""Methods that know beforehand what they compute: `full`, `prefix`, `full-reuse` and `epic`."""

from math import ceil

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import (
    RATIO_BUDGET,
    one_pass,
    prefer_mean,
    reuse_every_hit,
    reuse_exact_prefix,
    reuse_nothing,
    reused_spans,
)
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry


class _NothingToSet:
    """A method without parameters."""

    budget = None

    def __init__(self, _config: ReuseConfig) -> None:
        pass


class FullPrefill(_NothingToSet):
    """`full`: nothing from the store, every token active at every layer. The reference for quality and for time."""

    name = "full"
    reuses_nothing = True

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over all tokens."""
        return one_pass(self.name, reuse_nothing(lookup))


class ExactPrefix(_NothingToSet):
    """`prefix`: the longest exact prefix from the store, chunk by chunk, and everything after it computed.

    Exact (RAGCache §5.1 without its policies).
    """

    name = "prefix"

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over the tokens behind the prefix."""
        return one_pass(self.name, reuse_exact_prefix(lookup))


class FullReuse(_NothingToSet):
    """`full-reuse`: all hits reused; only misses and the question are computed. Fastest, and blind across chunks.

    CacheBlend §3.2; the PromptCache way.
    """

    name = "full-reuse"

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses and question."""
        return one_pass(self.name, reuse_every_hit(lookup, prefer_mean))


class Epic:
    """`epic`: the first `ceil(recompute_ratio * tokens)` tokens of every reused chunk are computed again.

    There attention sinks form (EPIC's LegoLink). EPIC fixes a number of tokens a chunk; a ratio makes its budget
    comparable with the other methods'.
    """

    name = "epic"
    budget = RATIO_BUDGET

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses, question and the heads of the reused chunks."""
        parts = reuse_every_hit(lookup, prefer_mean)
        heads = [
            position
            for span in reused_spans(parts)
            for position in range(span.start, span.start + ceil(self._ratio * len(span)))
        ]
        return one_pass(self.name, parts, heads)
