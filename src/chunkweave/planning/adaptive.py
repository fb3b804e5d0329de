"""Lets the loading controller set a method's ratio: what loading costs anyway is spent on recomputation."""

from collections.abc import Callable
from dataclasses import replace

from chunkweave.config import ReuseConfig
from chunkweave.planning.cost_model import CostModel
from chunkweave.planning.loading_controller import LoadingChoice, ratio_that_hides
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import Fate, Plan
from chunkweave.store.lookup import PromptLookup
from chunkweave.types import Geometry, SegmentId


class HiddenLoading:
    """A method whose ratio is at least the configured one, and more where segments load slowly (CacheBlend §5.1).

    `T_load` is the sum over the segments that the method takes, each at the throughput of the tier it lies in;
    `T_recompute(r)` is r times the prefill of the reused tokens. Methods without a ratio are not changed by it.
    """

    def __init__(
        self, name: str, config: ReuseConfig, cost: CostModel, tier_of: Callable[[SegmentId], str | None]
    ) -> None:
        """Wrap the method `name`; `config.recompute_ratio` is r*, the least ratio.

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

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """The wrapped method's plan at the ratio that hides its loading."""
        plan = self._least.plan(lookup, geometry)
        choice = self.choose(plan)
        if choice.ratio <= self._config.recompute_ratio:
            return plan
        return make_method(self.name, replace(self._config, recompute_ratio=choice.ratio)).plan(lookup, geometry)

    def choose(self, plan: Plan) -> LoadingChoice:
        """The controller's choice for a plan, with the delays that it expects."""
        taken = [(len(part.span), self._tier_of(part.segment) or "") for part in plan.parts if part.segment is not None]
        load_s = sum(self._cost.load(tokens, tier) for tokens, tier in taken)
        prefill_s = self._cost.prefill(plan.tokens(Fate.REUSED))
        return ratio_that_hides(prefill_s, load_s, least_ratio=self._config.recompute_ratio)
