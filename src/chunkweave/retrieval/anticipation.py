"""One question's requests to an engine while its search goes on, and after it (RAGCache §5.3, Algorithm 2)."""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from chunkweave.engine.async_engine import AnswerStream, AsyncEngine
from chunkweave.engine.request import Answer, StreamEvent
from chunkweave.errors import ChunkweaveError, RequestEndedError, UnknownRequestError
from chunkweave.retrieval.corpus import DocumentName, RetrievedChunk
from chunkweave.retrieval.pipeline import Pipelining
from chunkweave.scheduling.speculation import Action, Speculation

logger = logging.getLogger(__name__)

Submit = Callable[[Sequence[RetrievedChunk], bool], AnswerStream]
"""Asks the engine over chunks in the order of the prompt; the flag says whether that is speculative."""


class Anticipation:
    """Starts, keeps and ends the requests of one question as its search says. Owned by that question; close it.

    At most one request is under way. What a speculation gives is held back until the search has confirmed it; one that
    fails, or is refused, is as if it had not been started. Stages are lists in the order of the prompt.
    """

    def __init__(
        self, engine: AsyncEngine, speculation: "Speculation[Anticipation, DocumentName]", submit: Submit
    ) -> None:
        self._engine = engine
        self._speculation = speculation
        self._submit = submit
        self._stream: AnswerStream | None = None
        self._submitted_s = 0.0
        self._started = 0
        self._terminated = 0
        self._matched = False

    async def on_stage(self, chunks: Sequence[RetrievedChunk]) -> None:
        """A stage that is not the last has named `chunks`."""
        self._drop_failed()
        decision = self._speculation.on_stage(self, _names(chunks), self._pending())
        if decision.terminated is not None:
            await self._terminate()
        if decision.action is Action.START:
            self._start(chunks)

    async def answer_over(
        self, chunks: Sequence[RetrievedChunk], *, until_s: float | None
    ) -> AsyncGenerator[StreamEvent, None]:
        """The search is over: the pieces of the answer over `chunks`, computed already or from now on.

        `until_s` is the caller's deadline by `time.perf_counter`, after which no second try is made.

        Raises:
            ChunkweaveError: what `AsyncEngine.submit` and its streams raise.
        """
        self._drop_failed()
        decision = self._speculation.on_final(self, _names(chunks))
        if decision.terminated is not None:
            await self._terminate()
        if decision.action is Action.KEEP and self._stream is not None:
            self._matched = True
            with suppress(UnknownRequestError):  # it may have its whole answer by now
                self._engine.confirm(self._stream.id)
            shown = False
            try:
                async for event in self._stream:
                    shown = True
                    yield event
                return
            except RequestEndedError as error:
                if shown or (until_s is not None and time.perf_counter() >= until_s):
                    raise
                logger.warning("a speculation failed (%s); its request is computed anew", error)
                self._matched = False
        self._ask(chunks, speculative=False)
        assert self._stream is not None, "it was asked for"
        async for event in self._stream:
            yield event

    def told(self, answer: Answer, search_end_s: float) -> Pipelining:
        """What happened, once the answer is there and the search ended then."""
        report = answer.report
        began_s = self._submitted_s + report.queue_s
        ended_s = self._submitted_s + report.ttft_s + report.decode_s
        overlap_s = max(0.0, min(search_end_s, ended_s) - began_s)
        return Pipelining(self._started, self._terminated, self._matched, overlap_s if self._matched else 0.0)

    async def aclose(self) -> None:
        """End what is under way; a second time is harmless."""
        self._speculation.abort(self)
        if self._stream is not None:
            await self._stream.aclose()

    def _pending(self) -> int:
        """Requests that wait for, or are in, prefill, but for this question's own."""
        own = self._stream is not None and not self._stream.begun
        return max(0, self._engine.stats.pending - own)

    def _start(self, chunks: Sequence[RetrievedChunk]) -> None:
        try:
            self._ask(chunks, speculative=True)
            self._started += 1
        except ChunkweaveError as error:
            logger.debug("nothing is computed ahead: %s", error)
            self._speculation.failed(self)

    def _ask(self, chunks: Sequence[RetrievedChunk], *, speculative: bool) -> None:
        self._submitted_s = time.perf_counter()
        self._stream = self._submit(chunks, speculative)

    async def _terminate(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
            self._stream = None
            self._terminated += 1

    def _drop_failed(self) -> None:
        if self._stream is not None and self._stream.failed:
            self._stream = None
            self._speculation.failed(self)


def _names(chunks: Sequence[RetrievedChunk]) -> list[DocumentName]:
    return [chunk.name for chunk in chunks]
