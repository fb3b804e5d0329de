"""Requests that share one run through the layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from chunkweave.engine.ticket import RequestState
from chunkweave.scheduling.budget import Prefilling, TokenBudget


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """Those that decode, and prefills with how many tokens of each are taken."""

    decoding: Sequence[RequestState]
    pieces: Sequence[tuple[RequestState, int]]

    @property
    def requests(self) -> list[RequestState]:
        """All requests of the group."""
        return [*self.decoding, *(request for request, _ in self.pieces)]


def share_step(requests: Sequence[RequestState], budget: TokenBudget) -> StepGroup:
    """What of `requests` goes into a step; notes in each prefill whether it was passed over."""
    decoding = [request for request in requests if request.job is None]
    prefilling = {request.number: (request, request.job) for request in requests if request.job is not None}
    seen = [
        Prefilling(number, job.next_tokens, job.remaining_tokens, job.can_be_cut, request.passed_over)
        for number, (request, job) in prefilling.items()
    ]
    pieces = [(prefilling[piece.number][0], piece.tokens) for piece in budget.pieces(len(decoding), seen)]
    chosen = {request for request, _ in pieces}
    for request, _ in prefilling.values():
        request.passed_over = 0 if request in chosen else request.passed_over + 1
    return StepGroup(decoding, pieces)


def groups_of(requests: Sequence[RequestState], budget: TokenBudget) -> list[StepGroup]:
    """The steps of `requests`: one batch, those apart each for itself, or else a prefill that still loads."""
    ready = [request for request in requests if request.job is None or not request.job.loading]
    together = [request for request in ready if not request.apart]
    groups = [share_step(together, budget), *(share_step([request], budget) for request in ready if request.apart)]
    groups = [group for group in groups if group.requests]
    if not groups and requests:
        return [share_step(requests[:1], budget)]
    return groups
