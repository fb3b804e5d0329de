"""`chunkweave simulate` from traces to tables."""

import json

import pytest
from tests.integration.command_line import invoke, json_of, succeed

from chunkweave.planning.cost import CostModel


@pytest.fixture
def trace(tmp_path):
    lines = [
        {"arrival_s": number, "chunks": [{"id": name, "tokens": 64} for name in names], "question_tokens": 8}
        for number, names in enumerate(["ab", "ab", "ac", "cb", "ab"])
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_trace_becomes_a_row_for_each_policy_and_budget(trace, tmp_path):
    out = tmp_path / "out.json"
    result = json_of("simulate", "--trace", trace, "--policy", "pgdsf,lru", "--budget", "16MiB,1GiB", "--out", out)
    assert result == json.loads(out.read_text())
    assert result["benchmark"] == "simulation"
    assert result["config"]["trace"] == "trace.jsonl"
    assert result["equal_sizes"] is True
    rows = result["rows"]
    assert [(row["policy"], row["budget_bytes"]["host"]) for row in rows] == [
        (policy, budget) for budget in (16 << 20, 1 << 30) for policy in ("pgdsf", "lru")
    ]
    assert all(row["hit_rate"] <= row["bound"]["hit_rate"] for row in rows)
    assert rows[-1]["hits"] == 5, "ab once, a once, ab once more"
    assert rows[-1]["documents"] == 10


def test_it_shows_a_table_with_the_bound(trace):
    done = succeed("simulate", "--trace", trace, "--budget", "1GiB", "--device-budget", "16MiB", "--replicas", 2)
    assert "16.0 MiB + 1.0 GiB" in done.stdout
    assert "Belady's MIN for documents" in done.stdout
    for policy in ("pgdsf", "gdsf", "lru", "lfu"):
        assert policy in done.stdout


def test_generated_workloads_need_no_file():
    drawn = ("--requests", 50, "--documents", 30, "--rate", 2)
    rows = json_of("simulate", "--trace", "zipf", *drawn, "--budget", "8GiB")["rows"]
    assert {row["requests"] for row in rows} == {50}
    assert all(row["most_passed_over"] <= 32 for row in rows)


def test_a_measured_cost_model_is_the_clock(trace, tmp_path):
    CostModel((0,), (1, 1000), ((1.0, 1000.0),), 1000, {}).save(tmp_path / "cost.json")
    model = ("--cost-model", tmp_path / "cost.json")
    row = json_of("simulate", "--trace", trace, *model, "--policy", "lru", "--window", 0)["rows"][0]
    # 136 s, 8 s, 72 s, 136 s, 8 s of computing one after the other, arrivals a second apart.
    assert row["busy_s"] == pytest.approx(360.0)
    assert row["ttft_mean_s"] == pytest.approx((136 + 143 + 214 + 349 + 356) / 5)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--trace", "absent.jsonl"), 2, "neither a file nor one of mmlu-like, zipf"),
        (("--trace", "zipf", "--policy", "mru"), 2, "unknown eviction policy 'mru'; there are: fifo, gdsf"),
        (("--trace", "zipf", "--budget", "much"), 2, "not a size in bytes"),
        (("--trace", "zipf", "--shape", "llama-9"), 2, "there are: demo, "),
        (("--trace", "zipf", "--teraflops", "0"), 2, "must be positive"),
        (("--trace", "zipf", "--replicas", "3"), 2, "give both"),
        (("--trace", "zipf", "--top-k", "99"), 2, "top-k 99 needs"),
        (("--trace", "zipf", "--cost-model", "absent.json", "--shape", "demo"), 2, "either --shape or --cost-model"),
        (("--trace", "zipf", "--cost-model", "absent.json"), 1, "no cost model"),
    ],
)
def test_what_is_wrong_is_said(arguments, code, message):
    done = invoke("simulate", *arguments)
    assert done.exit_code == code, done.output
    assert message in " ".join(done.stderr.split())


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": "now", "hash_ids": [1]}\n')
    done = invoke("simulate", "--trace", path)
    assert done.exit_code == 1
    assert "bad.jsonl:2: 'timestamp' is not a number of at least 0: 'now'" in "".join(done.stderr.split("\n"))
