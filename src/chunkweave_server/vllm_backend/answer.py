"""An answer of vLLM's on its way: a replica, once more on another one, and a prefill before its search has ended."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from chunkweave.conversation.answer import AnswerEnd, Choice, Durations, WholeChoices
from chunkweave.conversation.prepare import PreparedRequest, RequestPreparer
from chunkweave.errors import ChunkweaveError, DeadlineError, RequestAbortedError
from chunkweave.planning.method import reuses_nothing
from chunkweave.planning.method_choice import FIELD
from chunkweave.vllm.request import weave_params
from chunkweave_server.backend import Submission
from chunkweave_server.errors import HttpError
from chunkweave_server.vllm_backend.fleet import Fleet, Placed, Replica, ReplicaBusyError
from chunkweave_server.vllm_backend.parsing import AnswerForms, AnswerParser
from chunkweave_server.vllm_backend.reports import (
    ReportInbox,
    cached_tokens,
    reuse_report,
    shown_report,
    what_was_found,
)
from chunkweave_server.vllm_backend.shadow import VllmShadow
from chunkweave_server.vllm_backend.upstream import UpstreamFailedError, UpstreamLostError, failed_reply

logger = logging.getLogger(__name__)

_REPORT_S = 2.0
TRIES = 2


@dataclass(slots=True)
class AnswerContext:
    """What all answers share. `retries` counts requests that were given to a replica for the second time."""

    preparer: RequestPreparer
    fleet: Fleet
    inbox: ReportInbox | None
    shadow: VllmShadow | None
    deadline_s: float | None
    first_token_s: float | None = None
    retries: int = 0
    forms: AnswerForms = field(default_factory=AnswerForms)


@dataclass(frozen=True, slots=True)
class VllmEvent:
    """Pieces of the choices of an answer, or its end behind them all."""

    choices: Sequence[Choice]
    end: AnswerEnd | None = None


class VllmAnswer:
    """Pieces of an answer as vLLM's events bring them. Leave it by `aclose`. Belongs to the event loop's thread.

    A speculative one is a completion of one token until it is confirmed. It leaves the prompt's KV in vLLM's prefix
    cache, where only a request of the same tokens, chunks and method finds it: the one that this then becomes. If it
    fails, that is computed as if it had not been started. With a method that reuses nothing, nothing is computed ahead.
    """

    def __init__(
        self,
        context: AnswerContext,
        prepared: PreparedRequest,
        submission: Submission,
        body: dict[str, Any],
        *,
        parsing: Mapping[str, Any] | None = None,
        speculative: bool = False,
    ) -> None:
        """`body` is what vLLM is sent but for the prompt, `parsing` what its parsers read, if it is to be parsed."""
        self._answered = False
        self._context = context
        self._prepared = prepared
        self._body = body
        self._parsing = parsing
        self._arrived_s, self._tenant = submission.arrived_s, submission.tenant
        self._streamed = submission.body.stream
        self._whole = WholeChoices()
        self._placed: Placed | None = None
        self._usage: dict[str, Any] = {}
        self._queued_s = 0.0
        self._first_s: float | None = None
        self._ended = self._aborted = False
        self._limit: asyncio.Timeout | None = None
        self._events = self._all()
        self._confirmed = not speculative
        self._prefilled_s: float | None = None
        ahead = speculative and not reuses_nothing(prepared.choice.method, prepared.choice.reuse)
        self._ahead = asyncio.create_task(self._prefill(), name="prefill ahead") if ahead else None

    @property
    def begun(self) -> bool:
        """Whether its first token, or before it is confirmed its prefill, has come, or it has ended."""
        prefilled = not self._confirmed and self._ahead is not None and self._ahead.done()
        return self._first_s is not None or self._ended or prefilled

    @property
    def failed(self) -> bool:
        """Whether it ended, or its prefill did, without a result."""
        ahead = self._ahead
        lost = ahead is not None and ahead.done() and (ahead.cancelled() or ahead.result() is None)
        return (self._ended and not self._answered) or lost

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> VllmEvent:
        """The next pieces.

        Raises:
            HttpError: vLLM refused the request or failed at it, or two replicas went away.
            ChunkweaveError: too many wait, the deadline has passed, or the server stops.
        """
        try:
            async with asyncio.timeout(self._left_s()) as self._limit:
                return await anext(self._events)
        except TimeoutError:
            self._ended = True
            if self._aborted:
                raise RequestAbortedError("the server stops") from None
            raise DeadlineError("the request was not answered in time") from None
        except (ChunkweaveError, HttpError):
            self._ended = True
            raise

    def confirm(self) -> None:
        """A speculative request is wanted."""
        self._confirmed = True

    def abort(self) -> None:
        """End it now; whoever reads it gets `RequestAbortedError`."""
        self._aborted = True
        if self._limit is not None and not self._limit.expired():
            with suppress(RuntimeError):  # nobody reads now: whoever does next finds no time left
                self._limit.reschedule(asyncio.get_running_loop().time())

    async def aclose(self) -> None:
        """End it if it runs, and free its places; a second time is harmless."""
        self._ended = True
        await self._events.aclose()
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.wait([self._ahead])
        if self._placed is not None:
            self._context.fleet.leave(self._placed)
        self._context.preparer.abandon(self._prepared)

    async def _all(self) -> AsyncGenerator[VllmEvent, None]:
        """Its events, from a second attempt if the first was lost, or late, before its first token (RAGCache §6).

        The paper continues a request that fails later from stored KV; here its stream ends with an error. The second
        attempt computes what neither replica has stored by then, and has until the deadline.
        """
        failed: Replica | None = None
        limit_s = self._context.first_token_s
        ahead = await self._prefilled_ahead()
        for last in (attempt == TRIES - 1 for attempt in range(TRIES)):
            try:
                async for event in self._attempt(avoid=failed, like=ahead, within_s=None if last else limit_s):
                    yield event
                if self._first_s is None:
                    raise HttpError(502, "vLLM answered nothing", code="replica_lost")
                return
            except (UpstreamLostError, UpstreamFailedError) as error:
                logger.warning("a request was not answered: %s", error)
                if self._placed is not None:
                    await _refuse_if_up(self._placed.replica, error)
                if last or self._first_s is not None:
                    message = "the vLLM server that answered this went away; its log says why"
                    raise HttpError(502, message, code="replica_lost") from error
                failed, ahead = None if self._placed is None else self._placed.replica, None
                if isinstance(error, ReplicaBusyError):
                    failed = error.replica
                self._context.retries += 1
                if limit_s is not None:
                    await self._context.fleet.until_another(failed, limit_s)

    async def _prefilled_ahead(self) -> Placed | None:
        """Where it was prefilled while it was speculative; None if it was not, or that takes too long."""
        if self._ahead is None:
            return None
        try:
            async with asyncio.timeout(self._context.first_token_s):
                return await asyncio.shield(self._ahead)
        except TimeoutError:
            self._ahead.cancel()
            return None

    async def _attempt(
        self, *, avoid: Replica | None, like: Placed | None, within_s: float | None
    ) -> AsyncGenerator[VllmEvent, None]:
        fleet, prepared = self._context.fleet, self._prepared
        placing = fleet.place(prepared, avoid=avoid, like=like, tenant=self._tenant, within_s=within_s)
        self._placed = placed = await placing
        self._queued_s = time.perf_counter() - self._arrived_s
        request_id = uuid.uuid4().hex
        try:
            body = {**self._body, **_prompt(placed, prepared.room)}
            parser, parsing = self._parser(placed), self._parsing or {}
            if "tools" in parsing:
                body |= await self._context.forms.held(placed.replica.upstream, parsing, body)
            upstream = placed.replica.upstream
            async with aclosing(upstream.complete_begun(body, request_id, within_s=within_s)) as stream:
                async for event in stream:
                    if event.get("usage"):
                        self._usage = event["usage"]
                    if choices := event.get("choices"):
                        if self._first_s is None:
                            self._first_s = time.perf_counter()
                        self._whole.add(choices)
                        if parsed := choices if parser is None else await parser.parsed(choices):
                            yield VllmEvent(parsed)
            if self._first_s is not None:
                end = await self._conclude(placed, request_id if "kv_transfer_params" in body else None)
                yield VllmEvent((), end)
        finally:
            fleet.leave(placed, served=self._answered)

    def _parser(self, placed: Placed) -> AnswerParser | None:
        if self._parsing is None:
            return None
        stop_ids, upstream = set(self._body["stop_token_ids"]), placed.replica.upstream
        ids = placed.prompt.token_ids
        return AnswerParser(upstream, ids, self._parsing, stop_ids=stop_ids, stream=self._streamed)

    async def _prefill(self) -> Placed | None:
        """Compute one token that nobody sees; returns where, None if that failed."""
        kept: dict[str, Any] = {name: self._body[name] for name in ("model", "cache_salt") if name in self._body}
        try:
            placed = await compute_ahead(self._context, self._prepared, kept, tenant=self._tenant)
            self._prefilled_s = time.perf_counter()
        except (ChunkweaveError, HttpError) as error:
            logger.debug("nothing is computed ahead: %s", error)
            return None
        except Exception:  # a speculation must not cost an answer
            logger.exception("nothing is computed ahead")
            return None
        return placed

    async def _conclude(self, placed: Placed, report_id: str | None) -> AnswerEnd:
        """All of it has come: get its report, if there is one, and let everybody know."""
        context, choice = self._context, self._whole.choices[0]
        reported = None
        if report_id is not None and context.inbox is not None:
            reported = await context.inbox.report(report_id, _REPORT_S)
        now, arrived_s = time.perf_counter(), self._arrived_s
        first_s = now if self._first_s is None else self._first_s
        durations = Durations(first_s - arrived_s, now - first_s, self._queued_s)
        new_tokens = int(self._usage.get("completion_tokens") or len(choice["token_ids"]))
        report = reuse_report(placed, reported, self._usage, durations, new_tokens)
        cached = cached_tokens(report, reported)
        context.fleet.served(placed, what_was_found(placed, report, reported))
        self._end_turn(placed, choice)
        context.preparer.answered(self._prepared, placed.arranged)
        shown = shown_report(placed, report, reported)
        finish_reason = str(choice.get("finish_reason") or "stop")
        self._answered = True
        if context.shadow is not None and report.reused_tokens:
            context.shadow.offer(placed, self._body, choice)
        return AnswerEnd(report, shown, cached, finish_reason, self._prefilled_s, placed.prompt)

    def _end_turn(self, placed: Placed, choice: Choice) -> None:
        """Keep a complete answer for its conversation, if it is one's; what was cut away is not in its tokens then."""
        preparer, turn = self._context.preparer, self._prepared.turn
        if turn is None:
            return
        cut, tokenizer = isinstance(choice.get("stop_reason"), str), preparer.builder.tokenizer
        said = tokenizer.encode(choice["text"]) if cut else choice["token_ids"]
        while said and said[-1] in tokenizer.stop_ids:  # what ends a turn comes from the template
            said = said[:-1]
        turns = preparer.turn_builder
        turns.end(turn, placed.prompt, turns.said(turn, placed.prompt, said))

    def _left_s(self) -> float | None:
        if self._aborted:
            return 0.0
        limit_s = self._context.deadline_s
        return None if limit_s is None else max(0.0, self._arrived_s + limit_s - time.perf_counter())


async def compute_ahead(
    context: AnswerContext,
    prepared: PreparedRequest,
    body: Mapping[str, Any],
    *,
    tenant: str,
    at: Replica | None = None,
) -> Placed:
    """Have one token computed behind a prompt, which no client sees, `at` that replica if it is up; returns where.

    `body` has vLLM's fields that say whose it is: `model`, `cache_salt`.

    Raises:
        ChunkweaveError, HttpError: vLLM did not.
    """
    fleet = context.fleet
    placed = await fleet.place(prepared, like=at, counted=False, tenant=tenant)
    try:
        whole = {**body, "temperature": 0, "stream": True, **_prompt(placed, 1, asked=False)}
        async with aclosing(placed.replica.upstream.complete(whole, uuid.uuid4().hex)) as stream:
            async for _ in stream:
                pass
        fleet.served(placed, None)
        return placed
    except (UpstreamLostError, UpstreamFailedError) as error:
        await _refuse_if_up(placed.replica, error)
        raise UpstreamLostError(str(error)) from error
    finally:
        fleet.leave(placed)


async def _refuse_if_up(replica: Replica, error: UpstreamLostError | UpstreamFailedError) -> None:
    """Refuse a request that a replica failed at, if that is healthy: another one would fail at it, too.

    Raises:
        HttpError: 502.
    """
    if isinstance(error, UpstreamFailedError) and await replica.upstream.healthy():
        raise failed_reply() from error


def _prompt(placed: Placed, max_tokens: int, *, asked: bool = True) -> dict[str, Any]:
    """The part of a body that depends on where it is computed; a prefill that nobody `asked` for yet says so."""
    prompt: dict[str, Any] = {"prompt": list(placed.prompt.token_ids), "max_tokens": max_tokens}
    prepared = placed.prepared
    choice = prepared.choice
    params = weave_params(placed.prompt, choice, placed.promotion, raisable=prepared.raisable, mean=prepared.mean)
    if params is None:
        if reuses_nothing(choice.method, choice.reuse):  # else vLLM's own prefix cache would serve it
            prompt["cache_salt"] = f"{prepared.request.cache_salt}|{uuid.uuid4().hex}"
        return prompt
    return {**prompt, "kv_transfer_params": {FIELD: params if asked else {**params, "asked": False}}}
