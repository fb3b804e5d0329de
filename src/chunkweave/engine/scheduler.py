"""Decides which requests wait and run, which are preempted, and what a step runs. The core computes.

Imports no torch.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chunkweave.engine.request_state import RequestState, RequestStatus
from chunkweave.engine.step_planner import StepGroup, StepPlanner
from chunkweave.errors import StoreError, UsageError
from chunkweave.scheduling.fairness import DECODED_COST, FairQueue, TenantWeights, VirtualTime
from chunkweave.scheduling.queue import BatchingConfig, StoredPrefixes, TokenBudget


class BlockPool:
    """Limits how much KV memory requests may hold. It counts blocks; the memory itself belongs to the requests' caches.

    Owned by one thread. An owner reserves before it allocates, and frees its memory before it releases; only the pool
    changes its `blocks`. What no owner needs may be lent to one borrower, who gives it up once an owner needs it.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        """A pool of `blocks`, each the KV of `block_tokens` tokens through all layers.

        Raises:
            UsageError: no blocks, or blocks of no tokens.
        """
        if blocks < 1 or block_tokens < 1:
            raise UsageError(f"a pool needs at least one block ({blocks}) of at least one token ({block_tokens})")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._reserved = 0
        self._lent = 0
        self._take_back: Callable[[], None] | None = None

    @property
    def tokens(self) -> int:
        """Most tokens that all requests together may hold."""
        return self.blocks * self.block_tokens

    @property
    def reserved(self) -> int:
        """Blocks that owners hold now; those lent are free."""
        return self._reserved

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` take."""
        return -(-tokens // self.block_tokens)

    def fits(self, tokens: int, *, without: Iterable[RequestState] = ()) -> bool:
        """Whether a new owner could reserve so much now, or if the owners `without` were gone."""
        return self.blocks_for(tokens) <= self.blocks - self._reserved + sum(owner.blocks for owner in without)

    def reserve(self, owner: RequestState, tokens: int) -> bool:
        """Give a new `owner` the blocks for `tokens`; False, and nothing, if there are too few.

        Raises:
            UsageError: it has some already.
        """
        if owner.blocks:
            raise UsageError(f"{owner!r} holds blocks already; let it grow instead")
        return self._grow(owner, tokens)

    def grow(self, owner: RequestState, tokens: int) -> bool:
        """Let `owner` have at least the blocks for `tokens`; False, and nothing more, if there are too few.

        Raises:
            UsageError: it has reserved nothing.
        """
        self._check_owner(owner)
        return self._grow(owner, tokens)

    def lend(self, tokens: int, take_back: Callable[[], None]) -> bool:
        """Lend the blocks for `tokens`, until `give_back` or until an owner needs them; False, and nothing, if too few.

        `take_back` is called in the latter case: the borrower's memory must be free when it returns. For owners the
        blocks count as free all the time.

        Raises:
            UsageError: some are lent already.
        """
        if self._take_back is not None:
            raise UsageError("the pool lends to one borrower at a time")
        if not self.fits(tokens):
            return False
        self._lent, self._take_back = self.blocks_for(tokens), take_back
        return True

    def give_back(self) -> None:
        """The borrower needs its blocks no more; without a loan nothing happens."""
        self._lent, self._take_back = 0, None

    def capacity(self, owner: RequestState) -> int:
        """Tokens that the blocks of `owner` hold."""
        return owner.blocks * self.block_tokens

    def release(self, owner: RequestState) -> None:
        """Take all blocks of `owner` back.

        Raises:
            UsageError: it has reserved nothing.
        """
        self._check_owner(owner)
        self._reserved -= owner.blocks
        owner.blocks = 0

    def check(self, owners: Iterable[RequestState] = ()) -> None:
        """Audit the counts; `owners` are all who may hold some.

        Raises:
            StoreError: they do not add up.
        """
        held = sum(owner.blocks for owner in owners)
        if self._reserved != held or not 0 <= self._reserved <= self.blocks:
            raise StoreError(f"{self._reserved} of {self.blocks} blocks are reserved, but owners hold {held}")
        if self._reserved + self._lent > self.blocks:
            raise StoreError(f"{self._lent} blocks are lent, but owners need {self._reserved} of {self.blocks}")

    def _grow(self, owner: RequestState, tokens: int) -> bool:
        more = self.blocks_for(tokens) - owner.blocks
        if more > self.blocks - self._reserved:
            return False
        if self._take_back is not None and more > self.blocks - self._reserved - self._lent:
            self._take_back()
            self.give_back()
        if more > 0:
            owner.blocks += more
            self._reserved += more
        return True

    def _check_owner(self, owner: RequestState) -> None:
        if not owner.blocks:
            raise UsageError(f"{owner!r} holds no blocks")


Fits = Callable[[RequestState], bool]


@dataclass(frozen=True, slots=True)
class BatchingStats:
    """What a batching engine does now and has done so far; blocks are those of its KV memory.

    `pending` requests wait for, or are in, prefill: the size of RAGCache's pool. `speculating` are those, waiting or
    running, that were not confirmed yet, `speculations_running` how many of them run. Of what was `preempted`,
    `speculations_preempted` had not been confirmed; `interrupted` are steps that were stopped between two layers,
    since a request arrived before which theirs yield. `prefetched_bytes` are held for requests that wait.
    """

    waiting: int = 0
    running: int = 0
    blocks: int = 0
    blocks_reserved: int = 0
    steps: int = 0
    finished: int = 0
    aborted: int = 0
    timed_out: int = 0
    failed: int = 0
    tried_again: int = 0
    preempted: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    pending: int = 0
    speculating: int = 0
    speculations_running: int = 0
    speculations_preempted: int = 0
    interrupted: int = 0
    prefetched_bytes: int = 0


class RequestQueue:
    """The tenants' cache-aware queues; behind them speculations, then what is computed in the background, by arrival.

    A speculation that is confirmed takes its place in the queue then, as if it had arrived only now, so speculation
    never lets a request overtake others. Used by one thread.
    """

    def __init__(self, tree: StoredPrefixes, time: VirtualTime, *, window: int) -> None:
        self._queue: FairQueue[RequestState] = FairQueue(tree, time, window=window)
        self._speculations: dict[int, RequestState] = {}
        self._background: dict[int, RequestState] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._queue) + len(self._speculations) + len(self._background)

    @property
    def requests(self) -> int:
        """How many of those that wait are confirmed."""
        return len(self._queue)

    def add(self, request: RequestState) -> None:
        """Let a request wait, and give it its number."""
        request.number = next(self._numbers) + (_BEHIND_ALL if request.background else 0)
        if request.yields:
            self._yielding(request)[request.number] = request
        else:
            queue = self._queue.of(request.tenant)
            request.place = queue.submit(request, request.path, len(request.prepared.prompt))

    def put_back(self, request: RequestState) -> None:
        """Let a request that was taken out wait again in its old place."""
        if request.yields:
            self._yielding(request)[request.number] = request
        else:
            assert request.place is not None, "it had a place in the queue"
            self._queue.of(request.tenant).put_back(request.place)

    def confirm(self, request: RequestState) -> None:
        """A speculation becomes a request like others, whether it waits or runs."""
        waits = self._speculations.pop(request.number, None) is not None
        request.speculative = False
        if waits:
            self.add(request)
        else:
            queue = self._queue.of(request.tenant)
            request.place = queue.place(request, request.path, len(request.prepared.prompt))
            request.number = next(self._numbers)

    def remove(self, request: RequestState) -> None:
        """A request is given up; one that does not wait is left alone."""
        if request.yields:
            self._yielding(request).pop(request.number, None)
        else:
            self._queue.of(request.tenant).remove(request)

    def forget(self, tenant: str) -> None:
        """A tenant has nothing under way any more that is confirmed."""
        self._queue.forget(tenant)

    def pop(self, fits: Fits, promised: Mapping[str, float], may: Callable[[str], bool]) -> RequestState | None:
        """Take out the confirmed request that is served next among those that fit; see `FairQueue.pop`."""
        place = self._queue.pop(lambda one: fits(one.request), promised, may)
        return None if place is None else place.request

    def pop_yielding(self, fits: Fits) -> RequestState | None:
        """Take out the oldest speculation, or else what waits longest in the background, if no confirmed request waits.

        None also if that does not fit.
        """
        waiting = self._speculations or self._background
        oldest = min(waiting, default=None)
        if oldest is None or len(self._queue) or not fits(waiting[oldest]):
            return None
        return waiting.pop(oldest)

    def next(self, count: int) -> list[RequestState]:
        """The confirmed requests that would be served next now."""
        return [place.request for place in self._queue.next(count)]

    def close(self) -> None:
        """Follow the tree no longer; the queue is of no use afterwards."""
        self._queue.close()

    def _yielding(self, request: RequestState) -> dict[int, RequestState]:
        return self._background if request.background else self._speculations


_BURST_STEPS = 16
"""Steps of which a tenant that asks seldom may have all tokens before it takes turns: a few prompts with answers."""

_BEHIND_ALL = 1 << 60
"""Numbers of requests in the background: they are younger than all others."""


class Scheduler:
    """Owns the requests from their arrival to their end, and the blocks that those hold which run.

    A request is admitted if what is known of it fits, and grows as it decodes. Where no block is left, the youngest
    request gives its KV up and waits again with its tokens kept. The oldest is never preempted for others, and no
    request may be larger than the whole memory: so there is always one that ends. Speculations yield their places and
    blocks to all others, and run only in steps in which no other request could. So does what is computed in the
    background, but that it also takes the tokens that others leave of their steps.

    Of several tenants the one that was served least is next, by its weight. What one holds beyond its share of places
    and memory is lent: a request of another one that is within its own takes it back, the youngest first, but never the
    last that a tenant has running. Used by one thread.
    """

    def __init__(
        self,
        tree: StoredPrefixes,
        config: BatchingConfig,
        *,
        preempting: Callable[[RequestState], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Nothing waits yet. `preempting` is called with a request that is about to lose its memory."""
        self.pool = BlockPool(config.kv_tokens // config.block_tokens, config.block_tokens)
        self._time = VirtualTime(TenantWeights.parse(config.tenant_weight), burst=_BURST_STEPS * config.step_tokens)
        self.planner = StepPlanner(self._time, config.step_time_s, clock=clock)
        self.queue = RequestQueue(tree, self._time, window=config.window)
        self.requests: dict[int, RequestState] = {}
        """All that wait or run, by id."""
        self._running: list[RequestState] = []  # in the order of admission
        self._preempting = preempting
        self._budget = TokenBudget(tokens=config.step_tokens, max_running=config.max_running)
        self._spare = TokenBudget(tokens=config.tokens_of_speculations, max_running=config.max_running)

    @property
    def running(self) -> tuple[RequestState, ...]:
        """Those that were admitted and have not ended, a snapshot; from any thread."""
        return tuple(self._running)

    def add(self, request: RequestState) -> None:
        """Let a new request wait."""
        self.requests[request.id] = request
        if not request.yields:
            self._time.join(request.tenant)
            self._time.charge(request.tenant, request.displaced)
        self.queue.add(request)

    def stops(self, request: RequestState) -> bool:
        """Whether a step is stopped for a request that has just come.

        Its tenant has nothing under way and was served at least a step less than the others by now, and it would be
        admitted at once. So a tenant that asks seldom does not wait for the steps of one that asks much, and what is
        thrown away is bounded, since its tenant pays for it (`displaced`).
        """
        if request.yields or self._time.behind(request.tenant) < self._budget.tokens:
            return False
        return self._giving_way(request) is not None

    def confirm(self, request: RequestState) -> None:
        """A speculation is a request like others from now on."""
        if request.runs and self.queue.requests:
            self._preempt(request)  # others wait for memory: the queue decides which is next
        self._time.join(request.tenant)
        self.queue.confirm(request)

    def admit(self) -> Iterator[RequestState]:
        """Each request that is admitted now, with blocks of its own; it is to be started before the next one is taken.

        Requests are admitted as if there were none that yield, and nothing lent, whose places they take where need be;
        then those that yield and still fit.
        """
        while True:
            request = self.queue.pop(
                lambda one: self._giving_way(one) is not None, self._promised(), self._may_have_place
            )
            if request is None:
                break
            for other in self._giving_way(request) or ():
                self._preempt(other)
            yield self._admitted(request)
        while len(self._running) < self._budget.max_running:
            request = self.queue.pop_yielding(lambda one: self.pool.fits(one.tokens))
            if request is None:
                break
            yield self._admitted(request)

    def groups(self) -> list[StepGroup]:
        """What this step runs: the requests that were asked for, and in the background what they leave tokens for.

        With what time is to spare speculations, or else what runs in the background alone.
        """
        self._make_room(speculative=False)
        if any(not one.yields for one in self._running):
            groups = self._groups([one for one in self._running if not one.speculative], self._budget)
            if groups:
                return groups
        self._make_room(speculative=True)
        speculations = self._groups([one for one in self._running if one.speculative], self._spare)
        return speculations or self._groups([one for one in self._running if one.background], self._budget)

    def computed(self, group: StepGroup) -> None:
        """What a step ran is computed: it counts for the tenants whose requests asked for it."""
        decoded = len(group.decoding)
        cost = self.planner.pace.tokens_worth(decoded, least=DECODED_COST) if decoded else 0.0
        costs = [(request, cost) for request in group.decoding]
        for request, cost in (*costs, *group.pieces):
            if not request.yields:
                self._time.charge(request.tenant, cost)

    def put_back(self, request: RequestState) -> None:
        """Let a running request wait again, with its tokens kept and nothing else."""
        self._stop(request)
        request.status = RequestStatus.WAITING
        self.queue.put_back(request)

    def end(self, request: RequestState) -> None:
        """A request neither waits nor runs any more."""
        if request.runs:
            self._stop(request)
        else:
            request.stop_reading()
            self.queue.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.id]
        if not request.yields and self._time.leave(request.tenant):
            self.queue.forget(request.tenant)

    def check(self) -> None:
        """Audit requests, blocks and caches.

        Raises:
            StoreError: a request that does not run holds blocks, or a cache is larger than its blocks.
        """
        self.pool.check(self.requests.values())
        runs = {one for one in self.requests.values() if one.runs}
        if runs != set(self._running) or len(self.queue) + len(runs) != len(self.requests):
            raise StoreError("a request neither waits nor runs, or does both")
        if {one for one in self.requests.values() if one.blocks} != runs:
            raise StoreError("blocks are not held by the running requests")
        for request in self._running:
            decode = request.decode
            if decode is not None and decode.prefilled.cache.capacity > self.pool.capacity(request):
                raise StoreError(f"the cache of request {request.id} is larger than its blocks")

    def _yielding(self) -> list[RequestState]:
        return [request for request in self._running if request.yields]

    def _promised(self) -> dict[str, float]:
        """By tenant, tokens that are still to be prefilled of its running requests."""
        promised: dict[str, float] = {}
        for one in self._running:
            if one.job is not None and not one.yields:
                promised[one.tenant] = promised.get(one.tenant, 0.0) + one.job.remaining_tokens
        return promised

    def _may_have_place(self, tenant: str) -> bool:
        """Whether a request of a tenant could run as far as places go."""
        free = len(self._running) - len(self._yielding()) < self._budget.max_running
        return free or bool(self._lent(tenant, self._running, places=1, blocks=0))

    def _giving_way(self, request: RequestState) -> list[RequestState] | None:
        """The running requests whose places or memory one that waits may take and needs; None if they are too few."""
        leaving: list[RequestState] = []
        while len(self._running) - len(leaving) >= self._budget.max_running or not self.pool.fits(
            request.tokens, without=leaving
        ):
            staying = [one for one in self._running if one not in leaving]
            more = self.pool.blocks_for(request.tokens)
            candidates = [one for one in staying if one.yields] or self._lent(
                request.tenant, staying, places=1, blocks=more
            )
            if not candidates:
                return None
            leaving.append(_youngest(candidates))
        return leaving

    def _lent(self, tenant: str, running: Sequence[RequestState], *, places: int, blocks: int) -> list[RequestState]:
        """Those of `running` that another tenant has, who is furthest above its share and was not served less.

        None if `tenant` would be above its own with `places` and `blocks` more, unless it has nothing.
        """
        by_tenant: dict[str, list[RequestState]] = {}
        for one in running:
            if not one.yields:
                by_tenant.setdefault(one.tenant, []).append(one)
        own = by_tenant.pop(tenant, [])
        if not by_tenant or (own and self._held(own, places, blocks) > self._time.share(tenant)):
            return []
        least = self._budget.tokens if own else 0  # a prefill is made again: small differences are not worth that
        promised = self._promised()
        times = {one: self._time.of(one, promised.get(one, 0.0)) for one in {*by_tenant, tenant}}
        above = {one: self._held(ones) / self._time.share(one, tenant) for one, ones in by_tenant.items()}
        lent = [
            one
            for one, ratio in above.items()
            if ratio > 1 and len(by_tenant[one]) > 1 and times[one] - times[tenant] >= least
        ]
        return by_tenant[max(lent, key=above.__getitem__)] if lent else []

    def _held(self, requests: Sequence[RequestState], places: int = 0, blocks: int = 0) -> float:
        """The part of places or memory that requests hold with so much more, whichever is larger."""
        blocks += sum(one.blocks for one in requests)
        return max((len(requests) + places) / self._budget.max_running, blocks / self.pool.blocks)

    def _admitted(self, request: RequestState) -> RequestState:
        reserved = self.pool.reserve(request, request.tokens)
        assert reserved, "only what fits is admitted"
        request.status = RequestStatus.PREFILLING
        self._running.append(request)
        return request

    def _groups(self, requests: Sequence[RequestState], budget: TokenBudget) -> list[StepGroup]:
        """The steps of `requests`: one batch, those apart each for itself, and by layers what is still being read.

        If nothing else is to be done, the first one of these waits for its next layer, in the background only alone.
        """
        self.planner.begin(requests)
        batches = [[one for one in requests if not one.apart], *([one] for one in requests if one.apart)]
        groups = [group for batch in batches for group in self.planner.share(batch, budget)]
        if not groups and requests:
            first = min(requests, key=lambda one: one.background)
            return [StepGroup((), [(first, budget.tokens)], by_layers=True)]
        return groups

    def _make_room(self, *, speculative: bool) -> None:
        """Let decoding requests of one kind have room for their last token's KV, the oldest first."""
        kind = [request for request in self._running if request.speculative is speculative]
        for request in sorted(kind, key=lambda one: one.number):
            while request.status is RequestStatus.DECODING:
                assert request.decode is not None, "a decoding request has a token"
                if self.pool.grow(request, request.decode.position + len(request.decode.pending)):
                    request.decode.prefilled.cache.grow(self.pool.capacity(request))
                    break
                lent = self._lent(request.tenant, self._running, places=0, blocks=1)
                self._preempt(_youngest(self._yielding() or lent or self._running))

    def _preempt(self, request: RequestState) -> None:
        """Take a running request's memory for others; it waits again."""
        self._preempting(request)
        self.put_back(request)

    def _stop(self, request: RequestState) -> None:
        """Take a running request's memory, pins and blocks."""
        request.stop_reading()
        if request.decode is not None:
            request.decode.let_go()
        self._running.remove(request)
        self.pool.release(request)


def _youngest(requests: Sequence[RequestState]) -> RequestState:
    return max(requests, key=lambda request: request.number)
