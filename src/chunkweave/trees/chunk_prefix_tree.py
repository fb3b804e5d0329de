"""CRAFT's Chunk-Prefix Tree: which prefixes are promoted, and where the KV of each chunk of them lies."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from chunkweave.errors import UsageError
from chunkweave.trees.knowledge_tree import KnowledgeTree, PathMatch

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Location:
    """A tier of one replica. `str()` is what it is called in matches: `host@a`."""

    tier: str
    replica: str

    def __str__(self) -> str:
        return f"{self.tier}@{self.replica}"


def promoted_length(hot: Sequence[bool], stored: int) -> int:
    """How many chunks of a path may be held: those `stored`, and the run of `hot` ones that goes on from there.

    CRAFT §4.2: a prefix is promoted if all its chunks reached the threshold; one that is reused is extended by the next
    chunk if that did. What is held already stays, whatever its count has become.

    >>> promoted_length([False, True, True, False, True], stored=1)
    3
    """
    length = stored
    while length < len(hot) and hot[length]:
        length += 1
    return length


class ChunkPrefixTree(Generic[KeyT]):
    """The global tree (CRAFT §4.1): prefixes of chunks whose KV some replica holds, and the rule by which they grow.

    It is a knowledge tree whose tiers are locations. Prefix slicing comes with the tree: every prefix of a held path
    is held. A node that lies nowhere any more ends all paths through it; what is below is found again if it returns.

    `count` says how often a chunk was asked for lately. Thread-safe, as `tree` is.
    """

    def __init__(self, locations: Sequence[Location], count: Callable[[KeyT], int], *, threshold: int = 2) -> None:
        """An empty tree over `locations`, the fastest first.

        Raises:
            UsageError: there is no location, one occurs twice, or the threshold is below 1.
        """
        if threshold < 1:
            raise UsageError(f"a promotion threshold must be at least 1, not {threshold}")
        self.threshold = threshold
        self.tree: KnowledgeTree[KeyT] = KnowledgeTree([str(location) for location in locations])
        self._locations = {str(location): location for location in locations}
        self._count = count

    def __len__(self) -> int:
        """Nodes that lie somewhere."""
        return len(self.tree)

    def longest_prefix(self, keys: Sequence[KeyT]) -> PathMatch:
        """How much of `keys` is held, in chunks and tokens, and from which location each chunk would be read."""
        return self.tree.match(keys)

    def locations(self, path: Sequence[KeyT]) -> frozenset[Location]:
        """Where the last chunk of `path` lies; nowhere if the path is not held."""
        return frozenset(self._locations[name] for name in self.tree.placement(path))

    def promote(self, keys: Sequence[KeyT], tokens: Sequence[int], location: Location) -> int:
        """After a request for `keys`, of so many `tokens` each, was counted and served at `location`: grow the tree.

        Returns how many chunks were inserted (§4.2, "Table Update and Maintenance").
        """
        held = self.tree.match(keys).nodes
        length = promoted_length([self._count(key) >= self.threshold for key in keys], held)
        for end in range(held + 1, length + 1):
            self.placed(keys[:end], location, tokens[end - 1])
        return length - held

    def placed(self, path: Sequence[KeyT], location: Location, tokens: int) -> None:
        """The KV of the last chunk of `path` lies at `location` now."""
        self.tree.placed(path, str(location), tokens)

    def displaced(self, path: Sequence[KeyT], location: Location) -> None:
        """It does so no longer. Said of what is not there it changes nothing."""
        self.tree.displaced(path, str(location))

    def check(self) -> None:
        """Audit links and counts.

        Raises:
            StoreError: they disagree.
        """
        self.tree.check()
