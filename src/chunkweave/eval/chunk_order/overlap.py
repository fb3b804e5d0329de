"""How much requests have in common with earlier ones: CRAFT's prefix and total overlap, and repeats across turns."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean

from chunkweave.trees.prefix_trie import PrefixTrie


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares from 0 to 1, averaged over all requests but the first.

    `prefix` is the longest common prefix with any earlier request, `total` the most shared chunks with any (CRAFT §3.1,
    Figure 3), both over the request's number of chunks. `seen` is the share of chunks that any earlier request had.
    """

    prefix: float
    total: float
    seen: float


def overlap_of(requests: Sequence[Sequence[Hashable]], progress: Callable[[int, int], None] | None = None) -> Overlap:
    """`Prefix` and `Total` of §3.1, a request's own number of chunks taking the place of k; 0 for a single request.

    >>> overlap_of([[1, 4, 5, 6, 7], [1, 2, 3, 4, 5]])
    Overlap(prefix=0.2, total=0.6, seen=0.6)
    """
    paths: PrefixTrie[Hashable, None] = PrefixTrie()
    earlier = EarlierSets()
    prefix, total, seen = [], [], []
    for number, request in enumerate(requests):
        chunks = dict.fromkeys(request)
        if number and chunks:
            prefix.append(len(paths.longest_prefix(request)) / len(request))
            total.append(earlier.most_shared(dict.fromkeys(chunks, 1)) / len(chunks))
            seen.append(sum(chunk in earlier for chunk in chunks) / len(chunks))
        for end in range(len(paths.longest_prefix(request)) + 1, len(request) + 1):
            paths.attach(request[:end], None)
        earlier.add(chunks)
        if progress is not None:
            progress(number + 1, len(requests))
    return Overlap(*(fmean(shares) if shares else 0.0 for shares in (prefix, total, seen)))


class EarlierSets:
    """Sets of chunks, each remembered once, by the chunks in them."""

    def __init__(self) -> None:
        self._known: set[frozenset[Hashable]] = set()
        self._with: dict[Hashable, list[int]] = defaultdict(list)

    def __contains__(self, chunk: Hashable) -> bool:
        return chunk in self._with

    def add(self, chunks: Sequence[Hashable] | dict[Hashable, None]) -> None:
        """Remember one more."""
        members = frozenset(chunks)
        if members in self._known:
            return
        for chunk in members:
            self._with[chunk].append(len(self._known))
        self._known.add(members)

    def most_shared(self, weights: dict[Hashable, int]) -> int:
        """The greatest sum of weights of what one earlier set shares with the chunks that `weights` names."""
        if frozenset(weights) in self._known:
            return sum(weights.values())
        shared: Counter[int] = Counter()
        for chunk, weight in weights.items():
            for number in self._with.get(chunk, ()):
                shared[number] += weight
        return max(shared.values(), default=0)


def repeated_across_turns(requests: Sequence[tuple[str, Sequence[Hashable]]]) -> float | None:
    """Mean share of a later turn's chunks that an earlier turn of its conversation had (CRAFT §3.2, Figure 6b).

    Requests are pairs of a conversation's name (empty: none) and chunks. None if no conversation has two turns.
    """
    had: dict[str, set[Hashable]] = {}
    shares = []
    for conversation, request in requests:
        if not conversation:
            continue
        chunks = set(request)
        if conversation in had and chunks:
            shares.append(len(chunks & had[conversation]) / len(chunks))
        had.setdefault(conversation, set()).update(chunks)
    return fmean(shares) if shares else None
