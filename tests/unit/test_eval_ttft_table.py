from dataclasses import dataclass

import pytest

from chunkweave.calibration.summaries import percentile
from chunkweave.metrics import ReuseReport
from chunkweave_lab.summaries import summarize


@dataclass(frozen=True)
class Timed:
    question: int
    method: str
    ttft_s: float
    report: ReuseReport | None = None


def report(method: str, *, flops: float, reused: int) -> ReuseReport:
    return ReuseReport(
        method=method,
        prompt_tokens=100,
        prefix_exact_tokens=0,
        reused_tokens=reused,
        recomputed_tokens=0,
        computed_tokens=100 - reused,
        recompute_fraction=0.0,
        queue_s=0.0,
        lookup_s=0.1,
        load_s=0.2,
        weave_s=0.3,
        ttft_s=1.0,
        decode_s=0.0,
        new_tokens=0,
        prefill_flops=flops,
        full_prefill_flops=100.0,
    )


def samples() -> list[Timed]:
    full, fast = report("full", flops=100.0, reused=0), report("fast", flops=20.0, reused=80)
    times = {"fast": (1.0, 10.0, 1.0), "full": (4.0, 20.0, 3.0)}
    return [
        sample
        for question in range(3)
        for sample in (
            Timed(question, "fast", times["fast"][question], fast),
            Timed(question, "full", times["full"][question], full),
            Timed(question, "hf", times["full"][question] * 2, None),
        )
    ]


def test_the_speedup_is_the_median_of_ratios_on_the_same_question():
    rows = {row.method: row for row in summarize(samples())}
    assert rows["fast"].speedup == 3.0  # ratios 4, 2, 3; the ratio of the medians is 4
    assert rows["fast"].flops_limit == 5.0
    assert rows["fast"].limit_share == pytest.approx(0.6)
    assert rows["fast"].reused_tokens == 80
    assert rows["full"].speedup == 1.0
    assert rows["full"].flops_limit == 1.0


def test_a_plain_forward_is_held_against_the_reference():
    row = next(row for row in summarize(samples()) if row.method == "hf")
    assert row.speedup == 0.5
    assert (row.flops_limit, row.computed_tokens, row.weave_s) == (1.0, 100, 0.0)


def test_the_reference_is_the_first_row():
    assert [row.method for row in summarize(samples())] == ["full", "fast", "hf"]


def test_questions_without_the_reference_do_not_count():
    cut = [*samples(), Timed(3, "fast", 0.001, report("fast", flops=1.0, reused=99))]
    assert summarize(cut)[1].speedup == 3.0
    assert summarize([Timed(0, "fast", 1.0)]) == []


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.1, 1.3)])
def test_percentile_is_linear_between_neighbours(share, value):
    assert percentile([3.0, 1.0, 4.0, 2.0], share) == pytest.approx(value)
