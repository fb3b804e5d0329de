"""Measures how chunk order affects reuse over sequences of requests. Imports no torch."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from chunkweave.calibration.questions import Example
from chunkweave.errors import DocumentError, UsageError
from chunkweave.ordering.arrangement import AccessTable
from chunkweave.ordering.ordering import Unordered, make_ordering
from chunkweave.planning.adaptive_methods import promoted_length
from chunkweave.store.prefix_trie import KnowledgeTree, PrefixTrie
from chunkweave.types import ChunkId
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.simulator.trace import Arrival, Part, key_of, read_trace
from chunkweave_lab.simulator.workloads import bundled_token_count


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares from 0 to 1, averaged over all requests except the first.

    `prefix` is the longest common prefix with an earlier request, `total` the largest number of chunks shared with one
    (CRAFT §3.1, Figure 3), both divided by the request's number of chunks. `seen` is the share of chunks that occurred
    in any earlier request.
    """

    prefix: float
    total: float
    seen: float


def overlap_of(requests: Sequence[Sequence[Hashable]], progress: Callable[[int, int], None] | None = None) -> Overlap:
    """`Prefix` and `Total` of CRAFT §3.1, with a request's number of chunks in place of k; 0 for a single request.

    >>> overlap_of([[1, 4, 5, 6, 7], [1, 2, 3, 4, 5]])
    Overlap(prefix=0.2, total=0.6, seen=0.6)
    """
    paths: PrefixTrie[Hashable, bool] = PrefixTrie()
    earlier = EarlierSets()
    prefix, total, seen = [], [], []
    for number, request in enumerate(requests):
        chunks = dict.fromkeys(request)
        if number and chunks:
            prefix.append(sum(paths.prefix(request)) / len(request))
            total.append(earlier.most_shared(dict.fromkeys(chunks, 1)) / len(chunks))
            seen.append(sum(chunk in earlier for chunk in chunks) / len(chunks))
        for end in range(sum(paths.prefix(request)) + 1, len(request) + 1):
            paths.grow(request[:end]).value = True
        earlier.add(chunks)
        if progress is not None:
            progress(number + 1, len(requests))
    return Overlap(*(fmean(shares) if shares else 0.0 for shares in (prefix, total, seen)))


class EarlierSets:
    """Distinct sets of chunks, indexed by their chunks."""

    def __init__(self) -> None:
        self._known: set[frozenset[Hashable]] = set()
        self._with: dict[Hashable, list[int]] = defaultdict(list)

    def __contains__(self, chunk: Hashable) -> bool:
        return chunk in self._with

    def add(self, chunks: Sequence[Hashable] | dict[Hashable, None]) -> None:
        """Add a set."""
        members = frozenset(chunks)
        if members in self._known:
            return
        for chunk in members:
            self._with[chunk].append(len(self._known))
        self._known.add(members)

    def most_shared(self, weights: dict[Hashable, int]) -> int:
        """The largest sum of `weights` over the chunks shared with one earlier set."""
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


_TIER = "host"


class UnlimitedCache:
    """A cache of exact prefixes, chunk by chunk, that keeps everything."""

    def __init__(self) -> None:
        self.tree: KnowledgeTree[ChunkId] = KnowledgeTree([_TIER])

    def hold(self, parts: Sequence[Part]) -> None:
        """Store all parts."""
        keys = [key_of(part) for part in parts]
        for end in range(self.tree.match(keys).nodes + 1, len(keys) + 1):
            self.tree.placed(keys[:end], _TIER, parts[end - 1].tokens)


Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The `window` of counts, and the count from which a path is stored (`promotion_threshold`, None: always).

    The cache is the same for all orderings; it stores exact paths, chunk by chunk.
    """

    window: int = 1000
    promotion_threshold: int | None = None


@dataclass(frozen=True, slots=True)
class Savings:
    """Savings of an ordering: document tokens whose KV was stored as an exact prefix, without the system part.

    `hit_chunks` of `chunks` were stored; `full_hits` requests had all their chunks stored.
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


def replay(
    arrivals: Sequence[Arrival], ordering: str, config: ReplayConfig | None = None, progress: Progress | None = None
) -> Savings:
    """Serve all requests with an ordering of the registry: look up, serve, count, store (CRAFT §4.2).

    Raises:
        UnknownMethodError: no such ordering.
    """
    made, config, cache = make_ordering(ordering), config or ReplayConfig(), UnlimitedCache()
    table: AccessTable[ChunkId] = AccessTable(config.window)
    hits = tokens = full = 0
    for number, arrival in enumerate(arrivals):
        head, documents = arrival.parts[: int(arrival.has_system)], arrival.documents
        before = [key_of(part) for part in head]
        ids = [key_of(part) for part in documents]
        sizes = [part.tokens for part in documents]
        places = made.order(Unordered(ids, [table.count(one) for one in ids], sizes, cache.tree.at(before)))
        ordered = [documents[place] for place in places]
        stored = max(0, cache.tree.match([*before, *(ids[place] for place in places)]).nodes - len(head))
        hits += stored
        tokens += sum(part.tokens for part in ordered[:stored])
        full += stored == len(documents)
        table.note(ids)
        threshold = config.promotion_threshold
        hot = [threshold is None or table.count(ids[place]) >= threshold for place in places]
        cache.hold([*head, *ordered[: promoted_length(hot, stored)]])
        if progress is not None:
            progress(number + 1, len(arrivals))
    documents_in_all = [part for arrival in arrivals for part in arrival.documents]
    total = sum(part.tokens for part in documents_in_all)
    return Savings(ordering, len(arrivals), len(documents_in_all), hits, total, tokens, full)


def saving_bound(arrivals: Sequence[Arrival], progress: Progress | None = None) -> int:
    """Upper bound on the document tokens that any order can save: what each request shares with one earlier request.

    A stored path was served to one request, so all its chunks are from that request. The cache is unlimited.
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


MOONCAKE = "Mooncake trace"
"""Kind of file. Its block names depend on all earlier blocks, so their order is not free."""


def read_requests(path: Path, *, top_k: int | None = None, seed: int = 0) -> tuple[str, list[Arrival]]:
    """The kind of a file, and its requests in order, each with its first `top_k` documents (None: all).

    A data set (MuSiQue or SQuAD JSON, or JSONL with `question`) has one request per question, one per second, with
    tokens counted by the bundled tokenizer. `seed` draws the paragraphs of a SQuAD question.

    Raises:
        DocumentError: the file cannot be read; the message has file, line and reason.
        UsageError: `top_k` is not positive.
    """
    if top_k is not None and top_k < 1:
        raise UsageError(f"top-k must be at least 1, not {top_k}")
    first = _first_line(path)
    if "arrival_s" in first or "hash_ids" in first:
        kind = MOONCAKE if "hash_ids" in first else "request trace"
        arrivals = sorted(read_trace(path), key=lambda one: one.arrival_s)
    else:
        kind, arrivals = "data set", _questions(load_dataset(path, seed=seed))
    return kind, arrivals if top_k is None else [_cut(arrival, top_k) for arrival in arrivals]


def _first_line(path: Path) -> dict[str, object]:
    """The object in the first non-empty line; empty if it is not an object."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            line = next((line for line in file if line.strip()), "")
        entry = json.loads(line) if line.lstrip().startswith("{") else {}
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8: bad byte at offset {error.start}") from error
    except OSError as error:
        raise DocumentError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except json.JSONDecodeError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _questions(examples: list[Example]) -> list[Arrival]:
    count = bundled_token_count()
    lengths: dict[str, int] = {}
    arrivals = []
    for number, example in enumerate(examples):
        for chunk in example.chunks:
            if chunk.text not in lengths:
                lengths[chunk.text] = max(1, count(chunk.text))
        parts = tuple(Part(chunk.text, lengths[chunk.text]) for chunk in example.chunks)
        arrivals.append(Arrival(float(number), parts, count(example.question)))
    return arrivals


def _cut(arrival: Arrival, top_k: int) -> Arrival:
    parts = arrival.parts[: int(arrival.has_system) + top_k]
    return replace(arrival, parts=parts)
