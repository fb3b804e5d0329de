"""What the page draws, from reports alone."""

from dataclasses import replace

import pytest

from chunkweave.metrics import ChunkReport, FullEstimate, ReuseReport
from chunkweave.page import AnswerView, asset
from chunkweave.types import ChunkId, Span

REPORT = ReuseReport(
    method="query",
    prompt_tokens=100,
    prefix_exact_tokens=10,
    reused_tokens=50,
    recomputed_tokens=20,
    computed_tokens=20,
    recompute_fraction=0.3,
    queue_s=0.1,
    lookup_s=0.0,
    load_s=0.1,
    weave_s=0.2,
    ttft_s=0.5,
    decode_s=1.0,
    new_tokens=4,
    prefill_flops=40.0,
    full_prefill_flops=100.0,
    chunks=(
        ChunkReport(ChunkId("s"), "system", "prefix-exact", None, "host", 10, 0),
        ChunkReport(
            ChunkId("a"), "Ferries", "reused", None, "disk", 70, 20, (Span(20, 30), Span(40, 50)), rank=0, start=10
        ),
    ),
    looked_up_tokens=80,
    hits={"host": 10, "disk": 70},
)
COMPUTED = replace(REPORT, prefix_exact_tokens=0, reused_tokens=0, recomputed_tokens=0, computed_tokens=100)
COLD = replace(COMPUTED, prefill_flops=100.0, ttft_s=2.1, queue_s=0.1, hits={})


def test_parts_cover_the_prompt_and_what_is_not_stored_is_computed():
    bars = AnswerView(REPORT).parts
    assert [(bar.start, bar.width, bar.kind) for bar in bars] == [
        (0.0, 0.1, "prefix-exact"),
        (0.1, 0.7, "reused"),
        (0.8, 0.2, "computed"),
    ]
    assert "Ferries: 70 tokens" in bars[1].label


def test_recomputed_tokens_are_marked_where_they_stand():
    assert [(bar.start, bar.width) for bar in AnswerView(REPORT).recomputed] == [(0.2, 0.1), (0.4, 0.1)]


def test_marks_that_nobody_could_tell_apart_are_one():
    alternating = tuple(Span(at, at + 1) for at in range(10, 80, 2))
    chunk = replace(REPORT.chunks[1], recomputed=alternating)
    long = replace(REPORT, prompt_tokens=100_000, chunks=(chunk,))
    assert len(AnswerView(long).recomputed) == 1


def test_phases_end_with_what_none_of_them_was():
    phases = AnswerView(REPORT).phases
    assert [bar.kind for bar in phases] == ["queue", "load", "weave", "rest"]
    assert sum(bar.width for bar in phases) == pytest.approx(1)


def estimate_of(*reports: ReuseReport) -> FullEstimate:
    estimate = FullEstimate()
    for report in reports:
        estimate.add(report)
    return estimate


def test_full_prefill_is_judged_by_the_least_disturbed_of_what_was_computed():
    assert estimate_of(REPORT).ttft_s(REPORT) is None
    estimate = estimate_of(REPORT, COLD, replace(COLD, ttft_s=9.0))
    assert estimate.ttft_s(REPORT) == pytest.approx(0.1 + 2.0)


def test_over_vllm_work_is_counted_in_tokens():
    cold = replace(COLD, prefill_flops=0.0, full_prefill_flops=0.0)
    woven = replace(REPORT, prefill_flops=0.0, full_prefill_flops=0.0)
    assert estimate_of(cold).ttft_s(woven) == pytest.approx(0.1 + 2.0)


def test_saved_time_is_that_of_prompts_that_reused_and_known_late_for_all_of_them():
    assert estimate_of(REPORT).saved_s is None
    # Twice 2.0 s of full prefill, of which each took 0.4 s; what reused nothing saves and costs nothing.
    estimate = estimate_of(REPORT, REPORT, COLD, replace(COLD, ttft_s=9.0))
    assert estimate.saved_s == pytest.approx(2 * (2.0 - 0.4))
    assert estimate_of(COLD, replace(REPORT, ttft_s=9.0)).saved_s == 0, "the others had the machine"


def test_there_are_no_other_files():
    with pytest.raises(KeyError):
        asset("../render.py")
