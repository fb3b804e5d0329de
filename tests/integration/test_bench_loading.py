"""`chunkweave bench loading` on the small shape."""

import json
from functools import partial

import pytest

from chunkweave.cli import options
from chunkweave.engine import profiling
from chunkweave.planning.cost import CostModel
from chunkweave_lab import loading
from tests.integration.command_line import invoke

pytestmark = pytest.mark.usefixtures("one_thread")
LOADING = ("bench", "loading", "--shape", "demo", "--chunks", 2, "--chunk-tokens", 32, "--repeats", 1, "--wait", 0)


@pytest.fixture(autouse=True)
def few_costs(monkeypatch):
    few = partial(profiling.profile_prefill, cached_tokens=(0, 32), new_tokens=(8, 32), repeats=1)
    monkeypatch.setattr(profiling, "profile_prefill", few)


def test_bench_loading_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "loading.json"
    done = invoke(*LOADING, "--quotients", "0.5,2", "--out", out)
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
    assert result["cost_model"]["new_tokens"] == [8, 32]


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
    done = invoke(*LOADING, "--quotients", "0.5,2", "--out", out)
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
