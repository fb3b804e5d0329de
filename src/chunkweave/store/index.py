"""The bookkeeping of stored segments, without payloads: how they are found, and what keeps them from being evicted.

They are found by path (exact prefixes) or by chunk (variants). The leases of requests and the claims of threads that
move payloads keep them.
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
    """One part of a prompt and what is stored for it.

    `exact` is set for the parts of the longest exact prefix (and for none after the first gap);
    `variants` are all stored segments of the chunk, whatever their context, most recently used first. `fresh` are the
    offsets of its tokens whose KV was already computed behind these very parts, in an earlier turn of a conversation.
    """

    part: PromptPart
    span: Span
    exact: SegmentRecord | None = None
    variants: tuple[SegmentRecord, ...] = ()
    fresh: frozenset[int] = frozenset()

    @property
    def settled(self) -> bool:
        """Whether it is reused as it is: a conversation's history, of which no token is to be recomputed."""
        return self.exact is None and len(self.fresh) == len(self.part) and bool(self.variants)


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """A prompt with what is stored for each of its parts."""

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
        """Every segment named, each once: in prompt order, the exact one of a part first."""
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
    """The lookup of `prompt`, given where its exact prefix may run and what is stored of a part.

    `path` has one id for each part that has one, in prompt order; it may end early. The exact prefix goes on while
    the id at that place is among the part's variants and exact.
    """
    left = iter(path)
    unbroken = True
    parts: list[PartLookup] = []
    for part, span in zip(prompt.parts, prompt.spans(), strict=True):
        if part.id is None:
            parts.append(PartLookup(part, span))
            continue
        variants = variants_of(part)
        wanted = next(left, None) if unbroken else None
        exact = next((record for record in variants if record.id == wanted and record.exact), None)
        unbroken = exact is not None
        parts.append(PartLookup(part, span, exact, variants))
    return PromptLookup(tuple(parts))


def path_request_of(lookup: PromptLookup) -> PathRequest:
    """What a lookup asked for, as a path of exact segments."""
    stored: list[SegmentId] = []
    missing: list[SegmentId] = []
    context: tuple[ChunkId, ...] = ()
    cached_tokens = 0
    for found in lookup.parts:
        if found.part.id is None:
            continue
        if found.exact is not None:
            stored.append(found.exact.id)
            cached_tokens += len(found.part.token_ids)
        else:
            missing.append(segment_id(found.part.id, context))
        context = (*context, found.part.id)
    return PathRequest(tuple(stored), tuple(missing), cached_tokens, lookup.prompt_tokens - cached_tokens)


@dataclass(frozen=True, slots=True)
class RequestUse:
    """What one request counts for once it is asked for: what it looked up, and the segments that its plan `used`."""

    path: PathRequest
    chunks: tuple[ChunkId, ...]
    used: tuple[SegmentId, ...]
    hits: int
    misses: int

    @classmethod
    def of(
        cls, found: PromptLookup, used: Iterable[SegmentId], saved: Mapping[SegmentId, float] | None = None
    ) -> "RequestUse":
        """What a lookup and the plan made of it count for; `saved` is the plan's, as far as it is `used`."""
        chunks = tuple(entry.part.id for entry in found.parts if entry.part.id is not None)
        path, segments = path_request_of(found), tuple(dict.fromkeys(used))
        beside = tuple(segment for segment in segments if segment not in path.stored)
        own = {segment: saved[segment] for segment in segments if segment in saved} if saved else {}
        return cls(replace(path, reused=beside, saved=own), chunks, segments, found.hits, found.misses)


class PathIndex:
    """A trie of exact segments by the path of chunk ids that each continues: finds the longest exact prefix.

    The path of a segment is its context and its own chunk; RAGCache's knowledge tree has the same nodes (§5.1).
    A segment whose ancestors are not all stored is in the trie but not on an exact prefix; it is again when they
    return. Inexact records are ignored, so that callers need not tell them apart. Not thread-safe.
    """

    def __init__(self) -> None:
        self._trie: PrefixTrie[ChunkId, SegmentId] = PrefixTrie()
        self._nodes: dict[SegmentId, TrieNode[ChunkId, SegmentId]] = {}

    def __contains__(self, segment: SegmentId) -> bool:
        """Whether an exact prefix may run over a segment: it and all its ancestors are stored exactly."""
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
        """Forget a record; no exact prefix runs over its descendants until it returns."""
        if record.exact:
            node = self._nodes.pop(record.id)
            node.value = None
            self._trie.prune(node)

    def longest_exact_prefix(self, chunks: Iterable[ChunkId]) -> list[SegmentId]:
        """Segments of the longest prefix of `chunks` that is stored exactly, in prompt order."""
        return list(self._trie.prefix(chunks))

    def has_children(self, segment: SegmentId) -> bool:
        """Whether an exact prefix may run over this segment and on to one that continues it."""
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
    """What is stored now, and what is not any more. `more` changes may follow.

    A chunk is stored as long as any segment of it is, a segment if it is exact.
    """

    added: frozenset[ChunkId | SegmentId] = frozenset()
    removed: frozenset[ChunkId | SegmentId] = frozenset()
    more: bool = False


class StoreFollower:
    """Reports which chunks, exact segments and marks come and go. It costs as much as what changes. Thread-safe.

    Stores only say, under their own lock, that something changed. Whether it is held is asked when the changes are
    taken, so that an interrupted change cannot be miscounted.
    """

    def __init__(self, holds: Callable[[ChunkId | SegmentId], bool]) -> None:
        """`holds` says whether any segment of a chunk, one with a mark, or an exact one, is stored on any level."""
        self._holds = holds
        self._lock = Lock()
        self._touched: dict[ChunkId | SegmentId, None] = {}
        self._reported: set[ChunkId | SegmentId] = set()

    def touched(self, *ids: ChunkId | SegmentId) -> None:
        """A segment came or went: it and its chunk may have changed."""
        with self._lock:
            self._touched.update(dict.fromkeys(ids))

    def take(self, limit: int | None = None) -> StoreChanges:
        """What changed since the last call, at most `limit` ids, those first that changed first. One caller."""
        with self._lock:
            if not self._touched:
                return StoreChanges()
            taken = tuple(islice(self._touched, limit))
            # A dict whose first entries were deleted one by one is slow to begin: a new one instead.
            self._touched = dict.fromkeys(islice(self._touched, len(taken), None))
            more = bool(self._touched)
        held = frozenset(filter(self._holds, taken))
        added, removed = held - self._reported, (frozenset(taken) - held) & self._reported
        self._reported |= added
        self._reported -= removed
        return StoreChanges(added, removed, more)


class SegmentIndex:
    """The bookkeeping of a segment store, without payloads (one pool, two indexes).

    The records are the truth; indexes, byte count and policy follow from them and can be rebuilt.
    A record is published last and withdrawn first. Not thread-safe: the store's lock guards it.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._records: dict[SegmentId, SegmentRecord] = {}
        self._used_bytes = 0
        self._owned_bytes: Counter[str] = Counter()
        self._chunks: dict[ChunkId, OrderedDict[SegmentId, None]] = {}  # variants, least recently used first
        self.paths = PathIndex()
        """The exact segments by path; only this index changes it."""
        self._tree: KnowledgeTree[ChunkId] | None = None
        self._tier = ""
        self._follower: StoreFollower | None = None

    def report_to(self, follower: StoreFollower) -> None:
        """Report changes to `follower` from now on, beginning with all that is stored."""
        self._follower = follower
        self._changed(self._records.values())

    def show_in(self, tree: KnowledgeTree[ChunkId], tier: str) -> None:
        """Keep `tree` current from now on: which exact segments are stored, as `tier`."""
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
        """Sum of the records' bytes by owner, those that have any."""
        return MappingProxyType(self._owned_bytes)

    @property
    def num_chunks(self) -> int:
        """Chunks with at least one record."""
        return len(self._chunks)

    def variants(self, chunk: ChunkId) -> list[SegmentRecord]:
        """Records of a chunk, most recently used first."""
        return [self._records[segment] for segment in reversed(self._chunks.get(chunk, ()))]

    def add(self, record: SegmentRecord) -> None:
        """Enter a record whose id is not held yet. Variants of a chunk come to share one tuple of token ids."""
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
        self._show(record)
        self._changed([record])

    def remove(self, record: SegmentRecord) -> None:
        """Withdraw a held record."""
        self._changed([record])  # first: an interrupted change may leave nothing that says which chunk it was
        del self._records[record.id]
        self._used_bytes -= record.nbytes
        self._owned_bytes[record.owner] -= record.nbytes
        if not self._owned_bytes[record.owner]:
            del self._owned_bytes[record.owner]
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
        """Pass on to the policy what a request asked for."""
        self._policy.on_request(request)

    def explain(self, segment: SegmentId) -> dict[str, float]:
        """By which numbers the policy ranks a segment; empty if it does not say."""
        return self._policy.explain(segment) if isinstance(self._policy, ExplainedPolicy) else {}

    def touch(self, record: SegmentRecord) -> None:
        """Count one use of a held record."""
        self._policy.on_hit(record)
        self._chunks[record.chunk_id].move_to_end(record.id)

    def victim(
        self,
        *,
        kept: Set[SegmentId],
        spared: Set[SegmentId],
        owner: str | None = None,
        above: Callable[[SegmentId], bool] = lambda _: False,
    ) -> SegmentRecord:
        """The record to evict next: never one of `kept`, one of `spared` or an inner node only if need be.

        Leaves of the path index, and what is outside it, come first (RAGCache §5.1: only leaves are evicted), and of
        these what is not `above`, on a faster level, too: a copy of that stays, so that it is swapped out only once.
        With an `owner` it is one of that one's, as long as any of these may go.

        Raises:
            StoreError: the policy offers nothing, though something is not in `kept`.
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
        raise StoreError("the eviction policy offers none of the segments that may be evicted")

    def rebuild(self, sizes: Mapping[SegmentId, int]) -> None:
        """Make everything agree with the records whose payload is there, `sizes` being bytes by id.

        May be interrupted and run again. Policy state and byte count survive; the recency of variants does not.
        """
        self._changed(self._records.values())
        self._records = {s: record for s, record in self._records.items() if sizes.get(s) == record.nbytes}
        self._used_bytes = sum(record.nbytes for record in self._records.values())
        self._owned_bytes = _owned(self._records.values())
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
            raise StoreError("a record is filed under another id than its own")
        total_bytes = sum(record.nbytes for record in self._records.values())
        if total_bytes != self._used_bytes:
            raise StoreError(f"{self._used_bytes} bytes are accounted for, the records sum to {total_bytes}")
        if _owned(self._records.values()) != self._owned_bytes:
            raise StoreError("bytes are accounted for to other owners than the records say")
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
    """Pins segments until it is released; a context manager that releases on leaving.

    Leases are made by `SegmentStore.lease`. The store refers to them weakly: one that is dropped without
    a release (an abandoned stream, an interrupt at the wrong moment) pins nothing once it is collected.

    Releasing takes no lock and touches nothing of the store's, since it may run inside a finalizer, in the
    middle of one of the store's own changes. For the same reason pins are not counted in the store:
    a segment is pinned while some live lease names it.
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
        """Unpin everything. A second release is harmless."""
        self._released = True

    def forget(self, segment: SegmentId) -> None:
        """For the store alone: the segment is gone, and one stored later under its id is not pinned by this."""
        self._ids = tuple(other for other in self._ids if other != segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class TieredLease(Lease):
    """One lease a level; releases them all, on leaving a `with` block too. Abandoned, it pins nothing."""

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
        """Unpin everything. A second release is harmless."""
        for lease in self._leases:
            lease.release()


class Pins:
    """The leases of one store, referred to weakly. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self._leases: list[ref[Lease]] = []

    def lease(self, ids: Iterable[SegmentId]) -> Lease:
        """A new lease on `ids`; it pins them until it is released or collected."""
        lease = Lease(ids)
        self._leases = [ref(other) for other in (*self._live(), lease)]
        return lease

    def ids(self) -> set[SegmentId]:
        """Segments that some live lease names."""
        return {segment for lease in self._live() for segment in lease.ids}

    def forget(self, segment: SegmentId) -> None:
        """The segment is gone: leases on it do not pin one stored later under its id."""
        for lease in self._live():
            lease.forget(segment)

    def _live(self) -> list[Lease]:
        # Not a WeakSet: an object collected by another thread may change that while it is iterated over.
        return [lease for lease in (weak() for weak in self._leases) if lease is not None and lease.ids]


class Claim:
    """One segment's payload under way, claimed by the thread that moves it. Nobody else may move that segment.

    `nbytes` are reserved for it meanwhile. Whoever fails sets `given_up`, which needs no lock; the store refers to
    claims weakly, so that one whose thread was interrupted between two statements is given up once it is collected.
    `unwanted` is set by the store when the segment is removed while it is being written.
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
        """Enter a claim on a segment that has none."""
        self._claims[claim.record.id] = (ref(claim), claim.nbytes, claim.record)

    def remove(self, segment: SegmentId) -> None:
        """The move has ended; unknown ids are ignored."""
        self._claims.pop(segment, None)

    def cancel_where(self, doomed: Callable[[SegmentRecord], bool]) -> None:
        """Whatever is being written under such a record is not to be published."""
        for weak, _, _ in self._claims.values():
            claim = weak()
            if claim is not None and doomed(claim.record):
                claim.unwanted = True

    def ids(self) -> set[SegmentId]:
        """Segments under way, or left behind by a thread that failed."""
        return set(self._claims)

    def broken(self) -> list[SegmentRecord]:
        """Segments whose move failed: what the tier has of them is to go."""
        claims = ((record, weak()) for weak, _, record in self._claims.values())
        return [record for record, claim in claims if claim is None or claim.given_up]

    def extra_bytes(self, records: Mapping[SegmentId, SegmentRecord]) -> int:
        """Bytes reserved beyond those of the records that are going to be replaced."""
        return sum(
            max(0, nbytes - (records[segment].nbytes if segment in records else 0))
            for segment, (_, nbytes, _) in self._claims.items()
        )
