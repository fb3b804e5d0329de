"""The knowledge tree under byte budgets, without payloads (RAGCache §5.1, Algorithm 1)."""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from chunkweave.errors import StoreError, UsageError
from chunkweave.store.eviction import EvictionPolicy, PathRequest
from chunkweave.store.index import SegmentIndex
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.types import ChunkId, SegmentId


@dataclass(frozen=True, slots=True)
class TreeTier:
    """A tier of a tree cache: its name, its budget, and a new policy that ranks its nodes."""

    name: str
    budget_bytes: int
    policy: EvictionPolicy


@dataclass(frozen=True, slots=True)
class TreeUse:
    """The nodes that a request found: the first `hits` of its path, with their tokens by tier read from."""

    hits: int
    cached_tokens: int
    new_tokens: int
    tokens_by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TreeCounts:
    """Counters of moves.

    `evictions` are nodes that left a tier; `swapped_out` of them were copied one tier down, `freed` were there already
    (swap-out-only-once) and needed no copy; the rest is gone. `promotions` are copies to a faster tier, `rejected`
    nodes that did not fit, `replicas` copies of hot upper nodes made ahead of evictions.
    """

    evictions: int = 0
    swapped_out: int = 0
    freed: int = 0
    promotions: int = 0
    rejected: int = 0
    replicas: int = 0


class TreeCache:
    """Makes the decisions of `TieredStore` on records only: same indexes, policies and rules.

    New nodes are stored in the fastest tier; a node used from a slower tier is copied up. To make room, a tier's policy
    evicts leaves first (a parent that became a leaf is a candidate at once). An evicted node is copied one tier down
    unless a copy is there. That copy stays while a faster tier has the node, if anything else can be evicted, so that a
    node is copied out once (swap-out-only-once, RAGCache §5.1). While a request's new nodes are stored, the nodes that
    it found are not evicted from their tiers.

    For simulation, capacity planning, and schedulers that own their memory; a store with payloads keeps the same tree
    itself (`TieredStore.tree`). Not thread-safe.
    """

    def __init__(self, tiers: Sequence[TreeTier]) -> None:
        """An empty cache over `tiers`, from fast to slow.

        Raises:
            UsageError: no tier, two tiers of one name, or a negative budget.
        """
        self.tree: KnowledgeTree[ChunkId] = KnowledgeTree([tier.name for tier in tiers])
        if any(tier.budget_bytes < 0 for tier in tiers):
            raise UsageError("a tier's budget must not be negative")
        self._counts: Counter[str] = Counter()
        self._no_pins: tuple[Set[SegmentId], ...] = (frozenset(),) * len(tiers)
        self._tiers = tuple(tiers)
        self._indexes = tuple(SegmentIndex(tier.policy) for tier in tiers)
        for tier, index in zip(tiers, self._indexes, strict=True):
            index.show_in(self.tree, tier.name)

    @property
    def counts(self) -> TreeCounts:
        """A snapshot of the counters."""
        return TreeCounts(**self._counts)

    def used_bytes(self, tier: str) -> int:
        """Bytes stored on `tier`."""
        return self._indexes[self.tree.tiers.index(tier)].used_bytes

    def records(self, tier: str) -> frozenset[SegmentId]:
        """Ids of the segments on `tier`."""
        return frozenset(self._indexes[self.tree.tiers.index(tier)].records)

    def use(self, path: Sequence[SegmentRecord], question_tokens: int = 0) -> TreeUse:
        """Serve one request for `path` (system part first) with `question_tokens`: count, promote, store, evict.

        Each record's context is the chunks before it in the path.
        """
        hits = self._stored(path)
        found, new = path[:hits], path[hits:]
        cached_tokens = sum(map(len, found))
        new_tokens = sum(map(len, new)) + question_tokens
        request = PathRequest(
            tuple(record.id for record in found), tuple(record.id for record in new), cached_tokens, new_tokens
        )
        by_tier: dict[str, int] = {}
        for record in found:
            tier = self._tiers[self._fastest(record.id)].name
            by_tier[tier] = by_tier.get(tier, 0) + len(record)
        self.tree.used(record.chunk_id for record in found)
        for index in self._indexes:
            index.note_request(request)
            for record in reversed(found):
                if record.id in index.records:
                    index.touch(record)
        pins = tuple(frozenset(s for s in request.stored if s in index.records) for index in self._indexes)
        for record in found:
            if self._fastest(record.id) > 0:
                self._promote(record, pins)
        for record in new:
            if not any(self._insert(i, record, pins) for i in range(len(self._tiers))):
                self._counts["rejected"] += 1
        return TreeUse(hits, cached_tokens, new_tokens, by_tier)

    def replicate(self, number: int) -> int:
        """Copy the `number` hottest upper nodes of the fastest tier one tier down; returns the number of new copies.

        If the fastest memory fails, the tree is not lost with it (RAGCache §6).
        """
        if len(self._tiers) < 2:
            return 0
        copied = 0
        for path in self.tree.missing_replicas(number, self._tiers[0].name, self._tiers[1].name):
            record = self._indexes[0].records[segment_id(path[-1], path[:-1])]
            copied += self._insert(1, record, self._no_pins)
        self._counts["replicas"] += copied
        return copied

    def check(self) -> None:
        """Audit tree, indexes and budgets.

        Raises:
            StoreError: they disagree.
        """
        self.tree.check()
        for tier, index in zip(self._tiers, self._indexes, strict=True):
            index.check()
            if index.used_bytes > tier.budget_bytes:
                raise StoreError(f"{tier.name} holds {index.used_bytes} bytes, the budget is {tier.budget_bytes}")

    def _stored(self, path: Sequence[SegmentRecord]) -> int:
        for i, record in enumerate(path):
            if not any(record.id in index.records for index in self._indexes):
                return i
        return len(path)

    def _fastest(self, segment: SegmentId) -> int:
        return next(i for i, index in enumerate(self._indexes) if segment in index.records)

    def _above(self, tier: int, segment: SegmentId) -> bool:
        return any(segment in index.records for index in self._indexes[:tier])

    def _promote(self, record: SegmentRecord, pins: Sequence[Set[SegmentId]]) -> None:
        if any(self._insert(i, record, pins) for i in range(self._fastest(record.id))):
            self._counts["promotions"] += 1

    def _insert(self, tier: int, record: SegmentRecord, pins: Sequence[Set[SegmentId]]) -> bool:
        """Store `record` on a tier, evicting others if needed; False, without evicting, if it does not fit.

        The rules are those of `SegmentStore.insert`: pinned nodes stay; ancestors of the new one stay if possible.
        """
        index, budget = self._indexes[tier], self._tiers[tier].budget_bytes
        if record.id in index.records:
            return True
        if index.used_bytes + record.nbytes > budget:
            staying = sum(index.records[s].nbytes for s in pins[tier] if s in index.records)
            if staying + record.nbytes > budget:
                return False
            ancestors = frozenset(index.paths.longest_exact_prefix(record.context))
            victims: list[SegmentRecord] = []
            while index.used_bytes + record.nbytes > budget:
                victim = index.victim(kept=pins[tier], spared=ancestors, above=partial(self._above, tier))
                index.remove(victim)
                victims.append(victim)
            below = list(pins)
            if tier + 1 < len(self._tiers):  # nodes evicted together do not evict each other's copies there
                below[tier + 1] = pins[tier + 1] | (self._indexes[tier + 1].records.keys() & {v.id for v in victims})
            for victim in victims:
                self._swap_out(tier, victim, below)
        index.add(record)
        return True

    def _swap_out(self, tier: int, victim: SegmentRecord, pins: Sequence[Set[SegmentId]]) -> None:
        self._counts["evictions"] += 1
        below = tier + 1
        if below == len(self._tiers):
            return
        if victim.id in self._indexes[below].records:
            self._counts["freed"] += 1
        elif self._insert(below, victim, pins):
            self._counts["swapped_out"] += 1
