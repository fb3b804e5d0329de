"""A pass cut down to a stretch of its prompt."""

from chunkweave.planning.plan import Evidence, KeepTop, Pass, StopUnfocused, TopBy, clipped
from chunkweave.types import Scattered, Span

CHUNKS = (Span(2, 10), Span(10, 20))


def test_what_lies_outside_is_left_out():
    pass_ = Pass((Span(0, 2), Span(20, 25)), CHUNKS)
    cut = clipped(pass_, 6, 22)
    assert cut.required == (Span(20, 22),)
    assert cut.candidates == (Span(6, 10), Span(10, 20))
    assert clipped(pass_, 12, 20).required == ()


def test_a_pass_that_lies_inside_stays_as_it_is():
    pass_ = Pass((Span(20, 25),), CHUNKS, (KeepTop(1, 5),), TopBy(9))
    assert clipped(pass_, 0, 25) == pass_


def test_counts_shrink_with_the_candidates():
    rules = (KeepTop(1, 9), KeepTop(2, 4, Evidence.READ_DEVIATION))
    cut = clipped(Pass((Span(20, 25),), CHUNKS, rules, TopBy(18)), 11, 25)
    assert cut.candidates == (Span(11, 20),)
    assert cut.start == TopBy(9)
    assert cut.keep_top == (KeepTop(1, 5), KeepTop(2, 2, Evidence.READ_DEVIATION))


def test_weights_go_with_their_candidates():
    pass_ = Pass((Span(20, 25),), (Span(2, 4), Scattered(10, (5, 0, 7))), start=TopBy(2, weights=(1, 2, 3, 4, 5)))
    cut = clipped(pass_, 3, 16)
    assert cut.candidates == (Span(3, 4), Scattered(10, (5, 0)))
    assert cut.start is not None
    assert cut.start.weights == (2, 3, 4)


def test_scattered_candidates_that_all_lie_outside_are_gone():
    cut = clipped(Pass((Span(20, 25),), (Scattered(2, (1, 3)), Scattered(10, (4,)))), 10, 25)
    assert cut.candidates == (Scattered(10, (4,)),)
    assert clipped(Pass((), (Scattered(2, (1, 3)),)), 10, 25).candidates == ()


def test_the_question_still_stops_chunks():
    focus = StopUnfocused(CHUNKS, Span(20, 25))
    assert clipped(Pass((Span(20, 25),), CHUNKS, (focus,)), 12, 25).stop_unfocused == focus
