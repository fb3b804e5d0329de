"""Methods that wrap another one: more recomputation where loading is slow, longer exact prefixes where they recur."""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from chunkweave.config import ReuseConfig
from chunkweave.ordering.arrangement import Promotion
from chunkweave.planning.cost import Loading, LoadingChoice, PrefillCosts, ratio_that_hides
from chunkweave.planning.method import (
    ReuseMethod,
    make_method,
    one_pass,
    prefer_least_read,
    reuse_every_hit,
    reuse_exact_prefix,
)
from chunkweave.planning.method_choice import EXACT_METHOD, EXACT_METHODS, MethodChoice, Why
from chunkweave.planning.plan import KVSource, PartPlan, Plan
from chunkweave.prompt.parts import PartKind
from chunkweave.store.index import PromptLookup
from chunkweave.types import ChunkId, Geometry


def method_for(
    choice: MethodChoice,
    promotion: Promotion,
    loading: Loading | None,
    costs: PrefillCosts | None = None,
    *,
    stores: bool = True,
) -> ReuseMethod:
    """The method that makes a request's plan when it is admitted, for both backends.

    With `costs` a method that the client did not name gives way to the exact one where it is expected to be no sooner,
    or, if the request `stores` what it computes, where its path comes back.

    Exact prefixes grow as `promotion` says. With `loading`, the loading controller may raise the method's ratio. Pass
    None if the request sets its own budget, or if other requests are pending or running: extra recomputation is free
    only for a request that is alone.
    """
    method = choice.made
    if loading is not None:
        method = LoadAwareMethod(choice.method, choice.reuse, loading)
    if promotion != Promotion():
        method = PrefixGrowingMethod(method, promotion)
    if costs is None or choice.why not in (Why.CALIBRATED, Why.LEARNED):
        return method
    return CheaperMethod(method, costs, stores=stores and promotion.kept is None)


class FirstPassMethod:
    """Computes a chunk after neutral passages: an exact prefix is reused, the last part is always computed.

    The last part is computed even if it is stored: another call may have stored it since this one was prepared.
    """

    name = "prefix"
    budget = None

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over the last part and all parts that are not stored."""
        return _last_computed(self.name, lookup, reuse_exact_prefix)


class ContextMethod:
    """Computes one context of a mean: all parts before the last are reused, the last one is computed.

    So a context costs only the chunk's own tokens.
    """

    name = "full-reuse"
    budget = None

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over the last part and all parts that are not stored."""
        return _last_computed(
            self.name, lookup, lambda lookup_before: reuse_every_hit(lookup_before, prefer_least_read)
        )


def _last_computed(name: str, lookup: PromptLookup, reuse: Callable[[PromptLookup], tuple[PartPlan, ...]]) -> Plan:
    *earlier, last = lookup.parts
    parts = (*reuse(PromptLookup(tuple(earlier))), PartPlan(last.part, last.span, KVSource.COMPUTED))
    return one_pass(name, parts)


class LoadAwareMethod:
    """Recomputes as much as configured, and more where segments load slowly (CacheBlend §5.1).

    Loading time is summed over the bytes left to read of the segments in the plan. The ratio r whose recomputation
    takes as long is a lower bound of the method's budget: a ratio is raised to r, an alpha until the share r is
    recomputed. A method without a budget is not changed. If the question is computed first (`query`), loading hides
    behind recomputation only after the last layer of that first pass.
    """

    def __init__(self, name: str, config: ReuseConfig, loading: Loading) -> None:
        """Wrap the method `name`; `config` has the minimum of its budget.

        Raises:
            UnknownMethodError: no such method.
        """
        self._least = make_method(name, config)
        self.name = name
        self.budget = self._least.budget
        self._config = config
        self._loading = loading

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """The wrapped method's plan with the budget that hides loading; `raised_to` is set if that is higher."""
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
        """The share of reused tokens whose recomputation hides loading, with the expected delays."""
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
        """Seconds of the question's own pass: the longer of loading and computing its layers."""
        share = plan.head_share(num_layers)
        if not share:
            return 0.0
        asked_s = self._loading.cost.prefill(plan.passes[0].required_tokens, plan.prompt_tokens)
        return share * max(load_s, asked_s)


class PrefixGrowingMethod:
    """A reuse method whose exact prefixes grow as a request's `promotion` says.

    An exact method stores exact paths over promoted chunks only. With a weaving method no exact prefix would ever grow,
    because everything after a reused chunk is inexact. So the chunk after the exact prefix is computed in full if the
    path with it recurs often enough: one chunk per request, which later requests with that beginning reuse exactly.
    """

    def __init__(self, method: ReuseMethod, promotion: Promotion) -> None:
        self.name = method.name
        self.budget = method.budget
        self._method = method
        self._promotion = promotion

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """The wrapped method's plan, with fewer parts stored or one more chunk computed."""
        if self.name not in EXACT_METHODS:
            return self._method.plan(continuing(lookup, self._promotion.continued), geometry)
        plan = self._method.plan(lookup, geometry)
        promoted = self._promotion.kept
        return plan if promoted is None else admitting(plan, lookup, promoted)


class CheaperMethod:
    """A weaving method, or the exact one where that is expected to be no later (`PrefillCosts.cheaper`).

    Its plans depend on what was measured before, so ranks that plan for themselves cannot use it.
    """

    def __init__(self, method: ReuseMethod, costs: PrefillCosts, *, stores: bool) -> None:
        self.name = method.name
        self.budget = method.budget
        self._method = method
        self._costs = costs
        self._stores = stores

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """The wrapped method's plan, or that of the exact prefix; `expected` is set if these differ."""
        woven = self._method.plan(lookup, geometry)
        if not woven.spans(KVSource.REUSED):
            return woven
        exact = one_pass(EXACT_METHOD, reuse_exact_prefix(lookup))
        return self._costs.cheaper(woven, exact, lookup, stores=self._stores)


def promoted_length(hot: Sequence[bool], stored: int) -> int:
    """Number of chunks of a path that may be stored: the `stored` ones and the run of `hot` ones after them.

    CRAFT §4.2: a prefix is promoted if all its chunks reached the threshold; a reused one is extended by the next chunk
    if that reached it. Chunks already stored stay, whatever their count is now.

    >>> promoted_length([False, True, True, False, True], stored=1)
    3
    """
    length = stored
    while length < len(hot) and hot[length]:
        length += 1
    return length


def admitting(plan: Plan, lookup: PromptLookup, hot: Set[ChunkId]) -> Plan:
    """The plan, storing no chunk after the stored exact prefix and the run of `hot` chunks that follows it."""
    chunks = [number for number, entry in enumerate(lookup.parts) if entry.part.kind is PartKind.CHUNK]
    stored = sum(lookup.parts[number].exact is not None for number in chunks)
    length = promoted_length([lookup.parts[number].part.id in hot for number in chunks], stored)
    dropped = frozenset(chunks[length:])
    return replace(
        plan,
        parts=tuple(replace(part, kept=False) if number in dropped else part for number, part in enumerate(plan.parts)),
    )


def continuing(lookup: PromptLookup, chunks: Set[ChunkId]) -> PromptLookup:
    """The lookup, with the first chunk after the exact prefix as not stored, if it is in `chunks`."""
    for number, entry in enumerate(lookup.parts):
        if entry.part.kind is PartKind.CHUNK and entry.exact is None:
            if entry.part.id not in chunks:
                return lookup
            computed = replace(entry, variants=())
            return PromptLookup((*lookup.parts[:number], computed, *lookup.parts[number + 1 :]))
    return lookup
