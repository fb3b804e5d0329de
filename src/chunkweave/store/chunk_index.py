"""Segments by chunk: what finds the variants of a chunk, whatever context they were computed in."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from chunkweave.errors import StoreError
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, SegmentId


class ChunkIndex:
    """Chunk id -> ids of its variants, least recently used first (DESIGN §3.4). Not thread-safe."""

    def __init__(self) -> None:
        self._variants: dict[ChunkId, OrderedDict[SegmentId, None]] = {}

    def __len__(self) -> int:
        """Chunks that have a variant."""
        return len(self._variants)

    def add(self, record: SegmentRecord) -> None:
        """Index a record as the most recently used variant of its chunk."""
        self._variants.setdefault(record.chunk_id, OrderedDict())[record.id] = None

    def touch(self, record: SegmentRecord) -> None:
        """Make an indexed record the most recently used variant of its chunk."""
        self._variants[record.chunk_id].move_to_end(record.id)

    def remove(self, record: SegmentRecord) -> None:
        """Forget an indexed record."""
        variants = self._variants[record.chunk_id]
        del variants[record.id]
        if not variants:
            del self._variants[record.chunk_id]

    def variants(self, chunk: ChunkId) -> Iterator[SegmentId]:
        """Variants of a chunk, most recently used first; empty for an unknown chunk."""
        return reversed(self._variants.get(chunk, OrderedDict()))

    def check(self, records: Mapping[SegmentId, SegmentRecord]) -> None:
        """Audit the index against all stored `records`.

        Raises:
            StoreError: they disagree.
        """
        indexed = {segment: chunk for chunk, variants in self._variants.items() for segment in variants}
        if indexed != {segment: record.chunk_id for segment, record in records.items()}:
            raise StoreError("chunk index: it does not list exactly the stored segments under their chunks")
        if sum(map(len, self._variants.values())) != len(indexed) or not all(self._variants.values()):
            raise StoreError("chunk index: a segment is listed twice, or a chunk without variants was kept")
