"""One answer of vLLM: its attempts on replicas, its speculative prefill, and its end."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from chunkweave.conversation.answer import AnswerEnd, Choice, Durations, WholeChoices
from chunkweave.conversation.prepare import PreparedRequest, RequestPreparer
from chunkweave.errors import ChunkweaveError, DeadlineError, RequestAbortedError
from chunkweave.planning.method import reuses_nothing
from chunkweave.planning.method_choice import FIELD
from chunkweave.types import CacheUse
from chunkweave.vllm.request import to_wire
from chunkweave_server.backend import Submission
from chunkweave_server.errors import HttpError
from chunkweave_server.vllm_backend.comparisons import VllmComparisons
from chunkweave_server.vllm_backend.fleet import Fleet, Placed, Replica, ReplicaBusyError
from chunkweave_server.vllm_backend.parsing import AnswerForms, AnswerParser
from chunkweave_server.vllm_backend.reports import (
    ReportInbox,
    prefill_report,
    reuse_report,
    shown_report,
)
from chunkweave_server.vllm_backend.upstream import UpstreamFailedError, UpstreamLostError, failed_reply

logger = logging.getLogger(__name__)

_REPORT_S = 2.0
TRIES = 2


@dataclass(slots=True)
class AnswerContext:
    """State shared by all answers. `retries` counts second attempts."""

    preparer: RequestPreparer
    fleet: Fleet
    inbox: ReportInbox | None
    comparisons: VllmComparisons | None
    deadline_s: float | None
    first_token_s: float | None = None
    retries: int = 0
    forms: AnswerForms = field(default_factory=AnswerForms)


@dataclass(frozen=True, slots=True)
class VllmEvent:
    """Pieces of the choices of an answer; the last event has the end."""

    choices: Sequence[Choice]
    end: AnswerEnd | None = None


class VllmAnswer:
    """The stream of one answer from vLLM. Close it by `aclose`. Used in the event loop's thread only.

    A speculative answer first runs a completion of one token. This leaves the prompt's KV in vLLM's prefix cache, where
    only a request with the same tokens, chunks and method finds it: the confirmed answer. If the speculative prefill
    fails, the confirmed answer is computed normally. With a method that reuses nothing, there is no speculative
    prefill.
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
        """`body` is the body for vLLM without the prompt, `parsing` the chat for its parsers (None: no parsing)."""
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
        ahead = speculative and not reuses_nothing(prepared.choice.made)
        self._ahead = asyncio.create_task(self._prefill(), name="prefill ahead") if ahead else None

    @property
    def begun(self) -> bool:
        """Whether the first token has arrived, the speculative prefill is done (before `confirm`), or it has ended."""
        prefilled = not self._confirmed and self._ahead is not None and self._ahead.done()
        return self._first_s is not None or self._ended or prefilled

    @property
    def failed(self) -> bool:
        """Whether it, or its speculative prefill, ended without a result."""
        ahead = self._ahead
        lost = ahead is not None and ahead.done() and (ahead.cancelled() or ahead.result() is None)
        return (self._ended and not self._answered) or lost

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> VllmEvent:
        """The next pieces.

        Raises:
            HttpError: vLLM refused the request or failed at it, or both attempts were lost.
            ChunkweaveError: the queue is full, the deadline has passed, or the server stops.
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
        """Turn a speculative answer into a normal one."""
        if not self._confirmed:
            self._context.preparer.confirm(self._prepared)
        self._confirmed = True

    def abort(self) -> None:
        """End it now; its reader gets `RequestAbortedError`."""
        self._aborted = True
        if self._limit is not None and not self._limit.expired():
            with suppress(RuntimeError):  # no reader now: the next read finds no time left
                self._limit.reschedule(asyncio.get_running_loop().time())

    async def aclose(self) -> None:
        """End it if it runs, and free its queue entries. Idempotent."""
        self._ended = True
        await self._events.aclose()
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.wait([self._ahead])
        if self._placed is not None:
            self._context.fleet.leave(self._placed)

    async def _all(self) -> AsyncGenerator[VllmEvent, None]:
        """The events, from a second attempt if the first was lost or late before its first token (RAGCache §6).

        The paper continues a request that fails later from stored KV; here its stream ends with an error. The second
        attempt reuses what its replica has stored, and may last until the deadline.
        """
        failed: Replica | None = None
        limit_s = self._context.first_token_s
        ahead = await self._prefilled_ahead()
        for last in (attempt == TRIES - 1 for attempt in range(TRIES)):
            try:
                async for event in self._attempt(avoid=failed, at=ahead, within_s=None if last else limit_s):
                    yield event
                if self._first_s is None:
                    raise HttpError(502, "vLLM returned no token", code="replica_lost")
                return
            except (UpstreamLostError, UpstreamFailedError) as error:
                logger.warning("a request was not answered: %s", error)
                if self._placed is not None:
                    await _refuse_if_up(self._placed.replica, error)
                if last or self._first_s is not None:
                    message = "the vLLM server of this request is gone; see its log"
                    raise HttpError(502, message, code="replica_lost") from error
                failed, ahead = None if self._placed is None else self._placed.replica, None
                if isinstance(error, ReplicaBusyError):
                    failed = error.replica
                self._context.retries += 1
                if limit_s is not None:
                    await self._context.fleet.until_another(failed, limit_s)

    async def _prefilled_ahead(self) -> Replica | None:
        """Where the speculative prefill ran; None if there was none, it failed, or it takes too long."""
        if self._ahead is None:
            return None
        try:
            async with asyncio.timeout(self._context.first_token_s):
                return await asyncio.shield(self._ahead)
        except TimeoutError:
            self._ahead.cancel()
            return None

    async def _attempt(
        self, *, avoid: Replica | None, at: Replica | None, within_s: float | None
    ) -> AsyncGenerator[VllmEvent, None]:
        fleet = self._context.fleet
        prepared = self._prepared
        placing = fleet.place(prepared, avoid=avoid, at=at, tenant=self._tenant, within_s=within_s)
        self._placed = placed = await placing
        self._queued_s = time.perf_counter() - self._arrived_s
        request_id = uuid.uuid4().hex
        try:
            body = {**self._body, **_prompt(prepared, prepared.room)}
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
        stop_ids = set(self._body["stop_token_ids"])
        upstream = placed.replica.upstream
        ids = self._prepared.prompt.token_ids
        return AnswerParser(upstream, ids, self._parsing, stop_ids=stop_ids, stream=self._streamed)

    async def _prefill(self) -> Replica | None:
        """Run the speculative prefill; returns where it ran, None if it failed."""
        fields: dict[str, Any] = {name: self._body[name] for name in ("model", "cache_salt") if name in self._body}
        try:
            replica = await compute_ahead(self._context, self._prepared, fields, tenant=self._tenant)
            self._prefilled_s = time.perf_counter()
        except (ChunkweaveError, HttpError) as error:
            logger.debug("a speculative prefill failed: %s", error)
            return None
        except Exception:  # a failed speculation must not fail the answer
            logger.exception("a speculative prefill failed")
            return None
        return replica

    async def _conclude(self, placed: Placed, report_id: str | None) -> AnswerEnd:
        """End a complete answer: wait for its report, update fleet, conversation and comparisons."""
        context = self._context
        choice = self._whole.choices[0]
        reported = None
        if report_id is not None and context.inbox is not None:
            reported = await context.inbox.report(report_id, _REPORT_S)
        now = time.perf_counter()
        arrived_s = self._arrived_s
        first_s = now if self._first_s is None else self._first_s
        durations = Durations(first_s - arrived_s, now - first_s, self._queued_s)
        new_tokens = int(self._usage.get("completion_tokens") or len(choice["token_ids"]))
        prefill = prefill_report(self._prepared, reported, self._usage)
        report = reuse_report(self._prepared, prefill, durations, new_tokens)
        context.fleet.served(placed)
        context.preparer.answered(self._prepared)
        report_fields = {**shown_report(report, prefill, reported), "replica": placed.replica.name}
        finish_reason = str(choice.get("finish_reason") or "stop")
        self._answered = True
        if context.comparisons is not None and report.reused_tokens:
            context.comparisons.offer(self._prepared, self._body, choice)
        return AnswerEnd(
            report, report_fields, prefill.cached_tokens, finish_reason, self._prefilled_s, self._prepared.prompt
        )

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
) -> Replica:
    """Prefill a prompt without an answer, `at` that replica if it is up; returns the replica that did.

    `body` has the fields `model` and `cache_salt` for vLLM.

    Raises:
        ChunkweaveError, HttpError: vLLM did not compute it.
    """
    fleet = context.fleet
    placed = await fleet.place(prepared, at=at, tenant=tenant)
    try:
        whole = {**body, "temperature": 0, "stream": True, **_prompt(replace(prepared, counts_as_request=False), 1)}
        async with aclosing(placed.replica.upstream.complete(whole, uuid.uuid4().hex)) as stream:
            async for _ in stream:
                pass
        fleet.served(placed)
        return placed.replica
    except (UpstreamLostError, UpstreamFailedError) as error:
        await _refuse_if_up(placed.replica, error)
        raise UpstreamLostError(str(error)) from error
    finally:
        fleet.leave(placed)


async def _refuse_if_up(replica: Replica, error: UpstreamLostError | UpstreamFailedError) -> None:
    """Refuse a request that a healthy replica failed at: another replica would fail at it, too.

    Raises:
        HttpError: 502, the replica is healthy.
    """
    if isinstance(error, UpstreamFailedError) and await replica.upstream.healthy():
        raise failed_reply() from error


def _prompt(prepared: PreparedRequest, max_tokens: int) -> dict[str, Any]:
    """The fields of a body with the prompt and what the plug-in needs to know of it."""
    prompt: dict[str, Any] = {"prompt": list(prepared.prompt.token_ids), "max_tokens": max_tokens}
    cache = prepared.request.cache
    params = None if cache is CacheUse.OFF else to_wire(prepared)
    if params is not None:
        return {**prompt, "kv_transfer_params": {FIELD: params}}
    if cache is not CacheUse.USE or reuses_nothing(prepared.choice.made):
        # A new salt, so that vLLM's own prefix cache is not used.
        prompt["cache_salt"] = f"{prepared.request.cache_salt}|{uuid.uuid4().hex}"
    return prompt
