"""`full`: compute the whole prompt. The reference for quality and for time."""

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import one_pass, reuse_nothing
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry


class FullPrefill:
    """Nothing from the store, every token active at every layer."""

    name = "full"
    budget = None
    reuses_nothing = True

    def __init__(self, _config: ReuseConfig) -> None:
        pass

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over all tokens."""
        return one_pass(self.name, reuse_nothing(lookup))


METHOD = FullPrefill
