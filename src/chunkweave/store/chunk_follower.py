"""Tells which chunks came into a hierarchy or left it, without ever listing what it holds."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from threading import Lock

from chunkweave.types import ChunkId


@dataclass(frozen=True, slots=True)
class ChunkNews:
    """Chunks of which now something is stored, and those of which nothing is any more; `more` is still to be told."""

    came: frozenset[ChunkId] = frozenset()
    went: frozenset[ChunkId] = frozenset()
    more: bool = False


class ChunkFollower:
    """Remembers what it has told of; costs as much as changes, not as much as is stored. Thread-safe.

    Stores only say that something about a chunk changed, under their own lock; whether it is held is asked when the
    news are taken. So nothing can be miscounted by a change that was interrupted.
    """

    def __init__(self, holds: Callable[[ChunkId], bool]) -> None:
        """`holds` says whether a segment of a chunk is stored on any level."""
        self._holds = holds
        self._lock = Lock()
        self._touched: dict[ChunkId, None] = {}
        self._told: set[ChunkId] = set()

    def touched(self, chunk: ChunkId) -> None:
        """A segment of that chunk came or went."""
        with self._lock:
            self._touched[chunk] = None

    def take(self, limit: int | None = None) -> ChunkNews:
        """What changed since the last call, of at most `limit` chunks, those first that changed first. One caller."""
        with self._lock:
            if not self._touched:
                return ChunkNews()
            taken = tuple(islice(self._touched, limit))
            # A dict whose first entries were deleted one by one is slow to begin: a new one instead.
            self._touched = dict.fromkeys(islice(self._touched, len(taken), None))
            more = bool(self._touched)
        held = frozenset(filter(self._holds, taken))
        came, went = held - self._told, (frozenset(taken) - held) & self._told
        self._told |= came
        self._told -= went
        return ChunkNews(came, went, more)
