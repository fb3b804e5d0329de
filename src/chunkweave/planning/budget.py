"""What sets how much a method recomputes, and how far that must go up for a given share of the reused tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from chunkweave.planning.plan import Plan

RATIO = "recompute_ratio"
ALPHA = "alpha"


@dataclass(frozen=True, slots=True)
class Budget:
    """The one setting by which a method trades quality for time.

    `parameter` is its field of `ReuseConfig`: from 0, which recomputes nothing, upwards. `reaching(plan, share)` is the
    least value at which the method would recompute that share (0 to 1) of the tokens that `plan`, made by it at some
    other value, reuses; where it never recomputes so many, the least value at which it recomputes most.
    """

    parameter: str
    reaching: Callable[[Plan, float], float]


def _ratio_reaching(_plan: Plan, share: float) -> float:
    return share


RATIO_BUDGET = Budget(RATIO, _ratio_reaching)
"""Of methods whose setting is that share itself."""


def _alpha_reaching(plan: Plan, share: float) -> float:
    """Least alpha with sum over parts of min(1, alpha impact) tokens = share of all (Cache-Craft eq. 12 for a prompt).

    The sum rises in straight pieces that end where a part is recomputed whole, at alpha = 1/impact.
    """
    parts = [(part.fix.impact, len(part.span)) for part in plan.parts if part.fix is not None and part.fix.impact]
    wanted = share * sum(len(part.span) for part in plan.parts if part.fix is not None)
    whole, rise = 0.0, sum(impact * tokens for impact, tokens in parts)
    for impact, tokens in sorted(parts, reverse=True):
        if whole + rise / impact >= wanted:
            return (wanted - whole) / rise
        whole += tokens
        rise -= impact * tokens
    return 1.0 / min(parts)[0] if parts else 0.0


ALPHA_BUDGET = Budget(ALPHA, _alpha_reaching)
"""Of methods that say with each part how much it needs (`Fix.impact`), and scale that."""
