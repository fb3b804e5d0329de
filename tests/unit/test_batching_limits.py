"""Blocks, token budget and limits of the batching engine, without a model."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chunkweave.errors import StoreError, UsageError
from chunkweave.scheduling.budget import BatchingConfig, BlockPool, Piece, Prefilling, TokenBudget

OWNERS = st.sampled_from("abcde")


class Owner:
    """Somebody who may hold blocks."""

    def __init__(self) -> None:
        self.blocks = 0


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a dict of tokens: what fits is what a sum says."""

    @initialize(blocks=st.integers(1, 12), block_tokens=st.integers(1, 5))
    def open(self, blocks, block_tokens):
        self.pool = BlockPool(blocks, block_tokens)
        self.model: dict[str, int] = {}
        self.owners = {name: Owner() for name in "abcde"}
        self.loan = 0

    @rule(tokens=st.integers(0, 30))
    def lend(self, tokens):
        if self.loan:
            return
        blocks = -(-tokens // self.pool.block_tokens)
        assert self.pool.lend(tokens, self.take_back) == (blocks <= self.free())
        if blocks <= self.free():
            self.loan = blocks
            if not blocks:
                self.pool.give_back()

    @rule()
    def give_back(self):
        self.pool.give_back()
        self.loan = 0

    def take_back(self):
        assert self.loan
        self.loan = 0

    def free(self) -> int:
        return self.pool.blocks - sum(self.model.values())

    @rule(owner=OWNERS, tokens=st.integers(1, 30))
    def reserve(self, owner, tokens):
        if owner in self.model:
            with pytest.raises(UsageError):
                self.pool.reserve(self.owners[owner], tokens)
            return
        blocks = -(-tokens // self.pool.block_tokens)
        fits = blocks <= self.free()
        assert self.pool.fits(tokens) == self.pool.reserve(self.owners[owner], tokens) == fits
        if fits:
            self.model[owner] = blocks

    @rule(owner=OWNERS, tokens=st.integers(0, 30))
    def grow(self, owner, tokens):
        if owner not in self.model:
            with pytest.raises(UsageError):
                self.pool.grow(self.owners[owner], tokens)
            return
        blocks = max(self.model[owner], -(-tokens // self.pool.block_tokens))
        fits = blocks - self.model[owner] <= self.free()
        assert self.pool.grow(self.owners[owner], tokens) == fits
        if fits:
            self.model[owner] = blocks
            assert self.pool.capacity(self.owners[owner]) >= tokens

    @rule(owner=OWNERS)
    def release(self, owner):
        if owner not in self.model:
            with pytest.raises(UsageError):
                self.pool.release(self.owners[owner])
            return
        self.pool.release(self.owners[owner])
        del self.model[owner]

    @invariant()
    def agree(self):
        if hasattr(self, "pool"):
            self.pool.check(self.owners.values())
            assert {name: owner.blocks for name, owner in self.owners.items() if owner.blocks} == self.model
            assert self.pool.reserved == sum(self.model.values())
            assert self.loan <= self.free(), "a borrower holds what an owner needs"


TestBlockPool = BlockPoolMachine.TestCase


def test_a_loan_stays_as_long_as_no_owner_needs_it():
    pool, owner, taken = BlockPool(4, 8), Owner(), []
    assert pool.lend(16, lambda: taken.append(1))
    with pytest.raises(UsageError):
        pool.lend(8, lambda: None)
    assert pool.reserve(owner, 16)
    assert not taken
    assert pool.grow(owner, 17)
    assert taken == [1]
    assert not pool.lend(16, lambda: None)
    pool.check([owner])


def test_a_pool_that_does_not_add_up_is_found_out():
    pool, owner = BlockPool(4, 8), Owner()
    pool.reserve(owner, 9)
    pool._reserved = 1
    with pytest.raises(StoreError):
        pool.check([owner])


def job(number, tokens, *, remaining=None, cut=True, passed_over=0):
    return Prefilling(number, tokens, tokens if remaining is None else remaining, cut, passed_over)


def test_decoding_comes_first_and_the_shortest_prefill_next():
    budget = TokenBudget(tokens=20, max_running=8)
    assert budget.pieces(4, [job(1, 30), job(2, 6)]) == [Piece(2, 6), Piece(1, 10)]
    assert budget.pieces(4, [job(1, 30, passed_over=4), job(2, 6)]) == [Piece(1, 16)]
    assert budget.pieces(4, []) == []


def test_the_end_of_a_prefill_needs_no_step_of_its_own():
    budget = TokenBudget(tokens=40, max_running=8)
    assert budget.pieces(4, [job(1, 41)]) == [Piece(1, 41)]
    assert budget.pieces(4, [job(1, 42)]) == [Piece(1, 36)]
    assert budget.pieces(4, [job(1, 20), job(2, 21)]) == [Piece(1, 20), Piece(2, 21)]
    background = replace(job(1, 41), background=True)
    assert budget.pieces(4, [background]) == [Piece(1, 36)]


def test_the_step_that_ends_the_only_prefill_of_a_tenant_is_not_filled_up_by_who_was_served_more():
    budget = TokenBudget(tokens=40, max_running=8)
    lone = replace(job(1, 20), lone=True)
    more, less = (replace(job(2, 30), due=due) for due in (1.0, 0.0))
    assert budget.pieces(0, [lone, more]) == [Piece(1, 20)]
    assert budget.pieces(0, [lone, less]) == [Piece(1, 20), Piece(2, 20)]
    assert budget.pieces(0, [job(1, 20), more]) == [Piece(1, 20), Piece(2, 20)]
    assert budget.pieces(0, [replace(lone, remaining_tokens=30), more]) == [Piece(1, 20), Piece(2, 20)]


def test_what_cannot_be_cut_goes_whole_if_it_fits_or_is_the_first():
    budget = TokenBudget(tokens=20, max_running=8)
    assert budget.pieces(0, [job(1, 30, cut=False)]) == [Piece(1, 30)]
    assert budget.pieces(0, [job(1, 10), job(2, 12, cut=False)]) == [Piece(1, 10)]
    assert budget.pieces(0, [job(1, 10), job(2, 12, cut=False), job(3, 25)]) == [Piece(1, 10), Piece(3, 10)]
    assert budget.pieces(0, [job(1, 10), job(2, 12, cut=False, passed_over=4)]) == [Piece(2, 12), Piece(1, 10)]


@settings(deadline=None)
@given(
    tokens=st.integers(9, 60),
    patience=st.integers(1, 5),
    jobs=st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=8),
    decoding=st.integers(0, 8),
)
def test_no_prefill_waits_longer_than_patience_and_the_others(tokens, patience, jobs, decoding):
    """Short ones keep coming: whoever ends is replaced by a newer and shorter one."""
    budget = TokenBudget(tokens=tokens, max_running=8, patience=patience)
    left = {number: list(size) for number, size in enumerate(jobs)}
    waited = dict.fromkeys(left, 0)
    for step in range(60):
        seen = [job(n, size, cut=cut, passed_over=waited[n]) for n, (size, cut) in left.items()]
        pieces = budget.pieces(decoding, seen)
        assert pieces
        if len(pieces) > 1:
            assert sum(piece.tokens for piece in pieces) <= tokens + tokens // 8 - decoding
        served = {piece.number for piece in pieces}
        for number in list(left):
            waited[number] = 0 if number in served else waited[number] + 1
            assert waited[number] <= patience + len(jobs)
        for piece in pieces:
            left[piece.number][0] -= piece.tokens
            if not left[piece.number][0]:
                del left[piece.number], waited[piece.number]
                left[1000 + 10 * step + piece.number % 10], waited[1000 + 10 * step + piece.number % 10] = [3, True], 0


@pytest.mark.parametrize("limits", [{"max_running": 0}, {"step_tokens": 8}, {"kv_tokens": 16}, {"deadline_s": 0}])
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(UsageError):
        BatchingConfig(**limits)


def test_a_pool_needs_blocks():
    with pytest.raises(UsageError):
        BlockPool(0, 8)
    with pytest.raises(UsageError):
        TokenBudget(tokens=10, max_running=4, patience=0)
