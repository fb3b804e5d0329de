"""The same traces through libcachesim, an independent cache simulator: plain objects, no tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import gcd
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.eval.simulator.trace import Trace
from chunkweave.store.records import SegmentRecord

MODERN = ("S3FIFO", "WTinyLFU", "LHD")
"""Policies that are newer than anything in a knowledge tree."""

_HASH_POWER = 18


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Hits of a libcachesim policy whose objects are the nodes of a trace (a chunk in its context).

    `object_hits` are documents that it held when they were asked for. `hits` are those of them whose whole path it
    held: only these can be reused as an exact prefix, and only these compare with a tree's hits.
    """

    policy: str
    documents: int
    hits: int
    object_hits: int

    @property
    def hit_rate(self) -> float:
        """Usable hits / documents asked for."""
        return self.hits / self.documents if self.documents else 0.0


def installed() -> bool:
    """Whether libcachesim can be used here."""
    return find_spec("libcachesim") is not None


def object_hits(
    policy: str, references: Sequence[SegmentRecord], budget_bytes: int, *, evict_first: bool = False
) -> list[bool]:
    """Whether each reference hits in a libcachesim cache of that name and size, ids and bytes being the objects'.

    With `evict_first` room is made before an object comes in, by libcachesim's own ranking; its GDSF otherwise puts
    the object in first and may choose it as its own victim, which no store does that needs the room beforehand.

    Raises:
        UsageError: libcachesim is not installed.
    """
    unit = gcd(*(record.nbytes for record in references))  # its sketches are sized by the cache's, and overflow
    room = budget_bytes // unit if unit else 0
    if not room:
        return [False] * len(references)
    cache, request = _open(policy, room)
    numbers: dict[str, int] = {}
    hits = []
    for record in references:
        request.obj_id = numbers.setdefault(record.id, len(numbers) + 1)
        request.obj_size = record.nbytes // unit
        if not evict_first:
            hits.append(bool(cache.get(request)))
            continue
        hits.append(cache.find(request, True) is not None)
        if not hits[-1] and request.obj_size <= room:
            while cache.get_occupied_byte() + request.obj_size > room:
                cache.evict(request)
            cache.insert(request)
    return hits


def reference_hits(policy: str, trace: Trace, budget_bytes: int) -> ReferenceResult:
    """All requests of `trace`, part by part from the root on.

    Raises:
        UsageError: libcachesim is not installed.
    """
    hit = iter(object_hits(policy, [record for one in trace.requests for record in one.path], budget_bytes))
    documents = usable = loose = 0
    for request in trace.requests:
        found = [next(hit) for _ in request.path]
        prefix = found.index(False) if False in found else len(found)
        documents += len(request.documents)
        usable += max(0, prefix - request.documents_from)
        loose += sum(found[request.documents_from :])
    return ReferenceResult(policy, documents, usable, loose)


def _open(policy: str, room: int) -> tuple[Any, Any]:
    if not installed():
        raise UsageError("libcachesim is not installed: pip install 'chunkweave[reference]'")
    import libcachesim

    request = libcachesim.Request()
    request.valid = True
    return getattr(libcachesim, policy)(cache_size=room, hashpower=_HASH_POWER), request
