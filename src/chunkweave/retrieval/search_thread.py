"""A search beside an event loop: its stages come as they are found, and nobody waits for who reads them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chunkweave.retrieval.corpus import RetrievalStage, RetrievedChunk

logger = logging.getLogger(__name__)


class StagedCorpus(Protocol):
    """What an asynchronous pipeline asks of a corpus; `chunkweave.Corpus` is one. Called in threads."""

    def __len__(self) -> int:
        """How many chunks there are."""

    def embed_query(self, question: str) -> NDArray[np.float32]:
        """The vector of a question, `[dimension]`."""

    def search(self, question: NDArray[np.float32], k: int) -> tuple[RetrievedChunk, ...]:
        """The `k` best chunks, the best first."""

    def search_stages(self, question: NDArray[np.float32], k: int) -> Iterator[RetrievalStage]:
        """The same in stages; the chunks of the last are those of `search`."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best chunks so far, the best first, and whether the search is over.

    `embed_s` and `search_s` are the seconds that it has taken, `at_s` when that was by `time.perf_counter`.
    """

    chunks: tuple[RetrievedChunk, ...]
    last: bool
    embed_s: float
    search_s: float
    at_s: float


class SearchThread:
    """One question's search in a thread of a pool. It goes on to the next stage at once; what was not read by then is
    passed over.
    """

    def __init__(
        self, pool: Executor, corpus: StagedCorpus, question: str, k: int, *, staged: Callable[[], bool]
    ) -> None:
        """Start as soon as a thread is free; unless it is to be `staged` by then, there is one stage, the whole search.

        `staged` is asked in that thread.
        """
        self._corpus = corpus
        self._question = question
        self._k = k
        self._staged = staged
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._newest: Found | BaseException | None = None
        self._cancelled = False
        self._work_left = pool.submit(self._work)
        self._work_left.add_done_callback(self._ended)

    async def next(self) -> Found:
        """What is known after the newest stage, once there is one that was not read yet.

        Raises whatever the corpus raises.
        """
        await self._news.wait()
        self._news.clear()
        assert self._newest is not None, "there is news"
        if isinstance(self._newest, BaseException):
            raise self._newest
        return self._newest

    def cancel(self) -> None:
        """End the search after its current stage. A second time is harmless, and so is one that is over."""
        self._cancelled = True
        self._work_left.cancel()

    async def left(self) -> None:
        """Wait until the corpus is not used any more; behind `cancel`, or the last stage."""
        await asyncio.gather(asyncio.wrap_future(self._work_left), return_exceptions=True)

    def _work(self) -> None:
        for found in self._stages():
            self._tell(found)
            if self._cancelled:
                return

    def _ended(self, work: Future[None]) -> None:
        error = None if work.cancelled() else work.exception()
        if error is not None:
            self._tell(error)

    def _stages(self) -> Iterator[Found]:
        asked = time.perf_counter()
        vector = self._corpus.embed_query(self._question)
        began = time.perf_counter()
        if not self._staged():
            chunks = self._corpus.search(vector, self._k)
            yield self._found(chunks, True, asked, began)
            return
        for stage in self._corpus.search_stages(vector, self._k):
            yield self._found(stage.chunks, stage.last, asked, began)

    def _found(self, chunks: tuple[RetrievedChunk, ...], last: bool, asked: float, began: float) -> Found:
        now = time.perf_counter()
        return Found(chunks, last, began - asked, now - began, now)

    def _tell(self, news: Found | BaseException) -> None:
        try:
            self._loop.call_soon_threadsafe(self._put, news)
        except RuntimeError:
            logger.debug("the event loop of a search is closed")
            self._cancelled = True

    def _put(self, news: Found | BaseException) -> None:
        self._newest = news
        self._news.set()
