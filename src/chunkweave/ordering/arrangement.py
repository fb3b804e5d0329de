"""Orders the chunks of prompts, and counts requests for chunks."""

import json
import logging
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from chunkweave.errors import StoreError, UsageError
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig, Unordered, make_ordering
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.store.shared_folder import replace_file
from chunkweave.types import ChunkId

logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT", bound=Hashable)


class AccessTable(Generic[KeyT]):
    """Exact counts of keys over the last `window` requests (CRAFT §4.1); memory is bounded by the window.

    A request counts each of its keys once. Thread-safe; `count` takes no lock.
    """

    def __init__(self, window: int) -> None:
        """An empty table.

        Raises:
            UsageError: a window below 1.
        """
        if window < 1:
            raise UsageError(f"chunks are counted over at least one request, not {window}")
        self.window = window
        self._requests: deque[tuple[KeyT, ...]] = deque()
        self._counts: dict[KeyT, int] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of keys in the window."""
        return len(self._counts)

    @property
    def requests(self) -> int:
        """Number of requests in the window."""
        return len(self._requests)

    def count(self, key: KeyT) -> int:
        """Number of requests in the window with `key`."""
        return self._counts.get(key, 0)

    def count_with(self, key: KeyT) -> int:
        """The result of `count` after one more request with `key`."""
        with self._lock:
            leaving = self._requests[0] if len(self._requests) == self.window else ()
            return self._counts.get(key, 0) + 1 - (key in leaving)

    def note(self, keys: Iterable[KeyT]) -> None:
        """Add a request; the oldest one leaves a full window."""
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
                raise StoreError(f"the access table of {self.window} requests has wrong counts")


ORIGINAL = "original"
"""The ordering that does not move chunks."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """The chunks of one request over which exact prefixes may grow.

    An exact method stores exact paths over `kept` parts only, earlier turns included (None: over all). A weaving method
    computes a chunk in `continued` in full if it follows the exact prefix.
    """

    kept: frozenset[ChunkId] | None = None
    continued: frozenset[ChunkId] = frozenset()


@dataclass(frozen=True, slots=True)
class Arranged:
    """A prompt whose chunks are in their final order.

    `ordering` is the ordering used. `ranks` maps part indices to the chunk's index in the caller's order, from 0.
    `promotion` says where its exact prefix may grow. `free`: the ordering was allowed to choose.
    """

    prompt: Prompt
    ordering: str = ORIGINAL
    ranks: Mapping[int, int] = field(default_factory=dict)
    promotion: Promotion = field(default_factory=Promotion)
    free: bool = False


_MOST_TENANTS = 256
"""Most tenants whose requests are counted; above it, the one without requests for the longest time is forgotten."""

FORMAT = 1
COUNTS_FILE = "access-counts.json"
"""File name for `Arranger.save`, in a cache folder."""


class _Counted:
    """The latest requests of one tenant: their chunks, and the path beginnings of those with free order."""

    def __init__(self, window: int) -> None:
        self.table: AccessTable[ChunkId] = AccessTable(window)
        self.begun: AccessTable[int] = AccessTable(window)
        self.latest: deque[tuple[bool, tuple[ChunkId, ...]]] = deque(maxlen=window)

    def note(self, path: Sequence[ChunkId], *, free: bool) -> None:
        """Add a request."""
        self.latest.append((free, tuple(path)))
        self.table.note(path)
        if free:
            self.begun.note(_beginnings(path))


class Arranger:
    """Orders each request's chunks by earlier requests, then counts it (CRAFT §4.2).

    Each tenant's requests are counted separately, so other tenants move no chunk out of its window. `save` and `load`
    keep the counts across restarts. Only the chunks directly before the question are moved: earlier turns of a
    conversation stay in place, because moving them would mean computing their KV again (§6.1). One caller at a time;
    tables may be read concurrently.
    """

    def __init__(
        self, config: OrderingConfig, tree: KnowledgeTree[ChunkId], *, order: ChunkOrder = ChunkOrder.FIXED
    ) -> None:
        """An arranger without requests.

        Args:
            config: how requests with free order are ordered.
            tree: the stored exact paths.
            order: default for requests that name none.

        Raises:
            UnknownMethodError: no such ordering.
        """
        self._counted: OrderedDict[str, _Counted] = OrderedDict()
        self._config = config
        self._ordering = make_ordering(config.ordering)
        self._tree = tree
        self._order = order

    @property
    def reorders(self) -> bool:
        """Whether requests with free order ignore the given sequence of chunks."""
        return self._ordering.name != ORIGINAL

    def table(self, tenant: str = "") -> AccessTable[ChunkId]:
        """The counts of a tenant's requests."""
        return self._of(tenant).table

    def save(self, path: Path | None) -> None:
        """Write the counts atomically (None: nowhere): chunk ids, no texts. A failure is logged."""
        if path is None or not self._counted:
            return
        counted = {tenant: list(history.latest) for tenant, history in self._counted.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({"format": FORMAT, "requests": counted}))
        except OSError as error:
            logger.warning("request counts cannot be stored: %s", error)

    def load(self, path: Path | None) -> None:
        """Load saved counts. A missing file is ignored; a damaged one is logged and ignored."""
        if path is None:
            return
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["format"] != FORMAT:
                raise ValueError("another format")
            requests = [
                (str(tenant), [ChunkId(str(chunk)) for chunk in chunks], bool(free))
                for tenant, latest in saved["requests"].items()
                for free, chunks in latest
            ]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be read (%s); request counts start at 0", path, error)
            return
        for tenant, chunks, free in requests:
            self._of(tenant).note(chunks, free=free)

    def _of(self, tenant: str) -> _Counted:
        counted = self._counted.pop(tenant, None) or _Counted(self._config.window)
        self._counted[tenant] = counted
        if len(self._counted) > _MOST_TENANTS:
            self._counted.popitem(last=False)
        return counted

    def arrange(
        self, prompt: Prompt, order: ChunkOrder | None = None, *, counted: bool = True, tenant: str = ""
    ) -> Arranged:
        """Put the prompt's chunks in order. Counts the request now, or with a later call of `count`.

        A speculative request, or one whose replica is not chosen yet, is arranged without being counted. The order
        depends on earlier requests; the promotion also on this one (CRAFT §4.2), counted yet or not, so that a
        threshold of n is reached by the n-th request.
        """
        free = (order or self._order) is ChunkOrder.FREE
        first, last = _chunks_before_the_question(prompt)
        chunks = prompt.parts[first:last]
        ids = [part.id for part in chunks if part.id is not None]
        places = self._free_order(prompt, first, chunks, tenant) if free else list(range(len(chunks)))
        moved = (*prompt.parts[:first], *(chunks[place] for place in places), *prompt.parts[last:])
        ordered = prompt if places == sorted(places) else Prompt(moved)
        path = [ids[place] for place in places]
        promotion = self._promotion(prompt.parts[:first], path, self._of(tenant), free=free)
        if counted:
            self.count(ordered, free=free, tenant=tenant)
        return Arranged(
            ordered,
            self._ordering.name if free else ORIGINAL,
            {first + number: place for number, place in enumerate(places)},
            promotion,
            free,
        )

    def _free_order(self, prompt: Prompt, first: int, chunks: Sequence[PromptPart], tenant: str) -> list[int]:
        """Indices into `chunks` in the ordering's order, placed after the parts before index `first`."""
        before = (part.id for part in prompt.parts[:first] if part.id is not None)
        ids = [part.id for part in chunks if part.id is not None]
        counts = [self.table(tenant).count(chunk) for chunk in ids]
        return self._ordering.order(Unordered(ids, counts, list(map(len, chunks)), self._tree.at(before)))

    def count(self, prompt: Prompt, *, free: bool, tenant: str = "") -> None:
        """Count a request with chunks in final order; `free` if the arranger was allowed to order them."""
        first, last = _chunks_before_the_question(prompt)
        path = [part.id for part in prompt.parts[first:last] if part.id is not None]
        self._of(tenant).note(path, free=free)

    def _promotion(
        self, before: Sequence[PromptPart], path: list[ChunkId], counted: _Counted, *, free: bool
    ) -> Promotion:
        """The promoted chunks of `path`, this request counted, among the first `path_chunks`.

        CRAFT's thresholds apply to a free order. RAGCache §8 caches requests with a large top-k as if they asked for
        fewer documents. The parts `before` the chunks are always kept.
        """
        kept = self._config.promotion_threshold
        continued = self._config.continuation_threshold
        most = self._config.path_chunks
        if not free:
            kept = continued = None
        if not free and most is None:
            return Promotion()
        begins = _beginnings(path)
        ids_before = {part.id for part in before if part.id is not None}
        hot = ids_before.union(
            chunk for chunk in path[:most] if kept is None or counted.table.count_with(chunk) >= kept
        )
        return Promotion(
            None if kept is None and most is None else frozenset(hot),
            frozenset(
                chunk
                for chunk, begin in zip(path, begins, strict=True)
                if continued is not None and counted.begun.count_with(begin) >= continued
            ),
        )


def _beginnings(path: Sequence[ChunkId]) -> list[int]:
    """A hash of each prefix of a path, shortest first; valid in this process only. A collision only causes a wrong
    count.
    """
    return list(accumulate(path, lambda before, chunk: hash((before, chunk)), initial=0))[1:]


def _chunks_before_the_question(prompt: Prompt) -> tuple[int, int]:
    """Index of the first part of the last run of chunks, and of the part after the run."""
    last = len(prompt.parts)
    while last and prompt.parts[last - 1].kind is PartKind.QUESTION:
        last -= 1
    first = last
    while first and prompt.parts[first - 1].kind is PartKind.CHUNK:
        first -= 1
    return first, last
