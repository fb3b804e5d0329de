"""How much prefill each ordering saves over a sequence of requests, beside a clairvoyant order and a bound."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any, Protocol

from chunkweave.eval.chunk_order.caches import PathCache, UnlimitedCache
from chunkweave.eval.chunk_order.overlap import EarlierSets
from chunkweave.eval.simulator.trace import Arrival, key_of
from chunkweave.ordering.access_table import AccessTable
from chunkweave.ordering.registry import Unordered, make_ordering
from chunkweave.trees.chunk_prefix_tree import promoted_length
from chunkweave.types import ChunkId

ORACLE = "oracle"
MOST_ORACLE_CHUNKS = 6
"""A clairvoyant order tries all permutations; of seven chunks there are 5040."""
_LOOK_AHEAD = 2000

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """How requests are counted (`window`), and from what count on a path is stored (`promotion_threshold`, None: any).

    The cache is the same for all orderings; what is stored is an exact path, chunk by chunk.
    """

    window: int = 1000
    promotion_threshold: int | None = None


@dataclass(frozen=True, slots=True)
class Savings:
    """What an ordering saved: tokens of documents whose KV was stored as an exact prefix. No system part counts.

    `hit_chunks` of `chunks` were stored, `full_hits` requests had all theirs.
    """

    ordering: str
    requests: int
    chunks: int
    hit_chunks: int
    document_tokens: int
    saved_tokens: int
    full_hits: int

    @property
    def saved_share(self) -> float:
        """Share of the documents' tokens that needed no computation: CRAFT's reduction in its Figure 12."""
        return self.saved_tokens / self.document_tokens if self.document_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "saved_share": self.saved_share}


class Arranging(Protocol):
    """Puts the documents of the request of that number in order, by what is known of earlier ones."""

    def __call__(self, number: int, given: Unordered) -> Sequence[int]:
        """Their places as they are to stand."""


def replay(
    arrivals: Sequence[Arrival],
    ordering: str,
    config: ReplayConfig | None = None,
    *,
    cache: PathCache | None = None,
    progress: Progress | None = None,
) -> Savings:
    """Serve all requests with an ordering of the registry, or with `oracle`.

    Raises:
        UnknownMethodError: no such ordering.
    """
    if ordering == ORACLE:
        arrange: Arranging = ClairvoyantOrder(arrivals).order
    else:
        made = make_ordering(ordering)

        def arrange(number: int, given: Unordered) -> Sequence[int]:  # noqa: ARG001
            return made.order(given)

    return replay_arranged(arrivals, ordering, arrange, config, cache=cache, progress=progress)


def replay_arranged(
    arrivals: Sequence[Arrival],
    name: str,
    arrange: Arranging,
    config: ReplayConfig | None = None,
    *,
    cache: PathCache | None = None,
    progress: Progress | None = None,
) -> Savings:
    """The same with any arrangement: look up, serve, count, store (CRAFT §4.2)."""
    config, cache = config or ReplayConfig(), cache or UnlimitedCache()
    table: AccessTable[ChunkId] = AccessTable(config.window)
    hits = tokens = full = 0
    for number, arrival in enumerate(arrivals):
        head, documents = arrival.parts[: int(arrival.has_system)], arrival.documents
        before = [key_of(part) for part in head]
        ids = [key_of(part) for part in documents]
        sizes = [part.tokens for part in documents]
        places = arrange(number, Unordered(ids, [table.count(one) for one in ids], sizes, cache.tree.at(before)))
        stood = [documents[place] for place in places]
        stored = max(0, cache.tree.match([*before, *(ids[place] for place in places)]).nodes - len(head))
        hits += stored
        tokens += sum(part.tokens for part in stood[:stored])
        full += stored == len(documents)
        table.note(ids)
        threshold = config.promotion_threshold
        hot = [threshold is None or table.count(ids[place]) >= threshold for place in places]
        cache.hold([*head, *stood[: promoted_length(hot, stored)]])
        if progress is not None:
            progress(number + 1, len(arrivals))
    documents_in_all = [part for arrival in arrivals for part in arrival.documents]
    total = sum(part.tokens for part in documents_in_all)
    return Savings(name, len(arrivals), len(documents_in_all), hits, total, tokens, full)


def saving_bound(arrivals: Sequence[Arrival], progress: Progress | None = None) -> int:
    """Document tokens that no order of chunks can save more of: of each request what it shares with one earlier one.

    A stored path was served to one request, so its chunks are all that one's. The cache is unlimited.
    """
    earlier = EarlierSets()
    saved = 0
    for number, arrival in enumerate(arrivals):
        weights: Counter[object] = Counter()
        for part in arrival.documents:
            weights[part.name] += part.tokens
        saved += earlier.most_shared(dict(weights))
        earlier.add(dict.fromkeys(weights))
        if progress is not None:
            progress(number + 1, len(arrivals))
    return saved


class ClairvoyantOrder:
    """Of all permutations one that saves most now and, of these, one along which later requests could save most.

    Knows all requests (2000 ahead), tries every permutation. The later saving of an order is that of every later
    request that has all chunks of its beginning, as if it were the only order ever stored. A choice that gives up
    something now for more later is not looked for, so that this is no bound; `saving_bound` is.
    """

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._with: dict[ChunkId, list[int]] = {}
        for number, arrival in enumerate(arrivals):
            for key in {key_of(part) for part in arrival.documents}:
                self._with.setdefault(key, []).append(number)

    def order(self, number: int, given: Unordered) -> Sequence[int]:
        """The order of request `number`."""
        numbers = range(len(given.chunks))
        later = self._later(number, given.chunks)
        if not later and not _anything_stored(given):
            return numbers
        return max(permutations(numbers), key=lambda order: (_saved(order, given), _worth(order, given, later)))

    def _later(self, number: int, chunks: Sequence[ChunkId]) -> dict[int, int]:
        """How many later requests have each set of these chunks, by the set as a bit mask."""
        shared: Counter[int] = Counter()
        for bit, chunk in enumerate(chunks):
            for other in reversed(self._with[chunk]):
                if other <= number:
                    break
                if other <= number + _LOOK_AHEAD:
                    shared[other] |= 1 << bit
        by_mask = Counter(shared.values())
        return (
            {
                part: sum(count for mask, count in by_mask.items() if mask & part == part)
                for part in range(1, 1 << len(chunks))
            }
            if by_mask
            else {}
        )


def _anything_stored(given: Unordered) -> bool:
    return given.place is not None and any(given.place.child(chunk) is not None for chunk in given.chunks)


def _saved(order: Sequence[int], given: Unordered) -> int:
    place, tokens = given.place, 0
    for number in order:
        place = None if place is None else place.child(given.chunks[number])
        if place is None:
            break
        tokens += given.tokens[number]
    return tokens


def _worth(order: Sequence[int], given: Unordered, later: dict[int, int]) -> int:
    mask = worth = 0
    for number in order:
        mask |= 1 << number
        if not later.get(mask):
            break
        worth += given.tokens[number] * later[mask]
    return worth
