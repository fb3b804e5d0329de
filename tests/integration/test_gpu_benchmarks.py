"""Smoke runs of the GPU benchmarks on the CPU, and what they may not need on a bare machine."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "gpu"
NOT_THERE = (
    *("charset_normalizer", "defusedxml", "faiss", "fastapi", "gguf", "html_to_markdown", "mammoth", "multipart"),
    *("openai", "pydantic", "pypdf", "redis", "semantic_text_splitter", "starlette", "uvicorn"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weave", "kernel", "throughput", "full_prefill"])
def test_a_smoke_run_continues_an_interrupted_one_and_prints_a_table_last(
    name, tmp_path, monkeypatch, capsys, one_thread
):
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])

    def run(minutes: str) -> dict:
        monkeypatch.setattr(sys, "argv", [name, "--tiny", "--device", "cpu", "--minutes", minutes, "--out", str(out)])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        return json.loads(out.read_text())

    nothing = run("0")
    assert not nothing["complete"]
    assert nothing["left_out"]
    before = {**nothing["left_out"][0], "of_before": 1}
    out.write_text(json.dumps({**nothing, "rows": [before]}))
    result = run("9")
    assert result["complete"]
    assert not [row for row in result["rows"] if "note" in row]
    assert [row for row in result["rows"] if "of_before" in row] == [before]
    assert len(result["rows"]) >= len(nothing["left_out"])
    assert {"command", "date", "machine", "versions", "commit", "config"} <= result.keys()
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert all(line.startswith("|") for line in lines[-len(result["rows"]) :])


@pytest.mark.slow
def test_a_part_runs_on_a_cpu(tmp_path):
    command = [sys.executable, SCRIPTS / "first.py", "kernels", "--device", "cpu", "--minutes", "4", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert [(task["task"], task["state"]) for task in report["tasks"]] == [
        ("stalls", "finished"),
        ("kernel", "finished"),
        ("sweep", "skipped"),
    ]
    assert "No GPU" in (tmp_path / "kernels.md").read_text()
    assert (tmp_path / "kernels.md").read_text() in done.stdout


@pytest.mark.slow
def test_scripts_and_tests_import_without_what_a_bare_machine_has_not():
    modules = (
        "first",
        "weave",
        "kernel",
        "throughput",
        "full_prefill",
        "tests.gpu.test_attention",
        "tests.gpu.test_weaving",
    )
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_THERE})); sys.path += [{str(SCRIPTS)!r}, {str(ROOT)!r}];"
        f"import importlib; [importlib.import_module(name) for name in {modules}]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env={})
    assert done.returncode == 0, done.stderr


def test_limits_by_hand(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    limits = runpy.run_path(str(SCRIPTS / "limits.py"))
    from chunkweave.planning.cost import known_shape
    from chunkweave.planning.outcome import full_prefill_flops, prefill_flops

    geometry = known_shape("llama-3-8b").geometry
    everything = prefill_flops(geometry, limits["weave_work"](geometry, 4096, 1.0))
    assert everything == pytest.approx(full_prefill_flops(geometry, 4096 + limits["QUESTION_TOKENS"]), rel=0.001)
    assert limits["weight_bytes"](geometry) == pytest.approx(2 * 7.5e9, rel=0.01)  # 8.03e9 less 0.53e9 of embeddings
