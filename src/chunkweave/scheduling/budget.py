"""How much a batching engine takes on at once, and what one of its steps takes in."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from chunkweave.errors import UsageError
from chunkweave.scheduling.queue import DEFAULT_WINDOW
from chunkweave.settings import SERVERS, Place, Unit, configuration, setting

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


_ENGINE = frozenset({Place.ENGINE})
_DEADLINE = {Place.ENGINE: 600.0, Place.VLLM: 600.0}


@configuration
@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The limits of a batching engine.

    Speculations run only in steps in which nothing else can: whoever arrives meanwhile waits for one layer of
    `speculation_tokens` at most; fewer of them read the weights more often.
    """

    max_running: int = setting(
        8, "Requests worked on at once.", name="max_num_seqs", old=("max_running",), places=_ENGINE
    )
    step_tokens: int = setting(
        512, "Tokens of one step of the engine.", name="max_num_batched_tokens", old=("step_tokens",), places=_ENGINE
    )
    kv_tokens: int = setting(32768, "Tokens that the KV memory of all running requests holds.", places=_ENGINE)
    block_tokens: int = setting(32, "Tokens of a block of KV memory.", name="block_size", places=_ENGINE)
    max_waiting: int = setting(256, "Requests that may wait; a server answers further ones with 503.", places=SERVERS)
    window: int = setting(
        DEFAULT_WINDOW,
        "How often a waiting request may be passed over by ones of which more is cached.",
        name="queue_window",
        old=("window",),
        places=SERVERS,
    )
    deadline_s: float | None = setting(
        None, "Longest time that a request may take; none: any.", unit=Unit.SECONDS, places=SERVERS, defaults=_DEADLINE
    )
    queue_timeout_s: float | None = setting(
        None, "Longest time that a request may wait before it is begun; none: any.", unit=Unit.SECONDS, places=_ENGINE
    )
    max_prompt_tokens: int | None = setting(
        None, "Tokens that a prompt may have; none: as many as the model's context and kv_tokens allow.", places=_ENGINE
    )
    speculation_tokens: int | None = setting(
        None, "Tokens of a step of speculations; none: as many as of any other step.", places=_ENGINE
    )
    prefetch_requests: int = setting(
        2, "Waiting requests whose segments are read ahead from slow tiers; 0: none.", places=_ENGINE
    )
    prefetch_bytes: int = setting(
        256 << 20, "Most bytes that are read ahead at any time.", unit=Unit.BYTES, places=_ENGINE
    )

    def __post_init__(self) -> None:
        TokenBudget(tokens=self.step_tokens, max_running=self.max_running)
        if self.speculation_tokens is not None:
            TokenBudget(tokens=self.speculation_tokens, max_running=self.max_running)
        if min(self.prefetch_requests, self.prefetch_bytes) < 0:
            raise UsageError(
                f"{self.prefetch_requests} requests and {self.prefetch_bytes} bytes to prefetch: 0 is least"
            )
        if not 1 <= self.block_tokens <= self.kv_tokens:
            raise UsageError(f"{self.kv_tokens} tokens of KV have no block of {self.block_tokens} tokens")
        if self.max_waiting < 1 or self.window < 0:
            raise UsageError(f"room to wait ({self.max_waiting}) must be at least 1, the window ({self.window}) 0")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise UsageError(f"max_prompt_tokens must be at least 1, not {self.max_prompt_tokens}")
        for name, limit in (("deadline_s", self.deadline_s), ("queue_timeout_s", self.queue_timeout_s)):
            if limit is not None and not (isfinite(limit) and limit > 0):
                raise UsageError(f"{name} must be a positive number of seconds, not {limit}")

    @property
    def tokens_of_speculations(self) -> int:
        """Tokens in a step of speculations: what was asked for, and no more than in any other step."""
        return self.step_tokens if self.speculation_tokens is None else min(self.step_tokens, self.speculation_tokens)
