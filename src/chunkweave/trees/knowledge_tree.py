"""RAGCache's knowledge tree: which chunk sequences are stored exactly, and on which tiers each chunk of them lies."""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import RLock
from typing import Generic, TypeVar

from chunkweave.errors import StoreError, UsageError

KeyT = TypeVar("KeyT", bound=Hashable)

Follower = Callable[[tuple[KeyT, ...], str, int | None], None]
"""Told of a path whose last node lies on a tier now, with its tokens, or does so no longer (None)."""


@dataclass(frozen=True, slots=True)
class PathMatch:
    """How far a path is stored: its first `nodes` keys, `tokens` tokens together.

    `tokens_by_tier` says from where they would be read: each node counts for the fastest tier that holds it.
    """

    nodes: int = 0
    tokens: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)


class _Node(Generic[KeyT]):
    """A chunk behind the chunks of its ancestors. In `children_on` are those tiers only that hold a child."""

    __slots__ = ("children", "children_on", "key", "parent", "tiers", "tokens", "uses")

    def __init__(self, key: KeyT, parent: "_Node[KeyT] | None") -> None:
        self.key = key
        self.parent = parent
        self.children: dict[KeyT, _Node[KeyT]] = {}
        self.tiers: set[str] = set()
        self.children_on: dict[str, int] = {}
        self.tokens = 0
        self.uses = 0

    def path(self) -> tuple[KeyT, ...]:
        keys = []
        node: _Node[KeyT] | None = self
        while node is not None and node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return tuple(reversed(keys))


class TreePlace(Generic[KeyT]):
    """A place in a tree to walk down from, node by node.

    Looks without the tree's lock: what it says may be overtaken by the time it is read, so it is a hint.
    """

    __slots__ = ("_node",)

    def __init__(self, node: _Node[KeyT]) -> None:
        self._node = node

    @property
    def tokens(self) -> int:
        """Tokens of the node alone; 0 at the root."""
        return self._node.tokens

    def child(self, key: KeyT) -> "TreePlace[KeyT] | None":
        """The stored node of `key` right below; None if nothing is stored there."""
        node = self._node.children.get(key)
        return TreePlace(node) if node is not None and node.tiers else None

    def children_among(self, keys: Iterable[KeyT]) -> list[tuple[KeyT, "TreePlace[KeyT]"]]:
        """The stored nodes right below that are among `keys`, in their order."""
        nodes = self._node.children
        if not nodes:
            return []
        return [(key, TreePlace(node)) for key in keys if (node := nodes.get(key)) is not None and node.tiers]


class KnowledgeTree(Generic[KeyT]):
    """Placement of every stored path node over the tiers (RAGCache §5.1, Figure 8).

    A node is a chunk behind the chunks before it; the parts that begin prompts, the system part mostly, are the
    children of the root, which is no part itself. A node may lie on several tiers (a host copy outlives the device's)
    or on none: then it is free, and is remembered only while something below it is placed. A path is stored as far as
    every node of it lies somewhere.

    The tree holds no payload and decides nothing: whoever moves payloads says so by `placed` and `displaced`. It
    answers what scheduling asks all the time (how much of this prompt is stored, and where) without touching a
    store, and tells subscribers when an answer may have changed. Thread-safe; subscribers are called without its
    lock, in the thread that moved the payload, and must be quick.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        """A tree over `tiers`, named from fast to slow.

        Raises:
            UsageError: there is none, or one occurs twice.
        """
        if not tiers or len(set(tiers)) < len(tiers):
            raise UsageError(f"a knowledge tree needs tiers of different names, not {tuple(tiers)}")
        self.tiers = tuple(tiers)
        self._lock = RLock()
        self._root: _Node[KeyT] = _Node(None, None)  # type: ignore[arg-type]
        self._listeners: list[Callable[[tuple[KeyT, ...]], None]] = []
        self._followers: list[Follower[KeyT]] = []
        self._placed = 0

    def __len__(self) -> int:
        """Nodes that lie on some tier."""
        return self._placed

    def subscribe(self, listener: Callable[[tuple[KeyT, ...]], None]) -> None:
        """Call `listener` with each path whose last node is stored now and was not, or is no longer."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[tuple[KeyT, ...]], None]) -> None:
        """Call `listener` no more; one that does not listen is ignored."""
        self._listeners = [other for other in self._listeners if other != listener]

    def follow(self, follower: "Follower[KeyT]") -> None:
        """Tell `follower` of what is placed already and then of each change, in the order in which they happen.

        For that it is called with the lock held, so it may do no more than take note.
        """
        with self._lock:
            for node in self._walk():
                for tier in node.tiers:
                    follower(node.path(), tier, node.tokens)
            self._followers = [*self._followers, follower]

    def unfollow(self, follower: "Follower[KeyT]") -> None:
        """Tell `follower` nothing more; one that does not follow is ignored."""
        self._followers = [other for other in self._followers if other != follower]

    def at(self, path: Iterable[KeyT]) -> TreePlace[KeyT] | None:
        """The place at the end of `path` (the root's, if it is empty); None if it is not stored as far as that."""
        place: TreePlace[KeyT] | None = TreePlace(self._root)
        for key in path:
            place = None if place is None else place.child(key)
        return place

    def match(self, keys: Iterable[KeyT]) -> PathMatch:
        """How far the path `keys` is stored, O(its length): RAGCache's prefix matching."""
        nodes = tokens = 0
        by_tier: dict[str, int] = {}
        with self._lock:
            for node in self._descend(keys):
                nodes += 1
                tokens += node.tokens
                tier = next(tier for tier in self.tiers if tier in node.tiers)
                by_tier[tier] = by_tier.get(tier, 0) + node.tokens
        return PathMatch(nodes, tokens, by_tier)

    def stored_tokens(self, keys: Iterable[KeyT]) -> int:
        """Tokens of the longest stored prefix of `keys`."""
        with self._lock:
            return sum(node.tokens for node in self._descend(keys))

    def placement(self, path: Sequence[KeyT]) -> frozenset[str]:
        """Tiers that hold the node at `path`; empty if it is free or unknown."""
        with self._lock:
            node = self._find(path)
            return frozenset() if node is None else frozenset(node.tiers)

    def is_leaf(self, path: Sequence[KeyT], tier: str) -> bool:
        """Whether `tier` holds the node at `path` and no child of it: only leaves of a tier are evicted (§5.1)."""
        with self._lock:
            node = self._find(path)
            return node is not None and tier in node.tiers and tier not in node.children_on

    def used(self, keys: Iterable[KeyT]) -> None:
        """A request has used the stored prefix of `keys`: one more use of each node of it."""
        with self._lock:
            for node in self._descend(keys):
                node.uses += 1

    def hottest(self, number: int, tier: str) -> list[tuple[KeyT, ...]]:
        """The `number` most used nodes that `tier` holds down from the root without a gap, parents before children.

        A node is used at most as often as its parent, so these are upper nodes, and their ancestors are among them.
        """
        found: list[tuple[KeyT, ...]] = []
        with self._lock:
            order = count()
            frontier = [(-node.uses, next(order), node) for node in self._root.children.values()]
            heapq.heapify(frontier)
            while frontier and len(found) < number:
                _, _, node = heapq.heappop(frontier)
                if tier not in node.tiers:
                    continue
                found.append(node.path())
                for child in node.children.values():
                    heapq.heappush(frontier, (-child.uses, next(order), child))
        return found

    def placed(self, path: Sequence[KeyT], tier: str, tokens: int) -> None:
        """`tier` holds the node at `path` now; it has `tokens` tokens. Said twice it changes nothing.

        Raises:
            UsageError: the path is empty, or there is no such tier.
        """
        if not path or tier not in self.tiers:
            raise UsageError(f"no node of the knowledge tree: {tuple(path)} on {tier!r}")
        with self._lock:
            node = self._grow(path)
            node.tokens = tokens
            appeared = not node.tiers
            if tier not in node.tiers:
                node.tiers.add(tier)
                self._placed += appeared
                if node.parent is not None:
                    node.parent.children_on[tier] = node.parent.children_on.get(tier, 0) + 1
                self._report(path, tier, tokens)
        if appeared:
            self._tell(path)

    def displaced(self, path: Sequence[KeyT], tier: str) -> None:
        """`tier` holds the node at `path` no longer. Said of what is not there it changes nothing."""
        with self._lock:
            node = self._find(path)
            if node is None or tier not in node.tiers:
                return
            node.tiers.remove(tier)
            vanished = not node.tiers
            self._placed -= vanished
            if node.parent is not None:
                _count_down(node.parent.children_on, tier)
            self._prune(node)
            self._report(path, tier, None)
        if vanished:
            self._tell(path)

    def paths(self, tier: str) -> Iterator[tuple[KeyT, ...]]:
        """Paths of all nodes that `tier` holds, parents before children; a snapshot."""
        with self._lock:
            return iter([node.path() for node in self._walk() if tier in node.tiers])

    def check(self) -> None:
        """Audit links and counts.

        Raises:
            StoreError: they disagree, or a free node is remembered for nothing.
        """
        with self._lock:
            nodes = list(self._walk())
            if sum(bool(node.tiers) for node in nodes) != self._placed:
                raise StoreError(f"the knowledge tree counts {self._placed} placed nodes and has others")
            for node in (self._root, *nodes):
                counts: dict[str, int] = {}
                for key, child in node.children.items():
                    if child.key != key or child.parent is not node:
                        raise StoreError(f"knowledge tree: node {child.key!r} is filed wrongly")
                    for tier in child.tiers:
                        counts[tier] = counts.get(tier, 0) + 1
                if counts != node.children_on:
                    raise StoreError(f"knowledge tree: children of {node.path()} are miscounted")
                if node is not self._root and not node.tiers and not node.children:
                    raise StoreError(f"knowledge tree: {node.path()} is free and has nothing below it")

    def _descend(self, keys: Iterable[KeyT]) -> Iterator[_Node[KeyT]]:
        children = self._root.children
        for key in keys:
            node = children.get(key)
            if node is None or not node.tiers:
                return
            yield node
            children = node.children

    def _find(self, path: Sequence[KeyT]) -> _Node[KeyT] | None:
        node = self._root
        for key in path:
            child = node.children.get(key)
            if child is None:
                return None
            node = child
        return None if node is self._root else node

    def _grow(self, path: Sequence[KeyT]) -> _Node[KeyT]:
        node = self._root
        for key in path:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, node)
            node = child
        return node

    def _prune(self, node: _Node[KeyT]) -> None:
        while not node.tiers and not node.children and node.parent is not None:
            del node.parent.children[node.key]
            node = node.parent

    def _walk(self) -> Iterator[_Node[KeyT]]:
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def _report(self, path: Sequence[KeyT], tier: str, tokens: int | None) -> None:
        for follower in self._followers:
            follower(tuple(path), tier, tokens)

    def _tell(self, path: Sequence[KeyT]) -> None:
        for listener in tuple(self._listeners):
            listener(tuple(path))


def _count_down(counts: dict[str, int], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
