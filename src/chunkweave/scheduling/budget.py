"""Limits of a batching engine: tokens and time per step, and blocks of KV memory. No torch here."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from sys import maxsize
from typing import Protocol, TypeVar

from chunkweave.errors import StoreError, UsageError
from chunkweave.scheduling.queue import DEFAULT_WINDOW
from chunkweave.settings import SERVERS, Place, SettingsGroup, setting

_TAIL = 8
"""A step may exceed its budget by 1/8 if that ends a pass: alone, the rest would read all weights for few tokens."""

DEFAULT_PATIENCE = 4
"""Steps that a prefill may be passed over before it goes first; few, because a step may take a second."""


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A request in prefill, as a budget sees it.

    `number` is its order of arrival. The next pass has `next_tokens`, all remaining passes `remaining_tokens`; a pass
    that cannot be cut runs whole. `passed_over` counts consecutive steps without tokens. A `background` request takes
    what others leave. `due` is its tenant's virtual time, `lone` whether the tenant has no other request. It joins a
    step only if all prefills of the step have at most `most_tokens` together.
    """

    number: int
    next_tokens: int
    remaining_tokens: int
    can_be_cut: bool
    passed_over: int = 0
    background: bool = False
    due: float = 0.0
    lone: bool = False
    most_tokens: int = maxsize


@dataclass(frozen=True, slots=True)
class Piece:
    """`tokens` tokens of the prefill of request `number`."""

    number: int
    tokens: int


class TokenBudget:
    """Shares out the tokens of each step.

    Decoding requests come first, one token each, so that no prefill delays running answers by more than a step. The
    rest goes to prefills: least served tenant first, and within it the one with the fewest tokens left, which minimizes
    the mean time to first token. A prefill that was passed over `patience` times goes before all others of its tenant,
    longest waiting first. A pass that cannot be cut runs if it fits or is first. The end of a pass is included if it
    exceeds the budget by at most an eighth (`_TAIL`). Only these two cases exceed the budget. Beside answers, the time
    of a step limits prefills further (`Prefilling.most_tokens`).

    The step in which a tenant's only prefill ends is not filled up for tenants that were served more, so that it ends
    sooner.
    """

    def __init__(self, *, tokens: int, max_running: int, patience: int = DEFAULT_PATIENCE) -> None:
        """A budget of `tokens` per step for at most `max_running` requests.

        Raises:
            UsageError: no request may run, or decoding requests could leave no token for prefills.
        """
        if max_running < 1 or tokens <= max_running or patience < 1:
            raise UsageError(
                f"a step needs at least one running request ({max_running}), more tokens than running requests "
                f"({tokens}), and a patience of at least one step ({patience})"
            )
        self.tokens = tokens
        self.max_running = max_running
        self.patience = patience

    def pieces(self, decoding: int, prefilling: Sequence[Prefilling]) -> list[Piece]:
        """The prefills that a step continues beside `decoding` requests, with their tokens."""
        tokens_left = self.tokens - decoding
        chosen: list[Piece] = []
        latest = inf
        for candidate in sorted(prefilling, key=self._rank):
            if tokens_left <= 0 or candidate.due > latest:
                break
            room = min(tokens_left, candidate.most_tokens - sum(piece.tokens for piece in chosen))
            if room <= 0:
                continue
            if candidate.can_be_cut:
                tail = 0 if candidate.background else min(self.tokens, candidate.most_tokens) // _TAIL
                chosen.append(
                    Piece(candidate.number, candidate.next_tokens if candidate.next_tokens <= room + tail else room)
                )
            elif candidate.next_tokens <= room or not chosen:
                chosen.append(Piece(candidate.number, candidate.next_tokens))
            else:
                continue
            tokens_left -= chosen[-1].tokens
            if candidate.lone and chosen[-1].tokens == candidate.remaining_tokens:
                latest = min(latest, candidate.due)
        return chosen

    def _rank(self, candidate: Prefilling) -> tuple[bool, float, bool, int, int]:
        overdue = candidate.passed_over >= self.patience
        return (
            candidate.background,
            candidate.due,
            not overdue,
            -candidate.passed_over if overdue else candidate.remaining_tokens,
            candidate.number,
        )


@dataclass(frozen=True, slots=True)
class BatchingConfig(SettingsGroup, places=frozenset({Place.ENGINE})):
    """Limits of a batching engine.

    Speculations run only in steps in which no other request can. A request that arrives meanwhile waits for at most one
    layer of `speculation_tokens` tokens; with fewer tokens per step, weights are read more often.

    >>> from chunkweave import AsyncEngine, BatchingConfig, Engine
    >>> with Engine.load("reader") as engine:
    ...     batching = AsyncEngine(engine, BatchingConfig(max_running=2))
    ...     batching.close()
    """

    max_running: int = setting(8, "Maximum running requests.", name="max_num_seqs")
    step_tokens: int = setting(
        512,
        "Maximum tokens per engine step; the end of a prompt may add 1/8.",
        name="max_num_batched_tokens",
    )
    step_time_s: float | None = 0.1
    """Maximum delay of decoding requests by prefills, to the end of a layer; none: no limit."""
    kv_tokens: int = setting(32768, "KV memory of all running requests, in tokens.")
    block_tokens: int = 32
    """Tokens per KV block."""
    max_waiting: int = 256
    """Maximum pending requests; more get 503 if their tenant has its share of the queue."""
    tenant_weight: tuple[str, ...] = setting(
        (), "NAME=WEIGHT: a tenant's weight in sharing resources (default 1); repeatable.", places=SERVERS
    )
    window: int = DEFAULT_WINDOW
    """Times that a pending request may be passed over by requests with more cached tokens."""
    deadline_s: float | None = setting(
        600.0, "Default deadline of requests; none: no deadline.", places=SERVERS, positive=True
    )
    queue_timeout_s: float | None = None
    """Maximum wait of a request before it starts; none: no limit."""
    max_prompt_tokens: int | None = None
    """Maximum tokens of a prompt; none: limited by the model's context and kv_tokens."""
    speculation_tokens: int | None = None
    """Maximum tokens per step of speculations; none: as in other steps."""
    prefetch_requests: int = 2
    """Pending requests whose segments are prefetched from slow tiers; 0: none."""
    prefetch_bytes: int = 256 << 20
    """Maximum prefetched bytes."""

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        TokenBudget(tokens=self.step_tokens, max_running=self.max_running)
        if self.speculation_tokens is not None:
            TokenBudget(tokens=self.speculation_tokens, max_running=self.max_running)
        if self.max_prompt_tokens == 0:
            raise UsageError("max_prompt_tokens is at least 1, not 0")
        if not 1 <= self.block_tokens <= self.kv_tokens:
            raise UsageError(f"kv_tokens ({self.kv_tokens}) cannot hold one block of {self.block_tokens} tokens")

    @property
    def tokens_of_speculations(self) -> int:
        """Most tokens of a step of speculations."""
        return self.step_tokens if self.speculation_tokens is None else min(self.step_tokens, self.speculation_tokens)


KeyT = TypeVar("KeyT")

LEAST_TOKENS = 16
"""Smallest piece of a prefill beside answers: less would cost a run through the layers for almost no progress."""

_NEWEST = 0.3
"""Weight of the newest measurement in an estimate."""

_MOST_CHANGE = 2.0
"""Upper bound of a measurement relative to the estimate, because another process may have delayed the step; and of a
prefill piece relative to the largest one measured.
"""

_MOST_WORTH = 100.0
"""Upper bound of a generated token's cost, in prefill tokens."""

_STALE = 16
"""Number of prefill measurements after which decoding alone is measured again."""


class StepPace:
    """Estimates in seconds: of a decoding step by its number of requests, and of a prefill by its tokens.

    Prefills have one estimate for slices by position and one for work by layers, counted as tokens through all layers.
    Before the first measurement, decoding takes no time and a piece has `LEAST_TOKENS`. Used by one thread.
    """

    def __init__(self) -> None:
        self._decoding_s: dict[int, float] = {}
        self._since_decoded = _STALE
        self._token_s: dict[bool, float] = {}
        self._largest: dict[bool, int] = {}

    @property
    def stale(self) -> bool:
        """Whether decoding alone was never measured, or not recently."""
        return self._since_decoded >= _STALE

    def decoding_s(self, requests: int) -> float:
        """Seconds of a step in which `requests` requests decode and nothing else runs.

        Linear between and above measured numbers, proportional below the smallest. The latter underestimates: fewer
        requests then join these few, and the next measurement corrects it.
        """
        measured = sorted(self._decoding_s)
        if not requests or not measured:
            return 0.0
        if requests <= measured[0] or len(measured) == 1:
            return self._decoding_s[measured[0]] * requests / measured[0]
        high = min(bisect_left(measured, requests), len(measured) - 1)
        first = measured[high - 1]
        second = measured[high]
        low_s = self._decoding_s[first]
        high_s = self._decoding_s[second]
        return max(low_s, low_s + (high_s - low_s) * (requests - first) / (second - first))

    def tokens_within(self, seconds: float, *, by_layers: bool) -> int:
        """Prefill tokens that fit into `seconds`; 0 if not positive."""
        most = int(_MOST_CHANGE * self._largest[by_layers]) if by_layers in self._largest else LEAST_TOKENS
        token_s = self._token_s.get(by_layers, 0.0)
        if seconds <= 0:
            return 0
        return most if most * token_s <= seconds else int(seconds / token_s)

    def tokens_worth(self, requests: int, *, least: float) -> float:
        """Cost of one generated token, in prefill tokens, in a step with `requests` decoding requests.

        At least `least`, also without measurements, and at most `_MOST_WORTH`.
        """
        token_s = self._token_s.get(False, 0.0)
        worth = self.decoding_s(requests) / requests / token_s if token_s else least
        return min(max(worth, least), _MOST_WORTH)

    def decoded(self, requests: int, seconds: float) -> None:
        """Record the time of a step in which `requests` requests decoded and nothing else ran."""
        self._decoding_s[requests] = _blended(self._decoding_s, requests, seconds)
        self._since_decoded = 0

    def prefilled(self, tokens: int, seconds: float, *, by_layers: bool) -> None:
        """Record the time of `tokens` prefill tokens, decoding excluded."""
        self._since_decoded += 1
        self._token_s[by_layers] = _blended(self._token_s, by_layers, max(0.0, seconds) / tokens)
        self._largest[by_layers] = max(tokens, self._largest.get(by_layers, 0))


def _blended(estimates: Mapping[KeyT, float], key: KeyT, measured: float) -> float:
    estimate = estimates.get(key)
    if not estimate:
        return measured
    return (1 - _NEWEST) * estimate + _NEWEST * min(measured, _MOST_CHANGE * estimate)


class BlockOwner(Protocol):
    """An owner of a pool's blocks; only the pool changes their number."""

    blocks: int


class BlockPool:
    """Limits the KV memory of requests. It counts blocks; the memory itself belongs to the requests' caches.

    Owned by one thread. An owner reserves before it allocates, and frees memory before it releases; only the pool
    changes an owner's `blocks`. Unreserved blocks may be lent to one borrower, who returns them when an owner needs
    them.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        """A pool of `blocks`, each with the KV of `block_tokens` tokens through all layers.

        Raises:
            UsageError: no blocks, or blocks without tokens.
        """
        if blocks < 1 or block_tokens < 1:
            raise UsageError(f"a pool needs at least one block ({blocks}) of at least one token ({block_tokens})")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._reserved = 0
        self._lent = 0
        self._take_back: Callable[[], None] | None = None

    @property
    def tokens(self) -> int:
        """Most tokens of all requests together."""
        return self.blocks * self.block_tokens

    @property
    def reserved(self) -> int:
        """Reserved blocks; lent ones count as free."""
        return self._reserved

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def fits(self, tokens: int, *, without: Iterable[BlockOwner] = ()) -> bool:
        """Whether a new owner could reserve that much now, or after the owners `without` release."""
        return self.blocks_for(tokens) <= self.blocks - self._reserved + sum(owner.blocks for owner in without)

    def reserve(self, owner: BlockOwner, tokens: int) -> bool:
        """Reserve blocks for `tokens` tokens of a new `owner`; False, without effect, if there are too few.

        Raises:
            UsageError: the owner already holds blocks.
        """
        if owner.blocks:
            raise UsageError(f"{owner!r} holds blocks already; let it grow instead")
        return self._grow(owner, tokens)

    def grow(self, owner: BlockOwner, tokens: int) -> bool:
        """Extend `owner` to at least the blocks for `tokens` tokens; False, without effect, if there are too few.

        Raises:
            UsageError: the owner has no reservation.
        """
        self._check_owner(owner)
        return self._grow(owner, tokens)

    def lend(self, tokens: int, take_back: Callable[[], None]) -> bool:
        """Lend blocks for `tokens` tokens until `give_back`, or until an owner needs them; False if there are too few.

        In the latter case `take_back` is called: the borrower's memory must be free when it returns. Lent blocks count
        as free for owners.

        Raises:
            UsageError: blocks are already lent.
        """
        if self._take_back is not None:
            raise UsageError("the pool lends to one borrower at a time")
        if not self.fits(tokens):
            return False
        self._lent, self._take_back = self.blocks_for(tokens), take_back
        return True

    def give_back(self) -> None:
        """End the loan. Idempotent."""
        self._lent, self._take_back = 0, None

    def capacity(self, owner: BlockOwner) -> int:
        """Tokens that the blocks of `owner` hold."""
        return owner.blocks * self.block_tokens

    def release(self, owner: BlockOwner) -> None:
        """Release all blocks of `owner`.

        Raises:
            UsageError: the owner has no reservation.
        """
        self._check_owner(owner)
        self._reserved -= owner.blocks
        owner.blocks = 0

    def check(self, owners: Iterable[BlockOwner] = ()) -> None:
        """Audit the counts; `owners` are all possible owners.

        Raises:
            StoreError: the counts disagree.
        """
        held = sum(owner.blocks for owner in owners)
        if self._reserved != held or not 0 <= self._reserved <= self.blocks:
            raise StoreError(f"{self._reserved} of {self.blocks} blocks are reserved, but owners hold {held}")
        if self._reserved + self._lent > self.blocks:
            raise StoreError(f"{self._lent} blocks are lent, but owners need {self._reserved} of {self.blocks}")

    def _grow(self, owner: BlockOwner, tokens: int) -> bool:
        more = self.blocks_for(tokens) - owner.blocks
        if more > self.blocks - self._reserved:
            return False
        if self._take_back is not None and more > self.blocks - self._reserved - self._lent:
            self._take_back()
            self.give_back()
        if more > 0:
            owner.blocks += more
            self._reserved += more
        return True

    def _check_owner(self, owner: BlockOwner) -> None:
        if not owner.blocks:
            raise UsageError(f"{owner!r} holds no blocks")
