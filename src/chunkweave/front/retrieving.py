"""Searches corpora for questions, in threads, and has replicas prefill meanwhile."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from chunkweave.front.prefill_ahead import PrefillAhead
from chunkweave.retrieval.corpus import RetrievedChunk
from chunkweave.retrieval.faiss_indexes import search_in_one_thread
from chunkweave.retrieval.indexes import usual_top_k
from chunkweave.retrieval.search_thread import Found, SearchThread
from chunkweave.server.corpora import Corpora
from chunkweave.server.keys import Tenant
from chunkweave.server.threads import to_its_end


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
            RefusalError: there is no such corpus.
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
