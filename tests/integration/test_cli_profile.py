"""`chunkweave profile` and `chunkweave bench loading` on the small shape."""

import json
from functools import partial
from pathlib import Path

import pytest

from chunkweave.cli import options
from chunkweave.config import StoreConfig
from chunkweave.engine import profiling
from chunkweave.engine.engine import Engine
from chunkweave.planning.cost import CostModel
from chunkweave_lab import loading
from tests.integration.command_line import invoke

pytestmark = pytest.mark.usefixtures("one_thread")

PROFILE = ("profile", "--shape", "demo", "--repeats", 1, "--cached-tokens", "0,32", "--new-tokens", "8,16")
TIERS = ("--segments", 2, "--segment-tokens", 16)
LOADING = ("bench", "loading", "--shape", "demo", "--chunks", 2, "--chunk-tokens", 32, "--repeats", 1, "--wait", 0)


def cost_model(folder: Path) -> Path:
    assert invoke(*PROFILE, "--out", folder / "cost.json").exit_code == 0
    return folder / "cost.json"


def test_profile_writes_the_cost_model_into_the_cache_directory(tmp_path):
    cache, remote = tmp_path / "cache", tmp_path / "remote"
    done = invoke(*PROFILE, *TIERS, "--cache-dir", cache, "--remote-url", f"file://{remote}", "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    cost = CostModel.read(Path(shown["file"]))
    assert Path(shown["file"]) == cache / cost.fingerprint / "cost-model.json"
    assert (cost.cached_tokens, cost.new_tokens) == ((0, 32), (8, 16))
    assert set(cost.tier_bytes_per_s) == {"disk", "remote"}
    assert all(value > 0 for row in cost.prefill_s for value in row)
    assert [path for path in cache.rglob("*") if path.is_file()] == [Path(shown["file"])]
    assert not [path for path in remote.rglob("*") if path.is_file()]
    assert json.loads(invoke("cache", "stats", cache, "--json").stdout)["models"][0]["cost_model"] is True
    with Engine.load_shape("demo", store=StoreConfig(cache_dir=cache, policy="pgdsf")) as engine:
        assert engine.runner.cost == cost
        policies = [level.store._index._policy for level in engine.store.levels]
        assert [policy._prefill_s(16, 32) for policy in policies] == [cost.prefill(16, 32)] * 2


def test_profile_shows_a_table_and_takes_a_file(tmp_path):
    done = invoke(*PROFILE, "--out", tmp_path / "cost.json")
    assert done.exit_code == 0, done.output
    assert "16 new" in done.stdout
    assert CostModel.read(tmp_path / "cost.json").tier_bytes_per_s == {}


def test_profile_goes_on_without_a_tier_that_fails(tmp_path, monkeypatch):
    def gone(*_arguments):
        raise OSError("connection refused")

    monkeypatch.setattr("chunkweave.tiers.blobs.FsspecBlobs.put", gone)
    out = tmp_path / "cost.json"
    done = invoke(*PROFILE, *TIERS, "--remote-url", "memory://nowhere", "--out", out)
    assert done.exit_code == 1
    assert "connection refused" in " ".join(done.stderr.split())
    assert CostModel.read(out).tier_bytes_per_s == {}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "--cache-dir"),
        (("--out", "/no/such/folder/c.json"), "/no/such/folder"),
        (("--out", "c.json", "--new-tokens", "many"), "--new-tokens"),
        (("--out", "c.json", "--new-tokens", "0.5"), "whole numbers"),
        (("--out", "c.json", "--new-tokens", "9000"), "8192"),
        (("--out", "c.json", "--cached-tokens", "9000"), "8192"),
    ],
)
def test_profile_refuses_what_it_cannot_measure(more, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*PROFILE, *more)
    assert done.exit_code == 2, done.output
    assert said in done.stderr


def test_bench_loading_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "loading.json"
    done = invoke(*LOADING, "--cost-model", cost_model(tmp_path), "--quotients", "0.5,2", "--out", out)
    assert done.exit_code == 0, done.output
    assert "ratio to memory" in done.stdout
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [(row["quotient"], row["mode"]) for row in result["rows"]] == [
        (quotient, mode) for quotient in (0.5, 2.0) for mode in loading.MODES
    ]
    assert (result["benchmark"], result["complete"], result["config"]["chunks"]) == ("loading", True, 2)
    assert all(
        {"ttft_median_s", "ratio_to_memory", "predicted_s", "prediction_error"} <= set(r) for r in result["rows"]
    )
    told = json.loads((tmp_path / "cost.json").read_text(encoding="utf-8"))
    assert result["cost_model"]["prefill_s"] == told["prefill_s"]


def test_bench_loading_measures_a_cost_model_where_none_is_given(monkeypatch):
    few = partial(profiling.profile_prefill, cached_tokens=(0, 32), new_tokens=(8, 32), repeats=1)
    monkeypatch.setattr(profiling, "profile_prefill", few)
    done = invoke(*LOADING, "--quotients", "1", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cost_model"]["new_tokens"] == [8, 32]


def test_bench_loading_refuses_the_cost_model_of_another_model(tmp_path):
    cost = CostModel((0,), (1,), ((0.1,),), 1, fingerprint="another")
    cost.save(tmp_path / "cost.json")
    done = invoke(*LOADING, "--cost-model", tmp_path / "cost.json")
    assert done.exit_code == 2
    assert "--cost-model was measured with another model than demo" in " ".join(done.stderr.split())


def test_bench_loading_interrupted_keeps_what_it_has(tmp_path, monkeypatch):
    real = loading.measure_loading

    def interrupted(*arguments):
        for row in real(*arguments):
            if row.quotient == 2.0:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(loading, "measure_loading", interrupted)
    out = tmp_path / "loading.json"
    done = invoke(*LOADING, "--cost-model", cost_model(tmp_path), "--quotients", "0.5,2", "--out", out)
    assert done.exit_code == 130
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["complete"] is False
    assert {row["quotient"] for row in result["rows"]} == {0.5}


@pytest.mark.parametrize("more", [("--quotients", "fast"), ("--quotients", "0"), ("--chunks", 99), ("--wait", -1)])
def test_bench_loading_refuses_what_it_cannot_measure(more):
    done = invoke("bench", "loading", "--shape", "demo", *more)
    assert done.exit_code == 2, done.output


def test_a_result_keeps_no_password(monkeypatch):
    argv = ["chunkweave", "ask", "--remote-url=rediss://me:secret@host:1/0?password=secret", "redis://:secret@h", "a b"]
    monkeypatch.setattr("sys.argv", argv)
    assert options.command_line() == "chunkweave ask --remote-url=rediss://host:1/0 redis://h 'a b'"
