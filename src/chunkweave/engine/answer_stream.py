"""One request's answer as it comes, from the thread that makes it to the event loop that reads it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Self

from chunkweave.engine.answer import Answer, StreamEvent
from chunkweave.errors import UnknownRequestError, UsageError

logger = logging.getLogger(__name__)


class AnswerStream:
    """One request's answer as it comes: an asynchronous iterator whose last event carries the whole `Answer`.

    Belongs to the event loop that it was made for. Leaving it early does not end the request; `aclose` does, and so
    does leaving an `async with`.
    """

    def __init__(self, number: int, abort: Callable[[int], None], loop: asyncio.AbstractEventLoop) -> None:
        self.id = number
        self.begun = False
        """Whether there is, or was, a first piece to be read, or the reason why there is none."""
        self.failed = False
        """Whether it has ended, or will as soon as it is read, without an answer."""
        self._abort = abort
        self._loop = loop
        self._events: asyncio.Queue[StreamEvent | Exception] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        """The next piece.

        Raises:
            RequestEndedError: there will be no answer: deadline, abort, or it failed twice.
            ChunkweaveError: the request itself was wrong.
        """
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, Exception):
            self._ended = True
            raise event
        self._ended = event.answer is not None
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def answer(self) -> Answer:
        """Wait for the whole answer; raises what iterating raises."""
        async for event in self:
            if event.answer is not None:
                return event.answer
        raise UsageError(f"the stream of request {self.id} was read to its end already")

    async def aclose(self) -> None:
        """Abort the request unless it has ended; a second time is harmless."""
        if not self._ended:
            self._ended = True
            try:
                self._abort(self.id)
            except UnknownRequestError:
                logger.debug("request %d had ended when its stream was closed", self.id)

    def deliver(self, event: StreamEvent | Exception) -> None:
        """Put an event in; from any thread. If the loop is gone, nobody reads it."""
        self.failed = isinstance(event, Exception)
        self.begun = True
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            logger.debug("the event loop of request %d is closed", self.id)
