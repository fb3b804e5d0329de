"""`original`: chunks stand as they came. What the other orderings are compared with."""

from chunkweave.ordering.ordering import Unordered


class OriginalOrder:
    """The caller's order, the best first."""

    name = "original"

    def order(self, given: Unordered) -> list[int]:
        """As they are."""
        return list(range(len(given.chunks)))


ORDERING = OriginalOrder
