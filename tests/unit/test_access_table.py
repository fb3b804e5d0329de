"""CRAFT's access table against a plain list of requests."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.errors import UsageError
from chunkweave.ordering.arrangement import AccessTable

requests = st.lists(st.lists(st.sampled_from("abcdefg"), max_size=5), max_size=40)


@given(requests, st.integers(1, 6))
def test_counts_are_those_of_the_last_requests(asked, window):
    table = AccessTable(window)
    for number, request in enumerate(asked, start=1):
        table.note(request)
        last = [set(one) for one in asked[:number][-window:]]
        for key in "abcdefgh":
            assert table.count(key) == sum(key in one for one in last)
            with_it = [set(one) for one in [*asked[:number], [key]][-window:]]
            assert table.count_with(key) == sum(key in one for one in with_it)
        assert table.requests == len(last)
        assert len(table) == len(set().union(*last))
        table.check()


def test_memory_does_not_grow_with_requests():
    table = AccessTable(100)
    for number in range(5_000):
        table.note((number, number + 1, number + 2))
    assert len(table) == 102
    assert table.requests == 100
    assert sys.getsizeof(table._counts) < 20_000


def test_a_window_without_requests_is_refused():
    with pytest.raises(UsageError, match="at least one request"):
        AccessTable(0)
