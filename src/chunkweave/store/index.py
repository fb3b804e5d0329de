"""The index of stored segments, without payloads: lookup, leases and claims.

Segments are found by path (exact prefixes) or by chunk (variants). Leases of requests, and claims of threads that move
payloads, protect them from eviction.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock
from types import MappingProxyType
from typing import Self
from weakref import ref

from chunkweave.errors import StoreError
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.store.eviction import EvictionPolicy, ExplainedPolicy, PathRequest
from chunkweave.store.prefix_trie import KnowledgeTree, PrefixTrie, TrieNode
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.types import ChunkId, SegmentId, Span


@dataclass(frozen=True, slots=True)
class PartLookup:
    """One part of a prompt and the segments stored for it.

    `exact` is set for the parts of the longest exact prefix (and for none after the first gap); `variants` are all
    stored segments of the chunk, whatever their context, most recently used first.
    """

    part: PromptPart
    span: Span
    exact: SegmentRecord | None = None
    variants: tuple[SegmentRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """A prompt with the segments stored for each of its parts."""

    parts: tuple[PartLookup, ...]

    @property
    def prompt_tokens(self) -> int:
        return self.parts[-1].span.stop if self.parts else 0

    @property
    def hits(self) -> int:
        """Parts with an id for which something is stored."""
        return sum(bool(part.variants) for part in self.parts)

    @property
    def misses(self) -> int:
        """Parts with an id for which nothing is stored."""
        return sum(part.part.id is not None and not part.variants for part in self.parts)

    def segments(self) -> tuple[SegmentId, ...]:
        """All segments found, each once: in prompt order, the exact one of a part first."""
        named: dict[SegmentId, None] = {}
        for part in self.parts:
            if part.exact is not None:
                named[part.exact.id] = None
            named.update((record.id, None) for record in part.variants)
        return tuple(named)


def look_up(
    prompt: Prompt,
    path: Sequence[SegmentId],
    variants_of: Callable[[PromptPart], tuple[SegmentRecord, ...]],
) -> PromptLookup:
    """The lookup of `prompt`, given the ids of its exact path and a function that returns the variants of a part.

    `path` has one id for each part that has one, in prompt order; it may end early. The exact prefix continues while
    the part has an exact variant with the id at that position. Of an `in_place` part only the variant of this context
    counts, if all its KV was computed in it.
    """
    remaining = iter(path)
    unbroken = True
    parts: list[PartLookup] = []
    for part, span, context in zip(prompt.parts, prompt.spans(), prompt.contexts(), strict=True):
        if part.id is None:
            parts.append(PartLookup(part, span))
            continue
        variants = variants_of(part)
        wanted = next(remaining, None) if unbroken else None
        exact = next((record for record in variants if record.id == wanted and record.exact), None)
        unbroken = exact is not None
        if part.in_place:
            here = segment_id(part.id, context)
            variants = tuple(record for record in variants if record.id == here and not record.generation)
        parts.append(PartLookup(part, span, exact, variants))
    return PromptLookup(tuple(parts))


def path_request_of(lookup: PromptLookup) -> PathRequest:
    """The path of exact segments that a lookup asked for."""
    stored: list[SegmentId] = []
    missing: list[SegmentId] = []
    context: tuple[ChunkId, ...] = ()
    cached_tokens = 0
    for part_lookup in lookup.parts:
        if part_lookup.part.id is None:
            continue
        if part_lookup.exact is not None:
            stored.append(part_lookup.exact.id)
            cached_tokens += len(part_lookup.part.token_ids)
        else:
            missing.append(segment_id(part_lookup.part.id, context))
        context = (*context, part_lookup.part.id)
    return PathRequest(tuple(stored), tuple(missing), cached_tokens, lookup.prompt_tokens - cached_tokens)


@dataclass(frozen=True, slots=True)
class RequestUse:
    """What is counted for one request: the path that it looked up, and the segments that its plan `used`."""

    path: PathRequest
    chunks: tuple[ChunkId, ...]
    used: tuple[SegmentId, ...]
    hits: int
    misses: int

    @classmethod
    def of(
        cls, lookup: PromptLookup, used: Iterable[SegmentId], saved: Mapping[SegmentId, float] | None = None
    ) -> "RequestUse":
        """The use of a lookup and its plan. Of the plan's savings (`saved`) only those of `used` segments count."""
        chunks = tuple(entry.part.id for entry in lookup.parts if entry.part.id is not None)
        path = path_request_of(lookup)
        segments = tuple(dict.fromkeys(used))
        beside = tuple(segment for segment in segments if segment not in path.stored)
        used_savings = {segment: saved[segment] for segment in segments if segment in saved} if saved else {}
        return cls(replace(path, reused=beside, saved=used_savings), chunks, segments, lookup.hits, lookup.misses)


class PathIndex:
    """A trie of exact segments by path of chunk ids; finds the longest exact prefix.

    The path of a segment is its context and its own chunk; RAGCache's knowledge tree has the same nodes (§5.1). A
    segment whose ancestors are not all stored is in the trie, but on no exact prefix until they return. Inexact records
    are ignored, so callers need not filter them. Not thread-safe.
    """

    def __init__(self) -> None:
        self._trie: PrefixTrie[ChunkId, SegmentId] = PrefixTrie()
        self._nodes: dict[SegmentId, TrieNode[ChunkId, SegmentId]] = {}

    def __contains__(self, segment: SegmentId) -> bool:
        """Whether a segment can be on an exact prefix: it and all its ancestors are stored exactly."""
        node = self._nodes.get(segment)
        while node is not None and node.value:
            node = node.parent
        return node is self._trie.root

    def add(self, record: SegmentRecord) -> None:
        """Index an exact record that is not indexed yet."""
        if record.exact:
            node = self._nodes[record.id] = self._trie.grow(record.path)
            node.value = record.id

    def remove(self, record: SegmentRecord) -> None:
        """Forget a record; its descendants are on no exact prefix until it returns."""
        if record.exact:
            node = self._nodes.pop(record.id)
            node.value = None
            self._trie.prune(node)

    def longest_exact_prefix(self, chunks: Iterable[ChunkId]) -> list[SegmentId]:
        """Segments of the longest prefix of `chunks` that is stored exactly, in prompt order."""
        return list(self._trie.prefix(chunks))

    def has_children(self, segment: SegmentId) -> bool:
        """Whether an exact prefix can continue from this segment to a child of it."""
        node = self._nodes.get(segment)
        return node is not None and any(child.value for child in node.children.values()) and segment in self

    def check(self, records: Mapping[SegmentId, SegmentRecord]) -> None:
        """Audit the trie against all stored `records`.

        Raises:
            StoreError: they disagree.
        """
        self._trie.check()
        held = tuple(self._trie.held())
        if len(held) != len(self._nodes) or {node.value: node for node in held} != self._nodes:
            raise StoreError("path index: a segment is not known by its own trie node")
        exact = {segment: record.path for segment, record in records.items() if record.exact}
        if {segment: node.path for segment, node in self._nodes.items()} != exact:
            raise StoreError("path index: it does not hold exactly the exact records, each at its own path")


@dataclass(frozen=True, slots=True)
class StoreChanges:
    """Ids that are stored since the last report, and ids that no longer are. If `more`, further changes are pending.

    A chunk is stored while any segment of it is; a segment is reported only if it is exact.
    """

    added: frozenset[ChunkId | SegmentId] = frozenset()
    removed: frozenset[ChunkId | SegmentId] = frozenset()
    more: bool = False


class StoreFollower:
    """Reports which chunks, exact segments and marks were added or removed. Cost: O(changes). Thread-safe.

    Stores only report, under their own lock, that an id may have changed. Whether it is stored is checked when the
    changes are taken, so an interrupted change cannot be miscounted.
    """

    def __init__(self, holds: Callable[[ChunkId | SegmentId], bool]) -> None:
        """`holds` returns whether a chunk (any segment of it), a mark or an exact segment is stored on any level."""
        self._holds = holds
        self._lock = Lock()
        self._touched: dict[ChunkId | SegmentId, None] = {}
        self._reported: set[ChunkId | SegmentId] = set()

    def touched(self, *ids: ChunkId | SegmentId) -> None:
        """Note that these ids may have changed: a segment was added or removed."""
        with self._lock:
            self._touched.update(dict.fromkeys(ids))

    def take(self, limit: int | None = None) -> StoreChanges:
        """The changes since the last call, at most `limit` ids, oldest first. For one caller."""
        with self._lock:
            if not self._touched:
                return StoreChanges()
            taken = tuple(islice(self._touched, limit))
            # A new dict: iterating over one whose first entries were deleted is slow.
            self._touched = dict.fromkeys(islice(self._touched, len(taken), None))
            more = bool(self._touched)
        held = frozenset(filter(self._holds, taken))
        added = held - self._reported
        removed = (frozenset(taken) - held) & self._reported
        self._reported |= added
        self._reported -= removed
        return StoreChanges(added, removed, more)


class SegmentIndex:
    """The index of a segment store, without payloads: one pool of records, two indexes.

    The records are authoritative; indexes, byte count and policy state can be rebuilt from them. A record is added
    after its index entries and removed before them. Not thread-safe: the store's lock guards it.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._records: dict[SegmentId, SegmentRecord] = {}
        self._used_bytes = 0
        self._owned_bytes: Counter[str] = Counter()
        self._novel: dict[SegmentId, None] = {}  # oldest first
        self.novel_bytes = 0
        """Sum of the novel records' bytes; only this index changes it."""
        self._chunks: dict[ChunkId, OrderedDict[SegmentId, None]] = {}  # variants, least recently used first
        self.paths = PathIndex()
        """The exact segments by path; only this index changes it."""
        self._tree: KnowledgeTree[ChunkId] | None = None
        self._tier = ""
        self._follower: StoreFollower | None = None

    def report_to(self, follower: StoreFollower) -> None:
        """Report changes to `follower` from now on, starting with everything stored."""
        self._follower = follower
        self._changed(self._records.values())

    def show_in(self, tree: KnowledgeTree[ChunkId], tier: str) -> None:
        """Keep `tree` up to date from now on: it lists the exact segments stored here under the name `tier`."""
        self._tree, self._tier = tree, tier
        for record in self._records.values():
            self._show(record)

    @property
    def records(self) -> Mapping[SegmentId, SegmentRecord]:
        """A read-only view of all records by id."""
        return MappingProxyType(self._records)

    @property
    def used_bytes(self) -> int:
        """Sum of the records' bytes."""
        return self._used_bytes

    @property
    def owned_bytes(self) -> Mapping[str, int]:
        """Sum of the records' bytes by owner, without owners that have none."""
        return MappingProxyType(self._owned_bytes)

    @property
    def num_chunks(self) -> int:
        """Chunks with at least one record."""
        return len(self._chunks)

    def variants(self, chunk: ChunkId) -> list[SegmentRecord]:
        """Records of a chunk, most recently used first."""
        return [self._records[segment] for segment in reversed(self._chunks.get(chunk, ()))]

    def add(self, record: SegmentRecord) -> None:
        """Add a record whose id is not stored yet. Variants of a chunk share one tuple of token ids."""
        variants = self._chunks.setdefault(record.chunk_id, OrderedDict())
        sibling = self._records[next(reversed(variants))] if variants else None
        if sibling is not None and sibling.token_ids == record.token_ids:
            record = replace(record, token_ids=sibling.token_ids)
        variants[record.id] = None
        self.paths.add(record)
        self._policy.on_insert(record)
        self._used_bytes += record.nbytes
        self._owned_bytes[record.owner] += record.nbytes
        self._records[record.id] = record
        if record.novel:
            self._novel[record.id] = None
            self.novel_bytes += record.nbytes
        self._show(record)
        self._changed([record])

    def remove(self, record: SegmentRecord) -> None:
        """Remove a stored record."""
        self._changed([record])  # first: after an interrupted change nothing may be left that names the chunk
        del self._records[record.id]
        self._used_bytes -= record.nbytes
        self._owned_bytes[record.owner] -= record.nbytes
        if not self._owned_bytes[record.owner]:
            del self._owned_bytes[record.owner]
        self._not_novel(record)
        self._policy.on_remove(record.id)
        self.paths.remove(record)
        variants = self._chunks[record.chunk_id]
        del variants[record.id]
        if not variants:
            del self._chunks[record.chunk_id]
        if self._tree is not None and record.exact:
            self._tree.displaced(record.path, self._tier)
        elif self._tree is not None:
            self._tree.woven(record.chunk_id)

    def note_request(self, request: PathRequest) -> None:
        """Pass a request's path to the policy."""
        self._policy.on_request(request)

    def explain(self, segment: SegmentId) -> dict[str, float]:
        """The numbers by which the policy ranks a segment; empty if it does not report them."""
        return self._policy.explain(segment) if isinstance(self._policy, ExplainedPolicy) else {}

    def touch(self, record: SegmentRecord) -> None:
        """Count one use of a stored record, which is not novel from then on."""
        self._policy.on_hit(record)
        self._chunks[record.chunk_id].move_to_end(record.id)
        if record.novel:
            self._not_novel(record)
            self._records[record.id] = replace(record, novel=False)

    def oldest_novel(
        self, *, kept: Set[SegmentId], spared: Set[SegmentId], owner: str | None = None
    ) -> SegmentRecord | None:
        """The oldest novel leaf in neither `kept` nor `spared`, of `owner` if one is given; None if there is none."""
        for segment in self._novel:
            record = self._records[segment]
            ours = owner is None or record.owner == owner
            if ours and segment not in kept and segment not in spared and not self.paths.has_children(segment):
                return record
        return None

    def victim(
        self,
        *,
        kept: Set[SegmentId],
        spared: Set[SegmentId],
        owner: str | None = None,
        above: Callable[[SegmentId], bool] = lambda _: False,
    ) -> SegmentRecord:
        """The record to evict next: never one of `kept`; one of `spared` or an inner node only as a last resort.

        Leaves of the path index, and segments outside it, come first (RAGCache §5.1: only leaves are evicted). Among
        these, segments that a faster level also holds (`above`) come last, so that each is swapped out only once. With
        an `owner`, that owner's segments come first.

        Raises:
            StoreError: the policy returns no victim although a segment is not in `kept`.
        """
        has_children = self.paths.has_children

        def free(segment: SegmentId) -> bool:
            return segment not in kept

        def leaf(segment: SegmentId) -> bool:
            return segment not in kept and not has_children(segment)

        def unrelated_leaf(segment: SegmentId) -> bool:
            return segment not in kept and segment not in spared and not has_children(segment)

        def only_here(segment: SegmentId) -> bool:
            return unrelated_leaf(segment) and not above(segment)

        def owned(evictable: Callable[[SegmentId], bool]) -> Callable[[SegmentId], bool]:
            return lambda segment: self._records[segment].owner == owner and evictable(segment)

        choices = (only_here, unrelated_leaf, leaf, free)
        for evictable in (*(map(owned, choices) if owner is not None else ()), *choices):
            segment = self._policy.victim(evictable)
            if segment is not None:
                return self._records[segment]
        raise StoreError("the eviction policy returned no victim although segments may be evicted")

    def rebuild(self, sizes: Mapping[SegmentId, int]) -> None:
        """Rebuild everything from the records whose payload is there; `sizes` are the payloads' bytes by id.

        May be interrupted and run again. Policy state and byte count survive; the recency of variants does not.
        """
        self._changed(self._records.values())
        self._records = {s: record for s, record in self._records.items() if sizes.get(s) == record.nbytes}
        self._used_bytes = sum(record.nbytes for record in self._records.values())
        self._owned_bytes = _owned(self._records.values())
        self._novel = {segment: None for segment, record in self._records.items() if record.novel}
        self.novel_bytes = sum(self._records[segment].nbytes for segment in self._novel)
        self._chunks, self.paths = {}, PathIndex()
        for record in self._records.values():
            self._chunks.setdefault(record.chunk_id, OrderedDict())[record.id] = None
            self.paths.add(record)
            self._show(record)
        if self._tree is not None:
            for path in set(self._tree.paths(self._tier)) - self._exact_paths():
                self._tree.displaced(path, self._tier)
        tracked = set(self._policy.ids())
        for segment in tracked - self._records.keys():
            self._policy.on_remove(segment)
        for segment in self._records.keys() - tracked:
            self._policy.on_insert(self._records[segment])

    def check(self) -> None:
        """Audit records, indexes, byte count and policy against each other.

        Raises:
            StoreError: they disagree.
        """
        if any(segment != record.id for segment, record in self._records.items()):
            raise StoreError("a record is stored under an id that is not its own")
        total_bytes = sum(record.nbytes for record in self._records.values())
        if total_bytes != self._used_bytes:
            raise StoreError(f"{self._used_bytes} bytes are counted, the records sum to {total_bytes}")
        if _owned(self._records.values()) != self._owned_bytes:
            raise StoreError("bytes are counted for other owners than those of the records")
        novel = {segment for segment, record in self._records.items() if record.novel}
        if novel != set(self._novel) or sum(self._records[segment].nbytes for segment in novel) != self.novel_bytes:
            raise StoreError("other records are counted as novel than those that are")
        if sorted(self._policy.ids()) != sorted(self._records):
            raise StoreError("the eviction policy does not track exactly the stored segments")
        listed = [(segment, chunk) for chunk, variants in self._chunks.items() for segment in variants]
        if sorted(listed) != sorted((segment, record.chunk_id) for segment, record in self._records.items()):
            raise StoreError("chunk index: it does not list exactly the stored segments under their chunks")
        if not all(self._chunks.values()):
            raise StoreError("chunk index: a chunk without variants was kept")
        self.paths.check(self._records)
        if self._tree is not None and set(self._tree.paths(self._tier)) != self._exact_paths():
            raise StoreError(f"the knowledge tree does not show exactly the exact segments held as {self._tier!r}")

    def _not_novel(self, record: SegmentRecord) -> None:
        if record.id in self._novel:
            del self._novel[record.id]
            self.novel_bytes -= record.nbytes

    def _exact_paths(self) -> set[tuple[ChunkId, ...]]:
        return {record.path for record in self._records.values() if record.exact}

    def _changed(self, records: Iterable[SegmentRecord]) -> None:
        if self._follower is not None:
            for record in records:
                self._follower.touched(record.chunk_id, record.id, *record.marks)

    def _show(self, record: SegmentRecord) -> None:
        if self._tree is not None and record.exact:
            self._tree.placed(record.path, self._tier, len(record))
        elif self._tree is not None:
            self._tree.woven(record.chunk_id)


def _owned(records: Iterable[SegmentRecord]) -> Counter[str]:
    owned: Counter[str] = Counter()
    for record in records:
        owned[record.owner] += record.nbytes
    return owned


class Lease:
    """Pins segments until it is released. A context manager that releases on exit.

    `SegmentStore.lease` makes leases. The store holds weak references: a lease that is dropped without a release (an
    abandoned stream, an interrupt) pins nothing once it is garbage-collected.

    Releasing takes no lock and changes nothing in the store, since it may run inside a finalizer, in the middle of a
    change of the store. For the same reason the store does not count pins: a segment is pinned while a live lease names
    it.
    """

    __slots__ = ("__weakref__", "_ids", "_released")

    def __init__(self, ids: Iterable[SegmentId]) -> None:
        self._ids = tuple(ids)
        self._released = False

    @property
    def ids(self) -> tuple[SegmentId, ...]:
        """Segments pinned by this lease, in the order asked for; empty after the release."""
        return () if self._released else self._ids

    def release(self) -> None:
        """Unpin everything. Idempotent."""
        self._released = True

    def forget(self, segment: SegmentId) -> None:
        """Drop a removed segment, so that one stored later under its id is not pinned. Only the store calls this."""
        self._ids = tuple(leased for leased in self._ids if leased != segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class TieredLease(Lease):
    """One lease per level. Releases all of them, also at the end of a `with` block. Abandoned, it pins nothing."""

    __slots__ = ("_leases",)

    def __init__(self, ids: Iterable[SegmentId], leases: Sequence[Lease]) -> None:
        super().__init__(ids)
        self._leases = tuple(leases)

    @property
    def ids(self) -> tuple[SegmentId, ...]:
        """Segments pinned on some level, in the order asked for; empty after the release."""
        pinned = {segment for lease in self._leases for segment in lease.ids}
        return tuple(segment for segment in self._ids if segment in pinned)

    def release(self) -> None:
        """Unpin everything. Idempotent."""
        for lease in self._leases:
            lease.release()


class Pins:
    """Weak references to the leases of one store. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self._leases: list[ref[Lease]] = []

    def lease(self, ids: Iterable[SegmentId]) -> Lease:
        """A new lease on `ids`; it pins them until it is released or collected."""
        lease = Lease(ids)
        self._leases = [ref(live_lease) for live_lease in (*self._live(), lease)]
        return lease

    def ids(self) -> set[SegmentId]:
        """Segments named by a live lease."""
        return {segment for lease in self._live() for segment in lease.ids}

    def forget(self, segment: SegmentId) -> None:
        """Drop a removed segment from all leases, so that one stored later under its id is not pinned."""
        for lease in self._live():
            lease.forget(segment)

    def _live(self) -> list[Lease]:
        # Not a WeakSet: garbage collection in another thread may change it during iteration.
        return [lease for lease in (weak() for weak in self._leases) if lease is not None and lease.ids]


class Claim:
    """A thread's exclusive right to move one segment's payload.

    `nbytes` are reserved for the payload during the move. A thread that fails sets `given_up`, which needs no lock. The
    store holds weak references: the claim of a thread that was interrupted counts as given up once it is
    garbage-collected. The store sets `unwanted` if the segment is removed while its payload is written.
    """

    __slots__ = ("__weakref__", "given_up", "nbytes", "record", "unwanted")

    def __init__(self, record: SegmentRecord, nbytes: int) -> None:
        self.record = record
        self.nbytes = nbytes
        self.given_up = False
        self.unwanted = False


class Claims:
    """The claims of one store, by segment. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self._claims: dict[SegmentId, tuple[ref[Claim], int, SegmentRecord]] = {}

    def __contains__(self, segment: SegmentId) -> bool:
        return segment in self._claims

    def add(self, claim: Claim) -> None:
        """Add a claim on a segment that has none."""
        self._claims[claim.record.id] = (ref(claim), claim.nbytes, claim.record)

    def remove(self, segment: SegmentId) -> None:
        """End the claim on a segment; unknown ids are ignored."""
        self._claims.pop(segment, None)

    def cancel_where(self, doomed: Callable[[SegmentRecord], bool]) -> None:
        """Mark pending writes of matching records as unwanted: they are not published."""
        for weak, _, _ in self._claims.values():
            claim = weak()
            if claim is not None and doomed(claim.record):
                claim.unwanted = True

    def ids(self) -> set[SegmentId]:
        """Segments whose payload is being moved, or whose move failed."""
        return set(self._claims)

    def broken(self) -> list[SegmentRecord]:
        """Records whose move failed: their payloads must be deleted from the tier."""
        claims = ((record, weak()) for weak, _, record in self._claims.values())
        return [record for record, claim in claims if claim is None or claim.given_up]

    def extra_bytes(self, records: Mapping[SegmentId, SegmentRecord]) -> int:
        """Reserved bytes beyond those of the records that are being replaced."""
        return sum(
            max(0, nbytes - (records[segment].nbytes if segment in records else 0))
            for segment, (_, nbytes, _) in self._claims.items()
        )
