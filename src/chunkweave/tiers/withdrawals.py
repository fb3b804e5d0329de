"""Deletions that have to win: over puts still on their way, and over a remote that cannot be reached."""

import logging
from threading import Lock
from weakref import ref

from chunkweave.tiers.blobs import BlobKey

logger = logging.getLogger(__name__)


class PutTicket:
    """One put, from its first attempt until the last thread that carries it is gone."""

    __slots__ = ("__weakref__", "_withdrawn", "key")

    def __init__(self, key: BlobKey) -> None:
        self.key = key
        self._withdrawn = False

    def withdraw(self) -> None:
        """The key is deleted: what this put has written must go, what it has not must not come."""
        self._withdrawn = True

    def is_withdrawn(self) -> bool:
        """Whether the key was deleted since this put began."""
        return self._withdrawn


class Withdrawals:
    """Remembers what was deleted but may still lie, or come to lie, in the remote. Thread-safe.

    An abandoned put goes on in its thread and may arrive after a deletion: its ticket then says so, and whoever
    carries the put deletes what it wrote. A deletion that failed is owed: its key reads as a miss here, and it is
    tried again later. What is owed is forgotten when the process ends, so a caller that must know asks `owed`.
    """

    def __init__(self, *, max_owed: int = 100_000) -> None:
        self._max_owed = max_owed
        self._lock = Lock()
        self._owed: dict[BlobKey, None] = {}
        self._tickets: list[ref[PutTicket]] = []

    def admit(self, key: BlobKey) -> PutTicket:
        """A put of `key` begins; a deletion owed from before is settled by it."""
        ticket = PutTicket(key)
        with self._lock:
            self._owed.pop(key, None)
            self._tickets = [ref(other) for other in (*self._live(), ticket)]
        return ticket

    def withdraw(self, key: BlobKey) -> None:
        """`key` is being deleted: owed until `settled`, and lost to every put under way."""
        with self._lock:
            for ticket in self._live():
                if ticket.key == key:
                    ticket.withdraw()
            self._owed[key] = None
            if len(self._owed) > self._max_owed:
                oldest = next(iter(self._owed))
                del self._owed[oldest]
                logger.error("too many deletions are owed; segment %s may stay in the remote store", oldest.segment)

    def settled(self, key: BlobKey) -> None:
        """The remote has carried the deletion out."""
        with self._lock:
            self._owed.pop(key, None)

    def is_owed(self, key: BlobKey) -> bool:
        """Deleted, and perhaps still there."""
        with self._lock:
            return key in self._owed

    def owed(self, limit: int | None = None) -> tuple[BlobKey, ...]:
        """What is deleted and perhaps still there, the oldest first."""
        with self._lock:
            return tuple(self._owed)[:limit]

    def _live(self) -> list[PutTicket]:
        return [ticket for ticket in (weak() for weak in self._tickets) if ticket is not None]
