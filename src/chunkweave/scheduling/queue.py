"""How much a batching engine takes on: which waiting request is next (RAGCache §5.2), and what one step takes in."""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from sys import maxsize
from typing import Generic, Protocol, TypeVar

from chunkweave.errors import QueueFullError, UsageError
from chunkweave.settings import SERVERS, Place, Unit, configuration, setting
from chunkweave.store.prefix_trie import PrefixWatch
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


_TAIL = 8
"""A step may be longer by this part if it ends a pass so: by itself the end would read all weights for few tokens."""

DEFAULT_PATIENCE = 4
"""Steps that a prefill is passed over at most before it goes first; few, since a step may last a second."""


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A request that is being prefilled, as a budget sees it.

    `number` is its place in the order of arrival. The next pass has `next_tokens`, all passes that are left
    `remaining_tokens`; one that cannot be cut goes whole. `passed_over` is how many steps in a row it got nothing. One
    in the `background` takes what the others leave. `due` is how much its tenant was served (`VirtualTime`), `lone`
    whether that has no other request. It is in the step only while all its prefills have at most `most_tokens`.
    """

    number: int
    next_tokens: int
    remaining_tokens: int
    can_be_cut: bool
    passed_over: int = 0
    background: bool = False
    due: float = 0.0
    lone: bool = False
    most_tokens: int = maxsize


@dataclass(frozen=True, slots=True)
class Piece:
    """So many `tokens` of the prefill of request `number`."""

    number: int
    tokens: int


class TokenBudget:
    """Shares out the tokens of each step.

    Decoding requests come first, one token each, so that no prefill delays running answers by more than a step. The
    rest goes to prefills: to those of the tenant that was served least, and of these to the one with the fewest tokens
    left first, which minimizes the mean time to first token; but one that was passed over `patience` times goes before
    all others of its tenant, longest waiting first. A pass that cannot be cut is taken if it fits or is the first. The
    end of a pass comes along if an eighth (`_TAIL`) more than the budget holds it. Only by these two is it exceeded.
    Beside answers the time of a step bounds prefills further (`Prefilling.most_tokens`).

    The step in which a tenant's only prefill ends is not filled up for tenants that were served more: it ends sooner.
    """

    def __init__(self, *, tokens: int, max_running: int, patience: int = DEFAULT_PATIENCE) -> None:
        """A budget of so many `tokens` a step for at most `max_running` requests.

        Raises:
            UsageError: nobody may run, or they could leave no token to a prefill.
        """
        if max_running < 1 or tokens <= max_running or patience < 1:
            raise UsageError(
                f"a step needs a request that runs ({max_running}), more tokens than requests ({tokens}), and patience "
                f"of at least a step ({patience})"
            )
        self.tokens = tokens
        self.max_running = max_running
        self.patience = patience

    def pieces(self, decoding: int, prefilling: Sequence[Prefilling]) -> list[Piece]:
        """Which prefills a step goes on with, beside `decoding` requests, and by how much."""
        left = self.tokens - decoding
        chosen: list[Piece] = []
        latest = inf
        for one in sorted(prefilling, key=self._rank):
            if left <= 0 or one.due > latest:
                break
            room = min(left, one.most_tokens - sum(piece.tokens for piece in chosen))
            if room <= 0:
                continue
            if one.can_be_cut:
                tail = 0 if one.background else min(self.tokens, one.most_tokens) // _TAIL
                chosen.append(Piece(one.number, one.next_tokens if one.next_tokens <= room + tail else room))
            elif one.next_tokens <= room or not chosen:
                chosen.append(Piece(one.number, one.next_tokens))
            else:
                continue
            left -= chosen[-1].tokens
            if one.lone and chosen[-1].tokens == one.remaining_tokens:
                latest = min(latest, one.due)
        return chosen

    def _rank(self, one: Prefilling) -> tuple[bool, float, bool, int, int]:
        overdue = one.passed_over >= self.patience
        return one.background, one.due, not overdue, -one.passed_over if overdue else one.remaining_tokens, one.number


_ENGINE = frozenset({Place.ENGINE})
_DEADLINE = {Place.ENGINE: 600.0, Place.VLLM: 600.0}


@configuration(_ENGINE)
@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The limits of a batching engine.

    Speculations run only in steps in which nothing else can: whoever arrives meanwhile waits for one layer of
    `speculation_tokens` at most; fewer of them read the weights more often.

    >>> from chunkweave import AsyncEngine, BatchingConfig, Engine
    >>> with Engine.load("reader") as engine:
    ...     batching = AsyncEngine(engine, BatchingConfig(max_running=2))
    ...     batching.close()
    """

    max_running: int = setting(8, "Requests worked on at once.", name="max_num_seqs")
    step_tokens: int = setting(
        512,
        "Tokens of one step of the engine; the end of a prompt may take an eighth more.",
        name="max_num_batched_tokens",
    )
    step_time_s: float | None = setting(
        0.1,
        "How long prefills may hold a request that decodes, to the end of a layer; none: for a step of any length.",
        unit=Unit.SECONDS,
        above=0,
    )
    kv_tokens: int = setting(32768, "Tokens that the KV memory of all running requests holds.")
    block_tokens: int = setting(32, "Tokens of a block of KV memory.", name="block_size")
    max_waiting: int = setting(
        256,
        "Requests that may wait; a server answers further ones of a tenant with 503, if it has its share of them.",
        places=SERVERS,
        least=1,
    )
    tenant_weight: tuple[str, ...] = setting(
        (), "NAME=WEIGHT, how much a tenant is to have of what all share; 1 if left out; repeatable.", places=SERVERS
    )
    store_by_tenant: bool = setting(
        False, "Where a tier has no room, evict first of tenants that hold more than their share of it, by weight."
    )
    window: int = setting(
        DEFAULT_WINDOW,
        "How often a waiting request may be passed over by ones of which more is cached.",
        name="queue_window",
        places=SERVERS,
        least=0,
    )
    deadline_s: float | None = setting(
        None,
        "Longest time that a request may take; none: any.",
        unit=Unit.SECONDS,
        places=SERVERS,
        defaults=_DEADLINE,
        above=0,
    )
    queue_timeout_s: float | None = setting(
        None, "Longest time that a request may wait before it is begun; none: any.", unit=Unit.SECONDS, above=0
    )
    max_prompt_tokens: int | None = setting(
        None, "Tokens that a prompt may have; none: as many as the model's context and kv_tokens allow.", least=1
    )
    speculation_tokens: int | None = setting(
        None, "Tokens of a step of speculations; none: as many as of any other step."
    )
    prefetch_requests: int = setting(
        2, "Waiting requests whose segments are read ahead from slow tiers; 0: none.", least=0
    )
    prefetch_bytes: int = setting(256 << 20, "Most bytes that are read ahead at any time.", unit=Unit.BYTES, least=0)

    def __post_init__(self) -> None:
        TokenBudget(tokens=self.step_tokens, max_running=self.max_running)
        if self.speculation_tokens is not None:
            TokenBudget(tokens=self.speculation_tokens, max_running=self.max_running)
        if not 1 <= self.block_tokens <= self.kv_tokens:
            raise UsageError(f"{self.kv_tokens} tokens of KV have no block of {self.block_tokens} tokens")

    @property
    def tokens_of_speculations(self) -> int:
        """Tokens in a step of speculations, at most those of any other step."""
        return self.step_tokens if self.speculation_tokens is None else min(self.step_tokens, self.speculation_tokens)
