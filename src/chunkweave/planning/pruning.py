"""Leaves out of a lookup what is stored but not worth having, before a method plans with it."""

from collections.abc import Callable, Collection
from dataclasses import replace

from chunkweave.planning.cost_model import CostModel
from chunkweave.planning.loading_controller import worth_loading
from chunkweave.store.index import PromptLookup
from chunkweave.types import SegmentId


def without(lookup: PromptLookup, segments: Collection[SegmentId]) -> PromptLookup:
    """The lookup as if `segments` were not stored; the exact prefix ends before the first one left out."""
    if not segments:
        return lookup
    parts = []
    unbroken = True
    for entry in lookup.parts:
        variants = tuple(record for record in entry.variants if record.id not in segments)
        exact = entry.exact if entry.exact is not None and entry.exact.id not in segments and unbroken else None
        unbroken = unbroken and (entry.part.id is None or exact is not None)
        parts.append(replace(entry, exact=exact, variants=variants))
    return PromptLookup(tuple(parts))


def too_slow(lookup: PromptLookup, cost: CostModel, tier_of: Callable[[SegmentId], str | None]) -> frozenset[SegmentId]:
    """Segments that take longer to load from where they are than to compute anew at their place."""
    return frozenset(
        record.id
        for entry in lookup.parts
        for record in {*entry.variants, *([entry.exact] if entry.exact else [])}
        if not worth_loading(cost, len(record), entry.span.start, tier_of(record.id) or "")
    )
