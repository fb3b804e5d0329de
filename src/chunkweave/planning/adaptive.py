"""Lets the loading controller raise a method's budget: what loading costs anyway is spent on recomputation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from chunkweave.config import ReuseConfig
from chunkweave.planning.budget import Budget
from chunkweave.planning.cost_model import CostModel
from chunkweave.planning.loading_controller import LoadingChoice, ratio_that_hides
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry, SegmentId


class HiddenLoading:
    """A method that recomputes what it is told to, and more where segments load slowly (CacheBlend §5.1).

    `T_load` is the sum over the segments that the method takes, each at the throughput of the tier it lies in;
    `T_recompute(r)` is r times the prefill of the reused tokens. The r at which they are equal is a floor for the
    method's budget, whatever its parameter is (DESIGN §5.3): a ratio is at least r, an alpha at least so great that
    it recomputes the share r of the reused tokens. A method without a budget is not changed, nor is a prompt in which
    it finds nothing to recompute. Where the question is
    asked first (`query`), loading hides behind recomputation only from the layer on that it was asked about last.
    """

    def __init__(
        self, name: str, config: ReuseConfig, cost: CostModel, tier_of: Callable[[SegmentId], str | None]
    ) -> None:
        """Wrap the method `name`; what `config` says of its budget is the least.

        Raises:
            UnknownMethodError: no such method.
        """
        self._least = make_method(name, config)
        self._config = config
        self._cost = cost
        self._tier_of = tier_of

    @property
    def name(self) -> str:
        """The wrapped method's."""
        return self._least.name

    @property
    def budget(self) -> Budget | None:
        """The wrapped method's."""
        return self._least.budget

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
        taken = [(len(part.span), self._tier_of(part.segment) or "") for part in plan.parts if part.segment is not None]
        load_s = sum(self._cost.load(tokens, tier) for tokens, tier in taken)
        prefill_s = self._cost.prefill(plan.tokens(KVSource.REUSED))
        head_s = self._head_s(plan, geometry.num_layers, load_s)
        return ratio_that_hides(prefill_s, load_s, least_ratio=0.0, head_s=head_s)

    def _head_s(self, plan: Plan, num_layers: int, load_s: float) -> float:
        """Until the question has been asked: as long as its layers take to load, or to compute."""
        share = plan.head_share(num_layers)
        if not share:
            return 0.0
        asked_s = self._cost.prefill(plan.passes[0].required_tokens, plan.prompt_tokens)
        return share * max(load_s, asked_s)
