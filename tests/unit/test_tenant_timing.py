"""The test of benchmarks/tenant_timing.py sees a leak, and none where there is none."""

from pathlib import Path
from random import Random

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def timing(monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tenant_timing

    return tenant_timing


@pytest.mark.parametrize(("leak", "ok"), [(0.0, True), (0.1, False)])
def test_a_tenth_is_seen_and_nothing_is_not(timing, leak: float, ok: bool):
    draw = Random(1)
    pairs = [timing.Pair(draw.gauss(1.0, 0.1) * (1 - leak), draw.gauss(1.0, 0.1), 0.4, True) for _ in range(500)]
    said = timing.summary(pairs)
    assert said["ok"] is ok
    assert said["p_of_own"] < 0.01
    assert said["p_if_shorter_by"]["10%"] < 0.01


def test_noise_that_hides_a_tenth_is_no_success(timing):
    draw = Random(1)
    said = timing.summary([timing.Pair(draw.gauss(9, 3), draw.gauss(9, 3), draw.gauss(9, 3), True) for _ in range(20)])
    assert said["p"] > 0.01
    assert not said["ok"]


def test_texts_differ_in_order_alone(timing):
    draw = Random(0)
    first, second = timing.text_of(draw, 40), timing.text_of(draw, 40)
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_load_table_says_what_the_quiet_tenant_saw(timing):
    import tenant_load

    quiet = {"ttft_p50_s": 0.5, "ttft_p99_s": 1.25, "error_rate": 0.0}
    loud = {"requests_per_s": 2.0, "error_rate": 0.25}
    rows = [
        {"run": "alone", "weight": 1, "quiet": quiet, "loud": None},
        {"run": "together", "weight": 4, "quiet": quiet, "loud": loud, "p99_over_alone": 1.4},
    ]
    alone, together = tenant_load.tables({"rows": rows})["tenant-load"].splitlines()[-2:]
    assert [cell.strip() for cell in alone.split("|")[1:-1]] == [
        "alone", "-", "0.500 s", "1.250 s", "-", "-", "0.0%", "-", "-"
    ]  # fmt: skip
    assert [cell.strip() for cell in together.split("|")[2:-1]] == [
        "4 : 1", "0.500 s", "1.250 s", "1.40x", "1.5x", "0.0%", "2.00/s", "25%"
    ]  # fmt: skip
