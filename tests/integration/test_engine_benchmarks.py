"""Benchmarks of our engine run, at sizes that say nothing, and write what they found."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.redis_server import free_port

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BOATS = [(1, "ferry"), (2, "barge"), (3, "tug")]


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """Benchmarks import each other, and set the number of threads of their process."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    torch.set_num_threads(threads)


def run(name: str, monkeypatch, out: Path, *arguments: object) -> dict:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments), "--out", str(out)])
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_sustained_reuse(monkeypatch, tmp_path):
    sizes = ("--shape", "demo", "--layers", 2, "--documents", 30, "--document-tokens", 8, "--chunks", 3)
    counts = ("--queries", 200, "--methods", "query", "--recompute-ratio", 0.5, "--threads", 1)
    told = run("sustained.py", monkeypatch, tmp_path / "out.json", *sizes, *counts)
    (row,) = told["rows"]
    assert len(row["ttft_s"]) == 200
    assert len(row["full_ttft_s"]) == 10
    assert 0.2 < row["reuse"] <= told["belady_hit_rate"] < 1.0
    assert "`query`" in importlib.import_module("sustained").tables(told)["sustained"]


def test_where_time_goes(monkeypatch, tmp_path):
    sizes = ("--model", "reader", "--chunks", 2, "--chunk-tokens", 48, "--rounds", 1, "--kernels", "sdpa")
    which = ("--methods", "full-reuse", "--their-methods", "full-reuse", "--also-weights", "plain")
    found = run("where_time_goes.py", monkeypatch, tmp_path / "out.json", *sizes, *which)
    rows = {row["what"]: row for row in found["rows"]}
    assert {"full", "full-reuse", "decode 1", "plain full", "plain decode 8", "hf-decode 1"} <= rows.keys()
    assert all(row["cpu_s"] > 0 for row in rows.values())


@pytest.mark.slow
def test_served_quality_keeps_what_a_run_has(monkeypatch, tmp_path):
    texts = [f"The {name} leaves from pier {number} at noon, and comes back at {number}." for number, name in BOATS]
    lines = [
        {"question": f"When does the {name} leave?", "answers": ["noon"], "chunks": texts[number - 1 :][:2]}
        for number, name in BOATS
    ]
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    sizes = ("--dataset", dataset, "--folder", tmp_path / "served", "--top-k", 2, "--ways", "full-reuse", "query=0.5")
    serve = ("--serve", f"{sys.executable} -m chunkweave serve --model reader --threads 1", "--port", free_port())
    first, second = (
        run("served_quality.py", monkeypatch, tmp_path / "out.json", *sizes, *serve, "--questions", questions)
        for questions in (2, 3)
    )
    assert (first["passages"], first["warmed"], len(second["asked"])) == (3, 3, 3)
    assert second["asked"][:2] == first["asked"]
    full, reuse, query = second["rows"]
    assert (full["recomputed"], full["agreement"], full["quotient"]) == (0, 1, 1)
    assert reuse["recomputed"] == 0 < query["recomputed"] < 1
    assert [row["methods"] for row in (full, reuse, query)] == [["full"], ["full-reuse"], ["query"]]
    assert "| query=0.5 |" in importlib.import_module("served_quality").tables(second)["served-quality"]
