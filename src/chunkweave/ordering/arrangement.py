"""Puts the chunks of prompts in order, and counts requests for them."""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from typing import Generic, TypeVar

from chunkweave.errors import StoreError, UsageError
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig, Unordered, make_ordering
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.types import ChunkId

KeyT = TypeVar("KeyT", bound=Hashable)


class AccessTable(Generic[KeyT]):
    """Exact counts of keys over the last `window` requests (CRAFT §4.1); memory is bounded by the window.

    A request counts each of its keys once. Ids of chunks contain model and cache salt, so tenants share a window but
    never a count. Thread-safe; `count` takes no lock.
    """

    def __init__(self, window: int) -> None:
        """An empty table.

        Raises:
            UsageError: the window has no request.
        """
        if window < 1:
            raise UsageError(f"chunks are counted over at least one request, not {window}")
        self.window = window
        self._requests: deque[tuple[KeyT, ...]] = deque()
        self._counts: dict[KeyT, int] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        """Keys in the window."""
        return len(self._counts)

    @property
    def requests(self) -> int:
        """Requests in the window."""
        return len(self._requests)

    def count(self, key: KeyT) -> int:
        """How many requests of the window have `key`."""
        return self._counts.get(key, 0)

    def count_with(self, key: KeyT) -> int:
        """`count` once one more request that has `key` is noted."""
        with self._lock:
            leaving = self._requests[0] if len(self._requests) == self.window else ()
            return self._counts.get(key, 0) + 1 - (key in leaving)

    def note(self, keys: Iterable[KeyT]) -> None:
        """Another request; the oldest one leaves a full window."""
        request = tuple(dict.fromkeys(keys))
        with self._lock:
            for key in request:
                self._counts[key] = self._counts.get(key, 0) + 1
            self._requests.append(request)
            if len(self._requests) > self.window:
                for key in self._requests.popleft():
                    if self._counts[key] == 1:
                        del self._counts[key]
                    else:
                        self._counts[key] -= 1

    def check(self) -> None:
        """Audit the counts against the requests of the window.

        Raises:
            StoreError: they disagree.
        """
        with self._lock:
            counts: dict[KeyT, int] = {}
            for request in self._requests:
                for key in request:
                    counts[key] = counts.get(key, 0) + 1
            if counts != self._counts or len(self._requests) > self.window:
                raise StoreError(f"the access table of {self.window} requests miscounts")


ORIGINAL = "original"
"""The ordering that leaves chunks where they are."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Over which chunks of one request exact prefixes may grow.

    An exact method keeps exact paths over `kept` chunks only (None: over all). A method that weaves computes in full
    what is in `continued` and comes right behind the exact prefix.
    """

    kept: frozenset[ChunkId] | None = None
    continued: frozenset[ChunkId] = frozenset()


@dataclass(frozen=True, slots=True)
class Arranged:
    """A prompt whose chunks stand as they will be computed.

    `ordering` put them there. `ranks` says of a part of the prompt, by its number, where the caller had it among the
    chunks, from 0 on. `promotion` says over what its exact prefix may grow; None if the order was not free.
    """

    prompt: Prompt
    ordering: str = ORIGINAL
    ranks: Mapping[int, int] = field(default_factory=dict)
    promotion: Promotion | None = None


class Arranger:
    """Orders each request by what the requests before it asked for, then counts it (CRAFT §4.2).

    Only chunks that stand right before the question are moved: what was said earlier in a conversation stays, since
    its KV would have to be computed anew (§6.1). One caller at a time; the table may be read by others.
    """

    def __init__(
        self, config: OrderingConfig, tree: KnowledgeTree[ChunkId], *, order: ChunkOrder = ChunkOrder.FIXED
    ) -> None:
        """An arranger that has seen no request.

        Args:
            config: how free requests are ordered.
            tree: where exact paths are stored.
            order: for requests that say nothing.

        Raises:
            UnknownMethodError: no such ordering.
        """
        self.table: AccessTable[ChunkId] = AccessTable(config.window)
        self._begun: AccessTable[int] = AccessTable(config.window)  # by a hash of the path: a collision is harmless
        self._config = config
        self._ordering = make_ordering(config.ordering)
        self._tree = tree
        self._order = order

    @property
    def reorders(self) -> bool:
        """Whether the sequence in which chunks of a free order are given says nothing about how they will stand."""
        return self._ordering.name != ORIGINAL

    def arrange(self, prompt: Prompt, order: ChunkOrder | None = None, *, counted: bool = True) -> Arranged:
        """The prompt with its chunks in order. Its request counts from now on, or when `count` is called.

        A speculative request, or one whose replica is still to be chosen, is arranged without being counted. Its order
        follows from the requests before it, its promotion from these and itself (CRAFT §4.2), counted yet or not: so a
        threshold of n is reached by the n-th request.
        """
        free = (order or self._order) is ChunkOrder.FREE
        first, last = _chunks_before_the_question(prompt)
        chunks = prompt.parts[first:last]
        ids = [part.id for part in chunks if part.id is not None]
        places = self._free_order(prompt, first, ids, chunks) if free else list(range(len(chunks)))
        moved = (*prompt.parts[:first], *(chunks[place] for place in places), *prompt.parts[last:])
        stands = prompt if places == sorted(places) else Prompt(moved)
        promotion = self._promotion([ids[place] for place in places]) if free else None
        if counted:
            self.count(stands, free=free)
        return Arranged(
            stands,
            self._ordering.name if free else ORIGINAL,
            {first + number: place for number, place in enumerate(places)},
            promotion,
        )

    def _free_order(
        self, prompt: Prompt, first: int, ids: Sequence[ChunkId], chunks: Sequence[PromptPart]
    ) -> list[int]:
        """The numbers of `chunks` as the ordering puts them behind the parts before number `first`."""
        before = (part.id for part in prompt.parts[:first] if part.id is not None)
        counts = [self.table.count(one) for one in ids]
        return self._ordering.order(Unordered(ids, counts, list(map(len, chunks)), self._tree.at(before)))

    def count(self, prompt: Prompt, *, free: bool) -> None:
        """Count a request whose chunks stand as they will be computed; `free` if that was for the arranger to say."""
        first, last = _chunks_before_the_question(prompt)
        path = [part.id for part in prompt.parts[first:last] if part.id is not None]
        self.table.note(path)
        if free:
            self._begun.note(_beginnings(path))

    def _promotion(self, path: list[ChunkId]) -> Promotion:
        """What of `path` comes back, with the request that asks for it counted."""
        kept, continued = self._config.promotion_threshold, self._config.continuation_threshold
        begins = _beginnings(path)
        return Promotion(
            None if kept is None else frozenset(one for one in path if self.table.count_with(one) >= kept),
            frozenset(
                chunk
                for chunk, begin in zip(path, begins, strict=True)
                if continued is not None and self._begun.count_with(begin) >= continued
            ),
        )


def _beginnings(path: list[ChunkId]) -> list[int]:
    """A hash of each prefix of a path, the shortest first."""
    return list(accumulate(path, lambda before, chunk: hash((before, chunk)), initial=0))[1:]


def _chunks_before_the_question(prompt: Prompt) -> tuple[int, int]:
    """Numbers of the first part of the last run of chunks, and of the part behind it."""
    last = len(prompt.parts)
    while last and prompt.parts[last - 1].kind is PartKind.QUESTION:
        last -= 1
    first = last
    while first and prompt.parts[first - 1].kind is PartKind.CHUNK:
        first -= 1
    return first, last
