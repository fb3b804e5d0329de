"""What a replica is believed to hold: learned from what it was sent, bounded, and never asked of the replica."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from chunkweave.errors import StoreError, UsageError
from chunkweave.trees.knowledge_tree import KnowledgeTree
from chunkweave.types import ChunkId

Path = tuple[ChunkId, ...]
Listener = Callable[[Path], None]

TIER = "replica"

_WEAVES = ChunkId("weaves")
"""Stands before the path of a waiting request that weaves: no id of a chunk has fewer than 32 characters."""


def waiting_path(path: Sequence[ChunkId], *, weaves: bool) -> Path:
    """A prompt's path as a queue over `ReplicaContents` is to be told of it."""
    return (_WEAVES, *path) if weaves else tuple(path)


class ReplicaContents:
    """A mirror of one replica's segment store in `budget_tokens` tokens, the least recently used leaving first.

    It is no truth: the replica's own store decides. A chunk that the mirror has and the replica has not costs a worse
    choice, nothing else; the replica computes and stores it, and the mirror is right again.

    `tree` holds the paths that are stored exactly, for orderings. What is stored of a chunk in any company counts for
    requests that weave. A `CacheAwareQueue` can be put over it, with paths from `waiting_path`. Belongs to one thread.
    """

    def __init__(self, budget_tokens: int) -> None:
        """An empty mirror.

        Raises:
            UsageError: it could hold nothing.
        """
        if budget_tokens < 1:
            raise UsageError(f"a replica's contents need room for a token, not {budget_tokens}")
        self.tree: KnowledgeTree[ChunkId] = KnowledgeTree([TIER])
        self._budget_tokens = budget_tokens
        self._segments: OrderedDict[tuple[Path, bool], int] = OrderedDict()
        self._tokens = 0
        self._of_chunk: dict[ChunkId, dict[tuple[Path, bool], int]] = {}
        self._listeners: list[Listener] = []

    @property
    def tokens(self) -> int:
        """Tokens of all segments that are believed to be there."""
        return self._tokens

    @property
    def segments(self) -> int:
        """How many these are."""
        return len(self._segments)

    def cached_tokens(self, path: Sequence[ChunkId], tokens: Sequence[int], *, weaves: bool) -> int:
        """Tokens of a prompt's stored parts that need not be computed, at most.

        Of an exact request these are its longest exact prefix, of one that `weaves` also every other chunk that is
        there in any company.
        """
        exact = self.tree.match(path).nodes
        woven = sum(
            size for chunk, size in zip(path[exact:], tokens[exact:], strict=True) if weaves and chunk in self._of_chunk
        )
        return sum(tokens[:exact]) + woven

    def note(self, path: Sequence[ChunkId], tokens: Sequence[int], *, weaves: bool) -> None:
        """A prompt with these stored parts was served: what was there has been used, what was not has been stored.

        What a woven prompt reuses approximately is not stored again, and what is computed behind it is no exact path.
        """
        exact = True
        for place, (chunk, size) in enumerate(zip(path, tokens, strict=True)):
            here = tuple(path[: place + 1])
            if exact and (here, True) in self._segments:
                self._segments.move_to_end((here, True))
            elif weaves and chunk in self._of_chunk:
                exact = False
                self._use_any(chunk)
            elif exact:
                self._add(here, size, exact=True)
            else:
                self._add((chunk,), size, exact=False)
        self._shrink()

    def forget(self, chunks: Sequence[ChunkId]) -> None:
        """The replica turns out to hold none of these."""
        for chunk in chunks:
            for key in list(self._of_chunk.get(chunk, ())):
                self._drop(key)

    def clear(self) -> None:
        """The replica begins anew and holds nothing."""
        while self._segments:
            self._drop_oldest()

    def stored_tokens(self, keys: Sequence[ChunkId]) -> int:
        """Of a `waiting_path`, the tokens that need not be computed."""
        if not keys or keys[0] != _WEAVES:
            return self.tree.stored_tokens(keys)
        found = (self._of_chunk.get(chunk) for chunk in keys[1:])
        return sum(next(iter(segments.values())) for segments in found if segments)

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with each waiting path of which something else is stored now, or a prefix of these."""
        self._listeners.append(listener)
        self.tree.subscribe(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Call `listener` no more."""
        self._listeners = [other for other in self._listeners if other != listener]
        self.tree.unsubscribe(listener)

    def check(self) -> None:
        """Audit the counts.

        Raises:
            StoreError: they disagree.
        """
        self.tree.check()
        if sum(self._segments.values()) != self._tokens:
            raise StoreError("the mirror of a replica miscounts its tokens")
        filed = {key: size for segments in self._of_chunk.values() for key, size in segments.items()}
        if filed != self._segments or not all(self._of_chunk.values()):
            raise StoreError("the mirror of a replica has lost a segment of a chunk")

    def _use_any(self, chunk: ChunkId) -> None:
        """Which one is read the replica knows; the one that came last is as good a guess as any."""
        self._segments.move_to_end(next(reversed(self._of_chunk[chunk])))

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

    def _shrink(self) -> None:
        while self._tokens > self._budget_tokens and self._segments:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._segments)))

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
            listener((_WEAVES,))
