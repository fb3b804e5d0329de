"""Where requests wait: those that were asked for before those that are only expected."""

import itertools
from collections.abc import Callable

from chunkweave.engine.ticket import Ticket
from chunkweave.scheduling.queue import CacheAwareQueue, StoredPrefixes

Fits = Callable[[Ticket], bool]


class WaitingRoom:
    """The cache-aware queue, and behind it the speculations, first come first served.

    A speculation that is confirmed takes its place in the queue then, as if it had arrived only now: so it is ahead of
    nobody whom it would not be ahead of without speculation. One thread's.
    """

    def __init__(self, tree: StoredPrefixes, *, window: int) -> None:
        self._queue: CacheAwareQueue[Ticket] = CacheAwareQueue(tree, window=window)
        self._speculations: dict[int, Ticket] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._queue) + len(self._speculations)

    @property
    def requests(self) -> int:
        """How many of those that wait are confirmed."""
        return len(self._queue)

    @property
    def speculations(self) -> int:
        """How many of those that wait are not confirmed."""
        return len(self._speculations)

    def add(self, ticket: Ticket) -> None:
        """Let a request wait, and give it its number."""
        if ticket.speculative:
            ticket.number = next(self._numbers)
            self._speculations[ticket.number] = ticket
        else:
            ticket.waiting = self._queue.submit(ticket, ticket.path, len(ticket.prepared.prompt))
            ticket.number = ticket.waiting.number

    def put_back(self, ticket: Ticket) -> None:
        """Let a request that was taken out wait again in its old place."""
        if ticket.speculative:
            self._speculations[ticket.number] = ticket
        else:
            assert ticket.waiting is not None, "it had a place in the queue"
            self._queue.put_back(ticket.waiting)

    def confirm(self, ticket: Ticket) -> None:
        """A speculation becomes a request like others, whether it waits or runs."""
        waits = self._speculations.pop(ticket.number, None) is not None
        ticket.speculative = False
        if waits:
            self.add(ticket)
        else:
            ticket.waiting = self._queue.place(ticket, ticket.path, len(ticket.prepared.prompt))
            ticket.number = ticket.waiting.number

    def remove(self, ticket: Ticket) -> None:
        """A request is given up; one that does not wait is left alone."""
        if ticket.speculative:
            self._speculations.pop(ticket.number, None)
        else:
            self._queue.remove(ticket)

    def pop(self, fits: Fits) -> Ticket | None:
        """Take out the confirmed request that is served next among those that fit."""
        waiting = self._queue.pop(lambda one: fits(one.request))
        return None if waiting is None else waiting.request

    def pop_speculation(self, fits: Fits) -> Ticket | None:
        """Take out the oldest speculation if it fits, and if nobody else waits."""
        oldest = min(self._speculations, default=None)
        if oldest is None or len(self._queue) or not fits(self._speculations[oldest]):
            return None
        return self._speculations.pop(oldest)

    def next(self, count: int) -> list[Ticket]:
        """The confirmed requests that are served next as things stand."""
        return [waiting.request for waiting in self._queue.next(count)]

    def close(self) -> None:
        """Follow the tree no longer; the room is of no use afterwards."""
        self._queue.close()
