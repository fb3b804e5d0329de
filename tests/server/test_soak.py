"""The soak in short: memory, descriptors and the engine's own audit after some hundred requests."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_short_soak_leaves_nothing_behind(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak

    result = soak.run(200, seed=1)
    del sys.modules["soak"]
    assert result["ok"], result
    assert set(result["answers"]) == {"200", "400", "left"}
