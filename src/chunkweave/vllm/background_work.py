"""Work of a worker between steps, mostly copies out of vLLM's blocks."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Condition, Thread

import torch

from chunkweave.tiers.device import Event, Streams
from chunkweave.types import ChunkId

logger = logging.getLogger("vllm.chunkweave")


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """`slices` does a small piece at each `next`. Until it is done, `tokens` in blocks of a request must not change.

    A piece only issues copies to the device. It yields an event, and the next piece runs once this event has occurred.

    `number` is reported when it is done or has failed; `chunks` are those that it stores.
    """

    slices: Iterator[Event]
    request_id: str
    number: int | None = None
    chunks: frozenset[ChunkId] = frozenset()
    tokens: int = 0


class BackgroundWork:
    """Runs work in order of arrival, in a thread that pauses while a step runs.

    So a step waits for at most one slice, and not for the device: the thread waits for a slice's event without the
    lock. Slices issue to a stream of their own. If more than `most_tokens` would be queued, work is done at once,
    because it would hold too many blocks.
    """

    def __init__(self, most_tokens: int, streams: Streams | None = None) -> None:
        """`streams` has the stream for slices, which nothing else uses; None: the CPU."""
        self._most_tokens = most_tokens
        self._streams = Streams() if streams is None else streams
        self._queue: list[Work] = []
        self._issued: Event = None
        """What the first work in the queue waits for."""
        self._done: set[int] = set()
        self._in_step = self._closed = False
        self._turn = Condition()
        self._thread = Thread(target=self._run, name="chunkweave-between-steps", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        """Start a step: wait for the current slice and pause the thread. Idempotent."""
        self._in_step = True
        with self._turn:
            pass

    def end_step(self) -> None:
        """End the step."""
        self._in_step = False
        with self._turn:
            self._turn.notify()

    def add(self, work: Work, *, at_once: bool = False) -> None:
        """Queue work, or with `at_once` do it, and all earlier work, now."""
        with self._turn:
            self._queue.append(work)
            while self._queue and (at_once or sum(work.tokens for work in self._queue) > self._most_tokens):
                self._finish_first()
            self._turn.notify()

    def finish(self, wanted: Callable[[Work], bool] = lambda _: True) -> None:
        """Finish all `wanted` work now, and everything queued before it."""
        with self._turn:
            last = max((place for place, work in enumerate(self._queue) if wanted(work)), default=-1)
            for _ in range(last + 1):
                self._finish_first()

    def reads(self, request_id: str) -> bool:
        """Whether blocks of a request must still be read."""
        with self._turn:
            return any(work.request_id == request_id and work.tokens for work in self._queue)

    def take_done(self) -> set[int]:
        """Numbers of work that is done or has failed; each once."""
        with self._turn:
            done, self._done = self._done, set()
            return done

    def close(self) -> None:
        """Finish all work and end the thread."""
        self._closed = True
        with self._turn:
            self._turn.notify()
        self._thread.join()
        self.finish()

    def _run(self) -> None:
        while True:
            with self._turn:
                while not self._closed and (self._in_step or not self._queue):
                    self._turn.wait()
                if self._closed:
                    return
                issued = self._issued  # another one if a step has finished work while this thread waited
                if issued is None or issued.query():  # type: ignore[no-untyped-call]
                    self._slice()
                    continue
            issued.synchronize()

    def _finish_first(self) -> None:
        while self._slice():
            pass

    def _slice(self) -> bool:
        """Run one slice of the first work, in any thread; returns whether more is left of it."""
        work = self._queue[0]
        issued = self._issued
        self._issued = None
        try:
            if issued is not None:
                issued.synchronize()
            with torch.inference_mode(), self._streams.copying():
                for event in work.slices:
                    self._issued = event
                    return True
        except Exception:  # a failed store costs later requests time; it must not end the engine
            logger.exception("KV of request %s could not be stored", work.request_id)
        del self._queue[0]
        if work.number is not None:
            self._done.add(work.number)
        return False
