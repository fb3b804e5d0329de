"""The engine for many concurrent requests: asynchronous streams over a thread that runs the steps."""

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any, Self, TypeVar, Unpack

from chunkweave.conversation.answer import Answer, StreamEvent
from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.conversation.turns import Build
from chunkweave.engine.core import BatchingCore
from chunkweave.engine.engine import Engine
from chunkweave.engine.request_state import Deliver, RequestState, Siblings
from chunkweave.engine.scheduler import BatchingStats
from chunkweave.errors import RequestAbortedError, UnknownRequestError, UsageError
from chunkweave.planning.method_choice import MethodOptions, MethodRequest
from chunkweave.prompt.contexts import ContextPool
from chunkweave.prompt.find_chunks import ChunkFinder
from chunkweave.prompt.request import Request
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.scheduling.queue import TenantWeights
from chunkweave.types import Chunk, ChunkId

logger = logging.getLogger(__name__)


class AnswerStream:
    """A stream of one request's answer: an asynchronous iterator whose last event carries the whole `Answer`.

    Belongs to one event loop. Breaking out of the iteration does not end the request; `aclose` does, and so does
    leaving an `async with`.

    >>> import asyncio
    >>> from chunkweave import AsyncEngine, Engine, Request
    >>> async def read(engine, request):
    ...     async with AsyncEngine(engine) as batching, batching.submit(request) as stream:
    ...         return [event.text async for event in stream]
    >>> request = Request("Who leads the choir?", ["The choir is led by Otto Gunmark."])
    >>> with Engine.load("reader") as engine:
    ...     print("".join(asyncio.run(read(engine, request))).strip())
    Otto Gunmark
    """

    def __init__(
        self,
        number: int,
        abort: Callable[[int], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.id = number
        self.begun = False
        """Whether an event was delivered: a piece of text, or the error."""
        self.failed = False
        """Whether the last delivered event is an error, read or not."""
        self.on_confirm: Callable[[], None] = lambda: None
        """Called by `confirm`; set by the engine."""
        self._abort = abort
        self._loop = loop
        self._events: asyncio.Queue[StreamEvent | Exception] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event.

        Raises:
            RequestEndedError: there is no answer: deadline passed, aborted, or failed twice.
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
        """Wait for the whole answer. Raises what iterating raises."""
        async for event in self:
            if event.answer is not None:
                return event.answer
        raise UsageError(f"the stream of request {self.id} was read to its end already")

    def confirm(self) -> None:
        """Make a speculative request an ordinary one; if it has its answer already, count it as requested.

        Raises:
            QueueFullError: it would be pending, and the queue is full. It stays a speculation.
        """
        self.on_confirm()

    def abort(self) -> None:
        """Abort the request unless it has ended; readers get `RequestAbortedError`."""
        with suppress(UnknownRequestError):  # it has ended meanwhile
            self._abort(self.id)

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        if not self._ended:
            self._ended = True
            self.abort()

    def deliver(self, event: StreamEvent | Exception) -> None:
        """Add an event, from any thread. Dropped if the event loop is closed."""
        self.failed = isinstance(event, Exception)
        self.begun = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


ResultT = TypeVar("ResultT")


@dataclass(slots=True, eq=False)
class _Open:
    """A request whose last event was not delivered yet."""

    request: RequestState
    stream: AnswerStream
    confirmed: bool


class AsyncEngine:
    """Answers many requests concurrently with one engine's model and store; its own thread runs the steps.

    All methods are thread-safe. The engine passed in must not be used until this one is closed, except in
    `between_steps`. Closing does not close that engine.

    >>> import asyncio
    >>> from chunkweave import AsyncEngine, Engine, Request
    >>> async def ask(engine, *questions):
    ...     async with AsyncEngine(engine) as batching:
    ...         streams = [batching.submit(Request(question, ["Otto leads the choir."])) for question in questions]
    ...         return await asyncio.gather(*(stream.answer() for stream in streams))
    >>> with Engine.load("reader") as engine:
    ...     len(asyncio.run(ask(engine, "Who leads the choir?", "What does Otto lead?")))
    2
    """

    def __init__(self, engine: Engine, config: BatchingConfig | None = None) -> None:
        """Start the thread."""
        self._config = config or BatchingConfig()
        self._weights = TenantWeights.parse(self._config.tenant_weight)
        if self._config.tenant_weight:
            engine.store.share_by(self._weights.share)
        self._preparer = engine.preparer
        self._comparisons = engine.comparisons
        self._store = engine.store
        self._core = BatchingCore(
            engine.parts, self._config, interrupt=lambda: self._urgent, arrived=lambda: self._arrived
        )
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._open: dict[int, _Open] = {}
        self._errands: list[Future[Any]] = []
        self._numbers = itertools.count()
        self._closing = False
        self._urgent = False
        self._arrived: list[RequestState] = []
        self._thread = threading.Thread(target=self._work, name="chunkweave-steps", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def stats(self) -> BatchingStats:
        """Current state and counters since the start."""
        with self._changed:
            stats = self._core.stats
            waiting = max(0, len(self._open) - stats.running)
            unconfirmed = [open_request for open_request in self._open.values() if not open_request.confirmed]
            return replace(
                stats,
                waiting=waiting,
                pending=stats.pending - stats.waiting + waiting,
                speculating=len(unconfirmed),
                speculations_running=sum(open_request.request.runs for open_request in unconfirmed),
            )

    @property
    def idle(self) -> bool:
        """Whether no request is pending or running, background work and comparisons included."""
        return not self._open and not self._core.can_compare

    @property
    def closed(self) -> bool:
        """Whether it accepts no more requests: it was closed, or an internal error stopped it (see the log)."""
        return self._closing

    @property
    def reorders(self) -> bool:
        """Whether requests with free order ignore the sequence of their chunks."""
        return self._preparer.arranger.reorders

    @property
    def most_tokens(self) -> int:
        """Most tokens of a prompt, also if the model's context is longer."""
        return self._core.most_tokens

    def submit(
        self,
        request: Request,
        *,
        method_request: MethodRequest | None = None,
        deadline_s: float | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        speculative: bool = False,
        tenant: str = "",
        answers: int = 1,
        build: Build | None = None,
        finder: ChunkFinder | None = None,
        **options: Unpack[MethodOptions],
    ) -> AnswerStream:
        """Queue a request; returns the stream of its answer at once.

        `options` say how chunks are reused, as in `Engine.generate`, unless `method_request` is given. `loop` is the
        event loop that reads the stream (None: the running one). Pass it to call this from another thread: the prompt
        is tokenized before this returns, which takes time for a long one.

        `finder`: the one by which `build` finds the chunks in the prompt (`prompt.find_chunks`).

        After `deadline_s` seconds (None: the configured deadline) the request ends with `DeadlineError`. A
        `speculative` request runs only when nothing else does, and delays others by at most one layer until it is
        confirmed. Tenants share queue, steps, running slots and memory by weight (`BatchingConfig.tenant_weight`).

        Several `answers` share one prefill; the events say which of them they belong to.
        `build` replaces the builder's usual prompt.

        Raises:
            QueueFullError: the queue, and the tenant's share of it, is full: pass this back-pressure on. Ordinary
                requests do not count speculations.
            RequestAbortedError: the engine is closed.
            UsageError: as `Engine.generate`, or a deadline that is not positive.
            RuntimeError: no loop is given and none is running.
            PromptTooLongError: the prompt exceeds the model's context or the engine's KV memory.
        """
        arrived_s = time.perf_counter()
        loop = loop or asyncio.get_running_loop()
        limit_s = self._config.deadline_s if deadline_s is None else deadline_s
        if limit_s is not None and not (isfinite(limit_s) and limit_s > 0):
            raise UsageError(f"deadline_s must be a positive number of seconds, not {limit_s}")
        self._refuse_if_full(tenant, speculative=speculative)
        method_request = method_request or MethodRequest.of(**options)
        most = self._core.most_tokens
        prepared = self._preparer.prepare(
            request, method_request, most_tokens=most, speculative=speculative, build=build, finder=finder
        )
        fitting = self._core.fitting(prepared)
        ends_s = None if limit_s is None else arrived_s + limit_s

        def made(number: int, deliver: Deliver) -> RequestState:
            state = RequestState(number, fitting, deliver, arrived_s, ends_s, speculative=speculative, tenant=tenant)
            if answers > 1:
                state.siblings = Siblings(state, [next(self._numbers) for _ in range(answers - 1)])
            return state

        return self._enter(made, loop)

    def beforehand(
        self,
        chunk: Chunk | str,
        pool: ContextPool | None = None,
        *,
        without: Collection[ChunkId] = (),
        cache_salt: str = "",
    ) -> Iterator[PreparedRequest]:
        """The requests to pass to `compute`, in order, so that a chunk is stored as `Engine.precompute` stores it.

        `without` are chunks that have left the pool; they are not used as context.

        Raises:
            UsageError: an empty chunk, or one that is not in the pool.
            PromptTooLongError: the chunk exceeds the model's context or the engine's KV memory.
        """
        most_tokens = self._core.most_tokens
        return self._preparer.prepare_beforehand(
            chunk, pool=pool, without=without, cache_salt=cache_salt, most_tokens=most_tokens
        )

    def compute(
        self,
        beforehand: PreparedRequest,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        tenant: str = "",
        unwanted: Callable[[], bool] = bool,
    ) -> AnswerStream:
        """Compute and store one request of `beforehand`, in the background.

        It uses the tokens that other requests leave of their steps. When the stream ends, the result is stored if there
        is room. It is aborted before the next step once `unwanted` returns True. `loop` is as in `submit`.

        Raises:
            RequestAbortedError: the engine is closed.
        """
        arrived_s = time.perf_counter()
        fitting = self._core.fitting(beforehand)

        def made(number: int, deliver: Deliver) -> RequestState:
            return RequestState(number, fitting, deliver, arrived_s, tenant=tenant, background=True, unwanted=unwanted)

        return self._enter(made, loop or asyncio.get_running_loop())

    def confirm(self, number: int) -> None:
        """Make a speculative request an ordinary one. Idempotent.

        Raises:
            UnknownRequestError: no pending or running request has this id; its stream may have its answer already.
            QueueFullError: it would be pending, and the queue is full. It stays a speculation.
        """
        with self._changed:
            entry = self._known(number)
        self._confirm(entry)

    def abort(self, number: int) -> None:
        """Abort a request; its stream raises `RequestAbortedError`.

        Raises:
            UnknownRequestError: no pending or running request has this id.
        """
        with self._changed:
            self._known(number)
            self._urgent = True
            self._command(number, self._core.abort)

    def between_steps(self, work: Callable[[], ResultT]) -> "Future[ResultT]":
        """Run `work` before the next step, in the thread that owns model and store. Requests wait meanwhile.

        The future gets the result or the exception. If it is cancelled before it starts, `work` does not run.

        Raises:
            RequestAbortedError: the engine is closed.
        """
        future: Future[ResultT] = Future()
        with self._changed:
            if self._closing:
                raise RequestAbortedError("the engine is closed and accepts no more work")
            self._urgent = True
            self._errands.append(future)
            self._commands.append(lambda: self._run_errand(future, work))
            self._changed.notify()
        return future

    def check(self) -> None:
        """Audit blocks, caches and store between two steps.

        Raises:
            StoreError: an invariant does not hold.
            RequestAbortedError: the engine is closed.
        """
        self.between_steps(self._core.check).result()
        self.between_steps(self._store.check).result()

    def close(self) -> None:
        """Abort all requests with `RequestAbortedError` and stop the thread. Idempotent."""
        with self._changed:
            self._closing = self._urgent = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _enter(self, make: Callable[[int, Deliver], RequestState], loop: asyncio.AbstractEventLoop) -> AnswerStream:
        """Queue the request that `make` returns for a new id; raises what `_refuse_if_full` raises."""
        with self._changed:
            number = next(self._numbers)
            stream = AnswerStream(number, self.abort, loop)
            state = make(number, partial(self._deliver, stream))
            if state.background:
                self._refuse_if_closed()
            else:
                self._refuse_if_full(state.tenant, speculative=state.speculative)
            self._open[number] = entry = _Open(state, stream, confirmed=not state.speculative)
            stream.on_confirm = partial(self._confirm, entry)
            self._urgent = self._urgent or not state.preemptible
            self._arrived.append(state)
            self._commands.append(lambda: self._core.submit(state))
            self._changed.notify()
            return stream

    def _confirm(self, entry: _Open) -> None:
        """Confirm a speculation, running or finished; a failed one is ignored."""
        with self._changed:
            number = entry.request.id
            if entry.confirmed or (entry.stream.failed and number not in self._open):
                return
            if not entry.stream.begun:
                self._refuse_if_full(entry.request.tenant)
            entry.confirmed = True
            self._commands.append(
                lambda: self._core.confirm(number) if number in self._open else self._core.count(entry.request)
            )
            self._changed.notify()
        self._preparer.confirm(entry.request.prepared)

    def _refuse_if_closed(self) -> None:
        if self._closing:
            raise RequestAbortedError("the engine is closed and accepts no more requests")

    def _refuse_if_full(self, tenant: str, *, speculative: bool = False) -> None:
        self._refuse_if_closed()
        pending = [
            entry for entry in tuple(self._open.values()) if entry.request.waits and not entry.request.background
        ]
        waiting = Counter(entry.request.tenant for entry in pending if speculative or entry.confirmed)
        self._weights.refuse_if_full(tenant, waiting, self._config.max_waiting)

    def _known(self, number: int) -> _Open:
        entry = self._open.get(number)
        if entry is None:
            raise UnknownRequestError(f"request {number} is neither pending nor running: unknown id, or it has ended")
        return entry

    def _run_errand(self, future: "Future[ResultT]", work: Callable[[], ResultT]) -> None:
        self._errands.remove(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:  # the future raises it; running requests continue
            logger.debug("work between two steps failed", exc_info=True)
            future.set_exception(error)

    def _command(self, number: int, command: Callable[[int], None]) -> None:
        """Queue a command on a request; it is skipped if the request has ended by then."""
        self._commands.append(lambda: command(number) if number in self._open else None)
        self._changed.notify()

    def _deliver(self, stream: AnswerStream, event: StreamEvent | Exception) -> None:
        if isinstance(event, Exception) or event.answer is not None:
            with self._changed:
                self._open.pop(stream.id, None)
        stream.deliver(event)

    def _work(self) -> None:
        """The thread's loop: steps while there is work, and queued commands between steps."""
        try:
            while self._wait_for_work():
                self._urgent, self._arrived = False, []
                while self._commands:
                    self._commands.popleft()()
                if self._core.busy:
                    self._core.step()
                if self._core.can_compare and not self._commands:
                    self._core.compare()
        except Exception:  # an internal error: end all streams, so that none waits for ever
            logger.exception("the batching engine stopped")
        with self._changed:
            self._closing = True
        self._core.close()
        for errand in self._errands:
            errand.cancel()
        for number, entry in list(self._open.items()):
            self._deliver(entry.stream, RequestAbortedError(f"request {number} ended with the engine"))
        if self._comparisons is not None:
            self._comparisons.drop_all()
            self._comparisons.save()

    def _wait_for_work(self) -> bool:
        """Wait until there is work; returns False if the thread must stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._core.busy or self._core.can_compare or self._closing)
            return not self._closing
