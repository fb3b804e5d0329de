"""Which parts of a running prefill are worth waiting for; every figure is worked out by hand."""

import pytest

from chunkweave.scheduling.in_progress import PartInProgress, Saving, Wanted, saving_of
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.types import ChunkId

A, B, C, D = (ChunkId(name * 32) for name in "abcd")


class Store:
    """A store by hand: exact paths in a tree, and chunks in any context."""

    def __init__(self, *paths, chunks=None) -> None:
        self.tree = KnowledgeTree(["host"])
        for path in paths:
            self.tree.placed(path, "host", 100)
        self._chunks = chunks or {}

    def chunk_tokens(self, chunk):
        return self._chunks.get(chunk, 0)


def part(chunk, *context, exact=True, left=100):
    return PartInProgress(chunk, context, exact, left)


def wanted(*chunks, woven=None):
    """Chunks of 100 tokens each, and a question of 10."""
    return Wanted(chunks, [100] * len(chunks), 100 * len(chunks) + 10, woven)


def test_exact_parts_count_as_far_as_they_continue_what_is_stored():
    running = [part(B, A, left=50), part(C, A, B, left=150), part(D, A, B, C, left=250)]
    found = saving_of(wanted(A, B, C), Store((A,)), running)
    assert found == Saving(frozenset({B, C}), 200, 150, 210)


def test_the_first_part_that_differs_ends_an_exact_prefix():
    assert saving_of(wanted(A, C), Store(), [part(B), part(C, B)]) == Saving(frozenset(), 0, 0, 210)


def test_parts_behind_reused_ones_are_of_use_only_to_methods_that_weave():
    running = [part(B, A, exact=False, left=70)]
    assert saving_of(wanted(A, B), Store((A,)), running).tokens == 0
    assert saving_of(wanted(A, B, woven=0.85), Store((A,)), running) == Saving(frozenset({B}), 85, 70, 110)


def test_a_chunk_that_is_stored_elsewhere_is_waited_for_only_for_what_its_exact_kv_saves():
    store = Store(chunks={A: 100})
    assert saving_of(wanted(A, woven=0.75), store, [part(A, B)]).tokens == 0
    assert saving_of(wanted(A, woven=0.75), store, [part(A)]) == Saving(frozenset({A}), 25, 100, 35)


def test_parts_that_were_waited_for_in_vain_are_left_out():
    assert saving_of(wanted(A), Store(), [part(A)], without={A}).tokens == 0


@pytest.mark.parametrize(
    ("saved", "left", "owner_left", "work", "sooner"),
    [
        (0, 0, 1000, 1000, False),  # nothing is saved
        (700, 700, 720, 710, True),  # an exact prefix: what it waits for it would compute itself
        (600, 790, 790, 790, True),  # stored at the owner's end: 790 + 190 against 790 + 790
        (100, 3000, 3000, 800, False),  # 3000 + 700 against 800 + 800
        (100, 300, 300, 170, False),  # 300 + 70 against 170 + 170
        (100, 260, 300, 170, True),  # 260 + 70 against 170 + 170
    ],
)
def test_waiting_is_compared_with_computing_beside_the_owner(saved, left, owner_left, work, sooner):
    assert Saving(frozenset({A}), saved, left, work).sooner(owner_left) is sooner
