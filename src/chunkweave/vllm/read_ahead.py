"""Segments of requests that wait for their turn in vLLM's queue, on their way from slow tiers into memory."""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from chunkweave.vllm.request import WeaveRequest
from chunkweave.weaving.segments import Prefetch

logger = logging.getLogger("vllm.chunkweave")

MOST_READ = 4
"""Requests whose segments are read before their turn: more would only read against one another, and take memory."""


class ReadAhead:
    """Owns what is read for waiting requests until their weaves have ended. `find` is called from any thread."""

    def __init__(self, prefetch: Callable[[WeaveRequest], Prefetch | None]) -> None:
        """`prefetch` finds what a request would read and begins to; None if that is nothing. Called on threads."""
        self._prefetch = prefetch
        self._waiting: dict[str, WeaveRequest] = {}
        self._reading: dict[str, Future[Prefetch | None]] = {}
        self._executor = ThreadPoolExecutor(MOST_READ, "chunkweave-ahead")

    def begin(self, waiting: Mapping[str, WeaveRequest], placed: Iterable[str]) -> None:
        """Read for requests that have come in, the first ones first; those that are `placed` read for themselves."""
        if not waiting and not self._waiting:
            return
        self._waiting.update(waiting)
        for request_id in placed:
            self._waiting.pop(request_id, None)
        while self._waiting and len(self._reading) < MOST_READ:
            request_id = next(iter(self._waiting))
            self._reading[request_id] = self._executor.submit(self._prefetch, self._waiting.pop(request_id))

    def find(self, request_id: str) -> Prefetch | None:
        """What is being read for a request whose turn has come; None if it is nothing, or not known yet."""
        reading = self._reading.get(request_id)
        if reading is None or not reading.done() or reading.cancelled() or reading.exception() is not None:
            return None
        return reading.result()

    def drop(self, request_id: str) -> None:
        """A request is woven, or will not be: what was read stays where it was put, and is pinned no longer."""
        self._waiting.pop(request_id, None)
        reading = self._reading.pop(request_id, None)
        if reading is not None and not reading.cancel():
            reading.add_done_callback(lambda done: self._close(request_id, done))

    def close(self) -> None:
        """Stop reading."""
        for request_id in [*self._waiting, *self._reading]:
            self.drop(request_id)
        self._executor.shutdown(wait=True)

    def _close(self, request_id: str, done: "Future[Prefetch | None]") -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            logger.warning("nothing is read ahead for request %s: %s", request_id, error)
        elif not done.cancelled() and (prefetch := done.result()) is not None:
            with suppress(RuntimeError):  # at shutdown: it is closed here then
                self._executor.submit(prefetch.close)
                return
            prefetch.close()
