"""First in, first out: uses do not count."""

from chunkweave.store.policies.lru import LRUPolicy
from chunkweave.store.records import SegmentRecord


class FIFOPolicy(LRUPolicy):
    """Evicts what was stored longest ago. All updates are O(1)."""

    def on_hit(self, record: SegmentRecord) -> None:
        """Changes nothing."""


POLICY = FIFOPolicy
