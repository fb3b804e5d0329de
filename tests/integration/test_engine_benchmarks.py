"""The benchmarks of search, speculation and load run, at sizes that say nothing, and write what they found."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.redis_server import free_port

pytest.importorskip("faiss", reason="the extra `retrieval` is not installed")

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


def test_a_graph_goes_on_where_it_was_interrupted(monkeypatch, tmp_path):
    import clustered_index
    from clustered_index import World, at_ratio, open_index

    from chunkweave.errors import UsageError

    monkeypatch.setattr(clustered_index, "BLOCK", 200)
    world, file = World("hnsw", vectors=500, dimension=16), tmp_path / "graph.faiss"
    real, writes = clustered_index._write, []

    def write(*arguments):
        real(*arguments)
        writes.append(1)
        if len(writes) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(clustered_index, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        open_index(world, file)
    resumed = open_index(world, file)
    assert len(writes) == 3, "only the last block was missing"
    whole = open_index(world)
    for question in world.questions(5):
        for ratio in (0.1, 1.0):
            assert at_ratio(resumed.index, ratio, 2).search(question, 3) == at_ratio(whole.index, ratio, 2).search(
                question, 3
            )
    assert resumed.build_s > 0
    with pytest.raises(UsageError, match="another world"):
        open_index(World("hnsw", vectors=400, dimension=16), file)


@pytest.mark.parametrize("index", ["ivf", "hnsw"])
def test_staged_search(monkeypatch, tmp_path, index):
    sizes = ("--index", index, "--vectors", 2000, "--dimension", 32, "--lists", 16, "--queries", 3)
    told = run("staged_search.py", monkeypatch, tmp_path / "out.json", *sizes, "--index-file", tmp_path / "i.faiss")
    assert [row["search_ratio"] for row in told["rows"]] == [0.125, 0.25, 0.5, 1.0]
    assert told["rows"][-1]["recall"] > 0.9
    assert (tmp_path / "i.faiss").exists()


@pytest.mark.slow
def test_speculation(monkeypatch, tmp_path):
    sizes = ("--shape", "demo", "--vectors", 2000, "--lists", 16, "--texts", 5, "--chunk-tokens", 30)
    counts = ("--warm-up", 1, "--questions", 2, "--ratios", 1.0, "--requests", 3, "--rounds", 1, "--new-tokens", 2)
    told = run("speculation.py", monkeypatch, tmp_path / "out.json", *sizes, *counts)
    [row] = told["rows"]
    for name in ("speculation", "without"):
        assert row[name]["ttft_mean_s"] > row[name]["search_mean_s"] > 0
    assert row["without"]["non_overlapping_mean_s"] == pytest.approx(row["without"]["search_mean_s"])
    [turn] = told["under_load"]["rows"]
    assert turn["speculation"]["error_rate"] == turn["without"]["error_rate"] == 0.0
    assert "| 100.0% |" in importlib.import_module("speculation").tables(told)["speculation"]


@pytest.mark.slow
def test_reordering(monkeypatch, tmp_path):
    sizes = ("--documents", 20, "--chunk-tokens", 20, "--shares", 0.3, "--max-running", 2)
    counts = ("--requests", 6, "--rounds", 1, "--warm-up", 4, "--trials", 1, "--trial-requests", 2, 3)
    told = run("reordering_engine.py", monkeypatch, tmp_path / "out.json", *sizes, *counts)
    [row] = told["rows"]
    assert row["ttft_mean_s"].keys() == {"in order", "reordered"}
    assert [method["method"] for method in told["sustained"]] == ["full", "prefix", "cacheblend", "cachecraft"]
    made = importlib.import_module("reordering_engine").tables(told)
    assert "| cachecraft |" in made["sustained-rate-engine"]


@pytest.mark.slow
def test_sustained_reuse(monkeypatch, tmp_path):
    sizes = ("--shape", "demo", "--layers", 2, "--documents", 30, "--document-tokens", 8, "--chunks", 3)
    counts = ("--queries", 200, "--methods", "query", "--recompute-ratio", 0.5, "--threads", 1)
    told = run("sustained.py", monkeypatch, tmp_path / "out.json", *sizes, *counts)
    (row,) = told["rows"]
    assert len(row["ttft_s"]) == 200
    assert len(row["full_ttft_s"]) == 10
    assert 0.2 < row["reuse"] <= told["belady_hit_rate"] < 1.0
    assert len(row["agreement"]) == 10
    assert min(row["kl"]) >= 0
    assert "`query`" in importlib.import_module("sustained").tables(told)["sustained"]


def test_where_time_goes(monkeypatch, tmp_path):
    sizes = ("--model", "reader", "--chunks", 2, "--chunk-tokens", 48, "--rounds", 1, "--kernels", "sdpa")
    which = ("--methods", "full-reuse", "--their-methods", "full-reuse", "--also-weights", "int8")
    found = run("where_time_goes.py", monkeypatch, tmp_path / "out.json", *sizes, *which)
    rows = {row["what"]: row for row in found["rows"]}
    assert {"full", "full-reuse", "decode 1", "int8 full", "int8 decode 8", "hf-decode 1"} <= rows.keys()
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
