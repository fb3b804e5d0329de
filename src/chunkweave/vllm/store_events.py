"""What the scheduler is told of a worker's store after each step."""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from chunkweave.chunking.prompt import Prompt
from chunkweave.store.index import ChunkNews
from chunkweave.types import ChunkId

if TYPE_CHECKING:
    from chunkweave.vllm.messages import Ask, StepResults

MOST_CHUNKS = 4096
"""Most chunks that the scheduler is told of in one step: what is left follows in the next."""


class StoreEvents:
    """Pairs what came and went with the questions that it answers. Called from one thread.

    A request goes on with what the scheduler knows when it hears that its question is answered. So an answer is told
    only with all that it brought, or after it: one that comes in while news are being taken waits for the next ones.
    """

    def __init__(
        self, changed: Callable[[int], ChunkNews], answered: Callable[[], set[str]], most: int = MOST_CHUNKS
    ) -> None:
        """Nothing is told yet.

        Args:
            changed: takes what is new of at most so many chunks.
            answered: takes the requests whose question is answered; what was found for them `changed` sees from then
                on.
            most: chunks a step.
        """
        self._changed = changed
        self._answered = answered
        self._most = most
        self._untold: set[str] = set()

    def tell(self, results: "StepResults") -> None:
        """Add what is new."""
        self._untold |= self._answered()
        news = self._changed(self._most)
        results.copies.update(dict.fromkeys(news.came, 1))
        results.copies.update(dict.fromkeys(news.went, -1))
        if not news.more:
            results.answered.update(self._untold)
            self._untold.clear()


class StoredMirror:
    """On how many ranks something of a chunk is stored. What is not on all of them is good for nothing.

    Ranks tell of changes at different times, so they are counted, not compared.
    """

    def __init__(self, ranks: int = 1) -> None:
        """`ranks` is how many workers each have a share of the heads."""
        self._ranks = ranks
        self._copies: dict[ChunkId, int] = {}

    def __contains__(self, chunk: ChunkId | None) -> bool:
        """Whether every rank has told that it holds something of it."""
        return chunk is not None and self._copies.get(chunk, 0) >= self._ranks

    def note(self, changes: Mapping[ChunkId, int]) -> None:
        """So many ranks more (or fewer) hold something of these chunks."""
        for chunk, change in changes.items():
            copies = self._copies.get(chunk, 0) + change
            if copies:
                self._copies[chunk] = copies
            else:
                self._copies.pop(chunk, None)

    def add(self, chunks: Iterable[ChunkId]) -> None:
        """One rank more holds these."""
        self.note(dict.fromkeys(chunks, 1))


_THREADS = 4


class RemoteLookups:
    """Asks on threads of its own, and says which requests need wait no longer. Called from one thread."""

    def __init__(
        self, probe: Callable[[Prompt], None], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nobody is asked yet.

        Args:
            probe: asks for what a prompt's chunks may have; what it finds is known to the store afterwards.
            timeout_s: after so long a request need not wait, whatever the tiers may say later: a call may take as long
                as their deadline.
            clock: seconds, monotonic.
        """
        self._probe = probe
        self._timeout_s = timeout_s
        self._clock = clock
        self._executor = ThreadPoolExecutor(_THREADS, "chunkweave-ask")
        self._under_way: dict[str, tuple[float, Future[None]]] = {}

    def begin(self, asks: "Iterable[Ask]") -> None:
        """Ask for requests that wait."""
        for ask in asks:
            self._under_way[ask.request_id] = (self._clock(), self._executor.submit(self._probe, ask.prompt))

    def answered(self) -> set[str]:
        """Requests whose question is answered, or took too long; each once."""
        if not self._under_way:
            return set()
        late_s = self._clock() - self._timeout_s
        done = {name for name, (asked_s, answer) in self._under_way.items() if answer.done() or asked_s < late_s}
        for name in done:
            self._under_way.pop(name)[1].cancel()
        return done

    def run(self, work: Callable[[], object]) -> None:
        """Do something else that may wait for a tier."""
        self._executor.submit(work)

    def close(self) -> None:
        """Give up what was not answered."""
        self._executor.shutdown(wait=False, cancel_futures=True)
