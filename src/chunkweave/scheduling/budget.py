"""How much a batching engine takes on: tokens and time of a step, and blocks of KV memory. Imports no torch."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from sys import maxsize
from typing import Protocol, TypeVar

from chunkweave.errors import StoreError, UsageError
from chunkweave.scheduling.queue import DEFAULT_WINDOW
from chunkweave.settings import SERVERS, Place, configuration, setting

_TAIL = 8
"""A step may be longer by this part if it ends a pass so: by itself the end would read all weights for few tokens."""

DEFAULT_PATIENCE = 4
"""Steps that a prefill is passed over at most before it goes first; few, since a step may last a second."""


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A request that is being prefilled, as a budget sees it.

    `number` is its place in the order of arrival. The next pass has `next_tokens`, all passes that are left
    `remaining_tokens`; one that cannot be cut goes whole. `passed_over` is how many steps in a row it got nothing. One
    in the `background` takes what the others leave. `due` is how much its tenant was served (`VirtualTime`), `lone`
    whether that has no other request. It is in the step only while all its prefills have at most `most_tokens`.
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
    """So many `tokens` of the prefill of request `number`."""

    number: int
    tokens: int


class TokenBudget:
    """Shares out the tokens of each step.

    Decoding requests come first, one token each, so that no prefill delays running answers by more than a step. The
    rest goes to prefills: to those of the tenant that was served least, and of these to the one with the fewest tokens
    left first, which minimizes the mean time to first token; but one that was passed over `patience` times goes before
    all others of its tenant, longest waiting first. A pass that cannot be cut is taken if it fits or is the first. The
    end of a pass comes along if an eighth (`_TAIL`) more than the budget holds it. Only by these two is it exceeded.
    Beside answers the time of a step bounds prefills further (`Prefilling.most_tokens`).

    The step in which a tenant's only prefill ends is not filled up for tenants that were served more: it ends sooner.
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
        latest = inf
        for one in sorted(prefilling, key=self._rank):
            if left <= 0 or one.due > latest:
                break
            room = min(left, one.most_tokens - sum(piece.tokens for piece in chosen))
            if room <= 0:
                continue
            if one.can_be_cut:
                tail = 0 if one.background else min(self.tokens, one.most_tokens) // _TAIL
                chosen.append(Piece(one.number, one.next_tokens if one.next_tokens <= room + tail else room))
            elif one.next_tokens <= room or not chosen:
                chosen.append(Piece(one.number, one.next_tokens))
            else:
                continue
            left -= chosen[-1].tokens
            if one.lone and chosen[-1].tokens == one.remaining_tokens:
                latest = min(latest, one.due)
        return chosen

    def _rank(self, one: Prefilling) -> tuple[bool, float, bool, int, int]:
        overdue = one.passed_over >= self.patience
        return one.background, one.due, not overdue, -one.passed_over if overdue else one.remaining_tokens, one.number


_ENGINE = frozenset({Place.ENGINE})
_DEADLINE = {Place.ENGINE: 600.0, Place.VLLM: 600.0}


@configuration(_ENGINE)
@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The limits of a batching engine.

    Speculations run only in steps in which nothing else can: whoever arrives meanwhile waits for one layer of
    `speculation_tokens` at most; fewer of them read the weights more often.

    >>> from chunkweave import AsyncEngine, BatchingConfig, Engine
    >>> with Engine.load("reader") as engine:
    ...     batching = AsyncEngine(engine, BatchingConfig(max_running=2))
    ...     batching.close()
    """

    max_running: int = setting(8, "Requests worked on at once.", name="max_num_seqs")
    step_tokens: int = setting(
        512,
        "Tokens of one step of the engine; the end of a prompt may take an eighth more.",
        name="max_num_batched_tokens",
    )
    step_time_s: float | None = setting(
        0.1,
        "How long prefills may hold a request that decodes, to the end of a layer; none: for a step of any length.",
        above=0,
    )
    kv_tokens: int = setting(32768, "Tokens that the KV memory of all running requests holds.")
    block_tokens: int = setting(32, "Tokens of a block of KV memory.", name="block_size")
    max_waiting: int = setting(
        256,
        "Requests that may wait; a server answers further ones of a tenant with 503, if it has its share of them.",
        places=SERVERS,
        least=1,
    )
    tenant_weight: tuple[str, ...] = setting(
        (), "NAME=WEIGHT, how much a tenant is to have of what all share; 1 if left out; repeatable.", places=SERVERS
    )
    store_by_tenant: bool = setting(
        False, "Where a tier has no room, evict first of tenants that hold more than their share of it, by weight."
    )
    window: int = setting(
        DEFAULT_WINDOW,
        "How often a waiting request may be passed over by ones of which more is cached.",
        name="queue_window",
        places=SERVERS,
        least=0,
    )
    deadline_s: float | None = setting(
        None, "Longest time that a request may take; none: any.", places=SERVERS, defaults=_DEADLINE, above=0
    )
    queue_timeout_s: float | None = setting(
        None, "Longest time that a request may wait before it is begun; none: any.", above=0
    )
    max_prompt_tokens: int | None = setting(
        None, "Tokens that a prompt may have; none: as many as the model's context and kv_tokens allow.", least=1
    )
    speculation_tokens: int | None = setting(
        None, "Tokens of a step of speculations; none: as many as of any other step."
    )
    prefetch_requests: int = setting(
        2, "Waiting requests whose segments are read ahead from slow tiers; 0: none.", least=0
    )
    prefetch_bytes: int = setting(256 << 20, "Most bytes that are read ahead at any time.", least=0)

    def __post_init__(self) -> None:
        TokenBudget(tokens=self.step_tokens, max_running=self.max_running)
        if self.speculation_tokens is not None:
            TokenBudget(tokens=self.speculation_tokens, max_running=self.max_running)
        if not 1 <= self.block_tokens <= self.kv_tokens:
            raise UsageError(f"{self.kv_tokens} tokens of KV have no block of {self.block_tokens} tokens")

    @property
    def tokens_of_speculations(self) -> int:
        """Tokens in a step of speculations, at most those of any other step."""
        return self.step_tokens if self.speculation_tokens is None else min(self.step_tokens, self.speculation_tokens)


KeyT = TypeVar("KeyT")

LEAST_TOKENS = 16
"""The smallest piece of a prefill beside answers: a smaller one costs a run through the layers for next to nothing."""

_NEWEST = 0.3
"""Share of the newest measurement in an estimate."""

_MOST_CHANGE = 2.0
"""A measurement counts at most so many times the estimate, since a step may have been held up by another process; and
a piece of a prefill has at most so many times the tokens of the largest one that was measured."""

_MOST_WORTH = 100.0
"""A generated token counts as at most so many of a prefill."""

_STALE = 16
"""Measurements of prefills after which what answers take alone is measured anew."""


class StepPace:
    """Estimates of seconds: of a step by the requests that decode in it, and of a prefill by its tokens.

    Prefills have one estimate for slices by position and one for work by layers, which counts as tokens through all
    layers. While nothing was measured decoding takes no time and a piece has `LEAST_TOKENS`. Used by one thread.
    """

    def __init__(self) -> None:
        self._decoding_s: dict[int, float] = {}
        self._since_decoded = _STALE
        self._token_s: dict[bool, float] = {}
        self._largest: dict[bool, int] = {}

    @property
    def stale(self) -> bool:
        """Whether it is long ago, or never was, that a step in which requests only decode was measured."""
        return self._since_decoded >= _STALE

    def decoding_s(self, requests: int) -> float:
        """Seconds of a step in which so many `requests` decode and nothing else runs.

        Between and above the numbers that were measured it is linear, below the smallest proportional: that is too
        little, so fewer requests are let in beside those few, and what these take alone is measured next.
        """
        known = sorted(self._decoding_s)
        if not requests or not known:
            return 0.0
        if requests <= known[0] or len(known) == 1:
            return self._decoding_s[known[0]] * requests / known[0]
        high = min(bisect_left(known, requests), len(known) - 1)
        first, second = known[high - 1], known[high]
        low_s, high_s = self._decoding_s[first], self._decoding_s[second]
        return max(low_s, low_s + (high_s - low_s) * (requests - first) / (second - first))

    def tokens_within(self, seconds: float, *, by_layers: bool) -> int:
        """Tokens of prefills that so many `seconds` have room for, none if they are not positive."""
        most = int(_MOST_CHANGE * self._largest[by_layers]) if by_layers in self._largest else LEAST_TOKENS
        token_s = self._token_s.get(by_layers, 0.0)
        if seconds <= 0:
            return 0
        return most if most * token_s <= seconds else int(seconds / token_s)

    def tokens_worth(self, requests: int, *, least: float) -> float:
        """How many tokens of a prefill take as long as each of so many `requests` takes to decode one.

        It is `least` where less was measured, or nothing, and at most `_MOST_WORTH`.
        """
        token_s = self._token_s.get(False, 0.0)
        worth = self.decoding_s(requests) / requests / token_s if token_s else least
        return min(max(worth, least), _MOST_WORTH)

    def decoded(self, requests: int, seconds: float) -> None:
        """A step in which only so many `requests` decoded took so long."""
        self._decoding_s[requests] = _blended(self._decoding_s, requests, seconds)
        self._since_decoded = 0

    def prefilled(self, tokens: int, seconds: float, *, by_layers: bool) -> None:
        """So many `tokens` of prefills took so long, beside what decoded."""
        self._since_decoded += 1
        self._token_s[by_layers] = _blended(self._token_s, by_layers, max(0.0, seconds) / tokens)
        self._largest[by_layers] = max(tokens, self._largest.get(by_layers, 0))


def _blended(estimates: Mapping[KeyT, float], key: KeyT, measured: float) -> float:
    estimate = estimates.get(key)
    if not estimate:
        return measured
    return (1 - _NEWEST) * estimate + _NEWEST * min(measured, _MOST_CHANGE * estimate)


class BlockOwner(Protocol):
    """Who holds blocks of a pool; only the pool changes how many."""

    blocks: int


class BlockPool:
    """Limits how much KV memory requests may hold. It counts blocks; the memory itself belongs to the requests' caches.

    Owned by one thread. An owner reserves before it allocates, and frees its memory before it releases; only the pool
    changes its `blocks`. What no owner needs may be lent to one borrower, who gives it up once an owner needs it.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        """A pool of `blocks`, each the KV of `block_tokens` tokens through all layers.

        Raises:
            UsageError: no blocks, or blocks of no tokens.
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
        """Most tokens that all requests together may hold."""
        return self.blocks * self.block_tokens

    @property
    def reserved(self) -> int:
        """Blocks that owners hold now; those lent are free."""
        return self._reserved

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` take."""
        return -(-tokens // self.block_tokens)

    def fits(self, tokens: int, *, without: Iterable[BlockOwner] = ()) -> bool:
        """Whether a new owner could reserve so much now, or if the owners `without` were gone."""
        return self.blocks_for(tokens) <= self.blocks - self._reserved + sum(owner.blocks for owner in without)

    def reserve(self, owner: BlockOwner, tokens: int) -> bool:
        """Give a new `owner` the blocks for `tokens`; False, and nothing, if there are too few.

        Raises:
            UsageError: it has some already.
        """
        if owner.blocks:
            raise UsageError(f"{owner!r} holds blocks already; let it grow instead")
        return self._grow(owner, tokens)

    def grow(self, owner: BlockOwner, tokens: int) -> bool:
        """Let `owner` have at least the blocks for `tokens`; False, and nothing more, if there are too few.

        Raises:
            UsageError: it has reserved nothing.
        """
        self._check_owner(owner)
        return self._grow(owner, tokens)

    def lend(self, tokens: int, take_back: Callable[[], None]) -> bool:
        """Lend the blocks for `tokens`, until `give_back` or until an owner needs them; False, and nothing, if too few.

        `take_back` is called in the latter case: the borrower's memory must be free when it returns. For owners the
        blocks count as free all the time.

        Raises:
            UsageError: some are lent already.
        """
        if self._take_back is not None:
            raise UsageError("the pool lends to one borrower at a time")
        if not self.fits(tokens):
            return False
        self._lent, self._take_back = self.blocks_for(tokens), take_back
        return True

    def give_back(self) -> None:
        """The borrower needs its blocks no more; without a loan nothing happens."""
        self._lent, self._take_back = 0, None

    def capacity(self, owner: BlockOwner) -> int:
        """Tokens that the blocks of `owner` hold."""
        return owner.blocks * self.block_tokens

    def release(self, owner: BlockOwner) -> None:
        """Take all blocks of `owner` back.

        Raises:
            UsageError: it has reserved nothing.
        """
        self._check_owner(owner)
        self._reserved -= owner.blocks
        owner.blocks = 0

    def check(self, owners: Iterable[BlockOwner] = ()) -> None:
        """Audit the counts; `owners` are all who may hold some.

        Raises:
            StoreError: they do not add up.
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
