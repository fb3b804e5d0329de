"""Choice of the replica for a request, and mirrors of what replicas store."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count

from chunkweave.errors import StoreError, UnknownMethodError, UsageError
from chunkweave.planning.plan import KVSource
from chunkweave.scheduling.queue import WEAVES, Listener, Path, share_reused
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.types import ChunkId

TIER = "replica"
_TOKENS_OF_A_SEGMENT = 16
_LEAST_SEGMENTS = 1024


class ReplicaContents:
    """A mirror of one replica's segment store within `budget_tokens` tokens, LRU; with short segments it holds fewer
    tokens.

    The mirror is an estimate. If it has a chunk that the replica lacks, the choice is worse until the replica's report
    corrects it (`correct`). `tree` holds the exact paths, for orderings; for weaving requests a chunk counts in any
    context. Usable by a `CacheAwareQueue` with paths from `waiting_path`. Belongs to one thread.
    """

    def __init__(self, budget_tokens: int) -> None:
        """An empty mirror.

        Raises:
            UsageError: a budget below 1.
        """
        if budget_tokens < 1:
            raise UsageError(f"a replica's contents need room for at least one token, not {budget_tokens}")
        self.tree: KnowledgeTree[ChunkId] = KnowledgeTree([TIER])
        self._budget_tokens = budget_tokens
        self._most_segments = max(_LEAST_SEGMENTS, budget_tokens // _TOKENS_OF_A_SEGMENT)  # each keeps its whole path
        self._segments: OrderedDict[tuple[Path, bool], int] = OrderedDict()
        self._tokens = 0
        self._of_chunk: dict[ChunkId, dict[tuple[Path, bool], int]] = {}
        self._listeners: list[Listener] = []

    @property
    def tokens(self) -> int:
        """Tokens of all mirrored segments."""
        return self._tokens

    @property
    def budget_tokens(self) -> int:
        """Most tokens that the mirror holds."""
        return self._budget_tokens

    @property
    def segments(self) -> int:
        """Number of mirrored segments."""
        return len(self._segments)

    def cached_tokens(self, path: Sequence[ChunkId], tokens: Sequence[int], *, weaves: bool) -> int:
        """Upper bound of the tokens of these cacheable parts, `tokens` each, that need not be computed.

        For an exact request the longest exact prefix, for one that `weaves` also every other chunk stored in any
        context.
        """
        exact = self.tree.match(path).nodes
        cached = [number < exact or (weaves and chunk in self._of_chunk) for number, chunk in enumerate(path)]
        return sum(compress(tokens, cached))

    def note(self, path: Sequence[ChunkId], tokens: Sequence[int], *, weaves: bool) -> None:
        """Record a served prompt with these parts: parts that were mirrored are marked as used, others are added.

        Approximately reused parts are not stored again, and parts computed after one are no exact path.
        """
        exact = True
        for place, (chunk, size) in enumerate(zip(path, tokens, strict=True)):
            prefix = tuple(path[: place + 1])
            if exact and (prefix, True) in self._segments:
                self._segments.move_to_end((prefix, True))
            elif weaves and chunk in self._of_chunk:
                exact = False
                latest = next(reversed(self._of_chunk[chunk]))  # a guess: only the replica knows which one it read
                self._segments.move_to_end(latest)
            elif exact:
                self._add(prefix, size, exact=True)
            else:
                self._add((chunk,), size, exact=False)
        self._fit()

    def correct(
        self, path: Sequence[ChunkId], tokens: Sequence[int], sources: Sequence[KVSource | None], *, weaves: bool
    ) -> None:
        """Apply a replica's report of each part's KV source; None: no information about that part.

        What it reused is there. What it computed was not: for an exact request, no exact segment at this index; for one
        that `weaves`, no segment of the chunk. Call it before `note`, which adds what was stored since.
        """
        for place, (chunk, size, source) in enumerate(zip(path, tokens, sources, strict=True)):
            prefix = tuple(path[: place + 1])
            if source is KVSource.EXACT:
                self._add(prefix, size, exact=True)
            elif source is KVSource.REUSED and chunk not in self._of_chunk:
                self._add((chunk,), size, exact=False)
            elif source is KVSource.COMPUTED and weaves:
                self.forget([chunk])
            elif source is KVSource.COMPUTED and (prefix, True) in self._segments:
                self._drop((prefix, True))

    def resize(self, budget_tokens: int) -> None:
        """Set the replica's store size in tokens (at least 1); evicts the least recently used."""
        self._budget_tokens = max(1, budget_tokens)
        self._most_segments = max(_LEAST_SEGMENTS, self._budget_tokens // _TOKENS_OF_A_SEGMENT)
        self._fit()

    def forget(self, chunks: Sequence[ChunkId]) -> None:
        """Remove chunks that the replica does not hold."""
        for chunk in chunks:
            for key in list(self._of_chunk.get(chunk, ())):
                self._drop(key)

    def clear(self) -> None:
        """Remove everything: the replica restarted empty."""
        for key in list(self._segments):
            self._drop(key)

    def stored_tokens(self, keys: Sequence[ChunkId]) -> int:
        """The tokens of a `waiting_path` that need not be computed."""
        if not keys or keys[0] != WEAVES:
            return self.tree.stored_tokens(keys)
        path = keys[2:]
        exact = self.tree.match(path)
        stored = (self._of_chunk.get(chunk) for chunk in path[exact.nodes :])
        return exact.tokens + int(share_reused(keys) * sum(next(iter(sizes.values())) for sizes in stored if sizes))

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with each waiting path, or prefix of waiting paths, whose contents changed."""
        self._listeners.append(listener)
        self.tree.subscribe(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling `listener`."""
        self._listeners = [subscribed for subscribed in self._listeners if subscribed != listener]
        self.tree.unsubscribe(listener)

    def check(self) -> None:
        """Audit the counts.

        Raises:
            StoreError: they disagree.
        """
        self.tree.check()
        if sum(self._segments.values()) != self._tokens:
            raise StoreError("the mirror of a replica has a wrong token count")
        filed = {key: size for segments in self._of_chunk.values() for key, size in segments.items()}
        if filed != self._segments or not all(self._of_chunk.values()):
            raise StoreError("the mirror of a replica has lost a segment of a chunk")

    def _fit(self) -> None:
        while self._segments and (self._tokens > self._budget_tokens or self.segments > self._most_segments):
            self._drop(next(iter(self._segments)))

    def _add(self, path: Path, size: int, *, exact: bool) -> None:
        key = (path, exact)
        if key in self._segments:
            self._segments.move_to_end(key)
            return
        self._segments[key] = size
        self._tokens += size
        self._of_chunk.setdefault(path[-1], {})[key] = size
        if exact:
            self.tree.placed(path, TIER, size)
        if len(self._of_chunk[path[-1]]) == 1:
            self._tell_weaving()

    def _drop(self, key: tuple[Path, bool]) -> None:
        path, exact = key
        self._tokens -= self._segments.pop(key)
        del self._of_chunk[path[-1]][key]
        if exact:
            self.tree.displaced(path, TIER)
        if not self._of_chunk[path[-1]]:
            del self._of_chunk[path[-1]]
            self._tell_weaving()

    def _tell_weaving(self) -> None:
        for listener in self._listeners:
            listener((WEAVES,))


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
