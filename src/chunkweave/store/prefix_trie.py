"""A trie over hashable keys, and two uses of it: RAGCache's knowledge tree, and watchers by path."""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import RLock
from typing import Generic, TypeVar

from chunkweave.errors import StoreError, UsageError

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")
WatcherT = TypeVar("WatcherT", bound=Hashable)


class TrieNode(Generic[KeyT, ValueT]):
    """The end of a path. A node is held if its value is true; a free node only connects held nodes below it."""

    __slots__ = ("children", "key", "parent", "value")

    def __init__(self, key: KeyT, parent: "TrieNode[KeyT, ValueT] | None") -> None:
        self.key = key
        self.parent = parent
        self.children: dict[KeyT, TrieNode[KeyT, ValueT]] = {}
        self.value: ValueT | None = None

    @property
    def path(self) -> tuple[KeyT, ...]:
        """The keys from the root to this node."""
        keys = []
        node = self
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return tuple(reversed(keys))


class PrefixTrie(Generic[KeyT, ValueT]):
    """Values by path. The same key may occur in a path more than once; the root is the empty path.

    Set a node's value to hold its path; to release it, set a false value and `prune` the node. Nothing is recursive, so
    depth is unlimited. Not thread-safe.
    """

    def __init__(self) -> None:
        self.root: TrieNode[KeyT, ValueT] = TrieNode(None, None)  # type: ignore[arg-type]

    def find(self, path: Iterable[KeyT]) -> TrieNode[KeyT, ValueT] | None:
        """The node at `path`, free or held, or None."""
        node = self.root
        for key in path:
            child = node.children.get(key)
            if child is None:
                return None
            node = child
        return node

    def grow(self, path: Iterable[KeyT]) -> TrieNode[KeyT, ValueT]:
        """The node at `path`; creates missing nodes as free ones."""
        node = self.root
        for key in path:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = TrieNode(key, node)
            node = child
        return node

    def prune(self, node: TrieNode[KeyT, ValueT]) -> None:
        """Drop a free node without children, and ancestors that are then free and without children."""
        while not node.value and not node.children and node.parent is not None:
            del node.parent.children[node.key]
            node = node.parent

    def prefix(self, keys: Iterable[KeyT]) -> Iterator[ValueT]:
        """Values along the longest prefix of `keys` whose nodes are all held, in order."""
        children = self.root.children
        for key in keys:
            node = children.get(key)
            if node is None or not node.value:
                return
            yield node.value
            children = node.children

    def held(self, top: TrieNode[KeyT, ValueT] | None = None) -> Iterator[TrieNode[KeyT, ValueT]]:
        """All held nodes, from `top` down if given, parents before children."""
        pending = [self.root if top is None else top]
        while pending:
            node = pending.pop()
            if node.value:
                yield node
            pending.extend(node.children.values())

    def check(self) -> None:
        """Audit the links between nodes.

        Raises:
            StoreError: a node has a wrong key or parent, or a free node connects nothing.
        """
        pending = [self.root]
        while pending:
            parent = pending.pop()
            for key, node in parent.children.items():
                if node.key != key or node.parent is not parent:
                    raise StoreError(f"trie node {node.key!r} is stored under {key!r} or has a wrong parent")
                if not node.value and not node.children:
                    raise StoreError(f"trie node {node.path} is free and has nothing below it")
                pending.append(node)


@dataclass(frozen=True, slots=True)
class PathMatch:
    """How far a path is stored: its first `nodes` keys, with `tokens` tokens in all.

    `tokens_by_tier` counts each node for the fastest tier that holds it, which is the tier it would be read from.
    """

    nodes: int = 0
    tokens: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)


class _Tiers(set[str]):
    """The tiers that hold a node, with its tokens and number of uses."""

    __slots__ = ("tokens", "uses")

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.uses = 0


class TreePlace(Generic[KeyT]):
    """A position in a tree, to walk down from node by node.

    Reads without the tree's lock: its answers may be outdated when they are used, so they are hints.
    """

    __slots__ = ("_node",)

    def __init__(self, node: TrieNode[KeyT, _Tiers]) -> None:
        self._node = node

    def child(self, key: KeyT) -> "TreePlace[KeyT] | None":
        """The stored child for `key`, or None."""
        node = self._node.children.get(key)
        return TreePlace(node) if node is not None and node.value else None


class KnowledgeTree(Generic[KeyT]):
    """The tiers that hold each stored chunk, by path (RAGCache §5.1, Figure 8).

    A node is a chunk after the chunks of its path. Parts that start prompts, mostly the system part, are children of
    the root; the root is not a part. A node may be on several tiers (a host copy outlives the device's) or on none:
    then it is free, and is kept only while a node below it is placed. A path is stored as far as all its nodes are on
    some tier.

    The tree holds no payload and decides nothing: stores report moved payloads with `placed` and `displaced`.
    Schedulers ask it how much of a prompt is stored, and where, without calling a store, and subscribe to changes.
    Thread-safe. Subscribers are called without the tree's lock, in the thread that moved the payload, and must be
    quick.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        """A tree over `tiers`, named from fast to slow.

        Raises:
            UsageError: `tiers` is empty or has duplicates.
        """
        if not tiers or len(set(tiers)) < len(tiers):
            raise UsageError(f"a knowledge tree needs tiers of different names, not {tuple(tiers)}")
        self.tiers = tuple(tiers)
        self._lock = RLock()
        self._trie: PrefixTrie[KeyT, _Tiers] = PrefixTrie()
        self._listeners: tuple[Callable[[tuple[KeyT, ...]], None], ...] = ()

    def __len__(self) -> int:
        """Number of nodes that are on a tier. O(nodes)."""
        with self._lock:
            return sum(1 for _ in self._trie.held())

    def subscribe(self, listener: Callable[[tuple[KeyT, ...]], None]) -> None:
        """Call `listener` with each path whose last node becomes stored, or is no longer stored."""
        self._listeners = (*self._listeners, listener)

    def unsubscribe(self, listener: Callable[[tuple[KeyT, ...]], None]) -> None:
        """Stop calling `listener`; an unknown one is ignored."""
        self._listeners = tuple(subscribed for subscribed in self._listeners if subscribed != listener)

    def at(self, path: Iterable[KeyT]) -> TreePlace[KeyT] | None:
        """The position at the end of `path` (the root if it is empty); None if the path is not wholly stored."""
        node = self._trie.root
        for key in path:
            child = node.children.get(key)
            if child is None or not child.value:
                return None
            node = child
        return TreePlace(node)

    def match(self, keys: Iterable[KeyT]) -> PathMatch:
        """How far the path `keys` is stored, O(its length): RAGCache's prefix matching."""
        nodes = tokens = 0
        by_tier: dict[str, int] = {}
        with self._lock:
            for placed in self._trie.prefix(keys):
                nodes += 1
                tokens += placed.tokens
                tier = next(tier for tier in self.tiers if tier in placed)
                by_tier[tier] = by_tier.get(tier, 0) + placed.tokens
        return PathMatch(nodes, tokens, by_tier)

    def stored_tokens(self, keys: Iterable[KeyT]) -> int:
        """Tokens of the longest stored prefix of `keys`."""
        with self._lock:
            return sum(placed.tokens for placed in self._trie.prefix(keys))

    def placement(self, path: Sequence[KeyT]) -> frozenset[str]:
        """Tiers that hold the node at `path`; empty if it is free or unknown."""
        with self._lock:
            node = self._trie.find(path)
            return frozenset(node.value or ()) if node is not None else frozenset()

    def used(self, keys: Iterable[KeyT]) -> None:
        """Count one use of each node on the stored prefix of `keys`."""
        with self._lock:
            for placed in self._trie.prefix(keys):
                placed.uses += 1

    def hottest(self, number: int, tier: str) -> list[tuple[KeyT, ...]]:
        """The `number` most used nodes that `tier` holds without a gap from the root, parents before children.

        A node is used at most as often as its parent, so these are upper nodes and include their ancestors.
        """
        paths: list[tuple[KeyT, ...]] = []
        order = count()
        frontier: list[tuple[int, int, TrieNode[KeyT, _Tiers]]] = []
        with self._lock:
            node = self._trie.root
            while len(paths) < number:
                for child in node.children.values():
                    if child.value is not None and tier in child.value:
                        heapq.heappush(frontier, (-child.value.uses, next(order), child))
                if not frontier:
                    break
                _, _, node = heapq.heappop(frontier)
                paths.append(node.path)
        return paths

    def missing_replicas(self, number: int, source: str, target: str) -> list[tuple[KeyT, ...]]:
        """Those of the `number` hottest upper nodes on `source` that are not on `target`, parents before children."""
        return [path for path in self.hottest(number, source) if target not in self.placement(path)]

    def woven(self, chunk: KeyT) -> None:
        """Notify subscribers that a segment of `chunk` that is on no path was added or removed."""
        self._notify((chunk,))

    def placed(self, path: Sequence[KeyT], tier: str, tokens: int) -> None:
        """Note that `tier` holds the node at `path`, of `tokens` tokens. Idempotent.

        Raises:
            UsageError: the path is empty, or there is no such tier.
        """
        if not path or tier not in self.tiers:
            raise UsageError(f"no node of the knowledge tree: {tuple(path)} on {tier!r}")
        with self._lock:
            node = self._trie.grow(path)
            placed = node.value
            if placed is None:
                placed = node.value = _Tiers()
            appeared = not placed
            placed.tokens = tokens
            placed.add(tier)
        if appeared:
            self._notify(path)

    def displaced(self, path: Sequence[KeyT], tier: str) -> None:
        """Note that `tier` no longer holds the node at `path`. Idempotent."""
        with self._lock:
            node = self._trie.find(path)
            if node is None or node.value is None or tier not in node.value:
                return
            node.value.remove(tier)
            vanished = not node.value
            self._trie.prune(node)
        if vanished:
            self._notify(path)

    def paths(self, tier: str) -> Iterator[tuple[KeyT, ...]]:
        """Paths of all nodes that `tier` holds, parents before children; a snapshot."""
        with self._lock:
            return iter([node.path for node in self._trie.held() if node.value is not None and tier in node.value])

    def check(self) -> None:
        """Audit the links between nodes.

        Raises:
            StoreError: a link is wrong, or a free node connects nothing.
        """
        with self._lock:
            self._trie.check()

    def _notify(self, path: Sequence[KeyT]) -> None:
        for listener in self._listeners:
            listener(tuple(path))


class PrefixWatch(Generic[KeyT, WatcherT]):
    """Watchers by path: finds those whose path runs through a changed node. Not thread-safe."""

    def __init__(self) -> None:
        self._trie: PrefixTrie[KeyT, set[WatcherT]] = PrefixTrie()

    def add(self, path: Sequence[KeyT], watcher: WatcherT) -> None:
        """Register `watcher` for every prefix of `path`."""
        node = self._trie.grow(path)
        if node.value is None:
            node.value = set()
        node.value.add(watcher)

    def remove(self, path: Sequence[KeyT], watcher: WatcherT) -> None:
        """Undo an `add`; unknown watchers are ignored."""
        node = self._trie.find(path)
        if node is not None and node.value is not None:
            node.value.discard(watcher)
            self._trie.prune(node)

    def below(self, path: Sequence[KeyT]) -> Iterator[WatcherT]:
        """All watchers whose path begins with `path`."""
        top = self._trie.find(path)
        for node in self._trie.held(top) if top is not None else ():
            yield from node.value or ()
