"""The test of benchmarks/tenant_timing.py sees a leak, and none where there is none."""

from random import Random

import pytest

pytest.importorskip("scipy")

import quiet_tenant
import tenant_timing as timing


@pytest.mark.parametrize(("leak", "ok"), [(0.0, True), (0.1, False)])
def test_a_tenth_is_seen_and_nothing_is_not(leak: float, ok: bool):
    draw = Random(1)
    pairs = [timing.Pair(draw.gauss(1.0, 0.1) * (1 - leak), draw.gauss(1.0, 0.1), 0.4, True) for _ in range(500)]
    said = timing.summary(pairs)
    assert said["ok"] is ok
    assert said["p_of_own"] < 0.01
    assert said["p_if_shorter_by"]["10%"] < 0.01


def slices(name: str, times, *, total: float = 3.0, error: str | None = None):
    requests = [{"ttft_s": time, "total_s": total * time, "tokens": 32, "error": error} for time in times]
    return quiet_tenant.Slice(0, name, requests, {"answered": 2} if name != quiet_tenant.ALONE else {})


def test_a_quiet_tenant_is_held_against_itself_alone():
    alone = slices("alone", [0.1] * 50)
    fine, slow, late = slices("prompts", [0.2] * 50), slices("aborts", [0.23] * 50), slices("answers", [0.1], total=9)
    rows = quiet_tenant.rows_of([alone, fine, slow, late], ["prompts", "aborts", "answers"])
    assert [row["ok"] for row in rows] == [True, True, False, False]
    assert rows[1]["total_p99_over_alone"] == pytest.approx(2.0)
    assert rows[1]["loud_did"] == {"answered": 2}
