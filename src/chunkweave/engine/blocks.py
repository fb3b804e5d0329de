"""KV memory of running requests, counted in blocks, so that no load can exhaust it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from chunkweave.errors import StoreError, UsageError

DEFAULT_BLOCK_TOKENS = 32
"""A request's cache is copied when it grows by a block. That reads and writes all its KV once in so many tokens, each
of which reads it once for attention anyway: a sixteenth more memory traffic, for half a block of waste on average."""


class BlockOwner(Protocol):
    """Who may hold KV memory. `blocks` is how much it has; only the pool changes it."""

    blocks: int


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Blocks of a pool: all, and those that are reserved now."""

    blocks: int
    reserved: int


class BlockPool:
    """Says who may hold how much KV memory. It counts blocks; the memory itself belongs to the requests' caches.

    Owned by one thread. An owner reserves before it allocates, and frees its memory before it releases. What no owner
    needs may be lent to one borrower, who gives it up the moment that an owner does.
    """

    def __init__(self, blocks: int, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> None:
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
    def use(self) -> PoolUse:
        """A snapshot of the counts; what is lent is free."""
        return PoolUse(self.blocks, self._reserved)

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
