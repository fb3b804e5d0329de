"""Methods whose computed tokens are fixed in advance: `full`, `prefix`, `full-reuse` and `epic`."""

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
    """Computes the whole prompt and reuses nothing: the answer that others are compared with."""

    name = "full"
    reuses_nothing = True

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over all tokens."""
        return one_pass(self.name, reuse_nothing(lookup))


class ExactPrefix(_NothingToSet):
    """Reuses the longest beginning that was computed in the same order, passage by passage: exact.

    Everything after it is computed (RAGCache §5.1 without its policies).
    """

    name = "prefix"

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over the tokens after the prefix."""
        return one_pass(self.name, reuse_exact_prefix(lookup))


class FullReuse(_NothingToSet):
    """Reuses every stored passage as it is: fastest, but no passage sees another one.

    Only misses and the question are computed. CacheBlend §3.2; PromptCache's method.
    """

    name = "full-reuse"

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses and question."""
        return one_pass(self.name, reuse_every_hit(lookup, prefer_mean))


class Epic:
    """Reuses every stored passage and computes the first tokens of each again.

    These are the first `ceil(recompute_ratio * tokens)` tokens of every reused chunk. Attention sinks form there
    (EPIC's LegoLink). Deviation: EPIC fixes a number of tokens per chunk; a ratio makes its budget comparable with
    other methods.
    """

    name = "epic"
    budget = RATIO_BUDGET

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses, question and the first tokens of reused chunks."""
        parts = reuse_every_hit(lookup, prefer_mean)
        heads = [
            position
            for span in reused_spans(parts)
            for position in range(span.start, span.start + ceil(self._ratio * len(span)))
        ]
        return one_pass(self.name, parts, heads)
