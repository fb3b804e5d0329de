"""A trie over hashable keys in which every node carries a value and none stands without its ancestors."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from chunkweave.errors import StoreError

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class TrieNode(Generic[KeyT, ValueT]):
    """A held path: its last key, its value, and its links. Only the trie changes them."""

    __slots__ = ("children", "key", "parent", "value")

    def __init__(self, key: KeyT, value: ValueT, parent: "TrieNode[KeyT, ValueT] | None") -> None:
        self.key = key
        self.value = value
        self.parent = parent
        self.children: dict[KeyT, TrieNode[KeyT, ValueT]] = {}


class PrefixTrie(Generic[KeyT, ValueT]):
    """Values by path, every prefix of a held path being held too.

    With chunk ids as keys and segments as values this is the shape of RAGCache's knowledge tree
    (RAGCache §5.1) and the path index of DESIGN §3.4. A path is a non-empty sequence of keys; the same
    key may occur in it more than once. Nothing here is recursive, so depth has no limit. Not thread-safe.
    """

    def __init__(self) -> None:
        self._roots: dict[KeyT, TrieNode[KeyT, ValueT]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, path: Sequence[KeyT]) -> bool:
        return self.node(path) is not None

    def node(self, path: Sequence[KeyT]) -> TrieNode[KeyT, ValueT] | None:
        """The node at `path`, good until it is detached; None if the path is not held."""
        node: TrieNode[KeyT, ValueT] | None = None
        children = self._roots
        for key in path:
            node = children.get(key)
            if node is None:
                return None
            children = node.children
        return node

    def get(self, path: Sequence[KeyT]) -> ValueT | None:
        """The value at `path`, or None if it is not held."""
        node = self.node(path)
        return None if node is None else node.value

    def longest_prefix(self, keys: Iterable[KeyT]) -> list[ValueT]:
        """Values of the longest held prefix of `keys`, first key first."""
        return [node.value for node in self._descend(keys)]

    def is_inner(self, path: Sequence[KeyT]) -> bool:
        """Whether `path` is held and so is something below it."""
        node = self.node(path)
        return node is not None and bool(node.children)

    def attach(self, path: Sequence[KeyT], value: ValueT) -> bool:
        """Hold `value` at `path`; False, and no change, if the parent of `path` is not held.

        A path that is held already gets the new value and keeps what is below it.

        Raises:
            ValueError: `path` is empty.
        """
        if not path:
            raise ValueError("the root of a trie carries no value")
        *above, key = path
        parent = self.node(above) if above else None
        if above and parent is None:
            return False
        siblings = self._roots if parent is None else parent.children
        if key in siblings:
            siblings[key].value = value
        else:
            siblings[key] = TrieNode(key, value, parent)
            self._size += 1
        return True

    def detach(self, path: Sequence[KeyT]) -> list[tuple[tuple[KeyT, ...], ValueT]]:
        """Drop `path` and all below it; returns what left, parents before children (empty if not held)."""
        top = self.node(path)
        if top is None:
            return []
        left = list(_walk(tuple(path), top))
        siblings = self._roots if top.parent is None else top.parent.children
        del siblings[top.key]
        self._size -= len(left)
        return left

    def items(self) -> Iterator[tuple[tuple[KeyT, ...], ValueT]]:
        """Every held path with its value, parents before children."""
        for key, root in self._roots.items():
            yield from _walk((key,), root)

    def check(self) -> None:
        """Audit the links between nodes.

        Raises:
            StoreError: a node is filed under another key or parent than its own, or the count is wrong.
        """
        found = 0
        pending: list[TrieNode[KeyT, ValueT] | None] = [None]
        while pending:
            parent = pending.pop()
            for key, node in (self._roots if parent is None else parent.children).items():
                if node.key != key or node.parent is not parent:
                    raise StoreError(f"trie node {node.key!r} is filed under {key!r} or has a wrong parent")
                found += 1
                pending.append(node)
        if found != self._size:
            raise StoreError(f"the trie counts {self._size} nodes and has {found}")

    def _descend(self, keys: Iterable[KeyT]) -> Iterator[TrieNode[KeyT, ValueT]]:
        children = self._roots
        for key in keys:
            node = children.get(key)
            if node is None:
                return
            yield node
            children = node.children


def _walk(path: tuple[KeyT, ...], top: TrieNode[KeyT, ValueT]) -> Iterator[tuple[tuple[KeyT, ...], ValueT]]:
    pending = [(path, top)]
    while pending:
        here, node = pending.pop()
        yield here, node.value
        pending.extend(((*here, key), child) for key, child in node.children.items())
