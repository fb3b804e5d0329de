"""KV memory of running requests, counted in blocks, so that no load can exhaust it."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from chunkweave.errors import StoreError, UsageError

DEFAULT_BLOCK_TOKENS = 32
"""A request's cache is copied when it grows by a block. That reads and writes all its KV once in so many tokens, each
of which reads it once for attention anyway: a sixteenth more memory traffic, for half a block of waste on average."""


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
        self._held: dict[Hashable, int] = {}
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

    @property
    def held(self) -> Mapping[Hashable, int]:
        """Blocks of each owner, a copy."""
        return dict(self._held)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` take."""
        return -(-tokens // self.block_tokens)

    def fits(self, tokens: int, *, without: Iterable[Hashable] = ()) -> bool:
        """Whether a new owner could reserve so much now, or if the owners `without` were gone.

        Raises:
            UsageError: one of them has reserved nothing.
        """
        return self.blocks_for(tokens) <= self.blocks - self._reserved + sum(map(self._of, without))

    def reserve(self, owner: Hashable, tokens: int) -> bool:
        """Give a new `owner` the blocks for `tokens`; False, and nothing, if there are too few.

        Raises:
            UsageError: it has some already.
        """
        if owner in self._held:
            raise UsageError(f"{owner!r} holds blocks already; let it grow instead")
        if not self.fits(tokens):
            return False
        self._held[owner] = 0
        return self.grow(owner, tokens)

    def grow(self, owner: Hashable, tokens: int) -> bool:
        """Let `owner` have at least the blocks for `tokens`; False, and nothing more, if there are too few.

        Raises:
            UsageError: it has reserved nothing.
        """
        more = self.blocks_for(tokens) - self._of(owner)
        if more > self.blocks - self._reserved:
            return False
        if self._take_back is not None and more > self.blocks - self._reserved - self._lent:
            self._take_back()
            self.give_back()
        if more > 0:
            self._held[owner] += more
            self._reserved += more
        return True

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

    def capacity(self, owner: Hashable) -> int:
        """Tokens that the blocks of `owner` hold.

        Raises:
            UsageError: it has reserved nothing.
        """
        return self._of(owner) * self.block_tokens

    def release(self, owner: Hashable) -> None:
        """Take all blocks of `owner` back.

        Raises:
            UsageError: it has reserved nothing.
        """
        self._reserved -= self._of(owner)
        del self._held[owner]

    def check(self) -> None:
        """Audit the counts.

        Raises:
            StoreError: they do not add up.
        """
        if self._reserved != sum(self._held.values()) or not 0 <= self._reserved <= self.blocks:
            raise StoreError(f"{self._reserved} of {self.blocks} blocks are reserved, but owners hold {self._held}")
        if self._reserved + self._lent > self.blocks:
            raise StoreError(f"{self._lent} blocks are lent, but owners need {self._reserved} of {self.blocks}")

    def _of(self, owner: Hashable) -> int:
        if owner not in self._held:
            raise UsageError(f"{owner!r} holds no blocks")
        return self._held[owner]
