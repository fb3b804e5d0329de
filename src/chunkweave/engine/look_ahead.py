"""Reads ahead, from slow levels, what the next requests of a queue will need (Cache-Craft §3.5)."""

import logging
from collections.abc import Iterable

from chunkweave.engine.prefetch import Prefetch
from chunkweave.engine.runner import Runner
from chunkweave.engine.ticket import RequestState

logger = logging.getLogger(__name__)


class LookAhead:
    """Prefetches of requests that wait, in at most `max_bytes` of memory. Owned by the core, one thread's.

    A request is looked at once while it waits. What was read for it is its own from its admission on and counts here
    no more: a running request's segments take their memory whether they were read ahead or not.
    """

    def __init__(self, runner: Runner, *, max_bytes: int) -> None:
        """Nothing is read yet. Without a slow level in the store, or without bytes, nothing ever is."""
        self._runner = runner
        slow = any(level.background for level in runner.store.levels)
        self._max_bytes = max_bytes if slow else 0
        self._waiting: dict[RequestState, Prefetch | None] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are taken for requests that wait. From any thread."""
        return sum(prefetch.nbytes for prefetch in tuple(self._waiting.values()) if prefetch is not None)

    @property
    def has_room(self) -> bool:
        """Whether anything could be read now."""
        return self.nbytes < self._max_bytes

    def look(self, requests: Iterable[RequestState]) -> None:
        """Begin to read for those that were not looked at, the first first, as long as there is room."""
        for request in requests:
            if not self.has_room:
                return
            if request not in self._waiting:
                self._waiting[request] = self._begin(request)

    def take(self, request: RequestState) -> Prefetch | None:
        """What was read for a request that waits no longer; whoever takes it closes it."""
        return self._waiting.pop(request, None)

    def _begin(self, request: RequestState) -> Prefetch | None:
        prepared = request.prepared
        try:
            prefetch = self._runner.prefetch(prepared.prompt, prepared.method, max_bytes=self._max_bytes - self.nbytes)
        except Exception:  # whatever it is, the request's own prefill finds out, and it alone pays for it
            logger.warning("nothing is read ahead for request %d", request.id, exc_info=True)
            return None
        if prefetch.nbytes:
            return prefetch
        prefetch.close()
        return None
