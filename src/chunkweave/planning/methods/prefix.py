"""`prefix`: reuse the longest exact prefix, chunk by chunk. Exact (RAGCache §5.1 without its policies)."""

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import one_pass, reuse_exact_prefix
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry


class ExactPrefix:
    """The longest exact prefix from the store, everything after it computed."""

    name = "prefix"
    budget = None

    def __init__(self, _config: ReuseConfig) -> None:
        pass

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over the tokens behind the prefix."""
        return one_pass(self.name, reuse_exact_prefix(lookup))


METHOD = ExactPrefix
