"""The scheduler's knowledge of the workers' stores, and the messages that update it."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from chunkweave.prompt.parts import Prompt
from chunkweave.store.index import StoreChanges
from chunkweave.types import ChunkId, SegmentId
from chunkweave.vllm.removal import Removed

if TYPE_CHECKING:  # they need vLLM
    from chunkweave.vllm.orders import LookupOrder, StepResults

MOST_CHANGES = 4096
"""Most changes of chunks and segments in one step's results; the rest follows in the next step."""

_THREADS = 4


class RemoteLookups:
    """Looks up prompts in shared tiers, in threads. Called from one thread."""

    def __init__(
        self, probe: Callable[[Prompt], None], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`probe` looks up a prompt's chunks in the shared tiers and records the result in the store.

        A request waits at most `timeout_s`; the call itself may take longer.
        """
        self._probe = probe
        self._timeout_s = timeout_s
        self._clock = clock
        self._executor = ThreadPoolExecutor(_THREADS, "chunkweave-lookup")
        self._running: dict[str, tuple[float, Future[None]]] = {}

    def begin(self, orders: "Iterable[LookupOrder]") -> None:
        """Start lookups for waiting requests."""
        for order in orders:
            self._running[order.request_id] = (self._clock(), self._executor.submit(self._probe, order.prompt))

    def answered(self) -> set[str]:
        """Requests whose lookup has ended or timed out; each once."""
        if not self._running:
            return set()
        late_s = self._clock() - self._timeout_s
        done = {name for name, (begun_s, lookup) in self._running.items() if lookup.done() or begun_s < late_s}
        for name in done:
            self._running.pop(name)[1].cancel()
        return done

    def run(self, work: Callable[[], object]) -> None:
        """Run other work that may wait for a tier."""
        self._executor.submit(work)

    def close(self) -> None:
        """Cancel unfinished lookups."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class StoreEvents:
    """One worker's side: changes of its store, ended lookups and removals, step by step. Called from one thread.

    After its lookup has ended, a request uses what the scheduler knows. So the end of a lookup is sent together with
    the chunks that it found, or later, never earlier. The same applies to removals.
    """

    def __init__(
        self,
        changed: Callable[[int], StoreChanges],
        answered: Callable[[], set[str]],
        removed: Callable[[], Mapping[str, Removed]] = dict,
        most: int = MOST_CHANGES,
    ) -> None:
        """`changed` returns at most the given number of changes, `answered` the requests whose lookup has ended.

        Results of a lookup are in `changed` before it is in `answered`; those of a removal before its answer is in
        `removed`. At most `most` changes are sent per step.
        """
        self._changed = changed
        self._answered = answered
        self._removed = removed
        self._most = most
        self._unsent: set[str] = set()
        self._unsent_removals: dict[str, Removed] = {}

    def add_to(self, results: "StepResults") -> None:
        """Add the changes since the last step."""
        self._unsent |= self._answered()
        self._unsent_removals.update(self._removed())
        changes = self._changed(self._most)
        results.copies.update(dict.fromkeys(changes.added, 1))
        results.copies.update(dict.fromkeys(changes.removed, -1))
        if not changes.more:
            results.answered.update(self._unsent)
            self._unsent.clear()
            results.removed.update({name: [removed] for name, removed in self._unsent_removals.items()})
            self._unsent_removals.clear()


class StoredMirror:
    """The scheduler's side: on how many ranks a chunk (in any context), or an exact segment, is stored.

    It is usable if all ranks have it. Ranks report changes at different times, so they are counted.
    """

    def __init__(self, ranks: int = 1) -> None:
        """`ranks` is the number of workers, each with a share of the heads."""
        self._ranks = ranks
        self._copies: dict[ChunkId | SegmentId, int] = {}
        self._coming: Counter[ChunkId | SegmentId] = Counter()

    def __contains__(self, key: ChunkId | SegmentId) -> bool:
        """Whether every rank holds a chunk in some context, or this exact segment, or will store it soon."""
        return self.held(key) or key in self._coming

    def held(self, key: ChunkId | SegmentId) -> bool:
        """Whether every rank holds it now."""
        return self._copies.get(key, 0) >= self._ranks

    def expect(self, coming: Iterable[ChunkId | SegmentId]) -> None:
        """Record that ranks were ordered to store these, which they do before any lookup."""
        self._coming.update(coming)

    def settle(self, come: Iterable[ChunkId | SegmentId]) -> None:
        """Record that ranks have stored what was expected, or could not."""
        self._coming -= Counter(come)

    def note(self, changes: Mapping[ChunkId | SegmentId, int]) -> None:
        """Add changes in the number of ranks that hold each entry."""
        for key, change in changes.items():
            copies = self._copies.get(key, 0) + change
            if copies:
                self._copies[key] = copies
            else:
                self._copies.pop(key, None)

    def add(self, stored: Iterable[ChunkId | SegmentId]) -> None:
        """Record that one more rank holds these."""
        self.note(dict.fromkeys(stored, 1))
