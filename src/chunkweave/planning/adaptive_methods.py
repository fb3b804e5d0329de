"""Methods around another one: more recomputation where loading is slow, longer exact prefixes where they come back."""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from chunkweave.config import ReuseConfig
from chunkweave.ordering.arrangement import Promotion
from chunkweave.planning.cost import Loading, LoadingChoice, ratio_that_hides
from chunkweave.planning.method import (
    ReuseMethod,
    make_method,
    one_pass,
    prefer_least_read,
    reuse_every_hit,
    reuse_exact_prefix,
)
from chunkweave.planning.method_choice import EXACT_METHODS, MethodChoice
from chunkweave.planning.plan import KVSource, PartPlan, Plan
from chunkweave.prompt.parts import PartKind
from chunkweave.store.index import PromptLookup
from chunkweave.types import ChunkId, Geometry


def method_for(choice: MethodChoice, promotion: Promotion | None, loading: Loading | None) -> ReuseMethod:
    """The method that a request's plan is made with, by both backends, when its turn has come.

    With `loading` the loading controller may raise its ratio. Give None for a request that says how much is to be
    recomputed, and if others wait or run then: recomputing more is free for a request that is alone, and costs others
    their time. With a `promotion` exact prefixes grow.
    """
    method: ReuseMethod
    if loading is None:
        method = make_method(choice.method, choice.reuse)
    else:
        method = LoadAwareMethod(choice.method, choice.reuse, loading)
    return method if promotion is None else PrefixGrowingMethod(method, promotion)


class FirstPassMethod:
    """What a chunk is computed by behind neutral passages: an exact prefix is reused, the last part is computed.

    That also if it is stored by now: another call may have computed it since this one was prepared.
    """

    name = "prefix"
    budget = None

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over the last part, and over those that are not stored."""
        return _last_computed(self.name, lookup, reuse_exact_prefix)


class ContextMethod:
    """What a mean's contexts are computed by: all parts before the last are reused, the last one is computed.

    So a context costs the chunk's own tokens, and no others.
    """

    name = "full-reuse"
    budget = None

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over the last part, and over those that are not stored."""
        return _last_computed(self.name, lookup, lambda before: reuse_every_hit(before, prefer_least_read))


def _last_computed(name: str, lookup: PromptLookup, reuse: Callable[[PromptLookup], tuple[PartPlan, ...]]) -> Plan:
    *before, last = lookup.parts
    parts = (*reuse(PromptLookup(tuple(before))), PartPlan(last.part, last.span, KVSource.COMPUTED))
    return one_pass(name, parts)


class LoadAwareMethod:
    """A method that recomputes as much as configured, and more where segments load slowly (CacheBlend §5.1).

    Loading time is summed over what is left to read of the segments that the method takes. The ratio r whose
    recomputation takes as long is a floor for the method's budget: a ratio becomes at least r, an alpha
    at least so large that the share r is recomputed. A method without a budget is not changed. Where the question is
    computed first (`query`), loading hides behind recomputation only after the last layer of that first pass.
    """

    def __init__(self, name: str, config: ReuseConfig, loading: Loading) -> None:
        """Wrap the method `name`; what `config` says of its budget is the least.

        Raises:
            UnknownMethodError: no such method.
        """
        self._least = make_method(name, config)
        self.name = name
        self.budget = self._least.budget
        self._config = config
        self._loading = loading

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """The wrapped method's plan at the budget that hides its loading; `raised_to` says if that is more."""
        plan = self._least.plan(lookup, geometry)
        if self.budget is None:
            return plan
        value = self.budget.reaching(plan, self.choose(plan, geometry).ratio)
        if value <= getattr(self._config, self.budget.parameter):
            return plan
        changes: dict[str, Any] = {self.budget.parameter: value}
        raised = make_method(self.name, replace(self._config, **changes)).plan(lookup, geometry)
        return replace(raised, raised_to=value)

    def choose(self, plan: Plan, geometry: Geometry) -> LoadingChoice:
        """The share of a plan's reused tokens whose recomputation hides its loading, and the delays expected then."""
        load_s = sum(
            self._loading.seconds(part.segment, len(part.span))
            * (1 - len(plan.unseen_layers(part, geometry.windows)) / geometry.num_layers)
            for part in plan.parts
            if part.segment is not None
        )
        prefill_s = self._loading.cost.prefill(plan.tokens(KVSource.REUSED))
        head_s = self._head_s(plan, geometry.num_layers, load_s)
        return ratio_that_hides(prefill_s, load_s, least_ratio=0.0, head_s=head_s)

    def _head_s(self, plan: Plan, num_layers: int, load_s: float) -> float:
        """Seconds of the question's own pass: as long as its layers take to load, or to compute."""
        share = plan.head_share(num_layers)
        if not share:
            return 0.0
        asked_s = self._loading.cost.prefill(plan.passes[0].required_tokens, plan.prompt_tokens)
        return share * max(load_s, asked_s)


class PrefixGrowingMethod:
    """A reuse method whose exact prefixes grow as a request's `promotion` says.

    An exact method stores exact paths over promoted chunks only. With a method that weaves no exact prefix would ever
    grow, since what follows it is inexact. So the next chunk behind the exact prefix is computed in full if the path
    over it comes back often enough: one chunk a request, which the next request with that beginning then has for free.
    """

    def __init__(self, method: ReuseMethod, promotion: Promotion) -> None:
        self.name = method.name
        self.budget = method.budget
        self._method = method
        self._promotion = promotion

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """The wrapped method's plan, with less stored or one more chunk computed."""
        if self.name not in EXACT_METHODS:
            return self._method.plan(continuing(lookup, self._promotion.continued), geometry)
        plan = self._method.plan(lookup, geometry)
        kept = self._promotion.kept
        return plan if kept is None else admitting(plan, lookup, kept)


def promoted_length(hot: Sequence[bool], stored: int) -> int:
    """How many chunks of a path may be held: those `stored`, and the run of `hot` ones that goes on from there.

    CRAFT §4.2: a prefix is promoted if all its chunks reached the threshold; one that is reused is extended by the next
    chunk if that did. What is held already stays, whatever its count has become.

    >>> promoted_length([False, True, True, False, True], stored=1)
    3
    """
    length = stored
    while length < len(hot) and hot[length]:
        length += 1
    return length


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
