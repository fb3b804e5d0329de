"""Orderings against exhaustive permutation, and the examples of CRAFT §3.1 and §4.2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.errors import UnknownMethodError
from chunkweave.ordering.arrangement import AccessTable
from chunkweave.ordering.ordering import Unordered, make_ordering
from chunkweave.plugins import ORDERINGS
from chunkweave.store.prefix_trie import KnowledgeTree

chunk_sets = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True)
paths = st.lists(st.text("abcdef", min_size=1, max_size=5), max_size=8)
counts = st.fixed_dictionaries({key: st.integers(0, 3) for key in "abcdef"})


def tokens_of(key: str) -> int:
    return 10 + ord(key) % 7


def tree_with(stored: list[str]) -> KnowledgeTree[str]:
    tree: KnowledgeTree[str] = KnowledgeTree(["host"])
    for path in stored:
        for end in range(1, len(path) + 1):
            tree.placed(path[:end], "host", tokens_of(path[end - 1]))
    return tree


def given_chunks(chunks, counted, tree: KnowledgeTree[str]) -> Unordered:
    return Unordered(chunks, [counted[key] for key in chunks], [tokens_of(key) for key in chunks], tree.at(()))


def ordered(name: str, chunks, counted, tree: KnowledgeTree[str]) -> str:
    places = make_ordering(name).order(given_chunks(chunks, counted, tree))
    return "".join(chunks[place] for place in places)


@given(st.lists(st.sampled_from("abcdef"), max_size=7), counts, paths, st.sampled_from(sorted(ORDERINGS.names)))
def test_every_order_is_a_permutation_even_of_equal_chunks(chunks, counted, stored, name):
    places = make_ordering(name).order(given_chunks(chunks, counted, tree_with(stored)))
    assert sorted(places) == list(range(len(chunks)))


@given(chunk_sets, counts, paths, st.randoms(use_true_random=False))
def test_equal_sets_get_equal_orders(chunks, counted, stored, rng):
    shuffled = rng.sample(chunks, len(chunks))
    tree = tree_with(stored)
    assert ordered("frequency", chunks, counted, tree) == ordered("frequency", shuffled, counted, tree)


@given(chunk_sets, counts, paths)
def test_frequency_falls_and_ties_go_to_what_is_stored_and_then_to_the_lesser_id(chunks, counted, stored):
    tree = tree_with(stored)
    found = ordered("frequency", chunks, counted, tree)
    assert [counted[key] for key in found] == sorted((counted[key] for key in found), reverse=True)
    for place in range(len(found) - 1):
        equal = [key for key in found[place + 1 :] if counted[key] == counted[found[place]]]
        continues = [key for key in equal if tree.match(found[:place] + key).nodes == place + 1]
        if tree.match(found[: place + 1]).nodes == place + 1:
            assert all(key > found[place] for key in continues)
        else:
            assert not continues
            assert all(key > found[place] for key in equal)


def test_nothing_stored_before_the_chunks_leaves_counts_and_ids():
    assert make_ordering("frequency").order(Unordered("cab", [1, 1, 2], [5, 5, 5], None)) == [2, 1, 0]


def test_the_example_of_section_3_1():
    """R1 is stored; R2 in the caller's order shares one chunk with it, in a free order three."""
    first, second = ["C1", "C4", "C5", "C6", "C7"], ["C1", "C2", "C3", "C4", "C5"]
    tree: KnowledgeTree[str] = KnowledgeTree(["host"])
    for end in range(1, 6):
        tree.placed(first[:end], "host", 1)
    table = AccessTable(1000)
    table.note(first)
    chunks = Unordered(second, [table.count(one) for one in second], [1] * 5, tree.at(()))
    original, frequency = (
        [second[place] for place in make_ordering(name).order(chunks)] for name in ("original", "frequency")
    )
    assert tree.match(original).nodes == 1
    assert frequency == ["C1", "C4", "C5", "C2", "C3"]
    assert tree.match(frequency).nodes == 3


def test_an_unknown_ordering_is_refused():
    with pytest.raises(UnknownMethodError, match=f"there are: {', '.join(ORDERINGS.names)}$"):
        make_ordering("alphabetical")
