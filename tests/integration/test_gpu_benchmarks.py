"""Smoke runs of the GPU benchmarks on the CPU, and what they may not need on a bare machine."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"
NOT_THERE = ("faiss", "semantic_text_splitter", "redis", "rouge_score")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weave", "kernel", "throughput", "full_prefill"])
def test_a_smoke_run_prints_a_table_last_and_writes_its_rows(name, tmp_path, monkeypatch, capsys, one_thread):
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", [name, "--tiny", "--device", "cpu", "--out", str(out)])
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    result = json.loads(out.read_text())
    assert result["rows"]
    assert result["complete"]
    assert {"date", "machine", "versions", "commit", "config"} <= result.keys()
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert all(line.startswith("|") for line in lines[-len(result["rows"]) :])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weave", "kernel", "throughput", "full_prefill"])
def test_a_script_imports_without_what_a_bare_machine_has_not(name):
    blocker = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({NOT_THERE}));"
        f"sys.argv = ['x', '--help']; sys.path.insert(0, {str(SCRIPTS)!r});"
        f"runpy.run_path({str(SCRIPTS / (name + '.py'))!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", blocker], capture_output=True, text=True, timeout=300, env={})
    assert done.returncode == 0, done.stderr
    assert "--tiny" in done.stdout


def test_limits_by_hand(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    limits = runpy.run_path(str(SCRIPTS / "limits.py"))
    from chunkweave.planning.cost import known_shape
    from chunkweave.planning.outcome import full_prefill_flops, prefill_flops

    geometry = known_shape("llama-3-8b").geometry
    everything = prefill_flops(geometry, limits["weave_work"](geometry, 4096, 1.0))
    assert everything == pytest.approx(full_prefill_flops(geometry, 4096 + limits["QUESTION_TOKENS"]), rel=0.001)
    assert limits["weight_bytes"](geometry) == pytest.approx(2 * 7.5e9, rel=0.01)  # 8.03e9 less 0.53e9 of embeddings
