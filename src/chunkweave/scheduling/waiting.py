"""What of a waiting request need not be computed, whatever it would be computed for. Imports no torch."""

from collections.abc import Callable, Sequence
from typing import Protocol

from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.types import ChunkId

Path = tuple[ChunkId, ...]
Listener = Callable[[Path], None]

WEAVES = ChunkId("weaves")
"""Stands before the path of a waiting request that weaves: no id of a chunk has fewer than 32 characters."""


def waiting_path(path: Sequence[ChunkId], *, weaves: bool, recomputed: float = 0.0) -> Path:
    """A prompt's path as it enters a queue over `StoredTokens`, or over what a replica holds.

    Of a request that weaves, about the share `recomputed` of the chunks that it reuses is computed again.
    """
    return (WEAVES, ChunkId(f"{recomputed:.3g}"), *path) if weaves else tuple(path)


def share_reused(path: Sequence[ChunkId]) -> float:
    """Of the path of a request that weaves, the share of reused chunks that is not computed again."""
    return 1.0 - float(path[1])


class ChunkStore(Protocol):
    """What is asked of a hierarchy of tiers."""

    tree: KnowledgeTree[ChunkId]

    def chunk_tokens(self, chunk: ChunkId) -> int:
        """Tokens of a chunk of which a segment is stored in any context; 0 if none is."""


class StoredTokens:
    """How many tokens of a waiting request need not be computed, for a `CacheAwareQueue` over a store.

    Paths are those of `waiting_path`: of an exact request the longest exact prefix counts, of one that weaves also
    every other chunk that is stored in any context, but for the share that is computed again. Thread-safe.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._tellers: dict[Listener, Listener] = {}

    def stored_tokens(self, keys: Sequence[ChunkId]) -> int:
        """Of a waiting path, the tokens that need not be computed."""
        if not keys or keys[0] != WEAVES:
            return self._store.tree.stored_tokens(keys)
        path = keys[2:]
        exact = self._store.tree.match(path)
        woven = sum(map(self._store.chunk_tokens, path[exact.nodes :]))
        return exact.tokens + int(share_reused(keys) * woven)

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with each path that came or went, and with the beginning of all paths that weave."""

        def tell(path: Path) -> None:
            listener(path)
            listener((WEAVES,))

        self._tellers[listener] = tell
        self._store.tree.subscribe(tell)

    def unsubscribe(self, listener: Listener) -> None:
        """Call `listener` no more."""
        self._store.tree.unsubscribe(self._tellers.pop(listener))
