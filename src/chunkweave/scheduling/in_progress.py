"""Which parts are being computed now, and by which requests, so that others can wait for them. Imports no torch."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class PartsInProgress(Generic[Owner]):
    """Owns which request computes which parts. Called from one thread.

    A key names a part in the form that a waiting request can use: what names the chunk and its context for an exact
    path, a `ChunkId` for a chunk that serves in any context.

    A request claims parts when it begins to compute and drops each when it can be found in the store. A request that
    holds a claim never waits. So every wait is for a request that has begun, and no two requests wait for each other.

    >>> parts = PartsInProgress[str]()
    >>> parts.claim("first", ["a", "b"])
    >>> parts.claim("second", ["b"])
    >>> parts.owner_of("b")
    'first'
    >>> parts.release("first")
    >>> parts.owner_of("a"), parts.owner_of("b")
    (None, 'second')
    """

    def __init__(self) -> None:
        self._owners: dict[Hashable, dict[Owner, None]] = {}
        """By part, the requests that compute it, in the order of their claims."""
        self._keys: dict[Owner, set[Hashable]] = {}

    def __len__(self) -> int:
        """How many parts are being computed."""
        return len(self._owners)

    def claim(self, owner: Owner, keys: Iterable[Hashable]) -> None:
        """`owner` computes these parts from now on. Parts that another request computes too have several owners."""
        for key in keys:
            self._owners.setdefault(key, {})[owner] = None
            self._keys.setdefault(owner, set()).add(key)

    def owner_of(self, key: Hashable) -> Owner | None:
        """The request that computes a part and claimed it first; None if there is none."""
        return next(iter(self._owners.get(key, ())), None)

    def owners_of(self, key: Hashable) -> tuple[Owner, ...]:
        """All requests that compute a part, the earliest claim first."""
        return tuple(self._owners.get(key, ()))

    def owns(self, owner: Owner) -> bool:
        """Whether a request computes a part that others may wait for, so that it must not wait itself."""
        return owner in self._keys

    def drop(self, owner: Owner, keys: Iterable[Hashable]) -> None:
        """`owner` has stored these parts, or will not. Keys that it does not hold are ignored."""
        held = self._keys.get(owner, set())
        for key in held.intersection(keys):
            held.discard(key)
            del self._owners[key][owner]
            if not self._owners[key]:
                del self._owners[key]
        if not held:
            self._keys.pop(owner, None)

    def release(self, owner: Owner) -> None:
        """`owner` has ended, failed or lost its KV. What it had not stored has the next owner, or none."""
        self.drop(owner, tuple(self._keys.get(owner, ())))

    def check(self) -> None:
        """Compare both indexes.

        Raises:
            AssertionError: they differ.
        """
        claims = {(owner, key) for owner, keys in self._keys.items() for key in keys}
        assert claims == {(owner, key) for key, owners in self._owners.items() for owner in owners}
        assert all(self._keys.values())
        assert all(self._owners.values())
