"""Exact segments by the path of chunk ids that they continue: what finds the longest exact prefix."""

from collections.abc import Iterable, Mapping

from chunkweave.errors import StoreError
from chunkweave.store.records import SegmentRecord
from chunkweave.trees.prefix_trie import PrefixTrie, TrieNode
from chunkweave.types import ChunkId, Context, SegmentId


class PathIndex:
    """A trie of exact segments, and a waiting room for those whose ancestors are not all stored.

    The path of a segment is its context and its own chunk; RAGCache's knowledge tree has the same nodes
    (RAGCache §5.1, DESIGN §3.4). Every exact record given to `add` is either in the trie or waits under
    its context, and none waits whose parent is in the trie: a missing parent brings its children back.
    Inexact records are ignored, so that callers need not tell them apart. Not thread-safe.
    """

    def __init__(self) -> None:
        self._trie: PrefixTrie[ChunkId, SegmentId] = PrefixTrie()
        self._nodes: dict[SegmentId, TrieNode[ChunkId, SegmentId]] = {}
        self._waiting: dict[Context, dict[ChunkId, SegmentId]] = {}

    def __contains__(self, segment: SegmentId) -> bool:
        """Whether a segment is in the trie, so that an exact prefix may run over it."""
        return segment in self._nodes

    def add(self, record: SegmentRecord) -> None:
        """Index an exact record that is not indexed yet; waiting children of it join."""
        if not record.exact:
            return
        if not self._attach(_path(record), record.id):
            self._waiting.setdefault(record.context, {})[record.chunk_id] = record.id
            return
        arrived = [_path(record)]
        while arrived:
            path = arrived.pop()
            for chunk, segment in self._waiting.pop(path, {}).items():
                self._attach((*path, chunk), segment)
                arrived.append((*path, chunk))

    def remove(self, record: SegmentRecord) -> None:
        """Forget a record; its descendants leave the trie with it and wait for its return."""
        if not record.exact:
            return
        siblings = self._waiting.get(record.context, {})
        if siblings.pop(record.chunk_id, None) is not None:
            if not siblings:
                del self._waiting[record.context]
            return
        _, *below = self._trie.detach(_path(record))
        del self._nodes[record.id]
        for path, segment in below:
            del self._nodes[segment]
            self._waiting.setdefault(path[:-1], {})[path[-1]] = segment

    def longest_exact_prefix(self, chunks: Iterable[ChunkId]) -> list[SegmentId]:
        """Segments of the longest prefix of `chunks` that is stored exactly, in prompt order."""
        return self._trie.longest_prefix(chunks)

    def has_children(self, segment: SegmentId) -> bool:
        """Whether exact segments in the trie continue this one."""
        node = self._nodes.get(segment)
        return node is not None and bool(node.children)

    def check(self, records: Mapping[SegmentId, SegmentRecord]) -> None:
        """Audit trie and waiting room against all stored `records`.

        Raises:
            StoreError: they disagree, or an inexact or orphaned segment is in the trie.
        """
        self._trie.check()
        inside = {segment: path for path, segment in self._trie.items()}
        waiting = {
            segment: (*context, chunk) for context, ids in self._waiting.items() for chunk, segment in ids.items()
        }
        exact = {segment: _path(record) for segment, record in records.items() if record.exact}
        if not all(self._waiting.values()):
            raise StoreError("path index: an empty waiting room was kept")
        if len(inside) != len(self._trie) or inside.keys() & waiting.keys() or inside | waiting != exact:
            raise StoreError("path index: trie and waiting room are not the exact records, each once, at its own path")
        if {segment: self._trie.node(path) for segment, path in inside.items()} != self._nodes:
            raise StoreError("path index: a segment is not known by its own trie node")
        for context in self._waiting:
            if not context or context in self._trie:
                raise StoreError(f"path index: segments wait under {context!r}, which is held")

    def _attach(self, path: tuple[ChunkId, ...], segment: SegmentId) -> bool:
        attached = self._trie.attach(path, segment)
        node = self._trie.node(path) if attached else None
        if node is not None:
            self._nodes[segment] = node
        return attached


def _path(record: SegmentRecord) -> tuple[ChunkId, ...]:
    return (*record.context, record.chunk_id)
