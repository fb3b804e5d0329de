"""Work in threads for handlers: with cancellation that waits for its end, and with turns between tenants."""

import asyncio
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, TypeVar

from starlette.types import Receive

from chunkweave.errors import RequestAbortedError
from chunkweave.scheduling.queue import TenantWeights
from chunkweave_server.errors import HttpError

ResultT = TypeVar("ResultT")


async def in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Run `work` in a thread and return its result.

    A cancellation of the caller is delayed until the work has ended: locks that the caller holds stay held until then.
    """
    return await to_its_end(asyncio.to_thread(work))


async def to_its_end(work: Awaitable[ResultT]) -> ResultT:
    """Wait for work that must not be interrupted; a cancellation is raised after its end."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it as never retrieved
        raise


class ClientGoneError(HttpError):
    """The client closed the connection, so this error's response is not read."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`; it is cancelled if the client disconnects first.

    The request's body must already be read, so that the only message left to receive is the disconnect.

    Raises:
        ClientGoneError: the client has disconnected.
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
"""Niceness of threads `behind` answers: they get a tenth of a core that a thread for answers also uses."""


def go_behind_answers() -> None:
    """Lower the priority of the calling thread permanently. Only on Linux, where threads have priorities.

    The engine computes an answer in many short pieces. A thread of equal priority that is always ready to run gets a
    turn between any two pieces, so the answer takes several times as long.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


_SHORT_TURN_S = 0.00002
_usual_turns_s: list[float] = []
"""The interpreter's usual switch interval, once for each piece of work that `_short_turns` shortens it for."""


@contextmanager
def _short_turns() -> Iterator[None]:
    """Shorten the interpreter's switch interval until the last one of these has ended. In the event loop's thread only.

    Work in Python delays an answer by up to this interval at each of its calls into PyTorch, several hundred for a few
    tokens. Nothing waits for work behind answers, so it pays for the additional switches.
    """
    _usual_turns_s.append(_usual_turns_s[0] if _usual_turns_s else sys.getswitchinterval())
    sys.setswitchinterval(min(_SHORT_TURN_S, _usual_turns_s[0]))
    try:
        yield
    finally:
        usual_s = _usual_turns_s.pop()
        if not _usual_turns_s:
            sys.setswitchinterval(usual_s)


class TenantThreads:
    """Threads for work on requests before they are queued, mostly tokenization.

    Tenants take turns; in each turn a tenant runs as many pieces of work as its weight. No tenant uses all threads: one
    thread is left for others. Used in the event loop's thread only.
    """

    def __init__(
        self, threads: int | None = None, *, weights: TenantWeights | None = None, behind: bool = False
    ) -> None:
        """`threads` is at least 2; None: the number of cores, up to 8.

        Threads `behind` answers have low priority, and let others interrupt them sooner: for work that no answer waits
        for.
        """
        self._weights = weights or TenantWeights()
        self._pieces: dict[str, float] = {}  # pieces that a waiting tenant may still run in its turn
        self._threads = max(2, threads or min(_MOST_THREADS, os.cpu_count() or 1))
        self._turns: Callable[[], AbstractContextManager[None]] = _short_turns if behind else nullcontext
        first = go_behind_answers if behind else None
        self._pool = ThreadPoolExecutor(self._threads, "chunkweave-prepare", initializer=first)
        self._working: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the tenant whose turn is next comes first
        self._closed = False

    async def run(
        self,
        tenant: str,
        work: Callable[[], ResultT],
        *,
        undo: Callable[[ResultT], Awaitable[None]] | None = None,
        stop: Callable[[], None] | None = None,
    ) -> ResultT:
        """Run `work` in a thread when it is the tenant's turn, and return its result.

        If the caller is cancelled before the work has begun, the work is not run. After that, `stop` is called at once,
        so that the work can end early; the cancellation is raised after the work has ended and `undo` has been called
        with its result.

        Raises:
            RequestAbortedError: the server stops.
        """
        await self._take_thread(tenant)
        try:
            context, loop = copy_context(), asyncio.get_running_loop()
            with self._turns():
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
        """Start no more work. Running work continues."""
        self._closed = True
        for turn in (waiting_turn for turns in self._waiting.values() for waiting_turn in turns):
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
            if not turn.cancelled() and turn.exception() is None:  # it had just got its turn
                self._give_thread(tenant)
            raise

    def _give_thread(self, tenant: str) -> None:
        self._working[tenant] -= 1
        self._next_turns()

    def _next_turns(self) -> None:
        """Start waiting work in order of turns, while threads are free."""
        while self._working.total() < self._threads:
            tenant = next((waiting for waiting in self._waiting if self._working[waiting] < self._threads - 1), None)
            if tenant is None:
                return
            turns = self._waiting.pop(tenant)
            pieces_left = self._pieces.pop(tenant, max(1.0, self._weights[tenant]))
            if pieces_left < 1:  # a weight below 1 accumulates over several turns
                self._waiting[tenant], self._pieces[tenant] = turns, pieces_left + self._weights[tenant]
                continue
            turn = turns.popleft()
            if turns and pieces_left >= 2:
                self._waiting, self._pieces[tenant] = {tenant: turns, **self._waiting}, pieces_left - 1
            elif turns:  # to the end of the order
                self._waiting[tenant], self._pieces[tenant] = turns, pieces_left - 1 + self._weights[tenant]
            if not turn.done():  # the waiting caller may be cancelled
                turn.set_result(None)
                self._working[tenant] += 1


def _stopping() -> RequestAbortedError:
    return RequestAbortedError("the server stops")
