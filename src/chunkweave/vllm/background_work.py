"""What a worker does while no step runs: mostly copies out of vLLM's blocks."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Condition, Thread

import torch

from chunkweave.types import ChunkId

logger = logging.getLogger("vllm.chunkweave")


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """`slices` does a little at each `next`. Until it is done, `tokens` in blocks of a request stay as they are.

    `number` is reported when it is done, or failed; `chunks` are those that it stores.
    """

    slices: Iterator[object]
    request_id: str
    number: int | None = None
    chunks: frozenset[ChunkId] = frozenset()
    tokens: int = 0


class BackgroundWork:
    """Does work in the order in which it came in, on a thread that rests while a step runs.

    So a step waits for one slice at most. Work on more than `most_tokens` does not wait: it would hold too many blocks.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._queue: list[Work] = []
        self._done: set[int] = set()
        self._in_step = self._closed = False
        self._turn = Condition()
        self._thread = Thread(target=self._run, name="chunkweave-between-steps", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        """A step begins: the thread ends its slice and rests. Nothing happens if one runs already."""
        self._in_step = True
        with self._turn:
            pass

    def end_step(self) -> None:
        """The step has ended."""
        self._in_step = False
        with self._turn:
            self._turn.notify()

    def add(self, work: Work, *, at_once: bool = False) -> None:
        """More work, which is done now if it is to be `at_once`."""
        with self._turn:
            self._queue.append(work)
            while self._queue and (at_once or sum(one.tokens for one in self._queue) > self._most_tokens):
                self._finish_first()
            self._turn.notify()

    def finish(self, wanted: Callable[[Work], bool] = lambda _: True) -> None:
        """Do that work now, and what came in before it."""
        with self._turn:
            last = max((place for place, work in enumerate(self._queue) if wanted(work)), default=-1)
            for _ in range(last + 1):
                self._finish_first()

    def reads(self, request_id: str) -> bool:
        """Whether blocks of a request are still to be read."""
        with self._turn:
            return any(work.request_id == request_id and work.tokens for work in self._queue)

    def take_done(self) -> set[int]:
        """Numbers of work that was done, or failed; each once."""
        with self._turn:
            done, self._done = self._done, set()
            return done

    def close(self) -> None:
        """Do all work, and end the thread."""
        self._closed = True
        with self._turn:
            self._turn.notify()
        self._thread.join()
        self.finish()

    def _run(self) -> None:
        with self._turn:
            while not self._closed:
                if self._in_step or not self._queue:
                    self._turn.wait()
                else:
                    self._slice()

    def _finish_first(self) -> None:
        while self._slice():
            pass

    def _slice(self) -> bool:
        """Go on with the first, in whatever thread; returns whether it goes on."""
        work = self._queue[0]
        try:
            with torch.inference_mode():
                if next(work.slices, self) is not self:
                    return True
        except Exception:  # a cache may cost time, never the engine
            logger.exception("what is to be kept of request %s is not stored", work.request_id)
        del self._queue[0]
        if work.number is not None:
            self._done.add(work.number)
        return False


def wait_for_now(device: torch.device) -> Callable[[], None]:
    """A call that lets the stream of whichever thread makes it wait for what the current stream was given until now."""
    if device.type != "cuda":
        return lambda: None
    now = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(now)
