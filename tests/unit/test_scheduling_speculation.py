"""Speculation: the paper's example, load, and bookkeeping for any sequence of stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.errors import UsageError
from chunkweave.retrieval.speculation import Action, Decision, Speculation, SpeculationCounts


def _speculation(batch: int = 4) -> Speculation[str, str]:
    return Speculation(max_prefill_batch=batch)


def test_figure_11_of_the_paper():
    speculation = _speculation()
    assert speculation.on_stage("q", ("1", "3"), 0) == Decision(Action.START, ("1", "3"))
    assert speculation.on_stage("q", ("1", "2"), 0) == Decision(Action.START, ("1", "2"), terminated=("1", "3"))
    assert speculation.on_stage("q", ("1", "2"), 0) == Decision(Action.KEEP, ("1", "2"))
    assert speculation.running == 1
    assert speculation.on_final("q", ("1", "2")) == Decision(Action.KEEP, ("1", "2"))
    assert speculation.counts == SpeculationCounts(stages=4, started=2, kept=1, terminated=1, matched=1)
    assert speculation.running == 0


def test_under_load_nothing_is_started_and_what_is_wrong_still_ends():
    speculation = _speculation(batch=2)
    assert speculation.on_stage("q", "a", 2) == Decision(Action.WAIT, ("a",))
    assert speculation.on_stage("q", "a", 1).action is Action.START, "the pool has room again"
    assert speculation.on_stage("q", "b", 2) == Decision(Action.TERMINATE, ("b",), terminated=("a",))
    assert speculation.on_final("q", "b") == Decision(Action.GENERATE, ("b",))
    assert speculation.counts == SpeculationCounts(stages=4, started=1, terminated=1, deferred=2, regenerated=1)


def test_an_aborted_request_ends_its_speculation_a_failed_one_starts_again_and_the_unknown_comes_late():
    speculation = _speculation()
    speculation.on_stage("q", "a", 0)
    speculation.failed("q")
    assert speculation.on_stage("q", "a", 0).action is Action.START
    assert speculation.abort("q") == ("a",)
    assert speculation.abort("q") is None
    assert speculation.on_final("never heard of", "a") == Decision(Action.GENERATE, ("a",))
    assert speculation.counts.late == 1
    with pytest.raises(UsageError, match="at least 1"):
        _speculation(batch=0)


stages = st.lists(
    st.tuples(st.sampled_from("qr"), st.text("ab", min_size=1, max_size=2), st.integers(0, 3), st.booleans()),
    max_size=40,
)


@given(stages, st.integers(1, 3))
def test_at_most_one_speculation_runs_for_a_request_and_every_one_is_accounted_for(stages, batch):
    speculation = _speculation(batch)
    running: dict[str, tuple[str, ...]] = {}
    for request, documents, pending, final in stages:
        named = tuple(documents)
        before = running.get(request)
        decision = speculation.on_final(request, named) if final else speculation.on_stage(request, named, pending)
        assert decision.documents == named
        assert (decision.action is Action.KEEP) == (before == named)
        assert decision.terminated == (None if before == named else before)
        if decision.action is Action.START:
            assert pending < batch
            running[request] = named
        elif decision.action is not Action.KEEP or final:
            running.pop(request, None)
        if final:
            assert decision.action in (Action.KEEP, Action.GENERATE)
    counts = speculation.counts
    assert counts.started == counts.terminated + counts.matched + len(running)
    assert speculation.running == len(running)
    assert counts.stages == len(stages)
