"""What the scheduler knows of the workers' stores."""

from collections.abc import Iterable, Mapping

from chunkweave.types import ChunkId


class StoredMirror:
    """On how many ranks something of a chunk is stored. What is not on all of them is good for nothing.

    Ranks tell of changes at different times, so they are counted, not compared.
    """

    def __init__(self, ranks: int = 1) -> None:
        """`ranks` is how many workers each have a share of the heads."""
        self._ranks = ranks
        self._copies: dict[ChunkId, int] = {}

    def __contains__(self, chunk: ChunkId | None) -> bool:
        """Whether every rank has told that it holds something of it."""
        return chunk is not None and self._copies.get(chunk, 0) >= self._ranks

    def note(self, changes: Mapping[ChunkId, int]) -> None:
        """So many ranks more (or fewer) hold something of these chunks."""
        for chunk, change in changes.items():
            copies = self._copies.get(chunk, 0) + change
            if copies:
                self._copies[chunk] = copies
            else:
                self._copies.pop(chunk, None)

    def add(self, chunks: Iterable[ChunkId]) -> None:
        """One rank more holds these."""
        self.note(dict.fromkeys(chunks, 1))
