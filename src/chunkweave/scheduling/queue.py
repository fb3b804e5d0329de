"""Serving order: the least served tenant first, and within it the request with the most cached tokens. No torch here.

Among tenants: VTC of "Fairness in Serving Large Language Models" (OSDI 2024). Virtual time is the number of tokens
computed, divided by the weight. Tokens count when computed; cached ones do not count. Work already promised to a tenant
is added when the next request is chosen, so that one tenant does not get all free slots at once. Within a tenant: the
cache-aware order of RAGCache §5.2.

Identifiers. A *request* is the caller's key. A *number* is the order of arrival; it survives preemption. A *path* is
the sequence of cacheable part ids in the prompt (`waiting_path` adds a prefix if the request weaves).
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Generic, Protocol, Self, TypeVar

from chunkweave.errors import QueueFullError, UsageError
from chunkweave.store.prefix_trie import KnowledgeTree, PrefixWatch
from chunkweave.types import ChunkId

RequestT = TypeVar("RequestT", bound=Hashable)

DEFAULT_WINDOW = 32
"""RAGCache §7.3: how often a request may be passed over in its evaluation."""


class StoredPrefixes(Protocol):
    """The part of a knowledge tree that the queue uses."""

    def stored_tokens(self, keys: Sequence[ChunkId]) -> int:
        """Tokens of the longest stored prefix of `keys`."""

    def subscribe(self, listener: Callable[[tuple[ChunkId, ...]], None]) -> None:
        """Call `listener` with each path whose last node becomes stored, or is no longer stored."""

    def unsubscribe(self, listener: Callable[[tuple[ChunkId, ...]], None]) -> None:
        """Stop calling `listener`."""


@dataclass(slots=True)
class Waiting(Generic[RequestT]):
    """A request in the queue; only the queue changes it.

    `path` are the ids of its cacheable parts in prompt order, `prompt_tokens` all its tokens. `number` is its order of
    arrival. `cached_tokens` is how many of them were stored at the last lookup.
    """

    request: RequestT
    path: tuple[ChunkId, ...]
    prompt_tokens: int
    number: int
    cached_tokens: int = 0
    _entry: tuple[float, int] = field(default=(0.0, 0), repr=False)

    @property
    def priority(self) -> float:
        """Cached length / computation length (RAGCache §5.2); at least one token is always computed."""
        return self.cached_tokens / max(1, self.prompt_tokens - self.cached_tokens)


class CacheAwareQueue(Generic[RequestT]):
    """Pending requests by decreasing cached length / computation length, then by arrival.

    A request is passed over when a later one is served before it, at most `window` times; then the oldest request goes
    first. A window of 0 serves in order of arrival. The tree reports changed paths (from any thread); `ready` looks up
    only requests on these paths again. Everything else belongs to one thread.
    """

    def __init__(self, tree: StoredPrefixes, *, window: int = DEFAULT_WINDOW, capacity: int | None = None) -> None:
        """An empty queue over `tree`.

        Args:
            tree: reports how much of a path is stored, and changes.
            window: how often a request may be passed over.
            capacity: most pending requests; None: no limit.

        Raises:
            UsageError: a negative window, or a capacity below 1.
        """
        if window < 0 or (capacity is not None and capacity < 1):
            raise UsageError(f"a queue needs a window from 0 on ({window}) and a capacity of at least 1 ({capacity})")
        self._tree = tree
        self._window = window
        self._capacity = capacity
        self._waiting: dict[RequestT, Waiting[RequestT]] = {}
        self._by_number: dict[int, Waiting[RequestT]] = {}
        self._numbers: list[int] = []  # of pending requests, ascending: the first is the oldest
        self._left: list[int] = []  # of requests removed unserved, ascending; pruned below the oldest pending one
        self._next_number = 0
        # (-priority, number), lowest first. Entries are never updated in place: an entry is valid only while it equals
        # its request's `_entry`; others are dropped when they reach the top (`_best`) or by a rebuild (`_rank`).
        self._heap: list[tuple[float, int]] = []
        self._watch: PrefixWatch[ChunkId, int] = PrefixWatch()
        self._changed: deque[tuple[ChunkId, ...]] = deque()
        tree.subscribe(self.cache_changed)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: RequestT) -> bool:
        return request in self._waiting

    def submit(self, request: RequestT, path: Sequence[ChunkId], prompt_tokens: int) -> Waiting[RequestT]:
        """Add `request` to the queue.

        Raises:
            QueueFullError: the queue is full.
            UsageError: it is already pending.
        """
        if request in self._waiting:
            raise UsageError(f"request {request!r} is already pending")
        if self._capacity is not None and len(self._waiting) >= self._capacity:
            raise QueueFullError(f"{self._capacity} requests are already pending; retry later or raise the capacity")
        queue_entry = self.place(request, path, prompt_tokens)
        self._enter(queue_entry)
        return queue_entry

    def place(self, request: RequestT, path: Sequence[ChunkId], prompt_tokens: int) -> Waiting[RequestT]:
        """The next number in order of arrival, for a request that is already running and may be put back."""
        queue_entry = Waiting(request, tuple(path), prompt_tokens, self._next_number)
        self._next_number += 1
        return queue_entry

    def put_back(self, waiting: Waiting[RequestT]) -> None:
        """Return a popped request (preempted or failed) to its old position.

        Younger requests served in the meantime count as having passed it over, so it soon goes first.

        Raises:
            UsageError: it is already pending.
        """
        if waiting.request in self._waiting:
            raise UsageError(f"request {waiting.request!r} is already pending")
        self._enter(waiting)

    def ready(self, fits: Callable[[Waiting[RequestT]], bool] = lambda _: True) -> Waiting[RequestT] | None:
        """The next request to serve among those that `fits` accepts; it stays in the queue.

        If the oldest request was passed over `window` times, the result is that one, or None if it does not fit: others
        wait until it does.
        """
        if not self._waiting:
            return None
        self._refresh()
        oldest = self._by_number[self._numbers[0]]
        if self.passed_over(oldest.request) >= self._window:
            return oldest if fits(oldest) else None
        return self._best(fits)

    def pop(self, fits: Callable[[Waiting[RequestT]], bool] = lambda _: True) -> Waiting[RequestT] | None:
        """Remove and return the result of `ready`; None if there is none."""
        queue_entry = self.ready(fits)
        if queue_entry is not None:
            self._leave(queue_entry)
        return queue_entry

    def next(self, count: int) -> list[Waiting[RequestT]]:
        """The `count` requests to serve next in the current state, in order; they stay in the queue."""
        if not self._waiting or count < 1:
            return []
        self._refresh()
        oldest = self._by_number[self._numbers[0]]
        overdue = self.passed_over(oldest.request) >= self._window
        return heapq.nsmallest(
            count, self._waiting.values(), key=lambda waiting: (not (overdue and waiting is oldest), *waiting._entry)
        )

    def remove(self, request: RequestT) -> bool:
        """Remove a pending request unserved; False if it is not pending. It does not count as having passed others
        over.
        """
        waiting = self._waiting.get(request)
        if waiting is None:
            return False
        self._leave(waiting)
        insort(self._left, waiting.number)
        return True

    def passed_over(self, request: RequestT) -> int:
        """How many later requests were served while `request` is pending; O(log n).

        Raises:
            UsageError: it is not pending.
        """
        if request not in self._waiting:
            raise UsageError(f"request {request!r} is not pending")
        # Served later ones = all later numbers, less those pending and those removed unserved. Counting up at each pop
        # instead would touch every older request.
        number = self._waiting[request].number
        later = self._next_number - number - 1
        waiting = len(self._numbers) - bisect_left(self._numbers, number + 1)
        given_up = len(self._left) - bisect_left(self._left, number + 1)
        return later - waiting - given_up

    def cache_changed(self, path: tuple[ChunkId, ...]) -> None:
        """Record that the last node of `path` became stored, or is no longer stored. Safe from any thread."""
        self._changed.append(path)

    def close(self) -> None:
        """Stop following the tree, which may outlive the queue; the queue cannot be used afterwards."""
        self._tree.unsubscribe(self.cache_changed)

    def _enter(self, waiting: Waiting[RequestT]) -> None:
        self._waiting[waiting.request] = waiting
        self._by_number[waiting.number] = waiting
        insort(self._numbers, waiting.number)
        self._watch.add(waiting.path, waiting.number)
        waiting.cached_tokens = self._tree.stored_tokens(waiting.path)
        self._rank(waiting)

    def _leave(self, waiting: Waiting[RequestT]) -> None:
        del self._waiting[waiting.request]
        del self._by_number[waiting.number]
        del self._numbers[bisect_left(self._numbers, waiting.number)]
        self._watch.remove(waiting.path, waiting.number)
        oldest = self._numbers[0] if self._numbers else self._next_number
        del self._left[: bisect_left(self._left, oldest)]

    def _refresh(self) -> None:
        """Look up the requests on changed paths again, each once."""
        # The tree's callback only appends to a deque (atomic): it runs in the storing thread, perhaps under its lock.
        paths = set()
        while self._changed:
            paths.add(self._changed.popleft())
        concerned = {number for path in paths for number in self._watch.below(path)}
        for number in concerned:
            waiting = self._by_number[number]
            cached_tokens = self._tree.stored_tokens(waiting.path)
            if cached_tokens != waiting.cached_tokens:
                waiting.cached_tokens = cached_tokens
                self._rank(waiting)

    def _rank(self, waiting: Waiting[RequestT]) -> None:
        waiting._entry = (-waiting.priority, waiting.number)
        heapq.heappush(self._heap, waiting._entry)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [waiting_request._entry for waiting_request in self._waiting.values()]
            heapq.heapify(self._heap)

    def _best(self, fits: Callable[[Waiting[RequestT]], bool]) -> Waiting[RequestT] | None:
        passed = []
        chosen = None
        while self._heap and chosen is None:
            entry = self._heap[0]
            waiting = self._by_number.get(entry[1])
            if waiting is None or waiting._entry != entry:
                heapq.heappop(self._heap)
            elif fits(waiting):
                chosen = waiting
            else:
                passed.append(heapq.heappop(self._heap))  # valid but unfit now: pushed again below
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return chosen


Path = tuple[ChunkId, ...]
Listener = Callable[[Path], None]

WEAVES = ChunkId("weaves")
"""First element of a weaving request's path; it cannot be a chunk id, which has 32 characters."""


def waiting_path(path: Sequence[ChunkId], *, weaves: bool, recomputed: float = 0.0) -> Path:
    """A prompt's path for a queue over `StoredTokens` or over a replica's contents.

    For a weaving request, about the share `recomputed` of reused chunks is recomputed.
    """
    return (WEAVES, ChunkId(f"{recomputed:.3g}"), *path) if weaves else tuple(path)


def share_reused(path: Sequence[ChunkId]) -> float:
    """The share of reused chunks that is not recomputed, from the path of a weaving request."""
    return 1.0 - float(path[1])


class ChunkStore(Protocol):
    """The part of a tiered store that the queue uses."""

    tree: KnowledgeTree[ChunkId]

    def chunk_tokens(self, chunk: ChunkId) -> int:
        """Tokens of a chunk if a segment of it is stored in any context; else 0."""


class StoredTokens:
    """Tokens of a pending request that need not be computed, for a `CacheAwareQueue` over a store.

    Paths are those of `waiting_path`. For an exact request the longest exact prefix counts; for a weaving one also
    every other chunk stored in any context, less the recomputed share. Thread-safe.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._tellers: dict[Listener, Listener] = {}

    def stored_tokens(self, keys: Sequence[ChunkId]) -> int:
        """The tokens of a waiting path that need not be computed."""
        if not keys or keys[0] != WEAVES:
            return self._store.tree.stored_tokens(keys)
        path = keys[2:]
        exact = self._store.tree.match(path)
        woven = sum(map(self._store.chunk_tokens, path[exact.nodes :]))
        return exact.tokens + int(share_reused(keys) * woven)

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with each changed path, and with the common beginning of all weaving paths."""

        # A chunk in any context concerns weaving requests wherever it is in their path, so all of them are looked up.
        def tell(path: Path) -> None:
            listener(path)
            listener((WEAVES,))

        self._tellers[listener] = tell
        self._store.tree.subscribe(tell)

    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling `listener`."""
        self._store.tree.unsubscribe(self._tellers.pop(listener))


DECODED_COST = 2.0
"""Lowest cost of a generated token, relative to a prefill token (OSDI 2024, §5.1); measured time may raise it."""


class TenantWeights:
    """Each tenant's weight in sharing resources; default 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """Parse entries `NAME=WEIGHT`.

        Raises:
            UsageError: wrong form, or no positive number.
        """
        weights: dict[str, float] = {}
        for entry in entries:
            name, _, weight_text = entry.rpartition("=")
            try:
                weight = float(weight_text)
            except ValueError:
                weight = 0.0
            if not name or not isfinite(weight) or weight <= 0:
                raise UsageError(f"a tenant's weight must be NAME=WEIGHT with a positive number, not {entry!r}")
            weights[name] = weight
        return cls(weights)

    def __getitem__(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def share(self, tenant: str, among: Iterable[str]) -> float:
        """A tenant's share of the whole if it and those `among` want some: above 0, at most 1."""
        return self[tenant] / sum(self[member] for member in {tenant, *among})

    def refuse_if_full(self, tenant: str, waiting: Mapping[str, int], most: int) -> None:
        """Refuse another request if `most` are pending in total and its tenant has its share of them.

        Raises:
            QueueFullError: the queue is full for this tenant.
        """
        total = sum(waiting.values())
        own_count = waiting.get(tenant, 0)
        if total >= most and own_count >= self.share(tenant, waiting) * most:
            raise QueueFullError(f"{total} requests are already pending, the maximum; retry later or raise max_waiting")


class VirtualTime:
    """Tokens computed for each tenant, divided by its weight. Used by one thread.

    A tenant without active (pending or running) requests starts near the least served one: it has saved at most `burst`
    tokens, so that a rare user need not take turns for its first tokens.
    """

    def __init__(self, weights: TenantWeights | None = None, *, burst: float = 0.0) -> None:
        self.weights = weights or TenantWeights()
        self._burst = burst
        self._served: dict[str, float] = {}
        self._active: Counter[str] = Counter()
        self._floor = 0.0  # lowest virtual time of active tenants, now or when there last were any; never falls

    @property
    def tenants(self) -> Iterable[str]:
        """Tenants with active requests."""
        return self._active.keys()

    def active(self, tenant: str) -> int:
        """Number of a tenant's active requests."""
        return self._active[tenant]

    def of(self, tenant: str, promised: float = 0.0) -> float:
        """The virtual time of an active tenant, once `promised` tokens are computed too."""
        return self._served.get(tenant, float("-inf")) + promised / self.weights[tenant]

    def share(self, tenant: str, *coming: str) -> float:
        """A tenant's share of slots and memory, among active tenants and those `coming`."""
        return self.weights.share(tenant, {*self.tenants, *coming})

    def join(self, tenant: str) -> None:
        """Add an active request of a tenant."""
        if not self._active[tenant]:
            self._served[tenant] = self._joining(tenant)
        self._active[tenant] += 1

    def behind(self, tenant: str) -> float:
        """Tokens that an inactive tenant could use before it takes turns; 0 for an active one."""
        if not self._active or self._active[tenant]:
            return 0.0
        joining = self._joining(tenant)  # also updates the floor
        return (self._floor - joining) * self.weights[tenant]

    def leave(self, tenant: str) -> bool:
        """Remove an active request; returns whether it was the tenant's last."""
        self._note_floor()
        self._active[tenant] -= 1
        if self._active[tenant]:
            return False
        del self._active[tenant]
        return True

    def charge(self, tenant: str, cost: float) -> None:
        """Add the cost of work for an active tenant."""
        self._served[tenant] = self.of(tenant, cost)

    def _joining(self, tenant: str) -> float:
        """The virtual time at which an inactive tenant starts."""
        self._note_floor()
        saved = self._burst / self.weights[tenant] if self._active else 0.0
        return max(self.of(tenant), self._floor - saved)

    def _note_floor(self) -> None:
        times = [self._served[member] for member in self._active]
        self._floor = max(self._floor, min(times, default=self._floor))
        least_time = self._floor - self._burst / min((self.weights[member] for member in self._served), default=1.0)
        self._served = {member: t for member, t in self._served.items() if t > least_time or member in self._active}


class FairQueue(Generic[RequestT]):
    """A cache-aware queue per tenant: first the tenant is chosen, then its request.

    A tenant without a fitting request is passed over at most `window` times; then no request is served until one of it
    fits. With one tenant this equals its queue. Used by one thread.
    """

    def __init__(self, tree: StoredPrefixes, time: VirtualTime, *, window: int) -> None:
        """An empty queue. `tree` and `window` apply to every tenant's queue."""
        self._tree = tree
        self._time = time
        self._window = window
        self._queues: dict[str, CacheAwareQueue[RequestT]] = {}
        self._passed_over: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def waiting(self, tenant: str) -> int:
        """Number of a tenant's pending requests."""
        return len(self._queues[tenant]) if tenant in self._queues else 0

    @property
    def tenants(self) -> list[str]:
        """Tenants with pending requests."""
        return [tenant for tenant, queue in self._queues.items() if len(queue)]

    def of(self, tenant: str) -> CacheAwareQueue[RequestT]:
        """A tenant's own queue, to submit, put back or remove requests."""
        if tenant not in self._queues:
            self._queues[tenant] = CacheAwareQueue(self._tree, window=self._window)
        return self._queues[tenant]

    def pop(
        self,
        fits: Callable[[Waiting[RequestT]], bool] = lambda _: True,
        promised: Mapping[str, float] | None = None,
        may: Callable[[str], bool] = lambda _: True,
    ) -> Waiting[RequestT] | None:
        """Remove and return the next request to serve among those that fit; None if there is none.

        `promised` is, by tenant, the cost of work left for requests popped earlier. Tenants for which `may` is False
        are skipped.
        """
        unfit: list[str] = []
        for tenant in filter(may, self._by_time(promised or {})):
            waiting = self._queues[tenant].pop(fits)
            if waiting is not None:
                self._passed_over.update(unfit)
                del self._passed_over[tenant]
                return waiting
            if self._passed_over[tenant] >= self._window:
                return None
            unfit.append(tenant)
        return None

    def next(self, count: int) -> list[Waiting[RequestT]]:
        """The next `count` requests in the current state, taking one of each tenant in turn."""
        turns = [self._queues[tenant].next(count) for tenant in self._by_time({})]
        return [turn[place] for place in range(count) for turn in turns if place < len(turn)][:count]

    def forget(self, tenant: str) -> None:
        """Drop the queue of a tenant without active requests."""
        del self._passed_over[tenant]
        if tenant in self._queues:
            self._queues.pop(tenant).close()

    def close(self) -> None:
        """Stop following the tree; the queue cannot be used afterwards."""
        for queue in self._queues.values():
            queue.close()

    def _by_time(self, promised: Mapping[str, float]) -> Sequence[str]:
        return sorted(self.tenants, key=lambda tenant: self._time.of(tenant, promised.get(tenant, 0.0)))
