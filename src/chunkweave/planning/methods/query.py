"""`query`: recompute the tokens that this question reads (query-aware weaving, DESIGN §5.6; ProphetKV's idea)."""

from math import ceil

from chunkweave.chunking.prompt import PartKind
from chunkweave.config import ReuseConfig
from chunkweave.planning.budget import RATIO_BUDGET
from chunkweave.planning.method import prefer_alone, required_spans, reuse_every_hit, reused_spans
from chunkweave.planning.plan import EarlierEvidence, Pass, Plan, TopBy
from chunkweave.store.lookup import PromptLookup
from chunkweave.types import Geometry


class QueryAware:
    """Two passes: the question alone over the reused KV, then the question and the tokens that it read most.

    What deviates and is never looked at cannot change the answer; `cacheblend` recomputes it all the same. The first
    pass computes the question (and missing chunks) only, so it costs next to nothing, and no dense layer is needed. The
    budget, `ceil(recompute_ratio * reused tokens)`, is the prompt's: chunks that the question does not read get none.
    Missing chunks and the question are computed in both passes, since what they see has changed.
    """

    name = "query"
    budget = RATIO_BUDGET

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """A pass that watches the question, and one over what it read; one pass where there is nothing to choose."""
        parts = reuse_every_hit(lookup, prefer_alone)
        candidates = reused_spans(parts)
        total = sum(len(span) for span in candidates)
        required = required_spans(parts)
        last = parts[-1]
        if not total or not self._ratio or last.part.kind is not PartKind.QUESTION:
            return Plan(self.name, parts, (Pass(required),))
        start = TopBy(ceil(self._ratio * total), EarlierEvidence.QUESTION_ATTENTION)
        passes = (Pass(required, watch=last.span), Pass(required, candidates, start=start))
        return Plan(self.name, parts, passes)
