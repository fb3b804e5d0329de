"""Decides which requests wait and run, which are preempted, and what a step runs. The core computes.

Between two tokens of an answer others' prefills run for `step_time_s` at most. And of several tenants none is slowed by
others' work more than if the machine were divided by weight: a step that a tenant's answers wait for takes no longer
than they take alone, divided by the tenant's share. That holds against tenants that were served more. Imports no torch.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from sys import maxsize

from chunkweave.engine.request_state import RequestQueue, RequestState, RequestStatus
from chunkweave.errors import StoreError
from chunkweave.scheduling.budget import LEAST_TOKENS, BatchingConfig, BlockPool, Prefilling, StepPace, TokenBudget
from chunkweave.scheduling.in_progress import PartInProgress, Saving, saving_of
from chunkweave.scheduling.queue import DECODED_COST, ChunkStore, StoredTokens, TenantWeights, VirtualTime

_LEAST_SHARE = 1 / 8
"""What prefills get at least of the time in which the answers beside them decode, so that they come to an end."""

_LONGEST_S = 1.0
"""How long a request that decodes waits at most for answers of tenants that were served less."""


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """Requests that share one run through the layers: those that decode, and so many tokens of some prefills.

    One prefill goes `by_layers`, alone, if it is still read, or was left between two layers since it held answers for
    too long: as many as the work of so many tokens allows.
    """

    decoding: Sequence[RequestState]
    pieces: Sequence[tuple[RequestState, int]]
    by_layers: bool = False

    @property
    def requests(self) -> list[RequestState]:
        """All requests of the group."""
        return [*self.decoding, *(request for request, _ in self.pieces)]


class StepPlanner:
    """Shares out steps, and learns from them how much work fits into the time that answers may be held.

    Used by one thread, which says what each step has done.
    """

    def __init__(
        self, shares: VirtualTime, step_time_s: float | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`shares` says whose turn it is. Without `step_time_s` a prefill holds answers for a step of any length."""
        self.pace = StepPace()
        self._shares = shares
        self._step_time_s = inf if step_time_s is None else step_time_s
        self._clock = clock
        self._answering: Counter[str] = Counter()
        self._decoding_s = 0.0
        self._decoded_s: float | None = None  # when the last step of answers ended, if there are any
        self._credit_s = 0.0
        self._limited: frozenset[RequestState] = frozenset()  # of this step's prefills those that it is for

    def begin(self, requests: Sequence[RequestState]) -> None:
        """A step is made of `requests`, which are then shared out."""
        self._answering = Counter(request.tenant for request in requests if request.job is None)
        if not self._answering:
            self._decoded_s = None
        elif self._decoded_s is None:
            self._decoded_s = self._clock()
        self._add_credit([request for request in requests if request.job is not None])

    def share(self, requests: Sequence[RequestState], budget: TokenBudget) -> list[StepGroup]:
        """What of `requests` goes into a step, together or by layers; notes in each prefill if it was passed over.

        All of it shares one budget. Prefills none of whose layers has come in wait, and are not passed over.
        """
        decoding = self._next_tokens([request for request in requests if request.job is None])
        self._decoding_s = self.pace.decoding_s(len(decoding))
        seen, by_layers, prefilling = [], set[int](), {}
        jobs = [(request, request.job) for request in requests if request.job is not None]
        for request, job in jobs:
            layers, next_tokens = job.layers_ready, job.next_tokens
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
                    self._shares.under_way(request.tenant) == 1,
                    most,
                )
            )
        pieces = {piece.number: piece.tokens for piece in budget.pieces(len(decoding), seen)}
        whole: list[tuple[RequestState, int]] = []
        layered: list[tuple[RequestState, int]] = []
        for number, request in prefilling.items():
            request.passed_over = 0 if number in pieces else request.passed_over + 1
            if number in pieces:
                (layered if number in by_layers else whole).append((request, pieces[number]))
        together = [StepGroup(decoding, whole)] if decoding or whole else []
        return [*together, *(StepGroup((), [piece], by_layers=True) for piece in layered)]

    @property
    def holds(self) -> bool:
        """Whether there are answers, which the step holds."""
        return self._decoded_s is not None

    def late(self, part_done: float = 0.0) -> bool:
        """Whether prefills have held answers for long enough, if of their next tokens that part is computed."""
        if self._decoded_s is None:
            return False
        return self._clock() - part_done * self._decoding_s >= self._decoded_s + self._step_time_s

    def ran(self, group: StepGroup, since_s: float) -> None:
        """A step that `holds` answers has run what `group` says, since then."""
        now = self._clock()
        tokens, seconds = sum(tokens for _, tokens in group.pieces), now - since_s
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
        """The requests that decode in this step: in turns, those of tenants that were served more as far as is fair.

        The one that waits longest does after `step_time_s`, or after `_LONGEST_S`, whatever is fair.
        """
        chosen: list[RequestState] = []
        now, wait_s = self._clock(), min(self._step_time_s, _LONGEST_S)
        longest = min(answers, key=lambda one: one.last_token_s, default=None)
        for one in sorted(answers, key=lambda one: (self._shares.of(one.tenant), one.last_token_s)):
            waits_s = now - one.last_token_s
            fits = self.pace.decoding_s(len(chosen) + 1) <= self._fair_s(one)
            if fits or (one is longest and waits_s >= wait_s):
                chosen.append(one)
        return chosen

    def _fair_s(self, request: RequestState) -> float:
        """Longest step that a request may be in, for the answers of other tenants that were served less."""
        least = inf
        for tenant, requests in self._answering.items():
            served_less = request.background or self._shares.of(tenant) < self._shares.of(request.tenant)
            alone_s = self.pace.decoding_s(requests)
            if tenant != request.tenant and served_less and alone_s:
                least = min(least, alone_s / self._shares.share(tenant))
        return least

    def _add_credit(self, prefilling: Sequence[RequestState]) -> None:
        """Let prefills have this step's part of the time that is fair, or what is left of it after what they overdrew.

        A pass that cannot be cut takes one layer at least, however long that is, and pauses for it afterwards.
        """
        fair = {request: self._fair_s(request) for request in prefilling}
        self._limited = frozenset(request for request, fair_s in fair.items() if isfinite(fair_s))
        fair_s = max((fair[request] for request in self._limited), default=0.0)
        more_s = max(fair_s - self._decoding_s, _LEAST_SHARE * self._decoding_s)
        self._credit_s = min(more_s, self._credit_s + more_s)

    def _most_tokens(self, request: RequestState, *, by_layers: bool) -> int:
        """Tokens that all prefills together may have with this one among them."""
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
    """What a batching engine does now and has done so far; blocks are those of its KV memory.

    `pending` requests wait for, or are in, prefill: the size of RAGCache's pool. `speculating` are those, waiting or
    running, that were not confirmed yet, `speculations_running` how many of them run. Of what was `preempted`,
    `speculations_preempted` had not been confirmed; `interrupted` are steps that were stopped between two layers,
    since a request arrived before which theirs yield. `prefetched_bytes` are held for requests that wait. `shared` is
    how often a request waited for parts that another one's prefill was computing, `sharing` how many do now.
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
    shared: int = 0
    sharing: int = 0


_BURST_STEPS = 16
"""Steps of which a tenant that asks seldom may have all tokens before it takes turns: a few prompts with answers."""


class Scheduler:
    """Owns the requests from their arrival to their end, and the blocks that those hold which run.

    A request is admitted if what is known of it fits, and grows as it decodes. Where no block is left, the youngest
    request gives its KV up and waits again with its tokens kept. The oldest is never preempted for others, and no
    request may be larger than the whole memory: so there is always one that ends. Speculations yield their places and
    blocks to all others, and run only in steps in which no other request could. So does what is computed in the
    background, but that it also takes the tokens that others leave of their steps.

    Of several tenants the one that was served least is next, by its weight. What one holds beyond its share of places
    and memory is lent: a request of another one that is within its own takes it back, the youngest first, but never the
    last that a tenant has running.

    A request that needs parts which a running prefill computes waits for them, out of the queue, where that is sooner
    than computing them too. It holds nothing meanwhile, and waits for running requests only, never for one that yields
    if it does not: so no request waits for one that waits for it. If the owner ends, fails or is preempted before the
    parts are stored, the request is back in its old place: one of those that waited computes them, and the others wait
    for it. Used by one thread.
    """

    def __init__(
        self,
        store: ChunkStore,
        config: BatchingConfig,
        *,
        preempting: Callable[[RequestState], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Nothing waits yet. `preempting` is called with a request that is about to lose its memory."""
        self._store = store
        self.pool = BlockPool(config.kv_tokens // config.block_tokens, config.block_tokens)
        self._time = VirtualTime(TenantWeights.parse(config.tenant_weight), burst=_BURST_STEPS * config.step_tokens)
        self.planner = StepPlanner(self._time, config.step_time_s, clock=clock)
        self.queue = RequestQueue(StoredTokens(store), self._time, window=config.window)
        self.requests: dict[int, RequestState] = {}
        """All that wait or run, by id."""
        self.awaiting: dict[int, RequestState] = {}
        """Those that wait for parts of a running request, by id; they are not in the queue."""
        self.shared = 0
        """How often a request began to wait so."""
        self._in_progress: dict[RequestState, list[PartInProgress]] = {}
        """What running requests compute, as far as this round of admission has asked: no prefill advances in it."""
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
        self._wait_no_longer(request)
        if request.runs and self.queue.requests:
            self._preempt(request)  # others wait for memory: the queue decides which is next
        self._time.join(request.tenant)
        self.queue.confirm(request)

    def admit(self) -> Iterator[RequestState]:
        """Each request that is admitted now, with blocks of its own; it is to be started before the next one is taken.

        Requests are admitted as if there were none that yield, and nothing lent, whose places they take where need be;
        then those that yield and still fit. What waits for parts that are stored by now is in the queue before.
        """
        self._in_progress.clear()
        for waiting in tuple(self.awaiting.values()):
            if not self._still_awaited(waiting):
                self._wait_no_longer(waiting)
        while True:
            request = self.queue.pop(
                lambda one: self._giving_way(one) is not None, self._promised(), self._may_have_place
            )
            if request is None:
                break
            if self._waits_for_parts(request):
                continue
            for other in self._giving_way(request) or ():
                self._preempt(other)
            yield self._admitted(request)
        while len(self._running) < self._budget.max_running:
            request = self.queue.pop_yielding(lambda one: self.pool.fits(one.tokens))
            if request is None:
                break
            if not self._waits_for_parts(request):
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
            self._wait_no_longer(request)
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
        if runs != set(self._running) or len(self.queue) + len(self.awaiting) + len(runs) != len(self.requests):
            raise StoreError("a request neither waits nor runs, or does both")
        if any(one.owner is None or one.owner is one for one in self.awaiting.values()):
            raise StoreError("a request waits for parts that no other one computes")
        if {one for one in self.requests.values() if one.blocks} != runs:
            raise StoreError("blocks are not held by the running requests")
        for request in self._running:
            decode = request.decode
            if decode is not None and decode.prefilled.cache.capacity > self.pool.capacity(request):
                raise StoreError(f"the cache of request {request.id} is larger than its blocks")

    def _waits_for_parts(self, request: RequestState) -> bool:
        """Let a request that was taken out of the queue wait for parts in progress, if that is sooner."""
        wanted = request.wanted
        if not self._running or not wanted.chunks or request.plan is not None:
            return False
        best, most = None, Saving()
        needs_profiles = request.prepared.kept.profiles
        for owner in self._running:
            serves = (request.yields or not owner.yields) and (owner.prepared.kept.profiles or not needs_profiles)
            parts = self._parts_of(owner) if owner.job is not None and serves else ()
            saving = saving_of(wanted, self._store, parts, without=request.waited_for)
            left = 0 if owner.job is None else owner.job.remaining_tokens
            if saving.tokens > most.tokens and saving.sooner(left):
                best, most = owner, saving
        if best is None:
            return False
        request.owner, request.awaited = best, most.chunks
        self.awaiting[request.id] = request
        self.shared += 1
        return True

    def _still_awaited(self, request: RequestState) -> bool:
        """Whether the owner still computes what a request waits for."""
        owner = request.owner
        assert owner is not None, "it waits for some request's parts"
        if any(part.chunk in request.awaited for part in self._parts_of(owner)):
            return True
        if owner.job is not None or owner.decode is not None:  # it has stored them, if the store took them
            request.waited_for |= request.awaited
        return False

    def _parts_of(self, owner: RequestState) -> list[PartInProgress]:
        if owner not in self._in_progress:
            self._in_progress[owner] = owner.in_progress
        return self._in_progress[owner]

    def _wait_no_longer(self, request: RequestState) -> None:
        """A request that waits for parts is back in its place in the queue; others are left alone."""
        if self.awaiting.pop(request.id, None) is not None:
            request.owner, request.awaited = None, frozenset()
            self.queue.put_back(request)

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
        self._in_progress.pop(request, None)
        self.pool.release(request)


def _youngest(requests: Sequence[RequestState]) -> RequestState:
    return max(requests, key=lambda request: request.number)
