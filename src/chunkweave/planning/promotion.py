"""Grows exact prefixes over chunks that many requests ask for (CRAFT §4.2), whatever the reuse method."""

from collections.abc import Set
from dataclasses import replace

from chunkweave.chunking.prompt import PartKind
from chunkweave.ordering.arrangement import Promotion
from chunkweave.planning.budget import Budget
from chunkweave.planning.method import ReuseMethod
from chunkweave.planning.method_choice import EXACT_METHODS
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.trees.chunk_prefix_tree import promoted_length
from chunkweave.types import ChunkId, Geometry


class Promoting:
    """A reuse method whose exact prefixes grow as a request's `promotion` says.

    An exact method stores an exact path on over promoted chunks only, so that the tree holds promoted prefixes and
    nothing else. A method that weaves makes what follows the exact prefix inexact, so that no prefix would ever grow:
    there the next chunk behind the exact prefix, if the path over it comes back often enough, is computed in full
    instead, and becomes the prefix's exact continuation. That is one chunk a request: the next request of that
    beginning has it for nothing.
    """

    def __init__(self, method: ReuseMethod, promotion: Promotion) -> None:
        self._method = method
        self._promotion = promotion

    @property
    def name(self) -> str:
        """The wrapped method's."""
        return self._method.name

    @property
    def budget(self) -> Budget | None:
        """The wrapped method's."""
        return self._method.budget

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """The wrapped method's plan, with less stored or one more chunk computed."""
        if self.name not in EXACT_METHODS:
            return self._method.plan(continuing(lookup, self._promotion.continued), geometry)
        plan = self._method.plan(lookup, geometry)
        kept = self._promotion.kept
        return plan if kept is None else admitting(plan, lookup, kept)


def admitting(plan: Plan, lookup: PromptLookup, hot: Set[ChunkId]) -> Plan:
    """The plan that stores no chunk behind the stored exact prefix and the run of `hot` chunks that goes on from it."""
    chunks = [number for number, entry in enumerate(lookup.parts) if entry.part.kind is PartKind.CHUNK]
    stored = sum(lookup.parts[number].exact is not None for number in chunks)
    length = promoted_length([lookup.parts[number].part.id in hot for number in chunks], stored)
    dropped = frozenset(chunks[length:])
    return replace(
        plan,
        parts=tuple(replace(part, kept=False) if number in dropped else part for number, part in enumerate(plan.parts)),
    )


def continuing(lookup: PromptLookup, chunks: Set[ChunkId]) -> PromptLookup:
    """The lookup as if nothing were stored of the first chunk behind the exact prefix, if it is one of `chunks`."""
    for number, entry in enumerate(lookup.parts):
        if entry.part.kind is PartKind.CHUNK and entry.exact is None:
            if entry.part.id not in chunks:
                return lookup
            computed = replace(entry, variants=(), fresh=frozenset())
            return PromptLookup((*lookup.parts[:number], computed, *lookup.parts[number + 1 :]))
    return lookup
