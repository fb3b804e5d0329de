"""Which segments are stored: records, the two indexes over them, their bytes, and the policy that ranks them."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from types import MappingProxyType

from chunkweave.errors import StoreError
from chunkweave.store.chunk_follower import ChunkFollower
from chunkweave.store.chunk_index import ChunkIndex
from chunkweave.store.eviction import EvictionPolicy
from chunkweave.store.path_index import PathIndex
from chunkweave.store.path_request import PathRequest
from chunkweave.store.records import SegmentRecord
from chunkweave.trees.knowledge_tree import KnowledgeTree
from chunkweave.types import ChunkId, SegmentId


class Catalog:
    """The bookkeeping of a segment store, without payloads (DESIGN §3.4: one pool, two indexes).

    The records are the truth; indexes, byte count and policy follow from them and can be rebuilt.
    A record is published last and withdrawn first. Not thread-safe: the store's lock guards it.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._records: dict[SegmentId, SegmentRecord] = {}
        self._used_bytes = 0
        self._chunks = ChunkIndex()
        self._paths = PathIndex()
        self._tree: KnowledgeTree[ChunkId] | None = None
        self._tier = ""
        self._follower: ChunkFollower | None = None

    def tell(self, follower: ChunkFollower) -> None:
        """From now on `follower` hears of the chunks whose records change; first of those that are here."""
        self._follower = follower
        self._changed(self._records.values())

    def show_in(self, tree: KnowledgeTree[ChunkId], tier: str) -> None:
        """From now on `tree` shows, as `tier`, which exact segments are held here."""
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
    def num_chunks(self) -> int:
        """Chunks with at least one record."""
        return len(self._chunks)

    def variants(self, chunk: ChunkId) -> list[SegmentRecord]:
        """Records of a chunk, most recently used first."""
        return [self._records[segment] for segment in self._chunks.variants(chunk)]

    def longest_exact_prefix(self, chunks: Iterable[ChunkId]) -> list[SegmentId]:
        """Segments of the longest prefix of `chunks` that is stored exactly, in prompt order."""
        return self._paths.longest_exact_prefix(chunks)

    def on_path(self, segment: SegmentId) -> bool:
        """Whether a segment is a node of the path index."""
        return segment in self._paths

    def has_children(self, segment: SegmentId) -> bool:
        """Whether a segment is an inner node of the path index."""
        return self._paths.has_children(segment)

    def add(self, record: SegmentRecord) -> None:
        """Enter a record whose id is not held yet. Variants of a chunk come to share one tuple of token ids."""
        sibling = next((self._records[segment] for segment in self._chunks.variants(record.chunk_id)), None)
        if sibling is not None and sibling.token_ids == record.token_ids:
            record = replace(record, token_ids=sibling.token_ids)
        self._chunks.add(record)
        self._paths.add(record)
        self._policy.on_insert(record)
        self._used_bytes += record.nbytes
        self._records[record.id] = record
        self._show(record)
        self._changed([record])

    def remove(self, record: SegmentRecord) -> None:
        """Withdraw a held record."""
        del self._records[record.id]
        self._used_bytes -= record.nbytes
        self._policy.on_remove(record.id)
        self._paths.remove(record)
        self._chunks.remove(record)
        self._hide(record)
        self._changed([record])

    def note_request(self, request: PathRequest) -> None:
        """Tell the policy what a request asked for."""
        self._policy.on_request(request)

    def touch(self, record: SegmentRecord) -> None:
        """Count one use of a held record."""
        self._policy.on_hit(record)
        self._chunks.touch(record)

    def victim(self, *, kept: Set[SegmentId], spared: Set[SegmentId]) -> SegmentRecord:
        """The record to evict next: never one of `kept`, one of `spared` or an inner node only if need be.

        Leaves of the path index, and what is outside it, come first (RAGCache §5.1: only leaves are evicted).

        Raises:
            StoreError: the policy offers nothing, though something is not in `kept`.
        """
        has_children = self._paths.has_children

        def free(segment: SegmentId) -> bool:
            return segment not in kept

        def leaf(segment: SegmentId) -> bool:
            return segment not in kept and not has_children(segment)

        def unrelated_leaf(segment: SegmentId) -> bool:
            return segment not in kept and segment not in spared and not has_children(segment)

        for evictable in (unrelated_leaf, leaf, free):
            segment = self._policy.victim(evictable)
            if segment is not None:
                return self._records[segment]
        raise StoreError("the eviction policy offers none of the segments that may be evicted")

    def rebuild(self, sizes: Mapping[SegmentId, int]) -> None:
        """Make everything agree with the records whose payload is there, `sizes` being bytes by id.

        May be interrupted and run again. Policy state and byte count survive; the recency of variants does not.
        """
        for segment, record in tuple(self._records.items()):
            if sizes.get(segment) != record.nbytes:
                self._hide(record)
        self._changed(self._records.values())
        self._records = {s: record for s, record in self._records.items() if sizes.get(s) == record.nbytes}
        self._used_bytes = sum(record.nbytes for record in self._records.values())
        self._chunks, self._paths = ChunkIndex(), PathIndex()
        for record in self._records.values():
            self._chunks.add(record)
            self._paths.add(record)
            self._show(record)
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
        if sorted(self._policy.ids()) != sorted(self._records):
            raise StoreError("the eviction policy does not track exactly the stored segments")
        self._chunks.check(self._records)
        self._paths.check(self._records)
        if self._tree is not None:
            shown = set(self._tree.paths(self._tier))
            if shown != {(*record.context, record.chunk_id) for record in self._records.values() if record.exact}:
                raise StoreError(f"the knowledge tree does not show exactly the exact segments held as {self._tier!r}")

    def _changed(self, records: Iterable[SegmentRecord]) -> None:
        if self._follower is not None:
            for record in records:
                self._follower.touched(record.chunk_id)

    def _show(self, record: SegmentRecord) -> None:
        if self._tree is not None and record.exact:
            self._tree.placed((*record.context, record.chunk_id), self._tier, len(record))

    def _hide(self, record: SegmentRecord) -> None:
        if self._tree is not None and record.exact:
            self._tree.displaced((*record.context, record.chunk_id), self._tier)
