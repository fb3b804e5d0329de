"""From a checked body to an answer that comes: chunks, prompt, a replica, once more on another one, and who is told."""

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from chunkweave.config import SamplingParams
from chunkweave.engine.request import Request
from chunkweave.errors import ChunkweaveError, DeadlineError, RequestAbortedError
from chunkweave.planning.method_choice import FIELD, MethodRequest
from chunkweave.retrieval.corpus import RetrievedChunk
from chunkweave.retrieval.indexes import usual_top_k
from chunkweave.retrieval.speculation import Found, PendingAnswer, Pipelining, Retriever, SpeculativeAnswer
from chunkweave.server.auth import Tenant
from chunkweave.server.corpora import Corpora
from chunkweave.server.errors import HttpError
from chunkweave.server.limits import Slot, TenantCounts, TenantLimits
from chunkweave.server.observability import Observer, RequestMeta
from chunkweave.server.requests import ReuseField, answer_tokens, check_documents, check_earlier, check_reuse, chunks_of
from chunkweave.server.settings import Settings
from chunkweave.server.threads import in_thread
from chunkweave.server.vllm_backend.bodies import FrontBody
from chunkweave.server.vllm_backend.fleet import Fleet, Placed, Replica
from chunkweave.server.vllm_backend.prefill_ahead import PrefillAhead, Prefilled
from chunkweave.server.vllm_backend.prompting import Prepared, Prompting, weave_params
from chunkweave.server.vllm_backend.replies import Choice, Ending, WholeChoices
from chunkweave.server.vllm_backend.reports import ReportInbox, Times, cached_tokens, reuse_report, shown_report
from chunkweave.server.vllm_backend.shadow import FrontShadow
from chunkweave.server.vllm_backend.upstream import Event, UpstreamLostError
from chunkweave.types import Chunk

logger = logging.getLogger(__name__)


_REPORT_S = 2.0
_TRIES = 2


@dataclass(slots=True, eq=False)
class Asking:
    """A request on its way: what is sent of it whichever replica gets it, and when it came."""

    tenant: Tenant
    asked: RequestMeta
    prepared: Prepared
    body: dict[str, Any]
    arrived_s: float
    found: Found | None = None
    ahead: SpeculativeAnswer[Prefilled] | None = None
    prefill: PendingAnswer[Prefilled] | None = None

    async def prefilled(self) -> Prefilled | None:
        """Wait until the chunks are prefilled, if they are being; None if they are not, or that failed."""
        if self.prefill is not None:
            with suppress(RequestAbortedError):
                async for prefilled in self.prefill:
                    return prefilled
        return None


class FrontAnswer:
    """vLLM's events of an answer as they come; `ending` is there after the last one. Leave it by `aclose`."""

    def __init__(self, answering: "FrontAnswering", asking: Asking, slot: Slot) -> None:
        self.ending: Ending | None = None
        self.whole = WholeChoices()
        self._answering = answering
        self._asking = asking
        self._slot = slot
        self._placed: Placed | None = None
        self._request_id = ""
        self._usage: dict[str, Any] = {}
        self._queued_s = 0.0
        self._first_s: float | None = None
        self._prefilled: Prefilled | None = None
        self._told = False
        self._ended_by_us = False
        self._limit: asyncio.Timeout | None = None
        self._events = self._all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event with a choice.

        Raises:
            HttpError: vLLM refused the request, or two replicas failed.
            ChunkweaveError: too many wait, the deadline has passed, or the front stops.
        """
        try:
            async with asyncio.timeout(self._left_s()) as self._limit:
                return await anext(self._events)
        except TimeoutError:
            late = DeadlineError("the request was not answered in time")
            raise self._failed(RequestAbortedError("the front stops") if self._ended_by_us else late) from None
        except (ChunkweaveError, HttpError) as error:
            raise self._failed(error) from error

    def end(self) -> None:
        """End it now; whoever reads it learns that."""
        self._ended_by_us = True
        if self._limit is not None and not self._limit.expired():
            with suppress(RuntimeError):  # nobody reads now: whoever does next finds no time left
                self._limit.reschedule(asyncio.get_running_loop().time())

    @property
    def begun(self) -> bool:
        """Whether its first token has come."""
        return self._first_s is not None

    async def aclose(self) -> None:
        """End it if it runs, and free its places; a second time is harmless."""
        await self._events.aclose()
        if self._asking.ahead is not None:
            await self._asking.ahead.aclose()
        if not self._told:
            self._told = True
            self._answering.observer.given_up(self._asking.asked)
        if self._placed is not None:
            self._answering.fleet.leave(self._placed)
        self._answering.prompting.abandon(self._asking.prepared)
        self._slot.release()
        self._answering.running.pop(self, None)

    async def _all(self) -> AsyncGenerator[Event, None]:
        failed: Replica | None = None
        for last in (attempt == _TRIES - 1 for attempt in range(_TRIES)):
            try:
                async for event in self._attempt(failed):
                    yield event
                return
            except UpstreamLostError as error:
                logger.warning("a request was not answered: %s", error)
                if last or self._first_s is not None:
                    told = "the vLLM server that answered this went away; its log says why"
                    raise HttpError(502, told, code="replica_lost") from error
                failed = None if self._placed is None else self._placed.replica
                self._answering.retries += 1

    async def _attempt(self, avoid: Replica | None) -> AsyncGenerator[Event, None]:
        fleet, prepared = self._answering.fleet, self._asking.prepared
        if avoid is None:
            self._prefilled = await self._asking.prefilled()
        ahead = None if self._prefilled is None or avoid is not None else self._prefilled.placed
        self._placed = placed = await fleet.place(prepared, avoid=avoid, like=ahead)
        self._queued_s = time.perf_counter() - self._asking.arrived_s
        self._request_id = uuid.uuid4().hex
        try:
            params = weave_params(placed.prompt, prepared.choice)
            body = {**self._asking.body, "prompt": list(placed.prompt.token_ids), "max_tokens": prepared.room}
            if params is not None:
                body["kv_transfer_params"] = {FIELD: params}
            stream = placed.replica.upstream.complete(body, self._request_id)
            try:
                async for event in stream:
                    if event.get("usage"):
                        self._usage = event["usage"]
                    if event.get("choices"):
                        if self._first_s is None:
                            self._first_s = time.perf_counter()
                        self.whole.add(event)
                        yield event
            finally:
                await stream.aclose()
            await self._conclude(placed, reported=params is not None)
        finally:
            fleet.leave(placed, served=self.ending is not None)

    async def _conclude(self, placed: Placed, *, reported: bool) -> None:
        """All of it has come: get its report, tell everybody."""
        answering = self._answering
        told = await answering.inbox.report(self._request_id, _REPORT_S) if reported and answering.inbox else None
        choice = self.whole.choices[0] if self.whole.choices else {}
        now, arrived_s = time.perf_counter(), self._asking.arrived_s
        first_s = now if self._first_s is None else self._first_s
        times = Times(queue_s=self._queued_s, ttft_s=first_s - arrived_s, decode_s=now - first_s)
        new_tokens = int(self._usage.get("completion_tokens") or len(choice.get("token_ids", ())))
        report = reuse_report(placed, told, self._usage, times, new_tokens)
        cached = cached_tokens(report, told)
        answering.fleet.served(placed, cached_tokens=cached)
        self._end_turn(placed, choice)
        usage = {
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": report.new_tokens,
            "total_tokens": report.prompt_tokens + report.new_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        found = self._asking.found
        shown = shown_report(placed, report, told, found, None if found is None else self._pipelining(found.at_s))
        self.ending = Ending(usage, shown)
        self._told = True
        asked = self._asking.asked
        answering.counts[asked.tenant].add(report)
        answering.observer.answered_with(asked, report, finish_reason=str(choice.get("finish_reason") or "stop"))
        if answering.shadow is not None and report.reused_tokens:
            answering.shadow.offer(placed, self._asking.body, choice)

    def _pipelining(self, search_end_s: float) -> Pipelining | None:
        ahead, prefilled = self._asking.ahead, self._prefilled
        if ahead is None:
            return None
        began_s, ended_s = (0.0, 0.0) if prefilled is None else (prefilled.began_s, prefilled.ended_s)
        return ahead.summary(search_end_s, began_s, ended_s)

    def _end_turn(self, placed: Placed, choice: Choice) -> None:
        cut = isinstance(choice.get("stop_reason"), str)
        ids = choice.get("token_ids", [])
        self._answering.prompting.end(
            self._asking.prepared, placed.prompt, ids, text=choice.get("text", "") if cut else None
        )

    def _left_s(self) -> float | None:
        if self._ended_by_us:
            return 0.0
        limit_s = self._answering.settings.batching.deadline_s
        return None if limit_s is None else max(0.0, self._asking.arrived_s + limit_s - time.perf_counter())

    def _failed(self, error: Exception) -> Exception:
        if not self._told:
            self._told = True
            self._answering.observer.failed(self._asking.asked, error)
        return error


class FrontAnswering:
    """Starts answers and knows which are under way. Belongs to the event loop's thread."""

    def __init__(
        self,
        prompting: Prompting,
        fleet: Fleet,
        inbox: ReportInbox | None,
        corpora: Corpora,
        limits: TenantLimits,
        settings: Settings,
        observer: Observer,
        shadow: FrontShadow | None = None,
    ) -> None:
        self.prompting = prompting
        self.fleet = fleet
        self.inbox = inbox
        self.settings = settings
        self.observer = observer
        self.shadow = shadow
        self.counts: dict[str, TenantCounts] = defaultdict(TenantCounts)
        self.running: dict[FrontAnswer, None] = {}
        self.retries = 0
        self.retriever = Retriever(
            lambda: self._prefilling() + self.speculation.running, max_prefill_batch=len(fleet.replicas)
        )
        self.speculation = self.retriever.speculation
        self._corpora = corpora
        self._limits = limits

    async def start(self, tenant: Tenant, body: FrontBody, asked: RequestMeta, *, model: str) -> FrontAnswer:
        """Retrieve if need be, tokenize, and let the request be read.

        Raises:
            HttpError: too many requests or documents, a corpus that is not there, a conversation that is not here.
            ChunkweaveError: what `Prompting.prepare` raises.
        """
        try:
            slot = self._limits.occupy(tenant.name)
            try:
                answer = FrontAnswer(self, await self._asking(tenant, body, asked, model), slot)
            except BaseException:
                slot.release()
                raise
        except asyncio.CancelledError:
            self.observer.given_up(asked)
            raise
        except (ChunkweaveError, HttpError) as error:
            self.observer.failed(asked, error)
            raise
        self.running[answer] = None
        return answer

    async def forget(self, tenant: Tenant, texts: Iterable[str], cache_salt: str = "") -> int:  # noqa: ARG002
        """VLLM's plug-in removes nothing by name: what no request asks for any more leaves by eviction."""
        return 0

    async def _asking(self, tenant: Tenant, body: FrontBody, asked: RequestMeta, model: str) -> Asking:
        arrived_s = time.perf_counter()
        limits, reuse = self.settings.limits, body.chunkweave
        check_documents(len(body.documents), limits)
        check_reuse(reuse, limits, calibrated=self.prompting.chooser.record is not None)
        question, salt = body.question, tenant.salt(body.cache_salt)
        check_earlier(self.prompting.conversations, reuse.conversation_id, salt, earlier=question.earlier)
        method_request = MethodRequest.of(reuse.method, reuse.quality, reuse.recompute_ratio)
        whole_answer = SamplingParams(answer_tokens(body.answer_tokens, limits))

        async def prepared_for(chunks: tuple[Chunk, ...], sampling: SamplingParams) -> Prepared:
            request = Request(
                question.text, chunks, question.system, sampling, salt, reuse.order, reuse.conversation_id
            )
            return await in_thread(lambda: self.prompting.prepare(request, method_request))

        async def prefill(chunks: Sequence[RetrievedChunk], speculative: bool) -> PrefillAhead:  # noqa: ARG001
            return PrefillAhead(self.fleet, lambda: prepared_for(_chunks(chunks), SamplingParams(1)), model=model)

        ahead = self.retriever.question(prefill) if self._speculates(reuse) else None
        try:
            found = started = None
            if reuse.corpus is not None:
                found = await self._retrieve(tenant, reuse.corpus, question.text, reuse.top_k, ahead)
                started = None if ahead is None else await ahead.final(found.chunks)
            chunks = chunks_of(body.documents) if found is None else _chunks(found.chunks)
            prepared = await prepared_for(chunks, whole_answer)
        except BaseException:
            if ahead is not None:
                await ahead.aclose()
            raise
        upstream = self._upstream_body(body, prepared, model)
        return Asking(tenant, asked, prepared, upstream, arrived_s, found, ahead, started)

    async def _retrieve(
        self, tenant: Tenant, name: str, question: str, top_k: int | None, ahead: SpeculativeAnswer[Prefilled] | None
    ) -> Found:
        """The best chunks of the corpus `name`; with `ahead` in stages."""
        served = self._corpora.get(tenant, name)
        async with self._corpora.locked(served):
            corpus = served.corpus
            k = min(self.settings.limits.max_documents, usual_top_k(len(corpus)) if top_k is None else top_k)

            async def on_stage(chunks: tuple[RetrievedChunk, ...]) -> None:
                if ahead is not None and len(chunks) == k:  # a search does not end with fewer
                    await ahead.on_stage(chunks)

            if not k:
                return Found()
            on_stages = None if ahead is None else on_stage
            return await self.retriever.search(corpus, question, k, on_stage=on_stages, wait_for_thread=True)

    def _speculates(self, reuse: ReuseField) -> bool:
        """Whether to prefill beside a search, if nobody waits; a conversation can be asked once only."""
        if reuse.corpus is None or reuse.conversation_id is not None or not self.settings.fleet.speculate:
            return False
        return self._prefilling() <= len(self.fleet.replicas)  # else stages cost calls, and nothing comes of them

    def _prefilling(self) -> int:
        return sum(not answer.begun for answer in list(self.running))

    def _upstream_body(self, body: FrontBody, prepared: Prepared, model: str) -> dict[str, Any]:
        stops = set(body.handed_on.get("stop_token_ids") or ()) | set(self.prompting.tokenizer.stop_ids)
        told: dict[str, Any] = {
            **body.handed_on,
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "n": body.n,
            "stop_token_ids": sorted(stops),
        }
        if body.temperature is not None:
            told["temperature"] = body.temperature
        if prepared.salt:
            told["cache_salt"] = prepared.salt
        logprobs = body.logprobs_of_tokens
        if self.shadow is not None and prepared.weaves:
            logprobs = max(logprobs or 0, self.shadow.alternatives)
            if body.logprobs_of_tokens is None:
                told["return_tokens_as_token_ids"] = True
        if logprobs is not None:
            told["logprobs"] = logprobs
        return told


def _chunks(retrieved: Sequence[RetrievedChunk]) -> tuple[Chunk, ...]:
    return tuple(one.chunk for one in retrieved)
