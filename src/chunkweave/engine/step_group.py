"""Requests that share one run through the layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from chunkweave.engine.ticket import Ticket
from chunkweave.scheduling.budget import Prefilling, TokenBudget


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """Those that decode, and prefills with how many tokens of each are taken."""

    decoding: Sequence[Ticket]
    pieces: Sequence[tuple[Ticket, int]]

    @property
    def tickets(self) -> list[Ticket]:
        """All requests of the group."""
        return [*self.decoding, *(ticket for ticket, _ in self.pieces)]


def share_step(tickets: Sequence[Ticket], budget: TokenBudget) -> StepGroup:
    """What of `tickets` goes into a step; notes in each prefill whether it was passed over."""
    decoding = [ticket for ticket in tickets if ticket.job is None]
    prefilling = {ticket.number: (ticket, ticket.job) for ticket in tickets if ticket.job is not None}
    seen = [
        Prefilling(number, job.next_tokens, job.remaining_tokens, job.can_be_cut, ticket.passed_over)
        for number, (ticket, job) in prefilling.items()
    ]
    pieces = [(prefilling[piece.number][0], piece.tokens) for piece in budget.pieces(len(decoding), seen)]
    chosen = {ticket for ticket, _ in pieces}
    for ticket, _ in prefilling.values():
        ticket.passed_over = 0 if ticket in chosen else ticket.passed_over + 1
    return StepGroup(decoding, pieces)


def groups_of(tickets: Sequence[Ticket], budget: TokenBudget) -> list[StepGroup]:
    """The steps of `tickets`: one batch, those apart each for itself, or else a prefill that still loads."""
    ready = [ticket for ticket in tickets if ticket.job is None or not ticket.job.loading]
    together = [ticket for ticket in ready if not ticket.apart]
    groups = [share_step(together, budget), *(share_step([ticket], budget) for ticket in ready if ticket.apart)]
    groups = [group for group in groups if group.tickets]
    if not groups and tickets:
        return [share_step(tickets[:1], budget)]
    return groups
