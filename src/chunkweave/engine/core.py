"""The step loop of a batching engine: admit, choose, run, deliver. One thread's, and without a thread of its own."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from chunkweave.engine.answer import StreamEvent
from chunkweave.engine.batching_stats import BatchingStats
from chunkweave.engine.look_ahead import LookAhead
from chunkweave.engine.prefill_job import PrefillJob, PrefillOptions
from chunkweave.engine.preparation import Preparation, Prepared
from chunkweave.engine.runner import Decoding
from chunkweave.engine.scheduler import Scheduler
from chunkweave.engine.shadow import ShadowChecks
from chunkweave.engine.step_group import StepGroup
from chunkweave.engine.ticket import Deliver, Ticket
from chunkweave.errors import (
    ChunkweaveError,
    DeadlineError,
    PromptTooLongError,
    RequestAbortedError,
    RequestFailedError,
    StoreError,
    UnknownRequestError,
    UsageError,
)
from chunkweave.fusion.loop import PassInterrupted
from chunkweave.kv.segment import SegmentLost
from chunkweave.planning.plan import KVSource
from chunkweave.scheduling.budget import BatchingConfig

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class BatchingCore:
    """Works on many requests at once, a step at a time (DESIGN §3.6; RAGCache §5.2 for who is admitted next).

    A step takes one token of every decoding request and as much of the prefills as its budget allows, in one flat
    batch. A prefill whose segments are still being read waits for them as long as there is other work.

    The `Scheduler` says who runs. A request that it preempts has its prompt prefilled by the same plan later, and its
    tokens behind it.

    A speculation (RAGCache §5.3) is a request that nobody has asked for yet. It delays nobody but by the layer that is
    under way: it yields to all others, and its step is stopped when a request arrives, and made again later.
    """

    def __init__(
        self,
        preparation: Preparation,
        config: BatchingConfig,
        *,
        clock: Clock = time.perf_counter,
        interrupt: Callable[[], bool] | None = None,
    ) -> None:
        """Nothing waits yet. `interrupt` is asked between the layers of a step of speculations whether to stop it."""
        self._preparation = preparation
        self._runner = preparation.runner
        self._config = config
        self._clock = clock
        self._interrupt = interrupt
        self._scheduler = Scheduler(self._runner.store.tree, config, preempting=self._preempting)
        self.pool = self._scheduler.pool
        self._look_ahead = LookAhead(self._runner, max_bytes=config.prefetch_bytes)
        self._tickets: dict[int, Ticket] = {}
        self._counts = BatchingStats()
        shadow = preparation.shadow
        self._checks = None if shadow is None else ShadowChecks(self._runner, shadow, self.pool)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._tickets)

    @property
    def running(self) -> frozenset[int]:
        """Ids of the requests that were admitted and have not ended."""
        return frozenset(ticket.id for ticket in self._scheduler.running)

    @property
    def can_check(self) -> bool:
        """Whether there is an answer to check in the shadow, and time for it."""
        checks = self._checks
        return checks is not None and bool(checks) and len(self._tickets) <= checks.beside

    @property
    def stats(self) -> BatchingStats:
        """A snapshot."""
        use, waiting, running = self.pool.use, self._scheduler.waiting, self._scheduler.running
        speculations_running = sum(ticket.speculative for ticket in running)
        return replace(
            self._counts,
            waiting=len(waiting),
            running=len(running),
            blocks=use.blocks,
            blocks_reserved=use.reserved,
            pending=len(waiting) + sum(ticket.job is not None or ticket.running is None for ticket in running),
            speculating=waiting.speculations + speculations_running,
            speculations_running=speculations_running,
            prefetched_bytes=self._look_ahead.nbytes,
        )

    @property
    def most_tokens(self) -> int:
        """Most tokens of a prompt that may grow, its answer among them: conversations are cut down to it."""
        return min(self.pool.tokens, self._config.max_prompt_tokens or self.pool.tokens)

    def fitting(self, prepared: Prepared) -> Prepared:
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

    def submit(
        self,
        number: int,
        prepared: Prepared,
        deliver: Deliver,
        *,
        arrived_s: float,
        deadline_s: float | None,
        speculative: bool = False,
    ) -> None:
        """Let a request of a new id `number` wait, that `arrived_s` then and is to be answered by `deadline_s`.

        `prepared` is one that `fitting` gave. A `speculative` one yields to all others until `confirm`.
        """
        ticket = Ticket(number, prepared, deliver, arrived_s, deadline_s, speculative=speculative)
        self._scheduler.add(ticket)
        self._tickets[number] = ticket

    def confirm(self, number: int) -> None:
        """A speculation is wanted: from now on it is a request like others. A second time is harmless.

        Raises:
            UnknownRequestError: it neither waits nor runs.
        """
        ticket = self._under_way(number)
        if ticket.speculative:
            self._scheduler.confirm(ticket)
            ticket.waits_since_s = self._clock()

    def abort(self, number: int) -> None:
        """End a request without an answer. What a speculation has computed whole by then stays stored.

        Raises:
            UnknownRequestError: it neither waits nor runs.
        """
        ticket = self._under_way(number)
        self._count(aborted=1)
        self._keep(ticket)
        self._end(ticket, RequestAbortedError(f"request {number} was aborted"))

    def close(self) -> None:
        """Abort whatever is under way; nothing can be submitted afterwards."""
        for number in list(self._tickets):
            self.abort(number)
        self._scheduler.close()
        if self._checks is not None:
            self._checks.close()

    def step(self) -> None:
        """One round: end what is overdue, admit what fits, and run what the budget allows."""
        self._count(steps=1)
        self._expire()
        for ticket in self._scheduler.admit():
            self._begin(ticket)
        if self._look_ahead.has_room:
            self._look_ahead.look(self._scheduler.waiting.next(self._config.prefetch_requests))
        for group in self._groups():
            self._run(group)

    def check_shadow(self) -> None:
        """One piece of a shadow check, if there is one; whatever comes of it, no request ends by it."""
        if self._checks is not None:
            self._checks.step()

    def check(self) -> None:
        """Audit blocks and caches.

        Raises:
            StoreError: blocks are held by somebody who does not run, or a cache is larger than its blocks.
        """
        self._scheduler.check()
        if len(self._scheduler.waiting) + len(self._scheduler.running) != len(self._tickets):
            raise StoreError("a request neither waits nor runs, or does both")

    def _expire(self) -> None:
        now = self._clock()
        for ticket in list(self._tickets.values()):
            waited = now - ticket.arrived_s
            if ticket.deadline_s is not None and now > ticket.deadline_s:
                self._count(timed_out=1)
                self._end(ticket, DeadlineError(f"request {ticket.id} was not answered within {waited:.3g} s"))
            elif self._was_not_begun(ticket, now):
                self._count(timed_out=1)
                self._end(ticket, DeadlineError(f"request {ticket.id} waited {waited:.3g} s without being begun"))

    def _was_not_begun(self, ticket: Ticket, now: float) -> bool:
        timeout_s = self._config.queue_timeout_s
        if timeout_s is None or ticket.admitted_s is not None or ticket.speculative:
            return False
        return now - ticket.waits_since_s > timeout_s

    def _begin(self, ticket: Ticket) -> None:
        if ticket.admitted_s is None:
            ticket.admitted_s = self._clock()
        self._guarded([ticket], partial(self._start, ticket))

    def _start(self, ticket: Ticket) -> None:
        prompt = ticket.prepared.prompt
        room = self.pool.capacity(ticket) - len(prompt)
        ticket.prefetch = self._look_ahead.take(ticket)
        options = PrefillOptions(
            new_tokens=room,
            generated=ticket.generated,
            plan=ticket.plan,
            prefetched=ticket.prefetch,
            history=ticket.prepared.history,
        )
        ticket.passed_over = 0
        ticket.job = self._runner.start(prompt, ticket.prepared.method, options)

    def _groups(self) -> list[StepGroup]:
        """What this step runs, once jobs know which of their segments are lost."""
        for ticket in self._scheduler.running:
            if ticket.job is not None:
                self._guarded([ticket], partial(_plan_again, ticket.job))
        return self._scheduler.groups()

    def _preempting(self, ticket: Ticket) -> None:
        self._count(preempted=1, speculations_preempted=int(ticket.speculative))
        if ticket.speculative and ticket.running is None:
            ticket.admitted_s = None  # it begins anew, and what it did until now is no part of its answer
        self._keep(ticket)

    def _keep(self, ticket: Ticket) -> None:
        """Store what a speculation that is given up has computed whole: an overlap with what comes next pays."""
        if ticket.speculative and ticket.job is not None:
            try:
                self._runner.store_computed(ticket.job)
            except Exception:  # what cannot be stored costs time later, and nothing now
                logger.exception("what speculation %d computed is not stored", ticket.id)

    def _run(self, group: StepGroup) -> None:
        self._guarded(group.tickets, partial(self._compute, group))

    def _compute(self, group: StepGroup) -> None:
        decodes = [
            Decoding(ticket.running.prefilled.cache, ticket.running.pending, ticket.running.position)
            for ticket in group.decoding
            if ticket.running is not None
        ]
        pieces = [(ticket.job, tokens) for ticket, tokens in group.pieces if ticket.job is not None]
        speculative = all(ticket.speculative for ticket in group.tickets)
        try:
            if speculative and self._interrupt is not None:
                logits = self._runner.step(decodes, pieces, interrupt=self._interrupt)
            else:
                logits = self._runner.step(decodes, pieces)
        except PassInterrupted:
            self._count(interrupted=1)
            return
        except SegmentLost as lost:
            [(job, _)] = pieces
            job.go_on_without(lost)
            return
        self._count(decoded_tokens=len(decodes), prefilled_tokens=sum(tokens for _, tokens in pieces))
        for ticket, own in zip(group.decoding, logits, strict=True):
            self._guarded([ticket], partial(self._advance, ticket, own))
        for ticket, _ in group.pieces:
            if ticket.job is not None and ticket.job.prefilled is not None:
                self._guarded([ticket], partial(self._prefilled, ticket))

    def _prefilled(self, ticket: Ticket) -> None:
        """A prefill is done: choose the next token, and store what is new unless this is the second time."""
        assert ticket.job is not None, "who was prefilled has a job"
        prefilled = ticket.job.prefilled
        assert prefilled is not None, "the job is done"
        ticket.stop_reading()
        if ticket.running is not None:
            ticket.running.go_on_with(prefilled)
            self._advance(ticket, prefilled.logits)
            return
        assert ticket.admitted_s is not None, "who runs was admitted"
        queue_s = ticket.admitted_s - ticket.arrived_s
        running = self._preparation.running(ticket.prepared, prefilled, queue_s=queue_s)
        approximate = any(part.kv_source is KVSource.REUSED for part in prefilled.plan.parts)
        ticket.plan = prefilled.plan if approximate else None
        running.advance(prefilled.logits)
        ticket.running, ticket.first_token_s = running, self._clock()
        running.ttft_s = ticket.first_token_s - ticket.arrived_s
        self._show(ticket)
        try:
            self._runner.store_new(prefilled)
        except Exception:  # what cannot be stored costs time later, and this request nothing
            logger.exception("what request %d computed is not stored", ticket.id)
        running.without_captures()
        self._finish_if_done(ticket)

    def _advance(self, ticket: Ticket, logits: torch.Tensor) -> None:
        assert ticket.running is not None, "who decodes has a token"
        ticket.running.advance(logits)
        self._show(ticket)
        self._finish_if_done(ticket)

    def _show(self, ticket: Ticket) -> None:
        assert ticket.running is not None, "who has text has a token"
        text = ticket.running.text
        ticket.deliver(StreamEvent(text[ticket.shown :]))
        ticket.shown = len(text)

    def _finish_if_done(self, ticket: Ticket) -> None:
        running = ticket.running
        if running is None or not running.done:
            return
        rest = running.finish()
        try:
            self._preparation.end(ticket.prepared, running)
        except Exception:  # what cannot be stored costs time in the conversation's next turn
            logger.exception("what request %d said is not stored", ticket.id)
        answer = running.answer(self._runner.model.geometry, self._clock() - ticket.first_token_s)
        self._count(finished=1)
        self._end(ticket, StreamEvent(rest, answer))
        if self._checks is not None:
            self._checks.offer(running, greedy=ticket.prepared.request.sampling.greedy)

    def _guarded(self, tickets: Sequence[Ticket], work: Callable[[], None]) -> None:
        """Do `work` for these requests; if it fails, each of them is tried once more, and apart from all others.

        What fails need not be known: of those that were together only the culprit fails again.
        """
        try:
            if len(tickets) == 1:
                tickets[0].context.copy().run(work)  # a copy, since one piece of work may be part of another
            else:
                work()
        except UsageError as error:
            for ticket in tickets:
                self._give_up(ticket, error)
        except Exception as error:  # the boundary between one request's fault and the others
            logger.warning("%d requests failed together", len(tickets), exc_info=True)
            for ticket in tickets:
                self._try_again(ticket, error)

    def _try_again(self, ticket: Ticket, error: Exception) -> None:
        if ticket.apart:
            failed = RequestFailedError(f"request {ticket.id} failed twice, the second time with {error!r}")
            failed.__cause__ = error
            self._give_up(ticket, failed)
        else:
            ticket.apart = True
            self._count(tried_again=1)
            self._scheduler.put_back(ticket)

    def _give_up(self, ticket: Ticket, error: ChunkweaveError) -> None:
        self._count(failed=1)
        self._end(ticket, error)

    def _end(self, ticket: Ticket, last: StreamEvent | Exception) -> None:
        if not self._scheduler.end(ticket):
            ticket.prefetch = self._look_ahead.take(ticket)
            ticket.stop_reading()
        del self._tickets[ticket.id]
        self._preparation.abandon(ticket.prepared)
        ticket.deliver(last)

    def _under_way(self, number: int) -> Ticket:
        ticket = self._tickets.get(number)
        if ticket is None:
            raise UnknownRequestError(f"request {number} is not under way: it never was, or it has ended")
        return ticket

    def _count(self, **more: int) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})


def _plan_again(job: PrefillJob) -> None:
    """Let a job go on without the segments that are known to be lost."""
    while job.lost is not None:
        job.go_on_without(job.lost)
