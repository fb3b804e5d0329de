"""What an eviction policy is, and how to get one by name.

To add a policy, put one module into `chunkweave.store.policies`: its file name is the policy's name
(`reuse_frequency.py` is "reuse-frequency") and its `POLICY` is what builds one.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Protocol

from chunkweave.errors import UnknownMethodError
from chunkweave.store import policies
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class EvictionPolicy(Protocol):
    """Chooses which segment goes next. It decides and holds no payload; the store calls it under its own lock.

    The policy tracks exactly the stored segments. It must not call back into the store. Which segments
    *may* go (pins, inner nodes of the path index) is the store's knowledge and reaches `victim` as a predicate.
    """

    def on_insert(self, record: SegmentRecord) -> None:
        """`record` is stored now; it was not before."""

    def on_hit(self, record: SegmentRecord) -> None:
        """A stored segment is used once more. Within a request the deepest part is reported first."""

    def on_remove(self, segment: SegmentId) -> None:
        """It is stored no longer, be it evicted, removed, replaced or lost; unknown ids are ignored."""

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The tracked segment to evict next among those that `evictable` admits; None if there is none.

        Changes nothing: the store follows up with `on_remove`.
        """

    def ids(self) -> Iterator[SegmentId]:
        """All ids tracked, in no order."""


def known_policies() -> tuple[str, ...]:
    """Names that `make_policy` accepts, sorted."""
    return tuple(sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(policies.__path__)))


def make_policy(name: str, **options: object) -> EvictionPolicy:
    """A fresh policy by name; `options` go to its constructor.

    Raises:
        UnknownMethodError: there is no policy of that name.
    """
    if name not in known_policies():
        raise UnknownMethodError(f"no eviction policy {name!r}; known: {', '.join(known_policies())}")
    module = importlib.import_module(f"{policies.__name__}.{name.replace('-', '_')}")
    policy: EvictionPolicy = module.POLICY(**options)
    return policy
