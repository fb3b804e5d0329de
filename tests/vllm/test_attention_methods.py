"""Methods that look at attention: what they choose, and the answers, against the reference and our own engine."""

from dataclasses import replace
from itertools import cycle, islice

import pytest

from tests.vllm.own_engine import own_engine
from tests.vllm.prompts import (
    Given,
    Scenario,
    behind_an_instruction,
    computed_alone,
    computed_in_context,
    one_missing,
    tokens,
)
from tests.vllm.reference import Reference
from tests.vllm.serving import serving

TOLERANCE = 5e-4
SCENARIOS = {
    "alone": computed_alone,
    "in-context": computed_in_context,
    "instruction": behind_an_instruction,
    "first-missing": lambda: one_missing(0),
    "middle-missing": lambda: one_missing(2),
    "last-missing": lambda: one_missing(3),
}
WAYS = {
    "llama-sliced": ("llama", {}),
    "qwen2-uncached": ("qwen2", {"enable_prefix_caching": False}),
    "qwen3-compiled": ("qwen3", {"enforce_eager": False}),
    "llama-two-ranks": ("llama", {"tensor_parallel_size": 2}),
}
METHODS = {
    "query-.05": ("query", {"ratio": 0.05}),
    "query-.3": ("query", {"ratio": 0.3}),
    "query-1": ("query", {"ratio": 1.0}),
    "query-all-tokens-late": ("query", {"ratio": 0.2, "query": {"tail": None, "layers": "late"}}),
    "query-two-rounds": ("query", {"ratio": 0.3, "query": {"rounds": 2}}),
    "query-measured": ("query-measured", {"ratio": 0.1}),
    "query-stored": ("query", {"ratio": 0.2, "query": {"factor": "stored"}}),
    "query-first-token": ("query-first-token", {"ratio": 0.2, "query": {"factor": "stored"}}),
    "query-until": ("query-until", {"ratio": 0.2}),
    "cachecraft-1": ("cachecraft", {"alpha": 1.0}),
    "cachecraft-.5": ("cachecraft", {"alpha": 0.5}),
    "cachecraft-unfocused": ("cachecraft", {"alpha": 0.8, "focus": False}),
    "h2o": ("h2o", {"ratio": 0.15}),
    "set-cache": ("set-cache", {}),
}
BEYOND_REFERENCE = {"cachecraft-1", "cachecraft-.5", "query-measured", "query-two-rounds", "query-until", "set-cache"}
"""It is told positions only: not which were dropped on the way up, nor which were computed before the others."""


@pytest.fixture(scope="module", params=WAYS)
def way(request, checkpoint):
    """A server and the folder of its model."""
    family, options = WAYS[request.param]
    folder = checkpoint(family)
    if request.param == "llama-sliced":
        yield request.getfixturevalue("sliced"), folder
        return
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "tensor_parallel_size" in options else {}
    with serving(folder, environment=environment, **options) as served:
        yield served, folder


@pytest.fixture(scope="module")
def own(way):
    """Our own engine with the same checkpoint."""
    return own_engine(way[1])


def ask(scenario: Scenario, key: str, new_tokens: int = 1, **more):
    method, options = METHODS[key]
    return scenario.prompt.ask(method, new_tokens=new_tokens, **options, **more)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("key", METHODS)
def test_the_same_as_our_own_engine_and_the_reference(way, own, key, name):
    served, folder = way
    scenario, method = SCENARIOS[name](), METHODS[key][0]
    scenario.precompute(served, capture=True)
    own.precompute(scenario)
    wanted = own.prefill(scenario.prompt, method, METHODS[key][1])
    got = served.answer(ask(scenario, key))[0]
    assert "error" not in got.report
    assert got.report["recomputed"] == wanted.recomputed
    assert got.report["recompute_fraction"] == pytest.approx(wanted.recompute_fraction)
    assert (got.log_probs[0] - wanted.log_probs).abs().max().item() <= TOLERANCE
    if key in BEYOND_REFERENCE:
        return
    reference = Reference(folder)
    woven = reference.weave(scenario.pieces(reference), "random", 0.0, chosen=wanted.recomputed)
    assert (got.log_probs[0] - woven.log_probs).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("key", ["query-.05", "query-two-rounds", "query-measured", "cachecraft-1", "h2o"])
def test_the_same_question_again_and_another_one(way, own, key):
    """The first answer's blocks are in vLLM's prefix cache: for the same question they are taken, for no other.

    Nothing is captured, or the second answer would have other variants to choose from.
    """
    served, _ = way
    scenario = computed_in_context()
    scenario.precompute(served, capture=True)
    own.precompute(scenario)
    other = replace(scenario, prompt=Given(scenario.prompt.chunks))
    for one in (scenario, scenario, other, scenario):
        wanted = own.prefill(one.prompt, METHODS[key][0], METHODS[key][1])
        got = served.answer(ask(one, key, capture=False))[0]
        assert (got.log_probs[0] - wanted.log_probs).abs().max().item() <= TOLERANCE
        found = got.report.get("recomputed", [])  # vLLM's own cache may have all there is to weave
        assert found == [position for position in wanted.recomputed if position in set(found)]
        if not got.report.get("local_tokens", 1):
            assert found == wanted.recomputed


@pytest.mark.parametrize("key", ["query-.05", "query-two-rounds", "query-measured", "cachecraft-1"])
def test_a_question_that_is_half_in_vllms_cache(way, own, key):
    """The rest is woven as the whole was: what the question reads in the cached half is not what it read then."""
    served, _ = way
    if not served.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
        pytest.skip("nothing is found without a prefix cache")
    chunks = [tokens(count) for count in (33, 38, 48)]
    first = Given(chunks, system=tokens(11))
    order = [chunks[2], chunks[0], chunks[1]]
    scenario = Scenario(Given(order, question=tokens(5)), dict.fromkeys(chunks, first))
    scenario.precompute(served, capture=True)
    own.precompute(scenario)
    wanted = own.prefill(scenario.prompt, METHODS[key][0], METHODS[key][1])
    whole, rest = (served.answer(ask(scenario, key, capture=False))[0] for _ in range(2))
    cached = 0 if key == "query-two-rounds" else 96  # it takes nothing from there
    assert (whole.report["local_tokens"], rest.report["local_tokens"]) == (0, cached)
    assert rest.report["recomputed"] == [position for position in whole.report["recomputed"] if position >= cached]
    assert whole.report["recomputed"] == wanted.recomputed
    assert (rest.log_probs[0] - wanted.log_probs).abs().max().item() <= TOLERANCE


def test_several_methods_and_plain_requests_at_once(way, own):
    served, folder = way
    reference = Reference(folder)
    scenarios = [make() for make in islice(cycle(SCENARIOS.values()), len(METHODS))]
    for scenario in scenarios:
        scenario.precompute(served, capture=True)
        own.precompute(scenario)
    plain = [Given([tokens(70)]), Given([tokens(150)])]
    woven = [ask(scenario, key, new_tokens=4) for scenario, key in zip(scenarios, METHODS, strict=True)]
    got = served.answer(*woven[:5], plain[0].plain(4), *woven[5:], plain[1].plain(4))
    plain_got = [got.pop(5), got.pop()]
    for answer, scenario, (method, options) in zip(got, scenarios, METHODS.values(), strict=True):
        wanted = own.prefill(scenario.prompt, method, options)
        assert answer.report["recomputed"] == wanted.recomputed
        assert (answer.log_probs[0] - wanted.log_probs).abs().max().item() <= TOLERANCE
    for answer, prompt in zip(plain_got, plain, strict=True):
        assert (answer.log_probs[0] - reference.log_probs(prompt.ids)).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("name", ["in-context", "instruction", "last-missing"])
def test_what_is_stored_is_what_our_own_engine_stores(way, own, name):
    """New chunks with what they attend to, and chunks that were recomputed whole as variants of this context."""
    served, _ = way
    scenario = SCENARIOS[name]()
    before = set(own.records()), set(served.worker("chunkweave_records")[0])
    scenario.precompute(served, capture=True)
    own.precompute(scenario)
    served.answer(scenario.prompt.ask("cachecraft", alpha=4.0, focus=False))
    own.prefill(scenario.prompt, "cachecraft", {"alpha": 4.0, "focus": False}, keep=True)
    wanted = {key: record for key, record in own.records().items() if key not in before[0]}
    assert any(not record["exact"] for record in wanted.values())
    for records in served.worker("chunkweave_records"):
        found = {key: record for key, record in records.items() if key not in before[1]}
        assert found.keys() == wanted.keys()
        for key, record in found.items():
            assert record["exact"] == wanted[key]["exact"]
            assert (record["attention"] is None) == (wanted[key]["attention"] is None)
            if record["attention"] is None:
                continue
            expected = wanted[key]["attention"]
            assert list(record["attention"].pop("chunks")) == list(expected["chunks"])
            for field, value in record["attention"].items():
                values = [value] if isinstance(value, float) else list(value)
                assert values == pytest.approx(
                    [expected[field]] if isinstance(value, float) else list(expected[field]), rel=1e-3, abs=1e-5
                )


def test_without_capture_chunks_count_as_dependent_on_what_is_gone(way):
    """And what was captured counts: a chunk that is back behind the same chunks needs nothing."""
    served, _ = way
    chunks = [tokens(count) for count in (30, 40, 35)]
    served.answer(Given(chunks).ask("prefix", capture=True))
    again = served.answer(Given(chunks).ask("cachecraft"))[0].report
    begins = int(again["local_tokens"] > 0)  # BOS is in vLLM's own blocks
    assert (again["recomputed"], again["prefix_exact_tokens"]) == ([], 105 + begins)
    blind = [tokens(count) for count in (30, 40, 35)]
    served.answer(Given(blind).ask("prefix"))
    moved = served.answer(Given([blind[2], blind[0], blind[1]]).ask("cachecraft", focus=False))[0].report
    assert len(moved["recomputed"]) > len(blind[1]) + len(blind[2])
