"""What the scheduler knows of the workers' stores, and how it gets to know it."""

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
"""Most changed chunks and segments in the results of one step: the rest follows in the next."""

_THREADS = 4


class RemoteLookups:
    """Looks up in shared tiers, on threads, what the scheduler knows nothing of. Called from one thread."""

    def __init__(
        self, probe: Callable[[Prompt], None], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`probe` looks a prompt's chunks up in the shared tiers; afterwards the store knows what was found.

        A request waits at most `timeout_s` for it; the call itself may take longer.
        """
        self._probe = probe
        self._timeout_s = timeout_s
        self._clock = clock
        self._executor = ThreadPoolExecutor(_THREADS, "chunkweave-lookup")
        self._running: dict[str, tuple[float, Future[None]]] = {}

    def begin(self, orders: "Iterable[LookupOrder]") -> None:
        """Look up for requests that wait."""
        for order in orders:
            self._running[order.request_id] = (self._clock(), self._executor.submit(self._probe, order.prompt))

    def answered(self) -> set[str]:
        """Requests whose lookup has ended, or took too long; each once."""
        if not self._running:
            return set()
        late_s = self._clock() - self._timeout_s
        done = {name for name, (begun_s, lookup) in self._running.items() if lookup.done() or begun_s < late_s}
        for name in done:
            self._running.pop(name)[1].cancel()
        return done

    def run(self, work: Callable[[], object]) -> None:
        """Do something else that may wait for a tier."""
        self._executor.submit(work)

    def close(self) -> None:
        """Cancel what has not ended."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class StoreEvents:
    """One worker's side: the changes of its store, ended lookups and removals, step by step. Called from one thread.

    A request goes on with what the scheduler knows once its lookup has ended. So the end of a lookup is sent with the
    chunks that it found, or after them, never before. Of a removal the same is true.
    """

    def __init__(
        self,
        changed: Callable[[int], StoreChanges],
        answered: Callable[[], set[str]],
        removed: Callable[[], Mapping[str, Removed]] = dict,
        most: int = MOST_CHANGES,
    ) -> None:
        """`changed` takes at most so many changes, `answered` the requests whose lookup has ended.

        What a lookup found is in `changed` once it is in `answered`; what a removal took away, once its answer is in
        `removed`. At most `most` changes are sent in a step.
        """
        self._changed = changed
        self._answered = answered
        self._removed = removed
        self._most = most
        self._unsent: set[str] = set()
        self._unsent_removals: dict[str, Removed] = {}

    def add_to(self, results: "StepResults") -> None:
        """Add what has changed since the last step."""
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
    """The scheduler's side: on how many ranks something of a chunk, or an exact segment, is stored.

    It can be used if it is on all. Ranks report changes at different times, so they are counted, not compared.
    """

    def __init__(self, ranks: int = 1) -> None:
        """`ranks` is how many workers each have a share of the heads."""
        self._ranks = ranks
        self._copies: dict[ChunkId | SegmentId, int] = {}
        self._coming: Counter[ChunkId | SegmentId] = Counter()

    def __contains__(self, one: ChunkId | SegmentId) -> bool:
        """Whether every rank holds a chunk, in some context, or this exact segment, or is about to."""
        return self._copies.get(one, 0) >= self._ranks or one in self._coming

    def expect(self, coming: Iterable[ChunkId | SegmentId]) -> None:
        """Ranks were told to store these, and do so before they look for anything."""
        self._coming.update(coming)

    def settle(self, come: Iterable[ChunkId | SegmentId]) -> None:
        """Ranks have stored what was expected, or could not."""
        self._coming -= Counter(come)

    def note(self, changes: Mapping[ChunkId | SegmentId, int]) -> None:
        """So many ranks more (or fewer) hold these."""
        for one, change in changes.items():
            copies = self._copies.get(one, 0) + change
            if copies:
                self._copies[one] = copies
            else:
                self._copies.pop(one, None)

    def add(self, stored: Iterable[ChunkId | SegmentId]) -> None:
        """One rank more holds these."""
        self.note(dict.fromkeys(stored, 1))
