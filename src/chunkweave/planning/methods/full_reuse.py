"""`full-reuse`: every cached chunk at its new position, nothing recomputed (CacheBlend §3.2; the PromptCache way)."""

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import one_pass, prefer_neutral, reuse_every_hit
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry


class FullReuse:
    """All hits reused; only misses and the question are computed. Fastest, and blind across chunks."""

    name = "full-reuse"
    budget = None

    def __init__(self, _config: ReuseConfig) -> None:
        pass

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses and question."""
        return one_pass(self.name, reuse_every_hit(lookup, prefer_neutral))


METHOD = FullReuse
