"""Requests whose chunks nobody here knows: the shared tiers are asked before vLLM computes them."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from chunkweave.chunking.prompt import Prompt
from chunkweave.vllm.messages import Ask

_THREADS = 4


class SharedAsks:
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

    def begin(self, asks: Iterable[Ask]) -> None:
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
