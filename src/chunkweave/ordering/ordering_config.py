"""How chunk order is chosen, and who may choose it."""

from dataclasses import dataclass
from enum import StrEnum

from chunkweave.errors import UsageError


class ChunkOrder(StrEnum):
    """What a request says about the order of its chunks."""

    FREE = "free"
    """They may stand in any order; the caller's is how well they fit, the best first."""
    FIXED = "fixed"
    """They stand where the caller put them."""

    @classmethod
    def parse(cls, text: str) -> "ChunkOrder":
        """By its name.

        Raises:
            UsageError: there is no such order.
        """
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"unknown order {text!r}; there are: {', '.join(cls)}") from None


@dataclass(frozen=True, slots=True)
class OrderingConfig:
    """How requests of free order are arranged (CRAFT §4).

    `ordering` is a name of `chunkweave.ordering.registry`. Chunks are counted over the last `window` requests (§6.2.4).
    A chunk that was asked for `promotion_threshold` times among these is promoted (§6.2.5): only then an exact method
    keeps an exact path on over it. None keeps exact paths as they come.

    A method that weaves computes the chunk right behind the exact prefix in full, so that the prefix grows, once
    `continuation_threshold` of these requests began with that path; None lets it weave. To compute a chunk costs a
    request several times what weaving saves each later one, so here it is the path that must come back: by CRAFT's
    rule, which looks at the chunk alone, nearly every request would pay for it.
    """

    ordering: str = "frequency"
    window: int = 1000
    promotion_threshold: int | None = 2
    continuation_threshold: int | None = 4

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"chunks are counted over at least one request, not {self.window}")
        for threshold in (self.promotion_threshold, self.continuation_threshold):
            if threshold is not None and threshold < 1:
                raise UsageError(f"a promotion threshold must be at least 1, not {threshold}")
