"""The benchmarks of chunk order at a tiny size: they run, and what they say can be checked by hand."""

import argparse
import sys
from itertools import permutations
from pathlib import Path

import pytest

from chunkweave.calibration.questions import Example
from chunkweave.config import ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.testing import toy_model
from chunkweave.types import Chunk
from chunkweave_lab.chunk_order import UnlimitedCache
from chunkweave_lab.simulator.trace import Arrival, Part

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import contextpilot_comparison  # noqa: E402
import craft_composing  # noqa: E402
import craft_ordering  # noqa: E402
import craft_serving  # noqa: E402
import ordering_overhead  # noqa: E402

CHUNKS = [Chunk(f"The {what} of Halvik is older than its harbour.", what) for what in ("mole", "tower", "bell", "dyke")]
PILOT = """
class ContextPilot:
    def __init__(self, use_gpu): ...
    def reorder(self, contexts):
        print("noise")
        return [sorted(one) for one in contexts][::-1], list(range(len(contexts)))[::-1]
"""


def test_overheads_are_timed_and_sizes_counted():
    wanted = argparse.Namespace(requests=60, k=3, documents=9, zipf=1.0, window=20, seed=0)
    rows, sizes = ordering_overhead.measure(wanted)
    assert [one["ordering"] for one in rows] == ["original", "frequency", "tree-greedy"]
    assert all(one["together"]["p50_s"] > 0 and one["arrange"]["p50_s"] > 0 for one in rows)
    assert 3 <= sizes["table_chunks"] <= 9
    assert min(sizes["table_bytes"], sizes["tree_bytes"]) > 1000


def test_contextpilot_goes_through_the_same_cache(tmp_path, monkeypatch):
    (tmp_path / "contextpilot.py").write_text(PILOT, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arrivals = [Arrival(float(n), tuple(Part(one, 10) for one in asked)) for n, asked in enumerate(["ab", "ba", "cab"])]
    rows = contextpilot_comparison.rows_of(arrivals, Path(sys.executable), {"unlimited_hit_rate": UnlimitedCache})
    found = {one["contender"]: one["unlimited_hit_rate"] for one in rows}
    assert found["original"] == 0
    assert found["tree-greedy"] == pytest.approx(4 / 7)
    assert found["contextpilot incremental"] == pytest.approx(4 / 7), "sorted by the number of first appearance"
    assert set(found) >= {"contextpilot offline", "contextpilot offline, rescheduled"}
    (tmp_path / "contextpilot.py").write_text("raise ImportError('no scipy')", encoding="utf-8")
    with pytest.raises(UsageError, match="no scipy"):
        contextpilot_comparison.contextpilot(Path(sys.executable), "offline", [[1, 2]])


def test_a_contender_is_a_method_an_ordering_and_a_threshold():
    parse = craft_serving.Spec.parse
    assert parse("prefix") == craft_serving.Spec("prefix", None, None)
    assert parse("cacheblend+tree-greedy") == craft_serving.Spec("cacheblend", "tree-greedy", None)
    assert parse("query+frequency/0").config(9).continuation_threshold is None
    assert parse("query+frequency/5").config(9).continuation_threshold == 5
    assert parse("query+frequency").config(9).continuation_threshold == 4


def test_engines_serve_one_sequence_and_are_compared():
    orders = list(permutations(CHUNKS))[::3]
    requests = [Example("What is old?", order, ("bell",)) for order in orders[:7]]
    field_of = craft_serving.contenders(
        toy_model(), ["prefix", "prefix+frequency", "cacheblend+frequency/2"], ReuseConfig(), window=100
    )
    assert list(craft_serving.serve_all(field_of, requests, warm_up=5, max_new_tokens=3, alone=True))[-1] == 7
    rows = {one.name: craft_serving.row(one, field_of[0], field_of[1]) for one in field_of}
    assert rows["full"]["exact_share"] == 0
    assert rows["full"]["f1_minus_full"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    assert rows["prefix"]["exact_share"] < rows["prefix+frequency"]["exact_share"]
    assert rows["cacheblend+frequency/2"]["exact_share"] == rows["prefix+frequency"]["exact_share"]
    best, ratio = craft_ordering.combination(field_of, list(rows.values()))
    assert best["ours"] == "cacheblend+frequency/2"
    assert ratio["ttft_ratio_of_means"] > 0
    assert "| `full` |" in craft_ordering.table("serve", list(rows.values()), {})
    craft_serving.close(field_of)


def test_composing_replays_what_engines_find_and_grow():
    requests = [Example("What is old?", order, ("bell",)) for order in list(permutations(CHUNKS[:3]))[:5]]
    field_of = craft_serving.contenders(toy_model(), ["cacheblend+frequency/3"], ReuseConfig(), window=100)
    list(craft_serving.serve_all(field_of, requests, warm_up=0, max_new_tokens=1, alone=True))
    named = {
        one.name: [chunk for report in one.reports for chunk in report.chunks if chunk.rank is not None]
        for one in field_of
    }
    craft_serving.close(field_of)
    part_of = {chunk.source: Part(chunk.id, chunk.tokens) for chunk in named["full"]}
    arrivals = [
        Arrival(float(number), tuple(part_of[chunk.source] for chunk in request.chunks))
        for number, request in enumerate(requests)
    ]
    config = craft_serving.Spec.parse("cacheblend+frequency/3").config(100)
    shares = craft_composing.shares_of(arrivals, config, warm_up=0, question_tokens=0.0)
    total = sum(chunk.tokens for chunk in named["full"])

    def share_of(name, source):
        return sum(chunk.tokens for chunk in named[name] if chunk.kv_source == source) / total

    assert shares.exact == pytest.approx(share_of("cacheblend+frequency/3", "prefix-exact"))
    assert shares.grown == pytest.approx(share_of("cacheblend+frequency/3", "computed"))
    assert shares.grown > 0
    assert shares.exact > 0


def test_only_timed_requests_hold_the_lock_and_full_needs_no_warm_up(tmp_path):
    import fcntl

    lock = tmp_path / "lock"
    requests = [Example("What is old?", tuple(CHUNKS[:2]), ("bell",))] * 4
    field_of = craft_serving.contenders(toy_model(), ["prefix"], ReuseConfig(), window=100)
    taken = []
    for _ in craft_serving.serve_all(field_of, requests, warm_up=2, max_new_tokens=1, alone=False, lock=lock):
        with lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken.append(False)
            except BlockingIOError:
                taken.append(True)
    assert taken == [False, False, True, True]
    assert [len(one.reports) for one in field_of] == [2, 2]
    craft_serving.close(field_of)


def test_savings_and_sensitivity_have_a_row_for_each_setting():
    wanted = argparse.Namespace(
        dataset=None, warm_up=0, requests=30, k=3, zipf=1.0, questions=6, worlds=2, window=100, seed=0
    )
    rows, more = craft_ordering.savings(wanted)
    assert len(rows) == 8
    assert all(one["saved_share"] <= more["bound"] for one in rows)
    assert "no order can save more" in craft_ordering.table("savings", rows, more)
    rows, _ = craft_ordering.sensitivity(wanted)
    assert {one["promotion_threshold"] for one in rows} == {1, 2, 3, 5}
    assert "drifting" in craft_ordering.table("sensitivity", rows, {})
