"""How often each chunk was asked for lately: CRAFT's Chunk-Access Table."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import Generic, TypeVar

from chunkweave.errors import StoreError, UsageError

KeyT = TypeVar("KeyT", bound=Hashable)


class AccessTable(Generic[KeyT]):
    """Exact counts of keys over the last `window` requests (CRAFT §4.1).

    A request counts each of its keys once. Noting one costs O(its keys), and those of the request that leaves the
    window; a key that no request of the window has is not remembered, so memory is bounded by the window.

    Ids of chunks name their model and cache salt: tenants share a window and never a count. Thread-safe; `count` takes
    no lock.
    """

    def __init__(self, window: int) -> None:
        """An empty table.

        Raises:
            UsageError: the window has no request.
        """
        if window < 1:
            raise UsageError(f"chunks are counted over at least one request, not {window}")
        self.window = window
        self._requests: deque[tuple[KeyT, ...]] = deque()
        self._counts: dict[KeyT, int] = {}
        self._lock = Lock()
        self.on_note: Callable[[tuple[KeyT, ...]], None] | None = None
        """Called with the keys of each request that was made here; must be quick."""

    def __len__(self) -> int:
        """Keys in the window."""
        return len(self._counts)

    @property
    def requests(self) -> int:
        """Requests in the window."""
        return len(self._requests)

    def count(self, key: KeyT) -> int:
        """How many requests of the window have `key`."""
        return self._counts.get(key, 0)

    def note(self, keys: Iterable[KeyT], *, elsewhere: bool = False) -> None:
        """Another request, made here or `elsewhere`; the oldest one leaves a full window."""
        request = tuple(dict.fromkeys(keys))
        if self.on_note is not None and not elsewhere:
            self.on_note(request)
        with self._lock:
            for key in request:
                self._counts[key] = self._counts.get(key, 0) + 1
            self._requests.append(request)
            if len(self._requests) > self.window:
                for key in self._requests.popleft():
                    if self._counts[key] == 1:
                        del self._counts[key]
                    else:
                        self._counts[key] -= 1

    def check(self) -> None:
        """Audit the counts against the requests of the window.

        Raises:
            StoreError: they disagree.
        """
        with self._lock:
            counts: dict[KeyT, int] = {}
            for request in self._requests:
                for key in request:
                    counts[key] = counts.get(key, 0) + 1
            if counts != self._counts or len(self._requests) > self.window:
                raise StoreError(f"the access table of {self.window} requests miscounts")
