"""The knowledge tree under byte budgets, without payloads: what would be kept where (RAGCache §5.1, Algorithm 1)."""

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
    """A tier of a tree cache: its name, its room, and what ranks its nodes (a fresh policy)."""

    name: str
    budget_bytes: int
    policy: EvictionPolicy


@dataclass(frozen=True, slots=True)
class TreeUse:
    """What one request found: the first `hits` nodes of its path, with their tokens by the tier they were read from."""

    hits: int
    cached_tokens: int
    new_tokens: int
    tokens_by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TreeCounts:
    """What has moved so far.

    `evictions` are nodes that left a tier; of these `swapped_out` were copied one tier down, `freed` were there
    already (swap-out-only-once) and cost no copy; the rest is gone. `promotions` are copies up, `rejected` nodes that
    found no room, `replicas` copies of hot upper nodes made ahead of any eviction.
    """

    evictions: int = 0
    swapped_out: int = 0
    freed: int = 0
    promotions: int = 0
    rejected: int = 0
    replicas: int = 0


class TreeCache:
    """Decides on records alone what `TieredStore` decides with payloads in hand: same indexes, policies and rules.

    New nodes go into the fastest tier; a node used from below is copied up again. To make room the policy of a
    tier gives up its leaves first (a parent that became a leaf is a candidate at once). What a tier gives up goes one
    tier down unless a copy is there already. That copy stays as long as a faster tier has the node, if anything else
    can go, so that a node is copied out once (swap-out-only-once, RAGCache §5.1). While a request's new nodes come in,
    those that it found are not evicted from the tiers that had them.

    For simulation, for capacity planning, and for schedulers that own their memory; a store with payloads keeps the
    same tree itself (`TieredStore.tree`). Not thread-safe.
    """

    def __init__(self, tiers: Sequence[TreeTier]) -> None:
        """An empty cache over `tiers`, from fast to slow.

        Raises:
            UsageError: no tier, two of one name, or a negative budget.
        """
        self.tree: KnowledgeTree[ChunkId] = KnowledgeTree([tier.name for tier in tiers])
        if any(tier.budget_bytes < 0 for tier in tiers):
            raise UsageError("a tier's budget cannot be negative")
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
        """Bytes that lie on `tier`."""
        return self._indexes[self.tree.tiers.index(tier)].used_bytes

    def records(self, tier: str) -> frozenset[SegmentId]:
        """Ids of what lies on `tier`."""
        return frozenset(self._indexes[self.tree.tiers.index(tier)].records)

    def use(self, path: Sequence[SegmentRecord], question_tokens: int = 0) -> TreeUse:
        """One request for `path` (system part first) with `question_tokens` behind it: count, promote, store, evict.

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
        """Copy the `number` hottest upper nodes of the fastest tier one tier down; returns how many were not there.

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
                raise StoreError(f"{tier.name} holds {index.used_bytes} bytes of {tier.budget_bytes}")

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
        """Put `record` on a tier, evicting what must go; False, and nothing evicted, if it does not fit.

        The rules are those of `SegmentStore.insert`: pinned nodes stay, and ancestors of the new one if they can.
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
            if tier + 1 < len(self._tiers):  # none of these pushes out the copy of another one there
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
