"""Choice of the replica for a request, and the chunks that were sent there."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from chunkweave.errors import StoreError, UnknownMethodError, UsageError
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.types import ChunkId

TIER = "replica"
_TOKENS_OF_A_SEGMENT = 16
_LEAST_SEGMENTS = 1024
Path = tuple[ChunkId, ...]


class SentPaths:
    """The chunks that were lately sent, within `budget_tokens` tokens, LRU; with short chunks fewer tokens.

    They are an estimate of what a replica stores: a wrong one only makes an order worse. `tree` holds the exact paths,
    for orderings; for weaving requests a chunk counts in any context. A `ChunkStore` for `StoredTokens`. Belongs to one
    thread; the tree may be read from others.
    """

    def __init__(self, budget_tokens: int) -> None:
        """Nothing was sent yet.

        Raises:
            UsageError: a budget below 1.
        """
        if budget_tokens < 1:
            raise UsageError(f"sent chunks need room for at least one token, not {budget_tokens}")
        self.tree: KnowledgeTree[ChunkId] = KnowledgeTree([TIER])
        self._budget_tokens = budget_tokens
        self._most_segments = max(_LEAST_SEGMENTS, budget_tokens // _TOKENS_OF_A_SEGMENT)  # each keeps its whole path
        self._segments: OrderedDict[tuple[Path, bool], int] = OrderedDict()
        self._tokens = 0
        self._of_chunk: dict[ChunkId, dict[tuple[Path, bool], int]] = {}

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return self._tokens

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self._segments)

    def chunk_tokens(self, chunk: ChunkId) -> int:
        """Tokens of a chunk if it was sent in any context; else 0."""
        return next(iter(self._of_chunk.get(chunk, {}).values()), 0)

    def note(self, path: Sequence[ChunkId], tokens: Sequence[int], *, weaves: bool) -> None:
        """Record a served prompt with these parts, `tokens` each: known parts are marked as used, others are added.

        Approximately reused parts are not stored again, and parts computed after one are no exact path.
        """
        exact = True
        for number, (chunk, size) in enumerate(zip(path, tokens, strict=True)):
            key = tuple(path[: number + 1]), True
            if weaves and (not exact or key not in self._segments) and chunk in self._of_chunk:
                exact = False
                key = next(reversed(self._of_chunk[chunk]))  # a guess: only the replica knows which one it read
            elif not exact:
                key = (chunk,), False
            self._use(key, size)
        while self._segments and (self._tokens > self._budget_tokens or self.segments > self._most_segments):
            self._drop(next(iter(self._segments)))

    def forget(self, chunks: Iterable[ChunkId]) -> None:
        """Remove chunks that are not stored any more."""
        for chunk in chunks:
            for key in list(self._of_chunk.get(chunk, ())):
                self._drop(key)

    def clear(self) -> None:
        """Remove everything: the replica restarted empty."""
        for key in list(self._segments):
            self._drop(key)

    def check(self) -> None:
        """Audit the counts.

        Raises:
            StoreError: they disagree.
        """
        self.tree.check()
        if sum(self._segments.values()) != self._tokens:
            raise StoreError("the count of sent chunks has a wrong number of tokens")
        filed = {key: size for segments in self._of_chunk.values() for key, size in segments.items()}
        if filed != self._segments or not all(self._of_chunk.values()):
            raise StoreError("the index of sent chunks has lost a segment")

    def _use(self, key: tuple[Path, bool], size: int) -> None:
        if key in self._segments:
            self._segments.move_to_end(key)
            return
        path, exact = key
        self._segments[key] = size
        self._tokens += size
        self._of_chunk.setdefault(path[-1], {})[key] = size
        if exact:
            self.tree.placed(path, TIER, size)

    def _drop(self, key: tuple[Path, bool]) -> None:
        path, exact = key
        self._tokens -= self._segments.pop(key)
        del self._of_chunk[path[-1]][key]
        if exact:
            self.tree.displaced(path, TIER)
        if not self._of_chunk[path[-1]]:
            del self._of_chunk[path[-1]]


USUAL_ROUTING = "affinity"

_MOST_LOAD = 1.25
"""With `affinity`, most outstanding tokens of a replica, relative to the mean."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take a request, with the tokens that it still has to compute for others."""

    name: str
    outstanding_tokens: int


class Router:
    """Chooses among replicas. One caller at a time.

    With `affinity`, by rendezvous hashing with bounded loads (Thaler and Ravishankar, 1998; Mirrokni et al., 2018): the
    key is the least id of a prompt's chunks, so that order does not matter, and prompts with many common chunks
    probably have the same key. A replica is left out if its outstanding tokens exceed 1.25 times the mean of all, the
    new request included. Prompts without chunks go to the least loaded replica, equals in turn.

    Raises:
        UnknownMethodError: no such policy; the message lists the known ones.
    """

    def __init__(self, policy: str = USUAL_ROUTING) -> None:
        if policy not in ROUTING:
            raise UnknownMethodError(f"unknown routing {policy!r}; there are: {', '.join(ROUTING)}")
        self._policy = ROUTING[policy]
        self._numbers = count()

    def choose(self, tokens: int, chunks: Collection[ChunkId], candidates: Sequence[Candidate]) -> Candidate:
        """The replica for a prompt of `tokens` tokens with these chunks; there is at least one candidate."""
        first = next(self._numbers) % len(candidates)
        return self._policy(tokens, chunks, [*candidates[first:], *candidates[:first]])


def _affinity(tokens: int, chunks: Collection[ChunkId], candidates: Sequence[Candidate]) -> Candidate:
    bound = _MOST_LOAD * (tokens + sum(candidate.outstanding_tokens for candidate in candidates)) / len(candidates)
    free = [
        candidate for candidate in candidates if candidate.outstanding_tokens <= bound
    ]  # never empty: one is at or below the mean
    if not chunks:
        return min(free, key=lambda candidate: candidate.outstanding_tokens)
    key = min(chunks)
    return max(free, key=lambda candidate: hashlib.blake2b(f"{candidate.name} {key}".encode(), digest_size=8).digest())


ROUTING: Mapping[str, Callable[[int, Collection[ChunkId], Sequence[Candidate]], Candidate]] = {
    "affinity": _affinity,
    "round-robin": lambda _tokens, _chunks, candidates: candidates[0],
}
