"""benchmarks/bench_guard.py: which ratios count as worse, that a second run may clear them, and what is said."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_guard  # noqa: E402

KEPT = {"decode over hf-decode": 0.5, "query@0.15 over full": 0.2}


def times(scale: float = 1.0) -> dict[str, list[float]]:
    """Three rounds: everything takes `scale` times what it is held against, in one round twice that."""
    found = {other: [1.0, 2.0, 4.0] for other in bench_guard.PAIRS.values()}
    for name, other in bench_guard.PAIRS.items():
        found[name] = [scale * one * (2 if place == 1 else 1) for place, one in enumerate(found[other])]
    return found


def test_a_ratio_is_worse_above_its_bound_only():
    assert bench_guard.worse(KEPT, KEPT) == {}
    assert bench_guard.worse(KEPT, {name: 0.1 * value for name, value in KEPT.items()}) == {}, "faster is no harm"
    assert bench_guard.worse(KEPT, {name: 1.29 * value for name, value in KEPT.items()}) == {}
    found = bench_guard.worse(KEPT, {**KEPT, "query@0.15 over full": 0.27, "new over full": 9.0})
    assert found == {"query@0.15 over full": "query@0.15 over full is 0.270, more than 30 % above 0.200"}


def test_a_ratio_that_is_gone_is_worse():
    found = bench_guard.worse(KEPT, {"decode over hf-decode": 0.5})
    assert found == {"query@0.15 over full": "query@0.15 over full is not measured any more, it was 0.200"}


def test_ratios_are_medians_of_one_run():
    found = bench_guard.ratios_of(times(0.5), {"full": "hf-forward"})
    assert found == {"full over hf-forward": 0.5}, "one slow round of three changes nothing"


@pytest.mark.parametrize(("runs", "code"), [((1.0,), 0), ((2.0, 1.0), 0), ((2.0, 2.0), 1)])
def test_what_is_worse_twice_fails(monkeypatch, capsys, runs, code):
    left = list(runs)
    monkeypatch.setattr(bench_guard, "measured", lambda: times(left.pop(0)))
    kept = bench_guard.ratios_of(times(), bench_guard.PAIRS)
    assert bench_guard.guard(kept, Console(width=200)) == code
    assert not left, "a second run only where the first one was worse"
    said = capsys.readouterr().out
    assert ("slower than before: full over hf-forward is" in said) == (code == 1)


def test_the_command_ends_with_the_code(monkeypatch, tmp_path):
    file = tmp_path / "guard.json"
    monkeypatch.setattr(bench_guard, "measured", lambda: times(1.0))
    monkeypatch.setattr(sys, "argv", ["bench_guard.py", "--out", str(file)])
    bench_guard.main()
    kept = json.loads(file.read_text())
    assert [row["ratio"] for row in kept["rows"]] == [f"{a} over {b}" for a, b in bench_guard.PAIRS.items()]
    assert kept["command"] == "python benchmarks/bench_guard.py --out guard.json"
    assert "0.500" not in bench_guard.tables(kept)["guard"]
    monkeypatch.setattr(sys, "argv", ["bench_guard.py", "--against", str(file)])
    for scale, code in ((1.0, 0), (1.5, 1)):
        monkeypatch.setattr(bench_guard, "measured", lambda scale=scale: times(scale))
        with pytest.raises(SystemExit) as ended:
            bench_guard.main()
        assert ended.value.code == code
