"""What no policy can exceed on a trace: Belady's rule where it is a bound, a relaxation where it is not."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chunkweave.eval.simulator.trace import Trace
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of the hit rates on one trace under one budget, for any cache that never holds more than it.

    Each node (a chunk in its context) counts as an object of its own that may come and go without its parent, and need
    not come in when it is asked for. The tree only forbids more, so these bound it; they need not be reachable.

    `token_hit_rate` is Belady's MIN with a token as the object: tokens have equal sizes, whatever the documents' are,
    so farthest-next-use is optimal, part of a node being allowed to stay.
    `hit_rate` is Belady's MIN over documents if all are of one size (`exact`). If sizes differ, farthest-next-use
    bounds nothing; then it is the relaxation in which room may be lent over time: bytes x requests between two uses,
    cheapest first, until budget x requests is spent (PFOO-L of Berger, Beckmann, Harchol-Balter, SIGMETRICS 2018).
    """

    hit_rate: float
    token_hit_rate: float
    exact: bool


def bounds_of(trace: Trace, budget_bytes: int) -> Bounds:
    """Both bounds, the cold start included: a first use is never a hit."""
    paths = [request.path for request in trace.requests]
    documents = [request.documents for request in trace.requests]
    references = sum(map(len, documents))
    if trace.equal_sizes and references:
        hits = float(_unit_hits(documents, budget_bytes))
    else:
        hits = _relaxed_hits(documents, budget_bytes)
    prompt_tokens = sum(request.prompt_tokens for request in trace.requests)
    return Bounds(
        hit_rate=hits / references if references else 0.0,
        token_hit_rate=_token_hits(paths, budget_bytes) / prompt_tokens if prompt_tokens else 0.0,
        exact=trace.equal_sizes,
    )


def _next_uses(references: Sequence[SegmentRecord]) -> list[float]:
    """For each reference the place of the next one to the same node."""
    following = [_NEVER] * len(references)
    seen: dict[SegmentId, int] = {}
    for place in range(len(references) - 1, -1, -1):
        segment = references[place].id
        following[place] = seen.get(segment, _NEVER)
        seen[segment] = place
    return following


def _unit_hits(requests: Iterable[Sequence[SegmentRecord]], budget_bytes: int) -> int:
    """Hits of Belady's MIN with bypass over equal objects."""
    references = [record for request in requests for record in request]
    room = budget_bytes // references[0].nbytes
    held: dict[SegmentId, float] = {}
    farthest: list[tuple[float, SegmentId]] = []
    hits = 0
    for record, following in zip(references, _next_uses(references), strict=True):
        hits += record.id in held
        held[record.id] = following
        heapq.heappush(farthest, (-following, record.id))
        while len(held) > room:
            place, segment = heapq.heappop(farthest)
            if held.get(segment) == -place:
                del held[segment]
    return hits


def _token_hits(requests: Iterable[Sequence[SegmentRecord]], budget_bytes: int) -> float:
    """Tokens hit by Belady's MIN with bypass if any part of a node may be kept."""
    references = [record for request in requests for record in request]
    held: dict[SegmentId, tuple[float, float]] = {}  # bytes kept, next use
    farthest: list[tuple[float, SegmentId]] = []
    used = hits = 0.0
    for record, following in zip(references, _next_uses(references), strict=True):
        kept, _ = held.pop(record.id, (0.0, _NEVER))
        hits += len(record) * kept / record.nbytes
        used -= kept
        if following == _NEVER:
            continue
        held[record.id] = (float(record.nbytes), following)
        used += record.nbytes
        heapq.heappush(farthest, (-following, record.id))
        while used > budget_bytes:
            place, segment = farthest[0]
            kept, next_use = held.get(segment, (0.0, 0.0))
            if next_use != -place:
                heapq.heappop(farthest)
                continue
            taken = min(kept, used - budget_bytes)
            used -= taken
            if taken < kept:
                held[segment] = (kept - taken, next_use)
            else:
                del held[segment]
                heapq.heappop(farthest)
    return hits


def _relaxed_hits(requests: Sequence[Sequence[SegmentRecord]], budget_bytes: int) -> float:
    """Most hits if only the average room over all requests is limited; the last one may be a part."""
    last: dict[SegmentId, int] = {}
    costs = []
    for number, request in enumerate(requests):
        for record in request:
            if record.nbytes <= budget_bytes and record.id in last:
                costs.append(record.nbytes * (number - last[record.id]))
            last[record.id] = number
    left = float(budget_bytes) * len(requests)
    hits = 0.0
    for cost in sorted(costs):
        if cost > left:
            return hits + left / cost
        left -= cost
        hits += 1
    return hits
