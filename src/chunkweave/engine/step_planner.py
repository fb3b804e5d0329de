"""What a step runs: whose next tokens, and how much of which prefills beside them. Imports no torch.

Between two tokens of an answer others' prefills run for `step_time_s` at most. And of several tenants none is slowed by
others' work more than if the machine were divided by weight: a step that a tenant's answers wait for takes no longer
than they take alone, divided by the tenant's share. That holds against tenants that were served more.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from sys import maxsize

from chunkweave.engine.request_state import RequestState
from chunkweave.scheduling.fairness import VirtualTime
from chunkweave.scheduling.pace import LEAST_TOKENS, StepPace
from chunkweave.scheduling.queue import Prefilling, TokenBudget

_LEAST_SHARE = 1 / 8
"""What prefills get at least of the time in which the answers beside them decode, so that they come to an end."""

_LONGEST_S = 1.0
"""How long a request that decodes waits at most for answers of tenants that were served less."""


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """Requests that share one run through the layers: those that decode, and so many tokens of some prefills.

    One prefill goes `by_layers`, alone, if it is still read, or was left between two layers since it held answers for
    too long: as many as the work of so many tokens allows.
    """

    decoding: Sequence[RequestState]
    pieces: Sequence[tuple[RequestState, int]]
    by_layers: bool = False

    @property
    def requests(self) -> list[RequestState]:
        """All requests of the group."""
        return [*self.decoding, *(request for request, _ in self.pieces)]


class StepPlanner:
    """Shares out steps, and learns from them how much work fits into the time that answers may be held.

    Used by one thread, which says what each step has done.
    """

    def __init__(
        self, shares: VirtualTime, step_time_s: float | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`shares` says whose turn it is. Without `step_time_s` a prefill holds answers for a step of any length."""
        self.pace = StepPace()
        self._shares = shares
        self._step_time_s = inf if step_time_s is None else step_time_s
        self._clock = clock
        self._answering: Counter[str] = Counter()
        self._decoding_s = 0.0
        self._decoded_s: float | None = None  # when the last step of answers ended, if there are any
        self._credit_s = 0.0
        self._limited: frozenset[RequestState] = frozenset()  # of this step's prefills those that it is for

    def begin(self, requests: Sequence[RequestState]) -> None:
        """A step is made of `requests`, which are then shared out."""
        self._answering = Counter(request.tenant for request in requests if request.job is None)
        if not self._answering:
            self._decoded_s = None
        elif self._decoded_s is None:
            self._decoded_s = self._clock()
        self._add_credit([request for request in requests if request.job is not None])

    def share(self, requests: Sequence[RequestState], budget: TokenBudget) -> list[StepGroup]:
        """What of `requests` goes into a step, together or by layers; notes in each prefill if it was passed over.

        All of it shares one budget. Prefills none of whose layers has come in wait, and are not passed over.
        """
        decoding = self._next_tokens([request for request in requests if request.job is None])
        self._decoding_s = self.pace.decoding_s(len(decoding))
        seen, by_layers, prefilling = [], set[int](), {}
        jobs = [(request, request.job) for request in requests if request.job is not None]
        for request, job in jobs:
            layers, next_tokens = job.layers_ready, job.next_tokens
            if layers == 0:
                continue
            most = self._most_tokens(request, by_layers=layers is not None)
            if layers is not None:
                by_layers.add(request.number)
                next_tokens = job.tokens_through(layers)
            prefilling[request.number] = request
            seen.append(
                Prefilling(
                    request.number,
                    next_tokens,
                    job.remaining_tokens,
                    layers is not None or job.can_be_cut,
                    request.passed_over,
                    request.background,
                    self._shares.of(request.tenant),
                    self._shares.under_way(request.tenant) == 1,
                    most,
                )
            )
        pieces = {piece.number: piece.tokens for piece in budget.pieces(len(decoding), seen)}
        whole: list[tuple[RequestState, int]] = []
        layered: list[tuple[RequestState, int]] = []
        for number, request in prefilling.items():
            request.passed_over = 0 if number in pieces else request.passed_over + 1
            if number in pieces:
                (layered if number in by_layers else whole).append((request, pieces[number]))
        together = [StepGroup(decoding, whole)] if decoding or whole else []
        return [*together, *(StepGroup((), [piece], by_layers=True) for piece in layered)]

    @property
    def holds(self) -> bool:
        """Whether there are answers, which the step holds."""
        return self._decoded_s is not None

    def late(self, part_done: float = 0.0) -> bool:
        """Whether prefills have held answers for long enough, if of their next tokens that part is computed."""
        if self._decoded_s is None:
            return False
        return self._clock() - part_done * self._decoding_s >= self._decoded_s + self._step_time_s

    def ran(self, group: StepGroup, since_s: float) -> None:
        """A step that `holds` answers has run what `group` says, since then."""
        now = self._clock()
        tokens, seconds = sum(tokens for _, tokens in group.pieces), now - since_s
        if group.decoding:
            for request in group.decoding:
                request.last_token_s = now
            self._decoded_s = now
            if not tokens:
                self.pace.decoded(len(group.decoding), seconds)
            seconds -= self._decoding_s
        if tokens:
            self.pace.prefilled(tokens, seconds, by_layers=group.by_layers)
            if any(request in self._limited for request, _ in group.pieces):
                self._credit_s -= max(0.0, seconds)

    def _next_tokens(self, answers: Sequence[RequestState]) -> list[RequestState]:
        """The requests that decode in this step: in turns, those of tenants that were served more as far as is fair.

        The one that waits longest does after `step_time_s`, or after `_LONGEST_S`, whatever is fair.
        """
        chosen: list[RequestState] = []
        now, wait_s = self._clock(), min(self._step_time_s, _LONGEST_S)
        longest = min(answers, key=lambda one: one.last_token_s, default=None)
        for one in sorted(answers, key=lambda one: (self._shares.of(one.tenant), one.last_token_s)):
            waits_s = now - one.last_token_s
            fits = self.pace.decoding_s(len(chosen) + 1) <= self._fair_s(one)
            if fits or (one is longest and waits_s >= wait_s):
                chosen.append(one)
        return chosen

    def _fair_s(self, request: RequestState) -> float:
        """Longest step that a request may be in, for the answers of other tenants that were served less."""
        least = inf
        for tenant, requests in self._answering.items():
            served_less = request.background or self._shares.of(tenant) < self._shares.of(request.tenant)
            alone_s = self.pace.decoding_s(requests)
            if tenant != request.tenant and served_less and alone_s:
                least = min(least, alone_s / self._shares.share(tenant))
        return least

    def _add_credit(self, prefilling: Sequence[RequestState]) -> None:
        """Let prefills have this step's part of the time that is fair, or what is left of it after what they overdrew.

        A pass that cannot be cut takes one layer at least, however long that is, and pauses for it afterwards.
        """
        fair = {request: self._fair_s(request) for request in prefilling}
        self._limited = frozenset(request for request, fair_s in fair.items() if isfinite(fair_s))
        fair_s = max((fair[request] for request in self._limited), default=0.0)
        more_s = max(fair_s - self._decoding_s, _LEAST_SHARE * self._decoding_s)
        self._credit_s = min(more_s, self._credit_s + more_s)

    def _most_tokens(self, request: RequestState, *, by_layers: bool) -> int:
        """Tokens that all prefills together may have with this one among them."""
        if self._decoded_s is None:
            return maxsize
        if self.pace.stale:
            return 0
        seconds = self._decoded_s + self._step_time_s - self._clock()
        if request in self._limited:
            if self._credit_s <= 0:
                return 0
            seconds = min(seconds, self._credit_s)
        if not isfinite(seconds):
            return maxsize
        return max(LEAST_TOKENS, self.pace.tokens_within(seconds, by_layers=by_layers))
