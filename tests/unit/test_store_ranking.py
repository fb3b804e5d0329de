"""The ranking against a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.store.eviction import Ranking
from chunkweave.types import SegmentId

ids = st.sampled_from([SegmentId(letter) for letter in "abcdef"])
operations = st.lists(
    st.one_of(st.tuples(st.just("rank"), ids, st.integers(0, 3)), st.tuples(st.just("remove"), ids, st.just(0))),
    max_size=300,
)


@given(operations, st.lists(st.sets(ids), min_size=1, max_size=5), st.sampled_from([1, 2, 512]))
def test_it_names_the_least_and_of_those_the_one_ranked_longest_ago(operations, refusals, most_passed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkweave.store.eviction._MOST_PASSED", most_passed)
        _compare(operations, refusals)


def _compare(operations, refusals):
    ranking = Ranking()
    order: dict[SegmentId, tuple[int, int]] = {}
    for number, (what, segment, rank) in enumerate(operations):
        if what == "rank":
            ranking.rank(segment, rank)
            order[segment] = (rank, number)
        else:
            ranking.remove(segment)
            order.pop(segment, None)
        for refused in (refusals[number % len(refusals)], refusals[0]):
            expected = sorted((place, name) for name, place in order.items() if name not in refused)
            assert ranking.least(lambda name, refused=refused: name not in refused) == (
                expected[0][1] if expected else None
            )
    assert set(ranking) == set(order)
    assert len(ranking) == len(order)
    assert all(ranking.of(name) == rank and name in ranking for name, (rank, _) in order.items())


def test_it_does_not_grow_with_the_number_of_times_something_is_ranked():
    ranking = Ranking()
    for rank in range(10_000):
        ranking.rank(SegmentId("a"), rank)
    assert len(ranking._heap) < 100
