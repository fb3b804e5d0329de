"""benchmarks/bench_guard.py: which ratios count as worse, that a second run may clear them, and what is said."""

import bench_guard
import pytest
from rich.console import Console


def times(scale: float = 1.0) -> dict[str, list[float]]:
    """Three rounds: everything takes `scale` times what it is held against, in one round twice that."""
    found = {other: [1.0, 2.0, 4.0] for other in bench_guard.PAIRS.values()}
    for name, other in bench_guard.PAIRS.items():
        found[name] = [scale * one * (2 if place == 1 else 1) for place, one in enumerate(found[other])]
    return found


@pytest.mark.parametrize(("runs", "code"), [((1.0,), 0), ((2.0, 1.0), 0), ((2.0, 2.0), 1)])
def test_what_is_worse_twice_fails(monkeypatch, capsys, runs, code):
    left = list(runs)
    monkeypatch.setattr(bench_guard, "measured", lambda: times(left.pop(0)))
    kept = bench_guard.ratios_of(times(), bench_guard.PAIRS)
    assert bench_guard.guard(kept, Console(width=200)) == code
    assert not left, "a second run only where the first one was worse"
    said = capsys.readouterr().out
    assert ("slower than before: full over hf-forward is" in said) == (code == 1)
