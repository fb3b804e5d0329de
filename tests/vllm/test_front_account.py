"""`chunkweave vllm-serve` with a real vLLM server: what is counted, and what leaves first."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from chunkweave.planning.cost import CostModel
from tests.server.conftest import wait_until
from tests.vllm.fronts import PASSAGES, FrontProcess, ask, front_process, told

BYTES_PER_TOKEN = 8192
"""Of the bundled reader in float32."""
EXACT = {"method": "prefix", "order": "fixed"}
COUNTED_S = 30
"""Workers say every ten seconds what their stores count."""


def shown_segments(front: FrontProcess) -> list[dict[str, float]]:
    """The segments behind others in the workers' last counts."""
    shown = json.loads(front.get("/v1/cache"))["eviction"]
    return [one for levels in shown.values() for one in levels["host"] if one["behind"]]


def wait_for(front: FrontProcess, tokens: int, frequency: int) -> dict[str, float]:
    """By what the worker ranks the segment of a document of so many tokens, once it was asked for so often."""
    found: list[dict[str, float]] = []

    def is_counted() -> bool:
        segments = shown_segments(front)
        time.sleep(0.2)
        found[:] = [one for one in segments if one["tokens"] == tokens and one["frequency"] >= frequency]
        return bool(found)

    wait_until(is_counted, COUNTED_S)
    return found[0]


def tokens_of(told) -> int:
    (chunk,) = told.model_extra["chunkweave"]["chunks"]
    return chunk["tokens"]


def test_a_request_counts_once_and_costs_what_vllm_takes(front, client):
    """Without a cost model the worker times vLLM's own forward at its start."""
    assert front.clear(everything=True).status_code == 200  # of many segments those that stay longest are not told
    wait_until(lambda: not shown_segments(front), COUNTED_S)  # another test's document may have as many tokens
    document = told("by one who counts")[1]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda n: ask(client, [document], f"Who leads it, {n}?", reuse=EXACT), range(6)))
    tokens = tokens_of(ask(client, [document], reuse=EXACT))
    found = wait_for(front, tokens, 7)
    assert found["frequency"] == 7
    assert 0 < found["average_cost_s"] < 0.5, "not a second a token"


def test_what_costs_least_a_token_leaves_first(tmp_path):
    """RAGCache eq. 1 by a given cost model, by which every prefill takes a second."""
    costs = tmp_path / "costs.json"
    CostModel((0,), (1, 100_000), ((1.0, 1.0),), kv_bytes_per_token=1).save(costs)
    tokens = 1200
    options = ("--policy", "pgdsf", "--set", f"cost_model={costs}", "--host-budget", str(tokens * BYTES_PER_TOKEN))
    with front_process(tmp_path, *options) as front:
        client = front.client
        documents = PASSAGES[1], " ".join(f"{PASSAGES[0]} {number}." for number in range(10))
        short, long = (tokens_of(ask(client, [document], reuse=EXACT)) for document in documents)
        cheap, dear = wait_for(front, long, 1), wait_for(front, short, 1)
        assert cheap["frequency"] == dear["frequency"] == 1
        assert cheap["priority"] < dear["priority"], "the one that came in last leaves first"
        assert dear["priority"] == pytest.approx(dear["average_cost_s"])
