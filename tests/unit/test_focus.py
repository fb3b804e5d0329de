"""Algorithm 1 of Cache-Craft against a transcription with indices from 1, and the tracker over layers."""

from itertools import pairwise
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.planning.plan import StopUnfocused
from chunkweave.planning.scores import FocusTracker, focused_by_gap
from chunkweave.types import Span
from chunkweave_lab.baselines import focused_as_printed

masses = st.lists(st.integers(0, 40).map(lambda n: n / 8), min_size=3, max_size=8)


def algorithm_1(cinter: list[float]) -> frozenset[int]:
    """Lines 4-9, line by line; everything is a dict from its index, which starts at 1."""
    k = len(cinter)
    numbered = sorted(((mass, -chunk) for chunk, mass in enumerate(cinter, 1)), reverse=True)
    sorted_cinter = {i: mass for i, (mass, _) in enumerate(numbered, 1)}
    diff = {i: sorted_cinter[i] - sorted_cinter[i + 1] for i in range(1, k)}
    if not any(diff.values()):
        return frozenset(range(k))
    p = {i: diff[i] / sum(diff.values()) for i in diff}
    h = {i: -sum(p[j] * log(p[j]) for j in range(1, i + 1) if p[j]) for i in range(1, k)}
    steps = {i: h[i + 1] - h[i] for i in range(1, k - 1)}
    best = next(i for i in sorted(steps) if steps[i] >= max(steps.values()) - 1e-12)
    return frozenset(-chunk - 1 for _, chunk in numbered[:best])


@settings(deadline=None)
@given(masses)
def test_as_printed_is_the_algorithm_line_by_line(mass):
    assert focused_as_printed(mass) == algorithm_1(mass)


@settings(deadline=None)
@given(masses)
def test_the_gap_reading_cuts_at_the_largest_gap(mass):
    falling = sorted(mass, reverse=True)
    gaps = [a - b for a, b in pairwise(falling)]
    focused = focused_by_gap(mass)
    if not any(gaps):
        assert len(focused) == len(mass)
        return
    others = [m for chunk, m in enumerate(mass) if chunk not in focused]
    assert min(mass[chunk] for chunk in focused) - max(others) == max(gaps)
    assert len(focused) == gaps.index(max(gaps)) + 1


@pytest.mark.parametrize("focused", [focused_as_printed, focused_by_gap])
def test_fewer_than_three_chunks_and_equal_masses_are_all_focused(focused):
    assert focused([]) == frozenset()
    assert focused([3.0]) == {0}
    assert focused([3.0, 0.0]) == {0, 1}
    assert focused([2.0, 2.0, 2.0, 2.0]) == {0, 1, 2, 3}
    assert focused([0.0, 0.0, 0.0]) == {0, 1, 2}


def test_the_tracker_cumulates_and_waits_for_the_window():
    tracker = FocusTracker(3, focused_by_gap)
    assert tracker.update([5.0, 1.0, 1.0]) is None
    assert tracker.update([0.0, 9.0, 0.0]) is None, "now the second one leads"
    assert tracker.update([4.0, 0.0, 0.0]) is None, "both, cumulated: (9, 10, 1)"
    assert tracker.update([1.0, 1.0, 0.0]) is None
    assert tracker.update([0.0, 0.0, 0.0]) == {0, 1}
    assert tracker.update([1.0, 1.0, 1.0]) == {0, 1}, "and goes on telling"


def test_a_window_of_one_is_the_first_layer():
    assert FocusTracker(1, focused_by_gap).update([0.0, 9.0, 1.0]) == {1}


@pytest.mark.parametrize("focused", [focused_as_printed, focused_by_gap])
def test_fewer_than_three_chunks_never_settle(focused):
    for chunks in range(3):
        tracker = FocusTracker(2, focused)
        assert all(tracker.update([9.0, 1.0][:chunks]) is None for _ in range(5))


def test_the_largest_gap_is_the_default_everywhere():
    assert StopUnfocused((Span(0, 1),), Span(1, 2)).focused is focused_by_gap
    assert FocusTracker(1).update([8.0, 7.0, 4.0, 3.9]) == {0, 1}


def test_what_a_tracker_refuses():
    with pytest.raises(ValueError, match="at least one layer"):
        FocusTracker(0)
    tracker = FocusTracker()
    tracker.update([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="2 chunks after that on 3"):
        tracker.update([1.0, 2.0])
