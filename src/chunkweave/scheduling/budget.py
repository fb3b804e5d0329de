"""What one step of a batching engine takes in: every decoding request's next token, then pieces of prefills."""

from collections.abc import Sequence
from dataclasses import dataclass

from chunkweave.errors import UsageError

DEFAULT_PATIENCE = 4
"""Steps that a prefill is passed over at most before it goes first; few, since a step may last a second."""


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A request that is being prefilled, as a budget sees it.

    `number` is its place in the order of arrival. The next pass has `next_tokens`, all passes that are left
    `remaining_tokens`; one that cannot be cut goes whole. `passed_over` is how many steps in a row it got nothing.
    """

    number: int
    next_tokens: int
    remaining_tokens: int
    can_be_cut: bool
    passed_over: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """So many `tokens` of the prefill of request `number`."""

    number: int
    tokens: int


class TokenBudget:
    """Shares out the tokens of each step.

    Decoding requests come first, one token each, so that no prefill makes a running answer stutter for longer than a
    step. What is left goes to prefills: the one with the fewest tokens left first, which makes the mean time to the
    first token least, but whoever was passed over `patience` times goes before all others, longest waiting first. A
    pass that cannot be cut is taken if it fits, or if it is the first; only so is a budget ever exceeded. So a prefill
    is passed over at most `patience` times, and once for each of the others.
    """

    def __init__(self, *, tokens: int, max_running: int, patience: int = DEFAULT_PATIENCE) -> None:
        """A budget of so many `tokens` a step for at most `max_running` requests.

        Raises:
            UsageError: nobody may run, or they could leave no token to a prefill.
        """
        if max_running < 1 or tokens <= max_running or patience < 1:
            raise UsageError(
                f"a step needs a request that runs ({max_running}), more tokens than requests ({tokens}), and patience "
                f"of at least a step ({patience})"
            )
        self.tokens = tokens
        self.max_running = max_running
        self.patience = patience

    def pieces(self, decoding: int, prefilling: Sequence[Prefilling]) -> list[Piece]:
        """Which prefills a step goes on with, beside `decoding` requests, and by how much."""
        left = self.tokens - decoding
        chosen: list[Piece] = []
        for one in sorted(prefilling, key=self._rank):
            if left <= 0:
                break
            if one.can_be_cut:
                chosen.append(Piece(one.number, min(left, one.next_tokens)))
            elif one.next_tokens <= left or not chosen:
                chosen.append(Piece(one.number, one.next_tokens))
            else:
                continue
            left -= chosen[-1].tokens
        return chosen

    def _rank(self, one: Prefilling) -> tuple[bool, int, int]:
        overdue = one.passed_over >= self.patience
        return not overdue, -one.passed_over if overdue else one.remaining_tokens, one.number
