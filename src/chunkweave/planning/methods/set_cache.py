"""`set-cache`: the longest stored prefix whose chunks are all in this prompt, in any order (Cache-Craft §5.1.4)."""

from collections import Counter
from collections.abc import Iterator

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import one_pass, settled_part
from chunkweave.planning.plan import KVSource, PartPlan, Plan
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, Geometry


class SetCache:
    """An exact prefix match that ignores the order: its segments go where their chunks stand in this prompt.

    A chain is a run of exact segments, each computed behind all those before it, the first behind nothing. Of the
    chains whose parts are all in this prompt, the one with the most tokens is reused without recomputation; of equals
    the one whose last part comes first. The exact prefix is taken as by every method; everything else is computed.
    """

    name = "set-cache"
    budget = None

    def __init__(self, _config: ReuseConfig) -> None:
        pass

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over what is in neither the exact prefix nor the chain."""
        left: dict[ChunkId, list[SegmentRecord]] = {}
        for link in max(_chains(lookup), key=lambda chain: sum(map(len, chain)), default=()):
            left.setdefault(link.chunk_id, []).append(link)
        parts: list[PartPlan] = []
        for entry in lookup.parts:
            chain = left.get(entry.part.id, []) if entry.part.id is not None else []
            record = chain.pop(0) if chain else None
            reused = record and PartPlan(entry.part, entry.span, KVSource.REUSED, record.id)
            parts.append(settled_part(entry) or reused or PartPlan(entry.part, entry.span, KVSource.COMPUTED))
        return one_pass(self.name, parts)


def _chains(lookup: PromptLookup) -> Iterator[tuple[SegmentRecord, ...]]:
    """Every chain of exact segments over parts of this prompt."""
    there = Counter(entry.part.id for entry in lookup.parts if entry.part.id is not None)
    records = [record for entry in lookup.parts for record in entry.variants if record.exact]
    ends = {(*record.context, record.chunk_id): record for record in records}
    for path in ends:
        prefixes = [ends.get(path[:length]) for length in range(1, len(path) + 1)]
        chain = tuple(record for record in prefixes if record is not None)
        if len(chain) == len(path) and Counter(path) <= there:
            yield chain


METHOD = SetCache
