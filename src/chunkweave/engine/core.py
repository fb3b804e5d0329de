"""The step loop of a batching engine: admit, choose, run, deliver. Used by one thread; starts none."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from chunkweave.conversation.answer import Durations, StreamEvent
from chunkweave.conversation.prepare import PreparedRequest, RequestPreparer
from chunkweave.engine.comparisons import Comparisons
from chunkweave.engine.decode import DecodeState
from chunkweave.engine.prefill import PrefillJob, PrefillOptions
from chunkweave.engine.request_state import RequestState, RequestStatus
from chunkweave.engine.runner import Decoding, Runner
from chunkweave.engine.scheduler import BatchingStats, Scheduler, StepGroup
from chunkweave.errors import (
    AnswerFormError,
    ChunkweaveError,
    DeadlineError,
    PromptTooLongError,
    RequestAbortedError,
    RequestFailedError,
    UnknownRequestError,
    UsageError,
)
from chunkweave.fusion.loop import PassInterrupted
from chunkweave.kv.segment import SegmentLost
from chunkweave.planning.method import ReuseMethod
from chunkweave.planning.plan import KVSource
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.scheduling.drafts import StepCosts
from chunkweave.types import CacheUse

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class CoreParts:
    """The components that an engine's step loops share. Answers are offered to `comparisons`, which outlive a loop."""

    preparer: RequestPreparer
    runner: Runner
    comparisons: Comparisons | None = None
    costs: StepCosts = field(default_factory=StepCosts)


class BatchingCore:
    """Works on many requests at once, one step at a time (order of admission: RAGCache §5.2).

    A step computes one token of every decoding request, and prefill tokens up to its budget, in one flat batch. A
    prefill whose segments are still being read runs by layers: through those that are loaded, within the budget. No
    step waits for a layer while there is other work.

    The `Scheduler` decides which requests run. A preempted request is prefilled again later: its prompt with the same
    plan, then the tokens that it had generated.

    A speculative request (RAGCache §5.3) starts before retrieval has confirmed its chunks. It yields to all others:
    when a request arrives, a step of speculative requests stops between two layers and is repeated later. The same
    applies to a step of background requests only, and to any step if a less served tenant sends a request
    (`Scheduler.stops`).
    """

    def __init__(
        self,
        parts: CoreParts,
        config: BatchingConfig,
        *,
        clock: Clock = time.perf_counter,
        interrupt: Callable[[], bool] | None = None,
        arrived: Callable[[], Sequence[RequestState]] = tuple,
    ) -> None:
        """Make a loop without requests.

        `interrupt` is called between the layers of a step in which all requests yield; True stops the step. For other
        steps, `arrived` returns the requests that arrived since the step began.
        """
        self._preparer = parts.preparer
        self._runner = parts.runner
        self._config = config
        self._clock = clock
        self._interrupt = interrupt
        self._arrived = arrived
        self._comparisons = parts.comparisons
        self._costs = parts.costs
        self._scheduler = Scheduler(self._runner.store, config, preempting=self._preempting, clock=clock)
        self._planner = self._scheduler.planner
        self.pool = self._scheduler.pool
        slow = any(level.background for level in self._runner.store.levels)
        self._prefetch_bytes = config.prefetch_bytes if slow else 0
        self._counts = BatchingStats()

    @property
    def busy(self) -> bool:
        """Whether any request is pending or running."""
        return bool(self._scheduler.requests)

    @property
    def can_compare(self) -> bool:
        """Whether a comparison is pending and no request is."""
        return bool(self._comparisons) and not self._scheduler.requests

    @property
    def stats(self) -> BatchingStats:
        """A snapshot of the counters."""
        requests = tuple(self._scheduler.requests.values())
        running = [request for request in requests if request.runs]
        return replace(
            self._counts,
            waiting=len(requests) - len(running),
            running=len(running),
            blocks=self.pool.blocks,
            blocks_reserved=self.pool.reserved,
            pending=sum(request.status is not RequestStatus.DECODING for request in requests),
            speculating=sum(request.speculative for request in requests),
            speculations_running=sum(request.speculative for request in running),
            prefetched_bytes=self._prefetched_bytes,
            shared=self._scheduler.shared,
            sharing=len(self._scheduler.awaiting),
        )

    @property
    def most_tokens(self) -> int:
        """Most tokens of a conversation's prompt with its answer; longer conversations are cut."""
        return min(self.pool.tokens, self._config.max_prompt_tokens or self.pool.tokens)

    def fitting(self, prepared: PreparedRequest) -> PreparedRequest:
        """The request, its answer limited to what the KV memory can hold. Safe from any thread.

        Raises:
            PromptTooLongError: the prompt does not fit the KV memory, or exceeds `max_prompt_tokens`.
        """
        most = self._config.max_prompt_tokens
        if most is not None and len(prepared.prompt) > most:
            raise PromptTooLongError(
                f"the prompt has {len(prepared.prompt)} tokens, but at most {most} are allowed; "
                f"send fewer or smaller chunks"
            )
        room = self.pool.tokens - len(prepared.prompt)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prepared.prompt)} tokens, but the engine's KV memory holds {self.pool.tokens}; "
                f"send fewer or smaller chunks, or raise kv_tokens"
            )
        return replace(prepared, room=min(prepared.room, room))

    def submit(self, request: RequestState) -> None:
        """Queue a new request, whose `prepared` came from `fitting`. An id is never used twice."""
        self._scheduler.add(request)

    def confirm(self, number: int) -> None:
        """Make a speculative request an ordinary one. Idempotent.

        Raises:
            UnknownRequestError: it is neither pending nor running.
        """
        request = self._active(number)
        for sibling in _together(request):
            if sibling.speculative:
                self._scheduler.confirm(sibling)
                sibling.waits_since_s = self._clock()
        self.count(request if request.siblings is None else request.siblings.first)

    def count(self, request: RequestState) -> None:
        """Report to the store what a request looked up and used: once, at its first plan.

        A speculation is counted when it is confirmed, running or finished.
        """
        if request.use is not None and not request.counted:
            request.counted = True
            self._runner.store.note_request(request.use)

    def abort(self, number: int) -> None:
        """End a request without an answer. Parts whose KV is complete stay stored.

        Raises:
            UnknownRequestError: it is neither pending nor running.
        """
        request = self._active(number)
        self._count(aborted=1)
        self._end(request, RequestAbortedError(f"request {number} was aborted"))

    def close(self) -> None:
        """Abort all pending and running requests; nothing can be submitted afterwards."""
        while self._scheduler.requests:
            self.abort(next(iter(self._scheduler.requests)))
        self._scheduler.queue.close()

    def step(self) -> None:
        """One round: end overdue and unwanted requests, admit those that fit, and run what the budget allows."""
        self._count(steps=1)
        self._expire()
        for request in self._scheduler.admit():
            if request.admitted_s is None:
                request.admitted_s = self._clock()
            self._guarded([request], partial(self._start, request))
            if self._planner.late():
                break
        if self._prefetch_bytes:
            self._look_ahead()
        for number, group in enumerate(self._groups()):
            if not (number and group.by_layers and self._planner.late()):
                self._guarded(group.requests, partial(self._compute, group))

    def compare(self) -> None:
        """Run one piece of a pending comparison, if any. A failure affects no request."""
        if self._comparisons is not None:
            self._comparisons.step(self.pool, self._interrupt)

    def check(self) -> None:
        """Audit requests, blocks and caches.

        Raises:
            StoreError: a request that does not run holds blocks, or a cache is larger than its blocks.
        """
        self._scheduler.check()

    def _expire(self) -> None:
        now = self._clock()
        timeout_s = self._config.queue_timeout_s
        for request in [request for request in self._scheduler.requests.values() if request.unwanted()]:
            self.abort(request.id)
        for request in list(self._scheduler.requests.values()):
            not_begun = request.admitted_s is None and not request.preemptible
            if request.deadline_s is not None and now > request.deadline_s:
                why = f"was not answered within {now - request.arrived_s:.3g} s"
            elif timeout_s is not None and not_begun and now - request.waits_since_s > timeout_s:
                why = f"waited {now - request.arrived_s:.3g} s without being started"
            else:
                continue
            self._count(timed_out=1)
            self._end(request, DeadlineError(f"request {request.id} {why}"))

    @property
    def _prefetched_bytes(self) -> int:
        """Bytes prefetched for pending requests; those of running ones are allocated anyway. Safe from any thread."""
        waiting = (request.prefetch for request in tuple(self._scheduler.requests.values()) if not request.runs)
        return sum(prefetch.nbytes for prefetch in waiting if prefetch is not None)

    def _look_ahead(self) -> None:
        """Prefetch segments of the next requests from slow tiers (Cache-Craft §3.5), within the byte limit."""
        for request in self._scheduler.queue.next(self._config.prefetch_requests):
            bytes_left = self._prefetch_bytes - self._prefetched_bytes
            if bytes_left <= 0:
                return
            if not request.looked_ahead and request.prepared.request.cache is not CacheUse.OFF:
                request.looked_ahead = True
                self._prefetch(request, bytes_left)

    def _prefetch(self, request: RequestState, max_bytes: int) -> None:
        prepared = request.prepared
        try:
            prefetch = self._runner.prefetch(prepared.prompt, prepared.reuse_method, max_bytes=max_bytes)
        except Exception:  # the request's own prefill will raise it again, for that request only
            logger.warning("prefetch failed for request %d", request.id, exc_info=True)
            return
        if prefetch.nbytes:
            request.prefetch = prefetch
        else:
            prefetch.close()

    def _start(self, request: RequestState) -> None:
        prompt = request.prepared.prompt
        room = self.pool.capacity(request) - len(prompt)
        capture_choice = request.prepared.kept
        options = PrefillOptions(
            new_tokens=room,
            capture=capture_choice.kv,
            profiles=capture_choice.profiles,
            generated=request.generated,
            plan=request.plan,
            prefetched=request.prefetch,
            owner=request.tenant,
            mean=request.prepared.mean,
            looks_up=request.prepared.request.cache is not CacheUse.OFF,
        )
        request.passed_over = 0
        request.job = self._runner.start(prompt, self._method(request), options)
        request.use = request.use or request.job.use
        if not request.preemptible:
            self.count(request)

    def _method(self, request: RequestState) -> ReuseMethod:
        """The method of an admitted request. Its recompute ratio is raised only if no other request would wait for
        that.
        """
        requests = (
            other_request
            for other_request in self._scheduler.requests.values()
            if other_request is not request and not other_request.preemptible
        )
        alone = next(requests, None) is None
        return request.prepared.raised(self._runner.loading(request.prefetch) if alone else None)

    def _groups(self) -> list[StepGroup]:
        """The groups that this step runs. First, prefills that lost segments are planned again."""
        for request in self._scheduler.running:
            if request.job is not None:
                self._guarded([request], partial(_plan_again, request.job))
        return self._scheduler.groups()

    def _preempting(self, request: RequestState) -> None:
        self._count(preempted=1, speculations_preempted=int(request.speculative))
        if request.speculative and request.decode is None:
            request.admitted_s = None  # it starts over: the time until now does not count towards its answer

    def _store_parts(self, request: RequestState) -> None:
        """Store each part once its last layer is done: others may wait for it, and this prefill may be preempted."""
        if request.job is not None:
            try:
                self._runner.store_computed(request.job)
            except Exception:  # a failed store costs later requests time, and this one nothing
                logger.exception("parts computed by request %d could not be stored", request.id)

    def _compute(self, group: StepGroup) -> None:
        drafts = self._drafts(group)
        decodes = [
            Decoding(state.prefilled.cache, (*state.pending, *draft), state.position, 1 + len(draft))
            for request, draft in zip(group.decoding, drafts, strict=True)
            if (state := request.decode) is not None
        ]
        pieces = [(request.job, tokens) for request, tokens in group.pieces if request.job is not None]
        preemptible = all(request.preemptible for request in group.requests)
        interrupt = self._interrupt if preemptible else lambda: self._stopping() is not None
        late = self._planner.late
        since_s = self._clock()
        try:
            if group.by_layers:
                [(job, tokens)] = pieces
                pieces = [(job, self._runner.step_layers(job, tokens, interrupt=interrupt, late=late))]
                logits = _NOTHING
            else:
                logits = self._runner.step(decodes, pieces, interrupt=interrupt, late=late)
                pieces = [(job, _done(job, tokens)) for job, tokens in pieces]
        except PassInterrupted as stopped:
            self._count(interrupted=1)
            if not preemptible and (coming := self._stopping()) is not None:
                coming.discarded_tokens = stopped.part * (len(decodes) + sum(tokens for _, tokens in pieces))
            return
        except SegmentLost as lost:
            [(job, _)] = pieces
            job.plan_without(lost)
            return
        done = [(request, tokens) for (request, _), (_, tokens) in zip(group.pieces, pieces, strict=True)]
        group = replace(group, pieces=done)
        self._scheduler.computed(group, map(len, drafts))
        self._count(decoded_tokens=len(decodes), prefilled_tokens=sum(tokens for _, tokens in pieces))
        rows = torch.split(logits, [decode.answering for decode in decodes])
        for request, own_rows, draft in zip(group.decoding, rows, drafts, strict=True):
            self._guarded([request], partial(self._advance, request, own_rows, draft))
        if self._planner.holds:
            self._runner.wait()
            self._planner.ran(group, since_s)
            if not group.pieces:
                self._costs.ran(len(decodes), sum(map(len, drafts)), self._clock() - since_s)
        for request, _ in group.pieces:
            if request.job is not None and request.job.prefilled is not None:
                self._guarded([request], partial(self._prefilled, request))
            else:
                self._store_parts(request)

    def _drafts(self, group: StepGroup) -> list[tuple[int, ...]]:
        """Draft tokens of each decoding request, as many as pay and as the step's budget leaves room for."""
        requests = group.decoding
        most = self._runner.compute.draft_tokens
        tokens_left = self._config.step_tokens - len(requests) - sum(tokens for _, tokens in group.pieces)
        if not most or tokens_left <= 0 or self._costs.stale(len(requests)):
            return [()] * len(requests)
        drafts_of = []
        chances = []
        for request in requests:
            assert request.decode is not None, "a decoding request has a token"
            drafts, acceptance = request.decode.find_drafts(most)
            drafts_of.append(drafts[: self._scheduler.room_for_drafts(request, len(drafts))])
            chances.append(acceptance)
        counts = self._costs.allot(list(zip(map(len, drafts_of), chances, strict=True)), tokens_left)
        return [drafts[:count] for drafts, count in zip(drafts_of, counts, strict=True)]

    def _stopping(self) -> RequestState | None:
        """The request that arrived since the step began and stops it; None if there is none."""
        return next((request for request in tuple(self._arrived()) if self._scheduler.stops(request)), None)

    def _prefilled(self, request: RequestState) -> None:
        """After a prefill: choose the next token, and store new segments unless the request was preempted before."""
        assert request.job is not None, "a prefilled request has a job"
        prefilled = request.job.prefilled
        assert prefilled is not None, "the job is done"
        request.stop_reading()
        request.status, request.last_token_s = RequestStatus.DECODING, self._clock()
        if request.decode is not None:
            if prefilled.lease is not None:
                prefilled.lease.release()  # the first prefill stored everything
            request.decode.continue_with(prefilled)
            self._advance(request, prefilled.logits[None])
            return
        decode = DecodeState(request.prepared, prefilled, self._preparer.builder.tokenizer, self._runner.store)
        plan = prefilled.plan
        if self._preparer.costs is not None:
            self._preparer.costs.ran(plan, prefilled.weave_s if prefilled.alone else None)
        request.plan = plan if plan.expected is not None or plan.spans(KVSource.REUSED) else None
        decode.advance(prefilled.logits)
        request.decode, request.first_token_s = decode, self._clock()
        self._show(request)
        try:
            if request.prepared.request.cache is CacheUse.USE:
                self._runner.store_new(prefilled)
        except Exception:  # a failed store costs later requests time, and this one nothing
            logger.exception("segments of request %d could not be stored", request.id)
        decode.without_captures()
        try:
            for sibling in () if request.siblings is None else request.siblings.made():
                self._branch(sibling, decode)
        except Exception as error:  # noqa: BLE001 - a fault of these answers alone ends them
            failed = RequestFailedError(f"the further answers of request {request.id} failed with {error!r}")
            failed.__cause__ = error
            self._give_up(request, failed)
        self._finish_if_done(request)

    def _branch(self, request: RequestState, first: DecodeState) -> None:
        """Begin one more answer to a prompt whose `first` one has a token; all share its prefill."""
        request.decode = decode = first.sibling(request.prepared, self._runner.store)
        decode.advance(first.prefilled.logits)
        fits = self._scheduler.branch(request)
        assert request.siblings is not None, "it is one of several answers"
        request.siblings.running.append(request)
        if fits:
            cache = first.prefilled.cache.copy(len(first.prefilled.prompt), self.pool.capacity(request))
            decode.continue_with(replace(first.prefilled, cache=cache))
        self._show(request)
        self._finish_if_done(request)

    def _advance(self, request: RequestState, logits: torch.Tensor, drafts: Sequence[int] = ()) -> None:
        if request.status is RequestStatus.FINISHED:  # it ended with another answer to its prompt
            return
        assert request.decode is not None, "a decoding request has a token"
        accepted = request.decode.verify(logits, drafts)
        self._count(decoded_tokens=accepted, draft_tokens=len(drafts), accepted_tokens=accepted)
        self._show(request)
        self._finish_if_done(request)

    def _show(self, request: RequestState) -> None:
        assert request.decode is not None, "a request with text has a token"
        new = request.decode.text[request.delivered_chars :]
        request.deliver(StreamEvent(new, logprobs=request.decode.take_logprobs() if new else None))
        request.delivered_chars += len(new)

    def _finish_if_done(self, request: RequestState) -> None:
        decode = request.decode
        if decode is None or not decode.done or request.status is RequestStatus.FINISHED:
            return
        rest = decode.finish()
        assert request.admitted_s is not None, "a running request was admitted"
        durations = Durations(
            ttft_s=request.first_token_s - request.arrived_s,
            decode_s=self._clock() - request.first_token_s,
            queue_s=request.admitted_s - request.arrived_s,
        )
        self._preparer.answered(request.prepared)
        self._store_turn(request, decode)
        answer = decode.answer(self._runner.model.geometry, durations)
        self._count(finished=1)
        self._end(request, StreamEvent(rest, answer, decode.prefilled.prompt, logprobs=decode.take_logprobs()))
        first = request.siblings is None or request.siblings.first is request
        if self._comparisons is not None and first and not request.speculative:
            self._comparisons.offer(request.prepared, decode)

    def _store_turn(self, request: RequestState, decode: DecodeState) -> None:
        """Store an answer for a later prompt that continues the conversation, if it will have the same token ids."""
        if request.speculative or not request.prepared.kept.kv or decode.prefilled_again:
            return
        try:
            turn = self._preparer.answered_turn(request.prepared, decode.text, decode.token_ids)
            if turn is None:
                return
            known_ids = (*request.prepared.prompt.parts[-1].token_ids, *decode.token_ids[:-1])
            if known_ids[: len(turn)] != turn.token_ids:
                self._count(turns_changed=1)
            elif self._runner.store_turn(decode.prefilled, turn):
                self._count(turns_stored=1)
        except Exception:  # a failed store costs later requests time, and this one nothing
            logger.exception("the answer of request %d could not be stored", request.id)

    def _guarded(self, requests: Sequence[RequestState], work: Callable[[], None]) -> None:
        """Run `work` for these requests. If it fails, retry each of them once, apart from all others.

        The failing request need not be known: of those that ran together, only it fails again. An error that a retry
        would repeat ends it at once.
        """
        try:
            if len(requests) == 1:
                requests[0].context.copy().run(work)  # a copy, because a context cannot be entered twice
            else:
                work()
        except (UsageError, AnswerFormError) as error:
            for request in requests:
                self._give_up(request, error)
        except Exception as error:  # the boundary between one request's fault and the others
            logger.warning("%d requests failed together", len(requests), exc_info=True)
            for request in requests:
                self._try_again(request, error)

    def _try_again(self, request: RequestState, error: Exception) -> None:
        if request.status is RequestStatus.FINISHED:
            return
        if request.retry_alone:
            failed = RequestFailedError(f"request {request.id} failed, and its retry failed with {error!r}")
            failed.__cause__ = error
            self._give_up(request, failed)
        else:
            request.retry_alone = True
            self._count(tried_again=1)
            self._scheduler.put_back(request)

    def _give_up(self, request: RequestState, error: ChunkweaveError) -> None:
        self._count(failed=1)
        self._end(request, error)

    def _end(self, request: RequestState, last: StreamEvent | Exception) -> None:
        """End a request; after an error, all answers to its prompt. No effect on an ended one."""
        if request.status is RequestStatus.FINISHED:
            return
        for sibling in _together(request) if isinstance(last, Exception) else [request]:
            self._scheduler.end(sibling)
            if sibling.siblings is not None:
                sibling.siblings.running.remove(sibling)
        request.deliver(last)

    def _active(self, number: int) -> RequestState:
        requests = self._scheduler.requests
        siblings = (
            request
            for request in requests.values()
            if request.siblings is not None and request.siblings.first.id == number
        )
        request = requests.get(number) or next(siblings, None)
        if request is None:
            raise UnknownRequestError(f"request {number} is neither pending nor running: unknown id, or it has ended")
        return request

    def _count(self, **more: int) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})


def _together(request: RequestState) -> list[RequestState]:
    """A request and the other answers to its prompt that have begun and not ended."""
    return [request] if request.siblings is None else list(request.siblings.running)


def _plan_again(job: PrefillJob) -> None:
    """Plan a job again without the segments that are known to be lost."""
    while (lost := job.lost) is not None:  # read once: a late segment may arrive in between
        job.plan_without(lost)


def _done(job: PrefillJob, tokens: int) -> int:
    """The work done of a piece, as tokens through all layers: part of it if the pass was left between two layers."""
    return tokens if job.open_pass is None else round(tokens * job.open_pass.run.part_done)
