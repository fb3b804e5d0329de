"""Copies of the hottest upper nodes on a second memory level, for when the first one is lost (RAGCache §6)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic

from chunkweave.store.level import Level
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.store.records import segment_id
from chunkweave.store.tier import PayloadT
from chunkweave.store.writer import Write
from chunkweave.types import ChunkId

EVERY = 100
"""Requests after which it is looked which nodes are the hottest."""


class Replicator(Generic[PayloadT]):
    """Keeps a copy of the `number` hottest upper nodes of the fastest memory level on the next one.

    Without a second level in memory there is nothing to do: what is on disk or remote survives anyway. Payloads are
    moved by the background writer. Thread-safe, as far as that a count may be lost.
    """

    def __init__(
        self,
        memory: Sequence[Level[PayloadT]],
        copying: Callable[[], AbstractContextManager[Callable[[Write[PayloadT]], bool]]],
        tree: KnowledgeTree[ChunkId],
        number: int,
        *,
        every: int = EVERY,
    ) -> None:
        """Of the levels in `memory`, from fast to slow, the first is copied from and the second to.

        Inside a `copying` block, what it gives queues a write, unless something was removed since the block began.
        """
        self._memory = memory[:2] if number else ()
        self._copying = copying
        self._tree = tree
        self._number = number
        self._every = every
        self._requests = 0

    def note_request(self) -> None:
        """Another request was counted; every so often, replicate."""
        self._requests += 1
        if self._requests % self._every == 0:
            self.replicate()

    def replicate(self) -> int:
        """Have copied what is hottest and lacks a copy; returns how many copies were queued."""
        if len(self._memory) < 2:
            return 0
        source, target = self._memory
        queued = 0
        for path in self._tree.missing_replicas(self._number, source.name, target.name):
            segment = segment_id(path[-1], path[:-1])
            with self._copying() as offer:
                record, payload = source.record(segment), source.get(segment)
                if record is not None and payload is not None:
                    queued += offer(Write(target, record, payload, record.nbytes))
        return queued
