"""Work that a handler waits for, whatever happens to the handler or its client; and whose turn it is in threads."""

import asyncio
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from starlette.types import Receive

from chunkweave.errors import RequestAbortedError
from chunkweave.scheduling.queue import TenantWeights
from chunkweave_server.errors import HttpError

ResultT = TypeVar("ResultT")


async def in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Run `work` in a thread and return what it returns.

    A cancelled caller gets its cancellation only when the work is done: what the work uses stays locked until then.
    """
    return await to_its_end(asyncio.to_thread(work))


async def to_its_end(work: Awaitable[ResultT]) -> ResultT:
    """Wait for something that must not be left half done; a cancellation is passed on after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, so that nobody complains that it was not
        raise


class ClientGoneError(HttpError):
    """The client closed the connection; nobody reads the answer to this."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `work` returns, unless the client goes first: then it is cancelled.

    The request's body has been read by now, so that all there is to receive is that its client has gone.

    Raises:
        ClientGoneError: it has.
    """
    tasks = working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_MOST_THREADS = 8
_NICENESS = 10
"""A thread `behind` answers gets about a tenth of a core that a thread which computes answers wants too."""


def go_behind_answers() -> None:
    """Lower the priority of the thread that calls this, for good; only Linux has one for each thread.

    The engine computes an answer in many short pieces. A thread that is always ready to run takes a turn between any
    two of them, and the answer takes several times as long.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class TenantThreads:
    """Threads for what a request costs before it waits for the model: above all for tokenizing it.

    Tenants take turns, as many pieces of work each as their weight says, and none of them has more than all threads but
    one: however much one sends, a thread is soon free for the others. Belongs to the event loop's thread.
    """

    def __init__(
        self, threads: int | None = None, *, weights: TenantWeights | None = None, behind: bool = False
    ) -> None:
        """So many threads, at least two; None: as many as there are cores, up to eight.

        Threads `behind` answers have a core only as far as these leave it: for work that no answer waits for.
        """
        self._weights = weights or TenantWeights()
        self._pieces: dict[str, float] = {}  # that a waiting tenant still has in its turn
        self._threads = max(2, threads or min(_MOST_THREADS, os.cpu_count() or 1))
        first = go_behind_answers if behind else None
        self._pool = ThreadPoolExecutor(self._threads, "chunkweave-prepare", initializer=first)
        self._working: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # first the tenant whose turn is next
        self._closed = False

    async def run(
        self,
        tenant: str,
        work: Callable[[], ResultT],
        *,
        undo: Callable[[ResultT], Awaitable[None]] | None = None,
        stop: Callable[[], None] | None = None,
    ) -> ResultT:
        """Run `work` in a thread, when it is the tenant's turn, and return what it returns.

        A caller that is cancelled while it waits has nothing done. One whose work has begun gets its cancellation when
        that is done, and when `undo` has been called with what it returned. `stop` is called at once, so that the work
        can end early.

        Raises:
            RequestAbortedError: the server stops.
        """
        await self._take_thread(tenant)
        try:
            context, loop = copy_context(), asyncio.get_running_loop()
            working = loop.run_in_executor(self._pool, lambda: context.run(work))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                if stop is not None:
                    stop()
                await asyncio.wait([working])
                if working.exception() is None and undo is not None:
                    await undo(working.result())
                raise
        finally:
            self._give_thread(tenant)

    def close(self) -> None:
        """Begin nothing more; what has begun goes on."""
        self._closed = True
        for turn in (one for turns in self._waiting.values() for one in turns):
            if not turn.done():
                turn.set_exception(_stopping())
        self._waiting.clear()
        self._pool.shutdown(wait=False)

    async def _take_thread(self, tenant: str) -> None:
        if self._closed:
            raise _stopping()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._next_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:  # its turn had just come
                self._give_thread(tenant)
            raise

    def _give_thread(self, tenant: str) -> None:
        self._working[tenant] -= 1
        self._next_turns()

    def _next_turns(self) -> None:
        """Let those begin whose turn it is, as long as a thread is free for them."""
        while self._working.total() < self._threads:
            tenant = next((one for one in self._waiting if self._working[one] < self._threads - 1), None)
            if tenant is None:
                return
            turns = self._waiting.pop(tenant)
            left = self._pieces.pop(tenant, max(1.0, self._weights[tenant]))
            if left < 1:  # a weight below 1 saves up over several turns
                self._waiting[tenant], self._pieces[tenant] = turns, left + self._weights[tenant]
                continue
            turn = turns.popleft()
            if turns and left >= 2:
                self._waiting, self._pieces[tenant] = {tenant: turns, **self._waiting}, left - 1
            elif turns:  # behind the others
                self._waiting[tenant], self._pieces[tenant] = turns, left - 1 + self._weights[tenant]
            if not turn.done():  # whoever waited may have gone
                turn.set_result(None)
                self._working[tenant] += 1


def _stopping() -> RequestAbortedError:
    return RequestAbortedError("the server stops")
