"""What an engine keeps under a tight budget is what the simulator's tree cache keeps (RAGCache §5.1, Algorithm 1)."""

import random

import pytest
from tests.toys import toy_model

from chunkweave import Chunk, Engine, StoreConfig
from chunkweave.planning.cost import CostModel
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.prompt.request import Request
from chunkweave.store.eviction import make_policy
from chunkweave.store.records import SegmentRecord
from chunkweave_lab.simulator.tree_cache import TreeCache, TreeTier

CHUNKS = {name: Chunk(f"{name} " * tokens, name) for name, tokens in {"a": 5, "b": 11, "c": 17, "d": 30}.items()}
SYSTEM = "Answer."


@pytest.fixture(scope="module")
def loaded():
    return toy_model("llama")


def _paths(seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.sample("abcd", draw.randint(1, 3))) for _ in range(25)]


@pytest.mark.parametrize("policy", ["lru", "pgdsf"])
@pytest.mark.parametrize(("seed", "tokens"), [(0, 60), (1, 80), (2, 110)])
def test_the_engine_keeps_what_the_simulator_keeps(loaded, policy, seed, tokens, tmp_path):
    probe = Engine(loaded)
    geometry = loaded.model.geometry
    token_bytes = geometry.kv_elements_per_token() * loaded.model.dtype.itemsize
    budget = tokens * token_bytes
    costs = tmp_path / "costs.json"  # a second a token, as the simulator's policy assumes
    CostModel((0,), (1, 1000), ((1.0, 1000.0),), kv_bytes_per_token=token_bytes).save(costs)
    engine = Engine(loaded, store=StoreConfig(host_budget_bytes=budget, policy=policy, cost_model=costs))
    engine.preparer.answered_turn = lambda *_: None  # the simulator knows no answers
    cache = TreeCache([TreeTier("host", budget, make_policy(policy))])
    for path in _paths(seed):
        chunks = [CHUNKS[name] for name in path]
        prompt = probe.preparer.prepare(Request("Why?", chunks, SYSTEM), MethodRequest("prefix")).prompt
        parts = [part for part in prompt.parts if part.id is not None]
        ids = [part.id for part in parts]
        records = [
            SegmentRecord.of(
                part.id, tuple(ids[:i]), part.token_ids, exact=True, nbytes=len(part.token_ids) * token_bytes
            )
            for i, part in enumerate(parts)
        ]
        used = cache.use(records, len(prompt) - sum(map(len, records)))
        report = engine.generate("Why?", chunks, system=SYSTEM, method="prefix", max_new_tokens=1).report
        assert report.prefix_exact_tokens == used.cached_tokens, path
        assert {record.id for record in engine.store.records()} == cache.records("host")
    engine.store.check()
