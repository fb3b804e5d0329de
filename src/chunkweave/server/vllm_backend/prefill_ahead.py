"""Searches corpora for questions and prefills on a replica meanwhile (RAGCache §5.3, Algorithm 2)."""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from chunkweave.errors import ChunkweaveError
from chunkweave.planning.method_choice import FIELD
from chunkweave.retrieval.corpus import DocumentName, RetrievedChunk
from chunkweave.retrieval.faiss_indexes import search_in_one_thread
from chunkweave.retrieval.indexes import usual_top_k
from chunkweave.retrieval.speculation import Action, Found, Pipelining, SearchThread, Speculation
from chunkweave.server.auth import Tenant
from chunkweave.server.corpora import Corpora
from chunkweave.server.errors import HttpError
from chunkweave.server.threads import to_its_end
from chunkweave.server.vllm_backend.fleet import Fleet, Placed
from chunkweave.server.vllm_backend.prompting import Prepared, weave_params

logger = logging.getLogger(__name__)


Prepare = Callable[[Sequence[RetrievedChunk]], Awaitable[Prepared]]
"""Makes the question's request over chunks, the best first, for an answer of one token."""

FrontSpeculation = Speculation["PrefillAhead", DocumentName]


class PrefillAhead:
    """Starts, keeps and ends the prefills of one question as its search says. Owned by that question; close it.

    At most one is under way: a completion of one token, which nobody sees. It leaves the prompt's KV in vLLM's prefix
    cache, where only a request of the same tokens, chunks and method finds it: the question's own, if the search ends
    with these very chunks. One that fails is as if it had not been started.
    """

    def __init__(
        self,
        fleet: Fleet,
        speculation: FrontSpeculation,
        prepare: Prepare,
        *,
        model: str,
        prefilling: Callable[[], int],
    ) -> None:
        """`model` is vLLM's name of it; `prefilling` counts requests that wait for their first token."""
        self._fleet = fleet
        self._speculation = speculation
        self._prepare = prepare
        self._model = model
        self._prefilling = prefilling
        self._task: asyncio.Task[Placed | None] | None = None
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._started = 0
        self._terminated = 0

    async def on_stage(self, chunks: Sequence[RetrievedChunk]) -> None:
        """A stage that is not the last has named `chunks`."""
        self._drop_failed()
        pending = self._prefilling() + self._speculation.running - (self._task is not None)
        decision = self._speculation.on_stage(self, _names(chunks), pending)
        if decision.terminated is not None:
            await self._terminate()
        if decision.action is Action.START:
            self._started += 1
            self._began_s = self._ended_s = None
            self._task = asyncio.create_task(self._prefill(chunks), name="prefill ahead")

    async def on_final(self, chunks: Sequence[RetrievedChunk]) -> None:
        """The search is over: what runs for other chunks ends."""
        self._drop_failed()
        decision = self._speculation.on_final(self, _names(chunks))
        if decision.terminated is not None:
            await self._terminate()

    async def finished(self) -> Placed | None:
        """Behind `on_final`: wait until the chunks are prefilled, if they are being, and tell where; else None."""
        return None if self._task is None else await self._task

    def told(self, search_end_s: float) -> Pipelining:
        """What happened; the search ended at `search_end_s` by `time.perf_counter`."""
        matched = self._task is not None and self._task.done() and _placed(self._task) is not None
        began_s, ended_s = self._began_s, self._ended_s
        if not matched or began_s is None or ended_s is None:
            return Pipelining(self._started, self._terminated)
        return Pipelining(self._started, self._terminated, True, max(0.0, min(search_end_s, ended_s) - began_s))

    async def aclose(self) -> None:
        """End what is under way; a second time is harmless."""
        self._speculation.abort(self)
        await self._end()

    async def _prefill(self, chunks: Sequence[RetrievedChunk]) -> Placed | None:
        try:
            prepared = await self._prepare(chunks)
            placed = await self._fleet.place(prepared, counted=False)
            try:
                self._began_s = time.perf_counter()
                stream = placed.replica.upstream.complete(self._body(placed), uuid.uuid4().hex)
                async with aclosing(stream):
                    async for _ in stream:
                        pass
                self._ended_s = time.perf_counter()
                self._fleet.served(placed, cached_tokens=None)
            finally:
                self._fleet.leave(placed)
        except (ChunkweaveError, HttpError) as error:
            logger.debug("nothing is computed ahead: %s", error)
            return None
        except Exception:  # what nobody has asked for must not cost an answer
            logger.exception("nothing is computed ahead")
            return None
        return placed

    def _body(self, placed: Placed) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(placed.prompt.token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
        }
        params = weave_params(placed.prompt, placed.prepared.choice)
        if params is not None:
            body["kv_transfer_params"] = {FIELD: params}
        if placed.prepared.salt:
            body["cache_salt"] = placed.prepared.salt
        return body

    async def _terminate(self) -> None:
        self._terminated += 1
        await self._end()

    async def _end(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _drop_failed(self) -> None:
        if self._task is not None and self._task.done() and _placed(self._task) is None:
            self._task = None
            self._speculation.failed(self)


def _placed(task: "asyncio.Task[Placed | None]") -> Placed | None:
    return None if task.cancelled() else task.result()


def _names(chunks: Sequence[RetrievedChunk]) -> list[DocumentName]:
    return [chunk.name for chunk in chunks]


@dataclass(frozen=True, slots=True)
class Retrieval:
    """What a corpus had for a question, how long finding it took, and when that was over by `time.perf_counter`."""

    chunks: tuple[RetrievedChunk, ...]
    seconds: float
    ended_s: float


class Retriever:
    """Searches one question at a time in each corpus. Belongs to the event loop's thread; close it."""

    def __init__(self, corpora: Corpora, most_chunks: int) -> None:
        """For requests of at most `most_chunks` chunks."""
        self._corpora = corpora
        self._most_chunks = most_chunks
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, "chunkweave-search", initializer=search_in_one_thread)

    async def retrieve(
        self, tenant: Tenant, name: str, question: str, top_k: int | None, ahead: PrefillAhead | None
    ) -> Retrieval:
        """The best chunks of the corpus `name`; with `ahead` in stages, of which it is told.

        Raises:
            HttpError: there is no such corpus.
            ChunkweaveError: what the corpus raises.
        """
        served = self._corpora.get(tenant, name)
        async with self._corpora.locked(served):
            corpus = served.corpus
            k = min(self._most_chunks, usual_top_k(len(corpus)) if top_k is None else top_k)
            if not k:
                return Retrieval((), 0.0, 0.0)
            search = SearchThread(self._threads, corpus, question, k, staged=lambda: ahead is not None)
            try:
                found = await _to_the_last(search, k, ahead)
            finally:
                search.cancel()
                await to_its_end(search.left())
        if ahead is not None:
            await ahead.on_final(found.chunks)
        return Retrieval(found.chunks, found.embed_s + found.search_s, found.at_s)

    async def close(self) -> None:
        """Give the threads up."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)


async def _to_the_last(search: SearchThread, k: int, ahead: PrefillAhead | None) -> Found:
    while not (found := await search.next()).last:
        if ahead is not None and len(found.chunks) == k:  # a search does not end with fewer
            await ahead.on_stage(found.chunks)
    return found
