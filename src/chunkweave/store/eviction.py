"""What an eviction policy is, and how to get one by name.

To add a policy, put one module into `chunkweave.store.policies`: its file name is the policy's name
(`reuse_frequency.py` is "reuse-frequency") and its `POLICY` is what builds one.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Protocol

from chunkweave.errors import UnknownMethodError
from chunkweave.store import policies
from chunkweave.store.path_request import PathRequest
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId

PrefillSeconds = Callable[[float, float], float]
"""Seconds to compute `new` tokens behind `cached` ones, in this order: `CostModel.prefill`."""


class EvictionPolicy(Protocol):
    """Chooses which segment goes next. It decides and holds no payload; the store calls it under its own lock.

    The policy tracks exactly the stored segments. It must not call back into the store. Which segments
    *may* go (pins, inner nodes of the path index) is the store's knowledge and reaches `victim` as a predicate.
    """

    def on_request(self, request: PathRequest) -> None:
        """A request asked for a path; what of it is stored or missing here or on another tier is told apart.

        Comes before the uses and inserts that follow from the request. Most policies do not care.
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


def make_policy(name: str, *, prefill_s: PrefillSeconds | None = None, **options: object) -> EvictionPolicy:
    """A fresh policy by name; `options` go to its constructor.

    Args:
        name: one of `known_policies()`.
        prefill_s: what computing costs, for a policy whose constructor has a parameter of that name; the others are
            made without. None leaves such a policy with its own assumption.
        **options: what else this policy's constructor takes.

    Raises:
        UnknownMethodError: there is no policy of that name.
    """
    if name not in known_policies():
        raise UnknownMethodError(f"no eviction policy {name!r}; known: {', '.join(known_policies())}")
    module = importlib.import_module(f"{policies.__name__}.{name.replace('-', '_')}")
    if prefill_s is not None and "prefill_s" in signature(module.POLICY).parameters:
        options["prefill_s"] = prefill_s
    policy: EvictionPolicy = module.POLICY(**options)
    return policy
