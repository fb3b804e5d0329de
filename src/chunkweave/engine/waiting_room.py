"""Where requests wait: those that were asked for before those that are only expected."""

import itertools
from collections.abc import Callable

from chunkweave.engine.ticket import RequestState
from chunkweave.scheduling.queue import CacheAwareQueue, StoredPrefixes

Fits = Callable[[RequestState], bool]


class RequestQueue:
    """The cache-aware queue, and behind it the speculations, first come first served.

    A speculation that is confirmed takes its place in the queue then, as if it had arrived only now: so it is ahead of
    nobody whom it would not be ahead of without speculation. One thread's.
    """

    def __init__(self, tree: StoredPrefixes, *, window: int) -> None:
        self._queue: CacheAwareQueue[RequestState] = CacheAwareQueue(tree, window=window)
        self._speculations: dict[int, RequestState] = {}
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

    def add(self, request: RequestState) -> None:
        """Let a request wait, and give it its number."""
        if request.speculative:
            request.number = next(self._numbers)
            self._speculations[request.number] = request
        else:
            request.waiting = self._queue.submit(request, request.path, len(request.prepared.prompt))
            request.number = request.waiting.number

    def put_back(self, request: RequestState) -> None:
        """Let a request that was taken out wait again in its old place."""
        if request.speculative:
            self._speculations[request.number] = request
        else:
            assert request.waiting is not None, "it had a place in the queue"
            self._queue.put_back(request.waiting)

    def confirm(self, request: RequestState) -> None:
        """A speculation becomes a request like others, whether it waits or runs."""
        waits = self._speculations.pop(request.number, None) is not None
        request.speculative = False
        if waits:
            self.add(request)
        else:
            request.waiting = self._queue.place(request, request.path, len(request.prepared.prompt))
            request.number = request.waiting.number

    def remove(self, request: RequestState) -> None:
        """A request is given up; one that does not wait is left alone."""
        if request.speculative:
            self._speculations.pop(request.number, None)
        else:
            self._queue.remove(request)

    def pop(self, fits: Fits) -> RequestState | None:
        """Take out the confirmed request that is served next among those that fit."""
        waiting = self._queue.pop(lambda one: fits(one.request))
        return None if waiting is None else waiting.request

    def pop_speculation(self, fits: Fits) -> RequestState | None:
        """Take out the oldest speculation if it fits, and if nobody else waits."""
        oldest = min(self._speculations, default=None)
        if oldest is None or len(self._queue) or not fits(self._speculations[oldest]):
            return None
        return self._speculations.pop(oldest)

    def next(self, count: int) -> list[RequestState]:
        """The confirmed requests that are served next as things stand."""
        return [waiting.request for waiting in self._queue.next(count)]

    def close(self) -> None:
        """Follow the tree no longer; the room is of no use afterwards."""
        self._queue.close()
