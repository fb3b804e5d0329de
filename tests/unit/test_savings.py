"""What reuse saves: against full prefill as it was measured, without what vLLM's own cache saved."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.metrics import ReuseReport, Saved, Savings

FULL = ReuseReport(
    method="full",
    prompt_tokens=1000,
    prefix_exact_tokens=0,
    reused_tokens=0,
    recomputed_tokens=0,
    computed_tokens=1000,
    queue_s=3.0,
    ttft_s=5.0,
    decode_s=1.0,
    new_tokens=4,
)
WOVEN = replace(FULL, reused_tokens=850, recomputed_tokens=100, computed_tokens=50, ttft_s=3.5)


def test_savings_are_measured_against_prompts_that_were_computed():
    savings = Savings()
    assert savings.add(WOVEN) is None, "nobody knows what full prefill takes"
    assert savings.add(FULL) == Saved(0.0, 2.0)
    saved = savings.add(WOVEN)
    assert (saved.seconds, saved.full_s, saved.share) == (1.5, 2.0, 0.75)
    later = savings.add(replace(WOVEN, ttft_s=6.0))
    assert later.as_dict() == {"saved_s": -1.0, "saved_share": -0.5}


def test_work_is_counted_in_flops_where_they_are_known():
    savings = Savings()
    savings.add(replace(FULL, prefill_flops=10.0, full_prefill_flops=10.0))
    assert savings.add(replace(WOVEN, prefill_flops=1.0, full_prefill_flops=5.0)).full_s == 1.0


def test_what_vllms_own_cache_found_is_not_saved_by_reuse():
    savings = Savings()
    savings.add(FULL)
    own = replace(FULL, prefix_exact_tokens=500, engine_cached_tokens=500, computed_tokens=500, ttft_s=4.0)
    assert savings.add(own) == Saved(0.0, 1.0)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_the_rate_is_the_median_of_the_latest(times):
    savings = Savings()
    for seconds in times:
        savings.add(replace(FULL, ttft_s=3.0 + seconds))
    latest = sorted(times[-9:])
    middle = (latest[(len(latest) - 1) // 2] + latest[len(latest) // 2]) / 2
    assert savings.add(WOVEN).full_s == pytest.approx(middle)
