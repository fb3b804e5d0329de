"""The step loop of a batching engine: admit, choose, run, deliver. One thread's, and without a thread of its own."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from chunkweave.conversation.answer import Durations, StreamEvent
from chunkweave.conversation.prepare import PreparedRequest, RequestPreparer
from chunkweave.conversation.turns import TurnUnderWay
from chunkweave.engine.decode import DecodeState
from chunkweave.engine.prefill import PrefillJob, PrefillOptions
from chunkweave.engine.request_state import RequestState, RequestStatus
from chunkweave.engine.runner import Decoding, Runner
from chunkweave.engine.scheduler import BatchingStats, Scheduler, StepGroup
from chunkweave.engine.shadow import ShadowChecks
from chunkweave.errors import (
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

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class CoreParts:
    """What an engine's step loops work with. Woven answers are offered to `checks`, which outlive a loop."""

    preparer: RequestPreparer
    runner: Runner
    checks: ShadowChecks | None = None


class BatchingCore:
    """Works on many requests at once, a step at a time (RAGCache §5.2 for the order of admission).

    A step takes one token of every decoding request and as much of the prefills as its budget allows, in one flat
    batch. A prefill whose segments are still being read goes by layers, through those that have come in and as far as
    the budget allows: no step waits for a layer as long as there is other work.

    The `Scheduler` decides which requests run. A preempted request is prefilled again later: its prompt by the same
    plan, then the tokens that it had generated.

    A speculative request (RAGCache §5.3) starts before retrieval has confirmed its chunks. It yields to all others: a
    step of speculative requests is stopped between two layers when a request arrives, and made again later. So is a
    step of requests in the background alone, and any step if a tenant asks that was served less (`Scheduler.stops`).
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
        """Nothing waits yet.

        `interrupt` is asked between the layers of a step of requests that yield whether to stop it; of any other step
        `arrived` is asked for the requests that have come since it began.
        """
        self._preparer = parts.preparer
        self._runner = parts.runner
        self._config = config
        self._clock = clock
        self._interrupt = interrupt
        self._arrived = arrived
        self._checks = parts.checks
        self._scheduler = Scheduler(self._runner.store, config, preempting=self._preempting, clock=clock)
        self._planner = self._scheduler.planner
        self.pool = self._scheduler.pool
        slow = any(level.background for level in self._runner.store.levels)
        self._prefetch_bytes = config.prefetch_bytes if slow else 0
        self._counts = BatchingStats()

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._scheduler.requests)

    @property
    def can_check(self) -> bool:
        """Whether there is an answer to check in the shadow, and time for it."""
        checks = self._checks
        return checks is not None and bool(checks) and len(self._scheduler.requests) <= checks.beside

    @property
    def stats(self) -> BatchingStats:
        """A snapshot."""
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
        """Most tokens of a prompt that may grow, its answer among them: conversations are cut down to it."""
        return min(self.pool.tokens, self._config.max_prompt_tokens or self.pool.tokens)

    def fitting(self, prepared: PreparedRequest) -> PreparedRequest:
        """The request with no more tokens to generate than its KV could ever have room for. From any thread.

        Raises:
            PromptTooLongError: not even its prompt has, or it is longer than the configuration allows.
        """
        most = self._config.max_prompt_tokens
        if most is not None and len(prepared.prompt) > most:
            raise PromptTooLongError(
                f"the prompt has {len(prepared.prompt)} tokens, and at most {most} are allowed; "
                f"send fewer or smaller chunks"
            )
        room = self.pool.tokens - len(prepared.prompt) - len(prepared.closing)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prepared.prompt)} tokens, but the engine's KV memory holds {self.pool.tokens}; "
                f"send fewer or smaller chunks, or raise kv_tokens"
            )
        return replace(prepared, room=min(prepared.room, room))

    def submit(self, request: RequestState) -> None:
        """Let a new request wait, whose `prepared` is one that `fitting` gave. Ids are never used twice."""
        self._scheduler.add(request)

    def confirm(self, number: int) -> None:
        """A speculation is wanted: from now on it is a request like others. A second time is harmless.

        Raises:
            UnknownRequestError: it neither waits nor runs.
        """
        request = self._under_way(number)
        if request.speculative:
            self._scheduler.confirm(request)
            request.waits_since_s = self._clock()
            self.count(request)

    def count(self, request: RequestState) -> None:
        """Tell the store what a request that is asked for has looked up and used: once, when its first plan is made.

        A speculation is counted when it is confirmed, be it under way or ended.
        """
        if request.use is not None and not request.counted:
            request.counted = True
            self._runner.store.note_request(request.use)

    def abort(self, number: int) -> None:
        """End a request without an answer. The parts that it has computed whole by then stay stored.

        Raises:
            UnknownRequestError: it neither waits nor runs.
        """
        request = self._under_way(number)
        self._count(aborted=1)
        self._end(request, RequestAbortedError(f"request {number} was aborted"))

    def close(self) -> None:
        """Abort whatever is under way; nothing can be submitted afterwards."""
        for number in list(self._scheduler.requests):
            self.abort(number)
        self._scheduler.queue.close()

    def step(self) -> None:
        """One round: end what is overdue, admit what fits, and run what the budget allows."""
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

    def check_shadow(self) -> None:
        """One piece of a shadow check, if there is one; whatever comes of it, no request ends by it."""
        if self._checks is not None:
            self._checks.step(self.pool)

    def check(self) -> None:
        """Audit requests, blocks and caches.

        Raises:
            StoreError: a request that does not run holds blocks, or a cache is larger than its blocks.
        """
        self._scheduler.check()

    def _expire(self) -> None:
        now, timeout_s = self._clock(), self._config.queue_timeout_s
        for request in list(self._scheduler.requests.values()):
            not_begun = request.admitted_s is None and not request.yields
            if request.deadline_s is not None and now > request.deadline_s:
                why = f"was not answered within {now - request.arrived_s:.3g} s"
            elif timeout_s is not None and not_begun and now - request.waits_since_s > timeout_s:
                why = f"waited {now - request.arrived_s:.3g} s without being begun"
            else:
                continue
            self._count(timed_out=1)
            self._end(request, DeadlineError(f"request {request.id} {why}"))

    @property
    def _prefetched_bytes(self) -> int:
        """Bytes that are taken for requests that wait; those of running ones are taken anyway. From any thread."""
        waiting = (one.prefetch for one in tuple(self._scheduler.requests.values()) if not one.runs)
        return sum(prefetch.nbytes for prefetch in waiting if prefetch is not None)

    def _look_ahead(self) -> None:
        """Begin to read, from slow levels, what the next requests will need (Cache-Craft §3.5), as far as it fits."""
        for request in self._scheduler.queue.next(self._config.prefetch_requests):
            left = self._prefetch_bytes - self._prefetched_bytes
            if left <= 0:
                return
            if not request.looked_ahead:
                request.looked_ahead = True
                self._prefetch(request, left)

    def _prefetch(self, request: RequestState, max_bytes: int) -> None:
        prepared = request.prepared
        try:
            prefetch = self._runner.prefetch(prepared.prompt, prepared.method, max_bytes=max_bytes)
        except Exception:  # whatever it is, the request's own prefill finds out, and it alone pays for it
            logger.warning("nothing is read ahead for request %d", request.id, exc_info=True)
            return
        if prefetch.nbytes:
            request.prefetch = prefetch
        else:
            prefetch.close()

    def _start(self, request: RequestState) -> None:
        prompt = request.prepared.prompt
        room = self.pool.capacity(request) - len(prompt)
        kept = request.prepared.kept
        options = PrefillOptions(
            new_tokens=room,
            capture=kept.kv,
            profiles=kept.profiles,
            generated=request.generated,
            plan=request.plan,
            prefetched=request.prefetch,
            history=request.prepared.history,
            owner=request.tenant,
            mean=request.prepared.mean,
        )
        request.passed_over = 0
        request.job = self._runner.start(prompt, self._method(request), options)
        request.use = request.use or request.job.use
        if not request.yields:
            self.count(request)

    def _method(self, request: RequestState) -> ReuseMethod:
        """The method of a request that is admitted; others would pay for what hides the loading of this one."""
        others = (one for one in self._scheduler.requests.values() if one is not request and not one.yields)
        alone = next(others, None) is None
        return request.prepared.raised(self._runner.loading(request.prefetch) if alone else None)

    def _groups(self) -> list[StepGroup]:
        """What this step runs, after prefills whose segments are known to be lost were planned again."""
        for request in self._scheduler.running:
            if request.job is not None:
                self._guarded([request], partial(_plan_again, request.job))
        return self._scheduler.groups()

    def _preempting(self, request: RequestState) -> None:
        self._count(preempted=1, speculations_preempted=int(request.speculative))
        if request.speculative and request.decode is None:
            request.admitted_s = None  # it begins anew: its time until now is no part of its answer's

    def _store_parts(self, request: RequestState) -> None:
        """Store each part as soon as its last layer is done: others may wait for it, and this prefill be given up."""
        if request.job is not None:
            try:
                self._runner.store_computed(request.job)
            except Exception:  # what cannot be stored costs time later, and nothing now
                logger.exception("parts that request %d computed are not stored", request.id)

    def _compute(self, group: StepGroup) -> None:
        decodes = [
            Decoding(request.decode.prefilled.cache, request.decode.pending, request.decode.position)
            for request in group.decoding
            if request.decode is not None
        ]
        pieces = [(request.job, tokens) for request, tokens in group.pieces if request.job is not None]
        yields = all(request.yields for request in group.requests)
        interrupt = self._interrupt if yields else lambda: self._stopping() is not None
        late, since_s = self._planner.late, self._clock()
        try:
            if group.by_layers:
                [(job, tokens)] = pieces
                pieces, logits = (
                    [(job, self._runner.step_layers(job, tokens, interrupt=interrupt, late=late))],
                    _NOTHING,
                )
            else:
                logits = self._runner.step(decodes, pieces, interrupt=interrupt, late=late)
                pieces = [(job, _done(job, tokens)) for job, tokens in pieces]
        except PassInterrupted as stopped:
            self._count(interrupted=1)
            if not yields and (coming := self._stopping()) is not None:
                coming.displaced = stopped.part * (len(decodes) + sum(tokens for _, tokens in pieces))
            return
        except SegmentLost as lost:
            [(job, _)] = pieces
            job.go_on_without(lost)
            return
        done = [(request, tokens) for (request, _), (_, tokens) in zip(group.pieces, pieces, strict=True)]
        group = replace(group, pieces=done)
        self._scheduler.computed(group)
        self._count(decoded_tokens=len(decodes), prefilled_tokens=sum(tokens for _, tokens in pieces))
        for request, own in zip(group.decoding, logits, strict=True):
            self._guarded([request], partial(self._advance, request, own))
        if self._planner.holds:
            self._runner.wait()
            self._planner.ran(group, since_s)
        for request, _ in group.pieces:
            if request.job is not None and request.job.prefilled is not None:
                self._guarded([request], partial(self._prefilled, request))
            else:
                self._store_parts(request)

    def _stopping(self) -> RequestState | None:
        """The request that has come since the step began and stops it."""
        return next((one for one in tuple(self._arrived()) if self._scheduler.stops(one)), None)

    def _prefilled(self, request: RequestState) -> None:
        """A prefill is done: choose the next token, and store what is new unless this is the second time."""
        assert request.job is not None, "a prefilled request has a job"
        prefilled = request.job.prefilled
        assert prefilled is not None, "the job is done"
        request.stop_reading()
        request.status, request.last_token_s = RequestStatus.DECODING, self._clock()
        if request.decode is not None:
            if prefilled.lease is not None:
                prefilled.lease.release()  # nothing is stored a second time
            request.decode.go_on_with(prefilled)
            self._advance(request, prefilled.logits)
            return
        decode = DecodeState(request.prepared, prefilled, self._preparer.builder.tokenizer, self._runner.store)
        approximate = any(part.kv_source is KVSource.REUSED for part in prefilled.plan.parts)
        request.plan = prefilled.plan if approximate else None
        decode.advance(prefilled.logits)
        request.decode, request.first_token_s = decode, self._clock()
        self._show(request)
        try:
            self._runner.store_new(prefilled)
        except Exception:  # what cannot be stored costs time later, and this request nothing
            logger.exception("what request %d computed is not stored", request.id)
        decode.without_captures()
        self._finish_if_done(request)

    def _advance(self, request: RequestState, logits: torch.Tensor) -> None:
        assert request.decode is not None, "a decoding request has a token"
        request.decode.advance(logits)
        self._show(request)
        self._finish_if_done(request)

    def _show(self, request: RequestState) -> None:
        assert request.decode is not None, "a request with text has a token"
        text = request.decode.text
        request.deliver(StreamEvent(text[request.shown :]))
        request.shown = len(text)

    def _finish_if_done(self, request: RequestState) -> None:
        decode = request.decode
        if decode is None or not decode.done:
            return
        rest = decode.finish()
        try:
            if request.prepared.turn is not None:
                self._end_turn(request.prepared.turn, decode)
        except Exception:  # what cannot be stored costs time in the conversation's next turn
            logger.exception("what request %d said is not stored", request.id)
        assert request.admitted_s is not None, "a running request was admitted"
        durations = Durations(
            ttft_s=request.first_token_s - request.arrived_s,
            decode_s=self._clock() - request.first_token_s,
            queue_s=request.admitted_s - request.arrived_s,
        )
        self._preparer.answered(request.prepared, request.prepared.arranged)
        answer = decode.answer(self._runner.model.geometry, durations)
        self._count(finished=1)
        self._end(request, StreamEvent(rest, answer, decode.prefilled.prompt))
        if self._checks is not None and request.prepared.mean is None:
            self._checks.offer(decode, greedy=request.prepared.request.sampling.greedy)

    def _end_turn(self, turn: TurnUnderWay, decode: DecodeState) -> None:
        """Keep a complete answer for the conversation's turns to come: its tokens, and their KV in the store."""
        turns, prefilled = self._preparer.turn_builder, decode.prefilled
        said = turns.said(turn, prefilled.prompt, decode.token_ids)
        try:
            self._runner.store_answer(prefilled, said)
        finally:  # what cannot be stored is computed again; what was said stays said
            turns.end(turn, prefilled.prompt, said, decode.history)

    def _guarded(self, requests: Sequence[RequestState], work: Callable[[], None]) -> None:
        """Do `work` for these requests; if it fails, each of them is tried once more, and apart from all others.

        The culprit need not be known: of those that ran together, only the culprit fails again.
        """
        try:
            if len(requests) == 1:
                requests[0].context.copy().run(work)  # a copy, since one piece of work may be part of another
            else:
                work()
        except UsageError as error:
            for request in requests:
                self._give_up(request, error)
        except Exception as error:  # the boundary between one request's fault and the others
            logger.warning("%d requests failed together", len(requests), exc_info=True)
            for request in requests:
                self._try_again(request, error)

    def _try_again(self, request: RequestState, error: Exception) -> None:
        if request.apart:
            failed = RequestFailedError(f"request {request.id} failed twice, the second time with {error!r}")
            failed.__cause__ = error
            self._give_up(request, failed)
        else:
            request.apart = True
            self._count(tried_again=1)
            self._scheduler.put_back(request)

    def _give_up(self, request: RequestState, error: ChunkweaveError) -> None:
        self._count(failed=1)
        self._end(request, error)

    def _end(self, request: RequestState, last: StreamEvent | Exception) -> None:
        self._scheduler.end(request)
        self._preparer.abandon(request.prepared)
        request.deliver(last)

    def _under_way(self, number: int) -> RequestState:
        request = self._scheduler.requests.get(number)
        if request is None:
            raise UnknownRequestError(f"request {number} is not under way: it never was, or it has ended")
        return request

    def _count(self, **more: int) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})


def _plan_again(job: PrefillJob) -> None:
    """Let a job go on without the segments that are known to be lost."""
    while (lost := job.lost) is not None:  # asked once: what was late may have come in a moment later
        job.go_on_without(lost)


def _done(job: PrefillJob, tokens: int) -> int:
    """What was computed of a piece, as tokens through all layers: a part of it if others' answers were held by it."""
    return tokens if job.under_way is None else round(tokens * job.under_way.run.part_done)
