"""Which request is served next: of the tenant that was served least, the one of which most is cached. Imports no torch.

Among tenants, VTC of "Fairness in Serving Large Language Models" (OSDI 2024): virtual time is tokens computed, divided
by the weight. They count as they are computed, and cached ones not at all. What a tenant is already promised is added
where the next request is chosen, so that one tenant does not get all places that are free at a time. Within a tenant,
the cache-aware order of RAGCache §5.2.
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
    """What the queue asks of a knowledge tree."""

    def stored_tokens(self, keys: Sequence[ChunkId]) -> int:
        """Tokens of the longest stored prefix of `keys`."""

    def subscribe(self, listener: Callable[[tuple[ChunkId, ...]], None]) -> None:
        """Call `listener` with each path whose last node is stored now and was not, or is no longer."""

    def unsubscribe(self, listener: Callable[[tuple[ChunkId, ...]], None]) -> None:
        """Call `listener` no more."""


@dataclass(slots=True)
class Waiting(Generic[RequestT]):
    """A request in the queue; only the queue changes it.

    `path` are the ids of its stored parts in prompt order, `prompt_tokens` all its tokens. `number` is its place in
    the order of arrival. `cached_tokens` is how much of it was stored when the queue looked last.
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
    """Waiting requests by falling cached length / computation length, then by arrival.

    A request is passed over whenever a later one is served before it, at most `window` times: then the oldest request
    goes first. So a window of 0 serves in the order of arrival. The tree reports which paths came or went (from any
    thread); only requests on them are looked up again, by `ready`. Everything else belongs to one thread.
    """

    def __init__(self, tree: StoredPrefixes, *, window: int = DEFAULT_WINDOW, capacity: int | None = None) -> None:
        """An empty queue over `tree`.

        Args:
            tree: says how much of a path is stored, and when that changes.
            window: how often a request may be passed over.
            capacity: most requests that wait; None sets no limit.

        Raises:
            UsageError: the window is negative, or nothing may wait.
        """
        if window < 0 or (capacity is not None and capacity < 1):
            raise UsageError(f"a queue needs a window from 0 on ({window}) and room for a request ({capacity})")
        self._tree = tree
        self._window = window
        self._capacity = capacity
        self._waiting: dict[RequestT, Waiting[RequestT]] = {}
        self._by_number: dict[int, Waiting[RequestT]] = {}
        self._numbers: list[int] = []
        self._left: list[int] = []
        self._next_number = 0
        self._heap: list[tuple[float, int]] = []
        self._watch: PrefixWatch[ChunkId, int] = PrefixWatch()
        self._changed: deque[tuple[ChunkId, ...]] = deque()
        tree.subscribe(self.cache_changed)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: RequestT) -> bool:
        return request in self._waiting

    def submit(self, request: RequestT, path: Sequence[ChunkId], prompt_tokens: int) -> Waiting[RequestT]:
        """Let `request` wait.

        Raises:
            QueueFullError: as many wait as may.
            UsageError: it waits already.
        """
        if request in self._waiting:
            raise UsageError(f"request {request!r} waits already")
        if self._capacity is not None and len(self._waiting) >= self._capacity:
            raise QueueFullError(f"{self._capacity} requests wait already; try again later or raise the queue's size")
        waiting = self.place(request, path, prompt_tokens)
        self._enter(waiting)
        return waiting

    def place(self, request: RequestT, path: Sequence[ChunkId], prompt_tokens: int) -> Waiting[RequestT]:
        """The next place in the order of arrival, for a request that is being served already; it can be put back."""
        waiting = Waiting(request, tuple(path), prompt_tokens, self._next_number)
        self._next_number += 1
        return waiting

    def put_back(self, waiting: Waiting[RequestT]) -> None:
        """Let a request that was taken out (and then was preempted, or failed) wait again in its old place.

        Younger requests that were served while it was out count as having passed it over, so that it soon goes first.

        Raises:
            UsageError: it waits already.
        """
        if waiting.request in self._waiting:
            raise UsageError(f"request {waiting.request!r} waits already")
        self._enter(waiting)

    def ready(self, fits: Callable[[Waiting[RequestT]], bool] = lambda _: True) -> Waiting[RequestT] | None:
        """Which request is to be served next among those that `fits` admits; it stays in the queue.

        Once the oldest request was passed over `window` times, it is that one or, if it does not fit, none: room is
        being made for it.
        """
        if not self._waiting:
            return None
        self._refresh()
        oldest = self._by_number[self._numbers[0]]
        if self.passed_over(oldest.request) >= self._window:
            return oldest if fits(oldest) else None
        return self._best(fits)

    def pop(self, fits: Callable[[Waiting[RequestT]], bool] = lambda _: True) -> Waiting[RequestT] | None:
        """Take out what `ready` names; None if there is none."""
        chosen = self.ready(fits)
        if chosen is not None:
            self._leave(chosen)
        return chosen

    def next(self, count: int) -> list[Waiting[RequestT]]:
        """The `count` requests that are served next as things stand, first to last; they stay in the queue."""
        if not self._waiting or count < 1:
            return []
        self._refresh()
        oldest = self._by_number[self._numbers[0]]
        overdue = self.passed_over(oldest.request) >= self._window
        return heapq.nsmallest(
            count, self._waiting.values(), key=lambda one: (not (overdue and one is oldest), *one._entry)
        )

    def remove(self, request: RequestT) -> bool:
        """A request is given up before it was served; False if it does not wait. It has passed nobody over."""
        waiting = self._waiting.get(request)
        if waiting is None:
            return False
        self._leave(waiting)
        insort(self._left, waiting.number)
        return True

    def passed_over(self, request: RequestT) -> int:
        """How many requests that came after `request` were served while it waits, O(log n).

        Raises:
            UsageError: it does not wait.
        """
        if request not in self._waiting:
            raise UsageError(f"request {request!r} does not wait")
        number = self._waiting[request].number
        later = self._next_number - number - 1
        waiting = len(self._numbers) - bisect_left(self._numbers, number + 1)
        given_up = len(self._left) - bisect_left(self._left, number + 1)
        return later - waiting - given_up

    def cache_changed(self, path: tuple[ChunkId, ...]) -> None:
        """The last node of `path` is stored now and was not, or is no longer. From any thread, at once."""
        self._changed.append(path)

    def close(self) -> None:
        """Follow the tree no longer, since the tree may live on; the queue is of no use afterwards."""
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
        """Look up again what the changes since the last time concern, each request once."""
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
            self._heap = [other._entry for other in self._waiting.values()]
            heapq.heapify(self._heap)

    def _best(self, fits: Callable[[Waiting[RequestT]], bool]) -> Waiting[RequestT] | None:
        passed = []
        found = None
        while self._heap and found is None:
            entry = self._heap[0]
            waiting = self._by_number.get(entry[1])
            if waiting is None or waiting._entry != entry:
                heapq.heappop(self._heap)
            elif fits(waiting):
                found = waiting
            else:
                passed.append(heapq.heappop(self._heap))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found


Path = tuple[ChunkId, ...]
Listener = Callable[[Path], None]

WEAVES = ChunkId("weaves")
"""Stands before the path of a waiting request that weaves: no id of a chunk has fewer than 32 characters."""


def waiting_path(path: Sequence[ChunkId], *, weaves: bool, recomputed: float = 0.0) -> Path:
    """A prompt's path as it enters a queue over `StoredTokens`, or over what a replica holds.

    Of a request that weaves, about the share `recomputed` of the chunks that it reuses is computed again.
    """
    return (WEAVES, ChunkId(f"{recomputed:.3g}"), *path) if weaves else tuple(path)


def share_reused(path: Sequence[ChunkId]) -> float:
    """Of the path of a request that weaves, the share of reused chunks that is not computed again."""
    return 1.0 - float(path[1])


class ChunkStore(Protocol):
    """What is asked of a hierarchy of tiers."""

    tree: KnowledgeTree[ChunkId]

    def chunk_tokens(self, chunk: ChunkId) -> int:
        """Tokens of a chunk of which a segment is stored in any context; 0 if none is."""


class StoredTokens:
    """How many tokens of a waiting request need not be computed, for a `CacheAwareQueue` over a store.

    Paths are those of `waiting_path`: of an exact request the longest exact prefix counts, of one that weaves also
    every other chunk that is stored in any context, but for the share that is computed again. Thread-safe.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._tellers: dict[Listener, Listener] = {}

    def stored_tokens(self, keys: Sequence[ChunkId]) -> int:
        """Of a waiting path, the tokens that need not be computed."""
        if not keys or keys[0] != WEAVES:
            return self._store.tree.stored_tokens(keys)
        path = keys[2:]
        exact = self._store.tree.match(path)
        woven = sum(map(self._store.chunk_tokens, path[exact.nodes :]))
        return exact.tokens + int(share_reused(keys) * woven)

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with each path that came or went, and with the beginning of all paths that weave."""

        def tell(path: Path) -> None:
            listener(path)
            listener((WEAVES,))

        self._tellers[listener] = tell
        self._store.tree.subscribe(tell)

    def unsubscribe(self, listener: Listener) -> None:
        """Call `listener` no more."""
        self._store.tree.unsubscribe(self._tellers.pop(listener))


DECODED_COST = 2.0
"""What a generated token costs at least, if one of a prefill costs 1 (OSDI 2024, §5.1); by time it may cost more."""


class TenantWeights:
    """How much of what tenants share each of them is to have: 1 unless it is said otherwise."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """Of `NAME=WEIGHT` each.

        Raises:
            UsageError: one is not that, or no positive number.
        """
        weights: dict[str, float] = {}
        for entry in entries:
            name, _, given = entry.rpartition("=")
            try:
                weight = float(given)
            except ValueError:
                weight = 0.0
            if not name or not isfinite(weight) or weight <= 0:
                raise UsageError(f"a tenant's weight must be NAME=WEIGHT with a positive number, not {entry!r}")
            weights[name] = weight
        return cls(weights)

    def __getitem__(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def share(self, tenant: str, among: Iterable[str]) -> float:
        """The part of the whole that is a tenant's, if it and those `among` want some: above 0, at most 1."""
        return self[tenant] / sum(self[one] for one in {tenant, *among})

    def refuse_if_full(self, tenant: str, waiting: Mapping[str, int], most: int) -> None:
        """Refuse one more request of a tenant that has its share of `most` waiting, if as many wait in all.

        Raises:
            QueueFullError: so it is.
        """
        total, own = sum(waiting.values()), waiting.get(tenant, 0)
        if total >= most and own >= self.share(tenant, waiting) * most:
            raise QueueFullError(
                f"{total} requests wait already, and no more may; try again later or raise max_waiting"
            )


class VirtualTime:
    """How much was computed for each tenant, by its weight. Used by one thread.

    A tenant that had nothing under way begins close to the one that was served least: it has saved up `burst` tokens at
    most, so that one which asks seldom need not take turns for its first tokens.
    """

    def __init__(self, weights: TenantWeights | None = None, *, burst: float = 0.0) -> None:
        self.weights = weights or TenantWeights()
        self._burst = burst
        self._served: dict[str, float] = {}
        self._under_way: Counter[str] = Counter()
        self._floor = 0.0  # of the tenants under way, or of those that were the last time there were any

    @property
    def tenants(self) -> Iterable[str]:
        """Those that have requests under way."""
        return self._under_way.keys()

    def under_way(self, tenant: str) -> int:
        """How many requests of a tenant are under way."""
        return self._under_way[tenant]

    def of(self, tenant: str, promised: float = 0.0) -> float:
        """The virtual time of a tenant with requests under way, or what it will be once `promised` is computed too."""
        return self._served.get(tenant, float("-inf")) + promised / self.weights[tenant]

    def share(self, tenant: str, *coming: str) -> float:
        """The part of places and memory that is a tenant's, among those that have requests under way or are coming."""
        return self.weights.share(tenant, {*self.tenants, *coming})

    def join(self, tenant: str) -> None:
        """One more request of a tenant is under way."""
        if not self._under_way[tenant]:
            self._served[tenant] = self._joining(tenant)
        self._under_way[tenant] += 1

    def behind(self, tenant: str) -> float:
        """Tokens of its own that a tenant with nothing under way could have before it takes turns; others have 0."""
        if not self._under_way or self._under_way[tenant]:
            return 0.0
        joining = self._joining(tenant)  # notes the floor
        return (self._floor - joining) * self.weights[tenant]

    def leave(self, tenant: str) -> bool:
        """One has ended; returns whether it was the tenant's last."""
        self._note_floor()
        self._under_way[tenant] -= 1
        if self._under_way[tenant]:
            return False
        del self._under_way[tenant]
        return True

    def charge(self, tenant: str, cost: float) -> None:
        """Something was computed for a tenant that has a request under way."""
        self._served[tenant] = self.of(tenant, cost)

    def _joining(self, tenant: str) -> float:
        """The virtual time at which a tenant with nothing under way begins."""
        self._note_floor()
        saved = self._burst / self.weights[tenant] if self._under_way else 0.0
        return max(self.of(tenant), self._floor - saved)

    def _note_floor(self) -> None:
        times = [self._served[one] for one in self._under_way]
        self._floor = max(self._floor, min(times, default=self._floor))
        kept = self._floor - self._burst / min((self.weights[one] for one in self._served), default=1.0)
        self._served = {one: t for one, t in self._served.items() if t > kept or one in self._under_way}


class FairQueue(Generic[RequestT]):
    """A cache-aware queue for each tenant: which of them is next is decided first, then which of its requests.

    A tenant none of whose requests fits is passed over `window` times, then none is served until one does: room is
    being made. With one tenant this is its queue. Used by one thread.
    """

    def __init__(self, tree: StoredPrefixes, time: VirtualTime, *, window: int) -> None:
        """Nothing waits. `tree` and `window` are those of every tenant's queue."""
        self._tree = tree
        self._time = time
        self._window = window
        self._queues: dict[str, CacheAwareQueue[RequestT]] = {}
        self._passed_over: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def waiting(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        return len(self._queues[tenant]) if tenant in self._queues else 0

    @property
    def tenants(self) -> list[str]:
        """Those that have requests waiting."""
        return [tenant for tenant, queue in self._queues.items() if len(queue)]

    def of(self, tenant: str) -> CacheAwareQueue[RequestT]:
        """A tenant's own queue: to let requests wait, to put them back, or to remove them."""
        if tenant not in self._queues:
            self._queues[tenant] = CacheAwareQueue(self._tree, window=self._window)
        return self._queues[tenant]

    def pop(
        self,
        fits: Callable[[Waiting[RequestT]], bool] = lambda _: True,
        promised: Mapping[str, float] | None = None,
        may: Callable[[str], bool] = lambda _: True,
    ) -> Waiting[RequestT] | None:
        """Take out the request that is served next among those that fit; None if there is none.

        `promised` is the cost of what is still to be computed of each tenant's requests that were taken out before.
        Tenants that `may` not have another one served now are left out.
        """
        unfit: list[str] = []
        for tenant in filter(may, self._by_time(promised or {})):
            found = self._queues[tenant].pop(fits)
            if found is not None:
                self._passed_over.update(unfit)
                del self._passed_over[tenant]
                return found
            if self._passed_over[tenant] >= self._window:
                return None
            unfit.append(tenant)
        return None

    def next(self, count: int) -> list[Waiting[RequestT]]:
        """The `count` requests that are served next as things stand, of each tenant one at a time."""
        turns = [self._queues[tenant].next(count) for tenant in self._by_time({})]
        return [turn[place] for place in range(count) for turn in turns if place < len(turn)][:count]

    def forget(self, tenant: str) -> None:
        """A tenant has nothing under way any more."""
        del self._passed_over[tenant]
        if tenant in self._queues:
            self._queues.pop(tenant).close()

    def close(self) -> None:
        """Follow the tree no longer; the queue is of no use afterwards."""
        for queue in self._queues.values():
            queue.close()

    def _by_time(self, promised: Mapping[str, float]) -> Sequence[str]:
        return sorted(self.tenants, key=lambda tenant: self._time.of(tenant, promised.get(tenant, 0.0)))
