"""Whose request is next among several tenants: whoever was served least, by its weight. Imports no torch.

VTC of "Fairness in Serving Large Language Models" (OSDI 2024): virtual time is tokens computed, divided by the weight.
They count as they are computed, and cached ones not at all. What a tenant is already promised is added where the next
request is chosen, so that one tenant does not get all places that are free at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Generic, Self

from chunkweave.errors import QueueFullError, UsageError
from chunkweave.scheduling.queue import CacheAwareQueue, RequestT, StoredPrefixes, Waiting

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
