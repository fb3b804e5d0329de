"""Decides which requests are pending or running, which are preempted, and what a step runs. The core computes.

Between two tokens of an answer, prefills of others run for at most `step_time_s`. Tenants are isolated: a step that a
tenant's answers wait for takes at most the time that they need alone, divided by the tenant's share. This limit applies
to tenants that were served more. No torch here.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from sys import maxsize

from chunkweave.engine.request_state import RequestQueue, RequestState, RequestStatus
from chunkweave.errors import StoreError
from chunkweave.scheduling.budget import LEAST_TOKENS, BatchingConfig, BlockPool, Prefilling, StepPace, TokenBudget
from chunkweave.scheduling.in_progress import PartInProgress, Saving, saving_of
from chunkweave.scheduling.queue import DECODED_COST, ChunkStore, StoredTokens, TenantWeights, VirtualTime

_LEAST_SHARE = 1 / 8
"""Minimum share of the decoding time beside them that prefills get, so that they finish."""

_LONGEST_S = 1.0
"""Longest time that a decoding request waits for answers of less served tenants."""


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """Requests that share one run through the layers: decoding requests, and pieces of prefills in tokens.

    With `by_layers`, the group is one prefill alone, whose segments are still being read or which was left between two
    layers because it delayed answers. It runs as many layers as its piece's tokens pay for.
    """

    decoding: Sequence[RequestState]
    pieces: Sequence[tuple[RequestState, int]]
    by_layers: bool = False

    @property
    def requests(self) -> list[RequestState]:
        """All requests of the group."""
        return [*self.decoding, *(request for request, _ in self.pieces)]


class StepPlanner:
    """Shares out steps, and learns how much work fits into the time that answers may be delayed.

    Used by one thread, which reports what each step ran.
    """

    def __init__(
        self, shares: VirtualTime, step_time_s: float | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`shares` orders tenants. Without `step_time_s` a prefill may delay answers by a step of any length."""
        self.pace = StepPace()
        self._shares = shares
        self._step_time_s = inf if step_time_s is None else step_time_s
        self._clock = clock
        self._answering: Counter[str] = Counter()
        self._decoding_s = 0.0
        self._decoded_s: float | None = None  # end of the last step with answers; None: no answers now
        self._credit_s = 0.0
        self._limited: frozenset[RequestState] = frozenset()  # prefills of this step that spend `_credit_s`

    def begin(self, requests: Sequence[RequestState]) -> None:
        """Begin a step over `requests`; `share` follows."""
        self._answering = Counter(request.tenant for request in requests if request.job is None)
        if not self._answering:
            self._decoded_s = None
        elif self._decoded_s is None:
            self._decoded_s = self._clock()
        self._add_credit([request for request in requests if request.job is not None])

    def share(self, requests: Sequence[RequestState], budget: TokenBudget) -> list[StepGroup]:
        """The part of `requests` that runs in this step, as groups; updates `passed_over` of each prefill.

        All groups share one budget. Prefills without a loaded layer wait, and do not count as passed over.
        """
        decoding = self._next_tokens([request for request in requests if request.job is None])
        self._decoding_s = self.pace.decoding_s(len(decoding))
        seen = []
        by_layers = set[int]()
        prefilling = {}
        jobs = [(request, request.job) for request in requests if request.job is not None]
        for request, job in jobs:
            # One unit for both kinds of work: tokens through all layers. A pass by layers asks for the tokens that its
            # loaded layers are worth; a slice by position asks for whole positions.
            layers = job.layers_ready
            next_tokens = job.next_tokens
            if layers == 0:
                continue
            most = self._most_tokens(request, by_layers=layers is not None)
            if layers is not None:
                by_layers.add(request.number)
                next_tokens = job.tokens_through(layers)
            prefilling[request.number] = request
            seen.append(
                Prefilling(
                    request.number,
                    next_tokens,
                    job.remaining_tokens,
                    layers is not None or job.can_be_cut,
                    request.passed_over,
                    request.background,
                    self._shares.of(request.tenant),
                    self._shares.active(request.tenant) == 1,
                    most,
                )
            )
        # `number` (order of arrival) names a request here, because the budget breaks ties by it; `id` is the caller's.
        pieces = {piece.number: piece.tokens for piece in budget.pieces(len(decoding), seen)}
        whole: list[tuple[RequestState, int]] = []
        layered: list[tuple[RequestState, int]] = []
        for number, request in prefilling.items():
            request.passed_over = 0 if number in pieces else request.passed_over + 1
            if number in pieces:
                (layered if number in by_layers else whole).append((request, pieces[number]))
        # Work by layers cannot join the flat batch, which runs all layers: it starts or stops between two layers.
        together = [StepGroup(decoding, whole)] if decoding or whole else []
        return [*together, *(StepGroup((), [piece], by_layers=True) for piece in layered)]

    @property
    def holds(self) -> bool:
        """Whether there are answers, which the step delays."""
        return self._decoded_s is not None

    def late(self, part_done: float = 0.0) -> bool:
        """Whether prefills have delayed answers long enough, if `part_done` of this step's decoding is done."""
        if self._decoded_s is None:
            return False
        return self._clock() - part_done * self._decoding_s >= self._decoded_s + self._step_time_s

    def ran(self, group: StepGroup, since_s: float) -> None:
        """Record what a step that `holds` answers ran, and since when."""
        now = self._clock()
        tokens = sum(tokens for _, tokens in group.pieces)
        seconds = now - since_s
        if group.decoding:
            for request in group.decoding:
                request.last_token_s = now
            self._decoded_s = now
            if not tokens:
                self.pace.decoded(len(group.decoding), seconds)
            seconds -= self._decoding_s
        if tokens:
            self.pace.prefilled(tokens, seconds, by_layers=group.by_layers)
            if any(request in self._limited for request, _ in group.pieces):
                self._credit_s -= max(0.0, seconds)

    def _next_tokens(self, answers: Sequence[RequestState]) -> list[RequestState]:
        """The requests that decode in this step: least served tenants first, the others as far as is fair.

        The one that has waited longest always decodes after `step_time_s`, or after `_LONGEST_S`.
        """
        chosen: list[RequestState] = []
        now = self._clock()
        wait_s = min(self._step_time_s, _LONGEST_S)
        longest = min(answers, key=lambda answer: answer.last_token_s, default=None)
        for answer in sorted(answers, key=lambda answer: (self._shares.of(answer.tenant), answer.last_token_s)):
            waits_s = now - answer.last_token_s
            fits = self.pace.decoding_s(len(chosen) + 1) <= self._fair_s(answer)
            if fits or (answer is longest and waits_s >= wait_s):
                chosen.append(answer)
        return chosen

    def _fair_s(self, request: RequestState) -> float:
        """Longest fair step for a request, given the answers of less served tenants."""
        least = inf
        for tenant, requests in self._answering.items():
            served_less = request.background or self._shares.of(tenant) < self._shares.of(request.tenant)
            alone_s = self.pace.decoding_s(requests)
            if tenant != request.tenant and served_less and alone_s:
                least = min(least, alone_s / self._shares.share(tenant))
        return least

    def _add_credit(self, prefilling: Sequence[RequestState]) -> None:
        """Add this step's fair prefill time to the credit, less earlier overdraft.

        A pass that cannot be cut runs at least one layer, however long that takes, and then pauses to pay for it.
        """
        fair = {request: self._fair_s(request) for request in prefilling}
        self._limited = frozenset(request for request, fair_s in fair.items() if isfinite(fair_s))
        fair_s = max((fair[request] for request in self._limited), default=0.0)
        more_s = max(fair_s - self._decoding_s, _LEAST_SHARE * self._decoding_s)
        self._credit_s = min(more_s, self._credit_s + more_s)

    def _most_tokens(self, request: RequestState, *, by_layers: bool) -> int:
        """Most tokens that all prefills together may compute in a step that includes this one."""
        if self._decoded_s is None:
            return maxsize
        if self.pace.stale:
            return 0
        seconds = self._decoded_s + self._step_time_s - self._clock()
        if request in self._limited:
            if self._credit_s <= 0:
                return 0
            seconds = min(seconds, self._credit_s)
        if not isfinite(seconds):
            return maxsize
        return max(LEAST_TOKENS, self.pace.tokens_within(seconds, by_layers=by_layers))


@dataclass(frozen=True, slots=True)
class BatchingStats:
    """State and counters of a batching engine; blocks are those of its KV memory.

    `pending` counts requests waiting for prefill or in it: the size of RAGCache's pool. `speculating` counts
    unconfirmed requests, waiting or running; `speculations_running` those that run. `preempted` includes
    `speculations_preempted` unconfirmed ones. `interrupted` counts steps stopped between two layers because a request
    with priority arrived. `prefetched_bytes` are held for waiting requests. `shared` counts how often a request waited
    for parts that another prefill was computing; `sharing` how many do now. `decoded_tokens` include `accepted_tokens`,
    those of `draft_tokens` that were right. `turns_stored` counts answers stored for prompts that continue their
    conversation, `turns_changed` those whose text would not be tokenized as it was generated.
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
    draft_tokens: int = 0
    accepted_tokens: int = 0
    turns_stored: int = 0
    turns_changed: int = 0
    prefilled_tokens: int = 0
    pending: int = 0
    speculating: int = 0
    speculations_running: int = 0
    speculations_preempted: int = 0
    interrupted: int = 0
    prefetched_bytes: int = 0
    shared: int = 0
    sharing: int = 0


_BURST_STEPS = 16
"""Burst of a rarely active tenant before it takes turns, in steps: about a few prompts with answers."""


class Scheduler:
    """Owns all requests from arrival to end, and the KV blocks of the running ones.

    A request is admitted if its known tokens fit, and grows as it decodes. When no block is free, the youngest request
    gives up its KV and is pending again with its tokens kept. The oldest is never preempted for others, and no request
    may exceed the whole memory, so one request always finishes. Speculations yield their slots and blocks to all
    others, and run only in steps in which no other request can. Background requests yield too, but also use the tokens
    that others leave of their steps.

    Among tenants, the least served one, by weight, is next. What a tenant holds beyond its share of slots and memory is
    lent: a request of a tenant within its own share takes it back, youngest first, but never the last running request
    of a tenant.

    A request that needs parts which a running prefill computes waits for them outside the queue, if that is sooner than
    computing them. It holds nothing meanwhile. It waits for running requests only, and an ordinary request never for
    one that yields, so waits cannot form a chain. If the owner ends, fails or is preempted before the parts are stored,
    the waiting requests return to their old queue positions: one of them computes the parts, and the others wait for
    it. Used by one thread.
    """

    def __init__(
        self,
        store: ChunkStore,
        config: BatchingConfig,
        *,
        preempting: Callable[[RequestState], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a scheduler without requests. `preempting` is called before a request loses its memory."""
        self._store = store
        self.pool = BlockPool(config.kv_tokens // config.block_tokens, config.block_tokens)
        self._time = VirtualTime(TenantWeights.parse(config.tenant_weight), burst=_BURST_STEPS * config.step_tokens)
        self.planner = StepPlanner(self._time, config.step_time_s, clock=clock)
        self.queue = RequestQueue(StoredTokens(store), self._time, window=config.window)
        self.requests: dict[int, RequestState] = {}
        """All pending and running requests, by id."""
        self.awaiting: dict[int, RequestState] = {}
        """Requests waiting for parts of a running request, by id; they are not in the queue."""
        self.shared = 0
        """How often a request started to wait for another's parts."""
        self._in_progress: dict[RequestState, list[PartInProgress]] = {}
        """Parts that running requests compute, cached for one round of admission: no prefill advances within it."""
        self._running: list[RequestState] = []  # in the order of admission
        self._preempting = preempting
        self._budget = TokenBudget(tokens=config.step_tokens, max_running=config.max_running)
        self._spare = TokenBudget(tokens=config.tokens_of_speculations, max_running=config.max_running)

    @property
    def running(self) -> tuple[RequestState, ...]:
        """The admitted, unfinished requests; a snapshot, safe from any thread."""
        return tuple(self._running)

    def add(self, request: RequestState) -> None:
        """Queue a new request."""
        self.requests[request.id] = request
        if not request.preemptible:
            self._time.join(request.tenant)
            self._time.charge(request.tenant, request.discarded_tokens)
        self.queue.add(request)

    def branch(self, request: RequestState) -> bool:
        """Add a request that continues a copy of another one's KV; returns whether it has the memory for the copy.

        Else it is pending and will be prefilled again.
        """
        self.requests[request.id] = request
        if not request.preemptible:
            self._time.join(request.tenant)
        self.queue.number(request)
        fits = len(self._running) < self._budget.max_running and self.pool.reserve(request, request.tokens)
        if fits:
            request.status = RequestStatus.DECODING
            self._running.append(request)
        else:
            self.queue.put_back(request)
        return fits

    def stops(self, request: RequestState) -> bool:
        """Whether a new request stops the current step.

        True if its tenant has no active request, was served at least one step less than the others, and the request
        would be admitted at once. So rare users do not wait for the steps of heavy ones. The discarded work is bounded,
        because its tenant is charged for it (`discarded_tokens`).
        """
        if request.preemptible or self._time.behind(request.tenant) < self._budget.tokens:
            return False
        return self._giving_way(request) is not None

    def confirm(self, request: RequestState) -> None:
        """Make a speculation an ordinary request."""
        self._wait_no_longer(request)
        if request.runs and self.queue.requests:
            self._preempt(request)  # others wait for memory: the queue decides which is next
        self._time.join(request.tenant)
        self.queue.confirm(request)

    def admit(self) -> Iterator[RequestState]:
        """Yield each request admitted now, with its blocks reserved; start it before taking the next.

        Ordinary requests come first and take slots of yielding requests and lent ones as needed; then yielding requests
        that still fit. Before that, requests whose awaited parts are stored return to the queue.
        """
        self._in_progress.clear()
        for waiting in tuple(self.awaiting.values()):
            if not self._still_awaited(waiting):
                self._wait_no_longer(waiting)
        while True:
            request = self.queue.pop(
                lambda candidate: self._giving_way(candidate) is not None, self._promised(), self._may_have_place
            )
            if request is None:
                break
            # Waiting is checked before preempting, so that no request loses its memory for one that then waits.
            if self._waits_for_parts(request):
                continue
            for preempted in self._giving_way(request) or ():
                self._preempt(preempted)
            yield self._admitted(request)
        while len(self._running) < self._budget.max_running:
            request = self.queue.pop_yielding(lambda waiting: self.pool.fits(waiting.tokens))
            if request is None:
                break
            if not self._waits_for_parts(request):
                yield self._admitted(request)

    def groups(self) -> list[StepGroup]:
        """The groups of this step: ordinary requests, and background ones with the tokens left over.

        If no ordinary request can run: speculations, or else background requests alone.
        """
        self._make_room(speculative=False)
        if any(not request.preemptible for request in self._running):
            groups = self._groups([request for request in self._running if not request.speculative], self._budget)
            if groups:
                return groups
        self._make_room(speculative=True)
        speculations = self._groups([request for request in self._running if request.speculative], self._spare)
        return speculations or self._groups([request for request in self._running if request.background], self._budget)

    def room_for_drafts(self, request: RequestState, most: int) -> int:
        """How many tokens behind a decoding request's pending ones fit its blocks, at most `most`.

        It may take free blocks, but no other request is preempted for drafts.
        """
        assert request.decode is not None, "a decoding request has a token"
        cache = request.decode.prefilled.cache
        needed = request.decode.position + len(request.decode.pending)
        if self.pool.grow(request, needed + most):
            cache.grow(self.pool.capacity(request))
        return min(most, cache.capacity - needed)

    def computed(self, group: StepGroup, drafts: Iterable[int]) -> None:
        """Charge the tenants for the work of a finished step; `drafts` are the draft tokens of decoding requests."""
        decoded = len(group.decoding)
        cost = self.planner.pace.tokens_worth(decoded, least=DECODED_COST) if decoded else 0.0
        costs = [(request, cost + more) for request, more in zip(group.decoding, drafts, strict=True)]
        for request, cost in (*costs, *group.pieces):
            if not request.preemptible:
                self._time.charge(request.tenant, cost)

    def put_back(self, request: RequestState) -> None:
        """Return a running request to the queue; only its tokens are kept."""
        self._stop(request)
        request.status = RequestStatus.WAITING
        self.queue.put_back(request)

    def end(self, request: RequestState) -> None:
        """Remove a request, pending or running."""
        if request.runs:
            self._stop(request)
        else:
            self._wait_no_longer(request)
            request.stop_reading()
            self.queue.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.id]
        if not request.preemptible and self._time.leave(request.tenant):
            self.queue.forget(request.tenant)

    def check(self) -> None:
        """Audit requests, blocks and caches.

        Raises:
            StoreError: a request that does not run holds blocks, or a cache is larger than its blocks.
        """
        self.pool.check(self.requests.values())
        runs = {request for request in self.requests.values() if request.runs}
        if runs != set(self._running) or len(self.queue) + len(self.awaiting) + len(runs) != len(self.requests):
            raise StoreError("a request is neither pending nor running, or both")
        if any(request.owner is None or request.owner is request for request in self.awaiting.values()):
            raise StoreError("a request waits for parts that no other request computes")
        if {request for request in self.requests.values() if request.blocks} != runs:
            raise StoreError("KV blocks are not held by exactly the running requests")
        for request in self._running:
            decode = request.decode
            if decode is not None and decode.prefilled.cache.capacity > self.pool.capacity(request):
                raise StoreError(f"the cache of request {request.id} is larger than its blocks")

    def _waits_for_parts(self, request: RequestState) -> bool:
        """Let a request that was popped from the queue wait for parts in progress, if that is sooner."""
        wanted = request.wanted
        if not self._running or not wanted.chunks or request.plan is not None:
            return False
        # Owners are running requests only, and an ordinary request has no yielding owner. Since a running request
        # waits for none, waits cannot form a cycle.
        best = None
        most = Saving()
        needs_profiles = request.prepared.kept.profiles
        for owner in self._running:
            serves = (request.preemptible or not owner.preemptible) and (
                owner.prepared.kept.profiles or not needs_profiles
            )
            parts = self._parts_of(owner) if owner.job is not None and serves else ()
            saving = saving_of(wanted, self._store, parts, without=request.waited_for)
            tokens_left = 0 if owner.job is None else owner.job.remaining_tokens
            if saving.tokens > most.tokens and saving.sooner(tokens_left):
                best = owner
                most = saving
        if best is None:
            return False
        request.owner, request.awaited = best, most.chunks
        self.awaiting[request.id] = request
        self.shared += 1
        return True

    def _still_awaited(self, request: RequestState) -> bool:
        """Whether the owner still computes the parts that a request waits for."""
        owner = request.owner
        assert owner is not None, "it waits for some request's parts"
        if any(part.chunk in request.awaited for part in self._parts_of(owner)):
            return True
        if owner.job is not None or owner.decode is not None:  # the parts are done: stored, or the store refused them
            request.waited_for |= request.awaited
        return False

    def _parts_of(self, owner: RequestState) -> list[PartInProgress]:
        if owner not in self._in_progress:
            self._in_progress[owner] = owner.in_progress
        return self._in_progress[owner]

    def _wait_no_longer(self, request: RequestState) -> None:
        """Return a request that waits for parts to its queue position; no effect on others."""
        if self.awaiting.pop(request.id, None) is not None:
            request.owner, request.awaited = None, frozenset()
            self.queue.put_back(request)

    def _yielding(self) -> list[RequestState]:
        return [request for request in self._running if request.preemptible]

    def _promised(self) -> dict[str, float]:
        """By tenant, prefill tokens left of its running requests."""
        promised: dict[str, float] = {}
        for request in self._running:
            if request.job is not None and not request.preemptible:
                promised[request.tenant] = promised.get(request.tenant, 0.0) + request.job.remaining_tokens
        return promised

    def _may_have_place(self, tenant: str) -> bool:
        """Whether a slot is available for a request of this tenant."""
        free = len(self._running) - len(self._yielding()) < self._budget.max_running
        return free or bool(self._lent(tenant, self._running, places=1, blocks=0))

    def _giving_way(self, request: RequestState) -> list[RequestState] | None:
        """The running requests to preempt for a pending one; None if that would not free enough."""
        leaving: list[RequestState] = []
        while len(self._running) - len(leaving) >= self._budget.max_running or not self.pool.fits(
            request.tokens, without=leaving
        ):
            staying = [running for running in self._running if running not in leaving]
            more = self.pool.blocks_for(request.tokens)
            candidates = [running for running in staying if running.preemptible] or self._lent(
                request.tenant, staying, places=1, blocks=more
            )
            if not candidates:
                return None
            leaving.append(_youngest(candidates))
        return leaving

    def _lent(self, tenant: str, running: Sequence[RequestState], *, places: int, blocks: int) -> list[RequestState]:
        """Requests in `running` of the tenant furthest above its share that was not served less than `tenant`.

        Empty if `tenant`, with `places` and `blocks` more, would exceed its own share, unless it runs nothing.
        """
        by_tenant: dict[str, list[RequestState]] = {}
        for request in running:
            if not request.preemptible:
                by_tenant.setdefault(request.tenant, []).append(request)
        of_tenant = by_tenant.pop(tenant, [])
        if not by_tenant or (of_tenant and self._held(of_tenant, places, blocks) > self._time.share(tenant)):
            return []
        # Preemption repeats a prefill: not worth it for small differences.
        least = self._budget.tokens if of_tenant else 0
        promised = self._promised()
        times = {name: self._time.of(name, promised.get(name, 0.0)) for name in {*by_tenant, tenant}}
        above = {name: self._held(requests) / self._time.share(name, tenant) for name, requests in by_tenant.items()}
        lent = [
            name
            for name, ratio in above.items()
            if ratio > 1 and len(by_tenant[name]) > 1 and times[name] - times[tenant] >= least
        ]
        return by_tenant[max(lent, key=above.__getitem__)] if lent else []

    def _held(self, requests: Sequence[RequestState], places: int = 0, blocks: int = 0) -> float:
        """The larger of the requests' shares of slots and of blocks, with `places` and `blocks` added."""
        blocks += sum(request.blocks for request in requests)
        return max((len(requests) + places) / self._budget.max_running, blocks / self.pool.blocks)

    def _admitted(self, request: RequestState) -> RequestState:
        reserved = self.pool.reserve(request, request.tokens)
        assert reserved, "only what fits is admitted"
        request.status = RequestStatus.PREFILLING
        self._running.append(request)
        return request

    def _groups(self, requests: Sequence[RequestState], budget: TokenBudget) -> list[StepGroup]:
        """The groups of `requests`: one batch, each request apart by itself, and one by layers per loading prefill.

        If nothing can run, the first loading prefill waits for its next layer; a background one only if alone.
        """
        self.planner.begin(requests)
        batches = [
            [request for request in requests if not request.retry_alone],
            *([request] for request in requests if request.retry_alone),
        ]
        groups = [group for batch in batches for group in self.planner.share(batch, budget)]
        if not groups and requests:
            first = min(requests, key=lambda request: request.background)
            return [StepGroup((), [(first, budget.tokens)], by_layers=True)]
        return groups

    def _make_room(self, *, speculative: bool) -> None:
        """Reserve blocks for the pending KV of decoding requests of one kind, oldest first; may preempt others."""
        kind = [request for request in self._running if request.speculative is speculative]
        for request in sorted(kind, key=lambda piece: piece.number):
            # The oldest grow first and the youngest are preempted, possibly `request` itself: then the loop ends. The
            # oldest request thus always grows, because the pool holds any single request.
            while request.status is RequestStatus.DECODING:
                assert request.decode is not None, "a decoding request has a token"
                if self.pool.grow(request, request.decode.position + len(request.decode.pending)):
                    request.decode.prefilled.cache.grow(self.pool.capacity(request))
                    break
                lent = self._lent(request.tenant, self._running, places=0, blocks=1)
                self._preempt(_youngest(self._yielding() or lent or self._running))

    def _preempt(self, request: RequestState) -> None:
        """Preempt a running request: its memory is freed and it is pending again."""
        self._preempting(request)
        self.put_back(request)

    def _stop(self, request: RequestState) -> None:
        """Release a running request's memory, pins and blocks."""
        request.stop_reading()
        if request.decode is not None:
            request.decode.let_go()
        self._running.remove(request)
        self._in_progress.pop(request, None)
        self.pool.release(request)


def _youngest(requests: Sequence[RequestState]) -> RequestState:
    return max(requests, key=lambda request: request.number)
