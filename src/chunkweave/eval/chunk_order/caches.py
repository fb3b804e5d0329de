"""Simulated caches of exact paths: what of a prompt's parts is stored, and what is stored after it."""

from collections.abc import Sequence
from typing import Protocol

from chunkweave.eval.simulator.trace import Part, PathRecords, key_of
from chunkweave.store.eviction import make_policy
from chunkweave.store.tree_cache import TreeCache, TreeTier
from chunkweave.trees.knowledge_tree import KnowledgeTree
from chunkweave.types import ChunkId

_TIER = "host"


class PathCache(Protocol):
    """A cache of exact prefixes, chunk by chunk."""

    tree: KnowledgeTree[ChunkId]
    """What is stored."""

    def hold(self, parts: Sequence[Part]) -> None:
        """A prompt that begins with `parts` was served: they are stored now, as far as there is room."""


class UnlimitedCache:
    """Everything that was ever served."""

    def __init__(self) -> None:
        self.tree: KnowledgeTree[ChunkId] = KnowledgeTree([_TIER])

    def hold(self, parts: Sequence[Part]) -> None:
        """Store all of it."""
        keys = [key_of(part) for part in parts]
        for end in range(self.tree.match(keys).nodes + 1, len(keys) + 1):
            self.tree.placed(keys[:end], _TIER, parts[end - 1].tokens)


class LimitedCache:
    """`budget_tokens` of KV under an eviction policy, by the store's own rules (`TreeCache`)."""

    def __init__(self, budget_tokens: int, policy: str = "lru") -> None:
        """An empty cache.

        Raises:
            UnknownMethodError: no such policy.
            UsageError: a negative budget.
        """
        self._cache = TreeCache([TreeTier(_TIER, budget_tokens, make_policy(policy))])
        self._records = PathRecords(1)
        self.tree = self._cache.tree

    def hold(self, parts: Sequence[Part]) -> None:
        """Count one use of what is stored of it, and store the rest."""
        self._cache.use(self._records.path(parts))
