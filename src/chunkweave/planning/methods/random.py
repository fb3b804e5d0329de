"""`random`: recompute tokens of every chunk drawn at random, the floor to beat (Cache-Craft §5.1.4, Random-Recomp)."""

from math import ceil
from random import Random

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import RATIO_BUDGET, one_pass, prefer_neutral, reuse_every_hit, reused_spans
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry


class RandomTokens:
    """`ceil(recompute_ratio * tokens)` of the tokens of every reused chunk, uniformly, without replacement.

    The draw depends on the seed and on the prompt's ids alone, so a request repeated gives the same plan.
    """

    name = "random"
    budget = RATIO_BUDGET

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio
        self._seed = config.seed

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses, question and the tokens drawn."""
        parts = reuse_every_hit(lookup, prefer_neutral)
        rng = Random(":".join([str(self._seed), *(part.part.id or "" for part in parts)]))
        drawn = [
            position
            for span in reused_spans(parts)
            for position in rng.sample(span.positions(), ceil(self._ratio * len(span)))
        ]
        return one_pass(self.name, parts, drawn)


METHOD = RandomTokens
