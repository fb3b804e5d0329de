"""How much of a step prefills have beside answers: learned from what steps took, and never nothing for long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.scheduling.budget import LEAST_TOKENS, Piece, Prefilling, StepPace, TokenBudget
from tests.unit.test_fairness import Simulation


def test_nothing_is_known_at_first_and_pieces_grow_with_what_was_measured():
    pace = StepPace()
    assert pace.stale
    assert pace.decoding_s(4) == 0.0
    assert pace.tokens_within(1.0, by_layers=False) == LEAST_TOKENS
    pace.prefilled(16, 0.016, by_layers=False)
    assert pace.tokens_within(0.01, by_layers=False) == 10
    assert pace.tokens_within(1.0, by_layers=False) == 32, "twice the largest that was measured"
    assert pace.tokens_within(1.0, by_layers=True) == LEAST_TOKENS, "that is other work"
    assert pace.tokens_within(0.0, by_layers=False) == 0


def test_one_outlier_counts_for_little():
    pace = StepPace()
    for _ in range(20):
        pace.prefilled(100, 0.1, by_layers=False)
    pace.prefilled(100, 60.0, by_layers=False)
    assert pace.tokens_within(0.1, by_layers=False) > 70


def test_what_answers_take_is_linear_between_measurements_and_proportional_below():
    pace = StepPace()
    pace.decoded(8, 0.024)
    assert not pace.stale
    assert pace.decoding_s(1) == pytest.approx(0.003)
    assert pace.decoding_s(16) == pytest.approx(0.048)
    pace.decoded(2, 0.012)
    assert pace.decoding_s(5) == pytest.approx(0.018)
    assert pace.decoding_s(10) == pytest.approx(0.028)
    pace.decoded(12, 0.020)
    assert pace.decoding_s(11) >= 0.020, "more never take less"


def test_what_answers_take_is_measured_again_after_a_while():
    pace = StepPace()
    pace.decoded(1, 0.01)
    for _ in range(100):
        pace.prefilled(16, 0.01, by_layers=False)
    assert pace.stale


@given(most=st.integers(0, 60), left=st.lists(st.integers(1, 90), min_size=1, max_size=5), decoding=st.integers(0, 8))
def test_pieces_have_at_most_the_tokens_that_time_allows(most, left, decoding):
    budget = TokenBudget(tokens=64, max_running=8)
    seen = [Prefilling(number, tokens, tokens, True, most_tokens=most) for number, tokens in enumerate(left)]
    pieces = budget.pieces(decoding, seen)
    assert sum(piece.tokens for piece in pieces) <= most + most // 8
    assert bool(pieces) == (most > 0)


def test_of_several_pieces_each_counts_what_comes_before_it():
    budget = TokenBudget(tokens=64, max_running=8)
    first, second = (Prefilling(n, 10, 10, True, most_tokens=most) for n, most in ((1, 64), (2, 12)))
    assert budget.pieces(0, [first, second]) == [Piece(1, 10), Piece(2, 2)]


def simulated(*weights: str, **limits) -> Simulation:
    """A step takes 10 ms and 1 ms a token."""
    return Simulation(*weights, max_running=8, **{"step_tokens": 400, "step_time_s": 0.1, **limits})


def steps_beside(run: Simulation, tokens: int) -> list[int]:
    """Tokens that each step prefills of a new request beside what decodes, until that has its first token."""
    request = run.submit("", tokens, answer=2)
    found = []
    while request.decode is None:
        before = run.prefilled.total()
        run.step()
        found.append(run.prefilled.total() - before)
    return found


def test_prefills_have_less_of_a_step_beside_answers_and_all_of_it_afterwards():
    run = simulated()
    streams = [run.submit("", 20, answer=10**6) for _ in range(3)]
    run.take_steps(20)
    beside = steps_beside(run, 1500)
    assert max(beside) <= 100, "100 ms"
    assert sum(sorted(beside)[-10:]) > 10 * 60, "it is used"
    for stream in streams:
        run.scheduler.end(stream)
    while run.scheduler.requests:
        run.step()
    assert steps_beside(run, 1500)[0] == 400


def test_prefills_have_their_time_where_the_answers_themselves_take_longer():
    run = simulated()
    run.step_s = 0.5
    run.submit("", 20, answer=10**6)
    run.take_steps(20)
    assert len(steps_beside(run, 1500)) < 1500 / 90 + 10


def test_with_step_time_none_a_step_is_as_large_as_it_may_be():
    run = simulated(step_time_s=None)
    run.submit("", 20, answer=10**6)
    run.take_steps(3)
    assert max(steps_beside(run, 1500)) == 399


def test_a_prefill_continues_where_answers_take_all_the_time_there_is():
    """Not even one token fits into a millisecond."""
    run = simulated(step_time_s=0.001)
    run.submit("", 20, answer=10**6)
    run.take_steps(3)
    steps = steps_beside(run, 320)
    assert len(steps) <= 320 / LEAST_TOKENS + 4


def speed_beside_loud(*weights: str) -> tuple[float, int]:
    """How fast a quiet tenant's answer is beside seven of a loud one, against alone, and the loud one's fewest tokens.

    Each answer in a step takes almost as long as a step: all eight at once would slow the quiet one eight times.
    """
    run = simulated(*weights, step_tokens=64)
    run.step_s, run.token_s = 0.0002, 0.001
    loud = [run.submit("loud", 200, answer=10**6) for _ in range(7)]
    run.take_steps(200)  # more than what a tenant may be ahead
    quiet = run.submit("quiet", 100, answer=10**6)
    run.prefill(quiet)
    before = {request: request.decode.steps for request in (*loud, quiet)}
    since_s = run.now_s
    run.take_steps(60)
    fewest = min(request.decode.steps - before[request] for request in loud)
    return (quiet.decode.steps - before[quiet]) * (run.step_s + run.token_s) / (run.now_s - since_s), fewest


def test_every_answer_of_a_loud_tenant_gets_its_turns_beside_a_quiet_ones_and_a_share_is_by_weight():
    equal, fewest = speed_beside_loud()
    assert equal >= 0.45, "about half as fast as alone"
    assert fewest > 0
    assert speed_beside_loud("quiet=3")[0] > 1.3 * equal


def test_an_answer_that_has_no_share_of_a_step_waits_for_step_time_and_no_longer():
    run = simulated("quiet=1000", step_tokens=64, step_time_s=0.01)
    loud = run.submit("loud", 200, answer=10**6)
    run.take_steps(1000)
    quiet = run.submit("quiet", 100, answer=10**6)
    run.prefill(quiet)
    before, since_s = loud.decode.steps, run.now_s
    run.take_steps(60)
    assert (run.now_s - since_s) / 0.05 <= loud.decode.steps - before < 60


def test_a_tenant_pays_no_time_back_that_it_had_in_its_turn():
    """The new tenant is served as much as the other one before it is limited."""
    run = simulated(step_tokens=100, step_time_s=0.2)
    run.submit("", 20, answer=10**6)
    run.take_steps(200)
    new, passed_over = run.submit("new", 6000, answer=2), []
    while new.decode is None:
        run.step()
        passed_over.append(new.passed_over)
    assert max(passed_over) <= 3


def test_a_generated_token_costs_what_it_takes():
    pace = StepPace()
    assert pace.tokens_worth(1, least=2.0) == 2.0, "nothing was measured"
    pace.prefilled(100, 0.01, by_layers=False)
    for requests, worth in ((1, 60.0), (8, 20.0)):
        pace.decoded(requests, requests * worth * 0.0001)
        assert pace.tokens_worth(requests, least=2.0) == pytest.approx(worth)
    pace.decoded(100, 0.0001)
    assert pace.tokens_worth(100, least=2.0) == 2.0


def test_a_tenant_is_not_served_much_because_its_prompts_are_long_and_decoding_is_slow():
    """One asks over prompts at less than its share of the time, the other for answers without end."""
    run = simulated(step_tokens=100, step_time_s=None)
    run.step_s, run.token_s = 0.02, 0.0001
    for _ in range(10):
        run.submit("answers", 10, answer=10**6)
    run.take_steps(300)
    waited = []
    for _ in range(40):
        asked = [run.submit("prompts", 300, answer=40) for _ in range(2)]
        began = run.now_s
        while any(one.decode is None for one in asked):
            run.step()
        waited.append(run.now_s - began)
        while any(one.runs for one in asked):
            run.step()
    assert max(waited) < 0.5, "neither waits until the other has its answer, which takes 0.8 s"
