"""Requests that are wrong, ended early, many at once, or whose segments fail."""

import math
from random import Random

import pytest

from tests.vllm.conftest import SLICED
from tests.vllm.prompts import Given, Scenario, computed_alone, one_missing, tokens
from tests.vllm.serving import Ask, Served, sampling, serving

TOLERANCE = 5e-4


def nothing_is_held(served: Served) -> bool:
    """One more request lets the scheduler and the worker hear of what ended; then nobody must hold anything."""
    served.one(tokens(4))
    states = served.worker("chunkweave_state")
    assert all(served.worker("chunkweave_check"))
    return served.blocks_are_free() and all(state["jobs"] == state["woven"] == 0 for state in states)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([[1, 5]], "chunkweave must be an object"),
        ({"chunks": [[1, 500]]}, "the last chunk ends at 500"),
        ({"chunks": [[1, 5]], "neutral": math.inf}, "neutral must be a whole number"),
        ({"chunks": [[1, 5]], "method": "cacheblend:layers=4"}, "layer 4, but the model has 4 layers"),
    ],
    ids=["no object", "beyond the prompt", "not in JSON", "not in the model"],
)
def test_a_wrong_request_is_served_without_reuse_and_reported(sliced, reference, params, message):
    ids = Given([tokens(40)]).ids
    got = sliced.one(ids, params)
    assert message in got.report["error"]
    assert (got.log_probs[0] - reference.log_probs(ids)).abs().max().item() <= TOLERANCE


def test_reports_sum_to_the_prompt(sliced):
    scenario = one_missing(2)
    scenario.precompute(sliced)
    prompt = scenario.prompt
    report = sliced.answer(prompt.ask("cacheblend", 0.2))[0].report
    parts = [report[f"{name}_tokens"] for name in ("prefix_exact", "reused", "recomputed", "computed")]
    assert sum(parts) == report["prompt_tokens"] == len(prompt.ids)
    sizes = list(map(len, prompt.chunks))
    reused = sizes[1] + sizes[3]
    start = int(report["engine_cached_tokens"] > 0)  # BOS is in vLLM's own blocks, or is computed
    fixed = math.ceil(0.2 * reused)
    assert parts == [sizes[0] + start, reused - fixed, fixed, 1 - start + sizes[2] + 9]
    assert report["recomputed_tokens"] == len(report["recomputed"])
    layers = 4
    active = reused + (layers - 1) * report["recomputed_tokens"]  # one dense layer before the check
    assert report["recompute_fraction"] == pytest.approx(active / (layers * reused))


def test_several_answers_to_one_prompt(sliced, reference):
    scenario = computed_alone()
    scenario.precompute(sliced)
    ask = scenario.prompt.ask("cacheblend", 0.15, 4)
    parameters = sampling(ask)
    parameters.n, parameters.temperature, parameters.seed = 3, 1.0, 1
    (output,) = sliced.llm.generate([ask.prompt], parameters, use_tqdm=False)
    assert len(output.outputs) == 3
    assert nothing_is_held(sliced)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_segment_that_fails_is_computed_by_vllm(sliced, reference, layer):
    """In layer 0 all candidates are computed, so that not every weave reads it."""
    scenario = computed_alone()
    scenario.precompute(sliced)
    other = Given([tokens(80)])
    woven = scenario.prompt.ask("cacheblend", 0.15, new_tokens=3)
    with sliced.broken_layer(layer):
        got, plain, again = sliced.answer(woven, other.plain(3), woven)
    full = reference.log_probs(scenario.prompt.ids)
    for one, wanted in ((got, full), (again, full), (plain, reference.log_probs(other.ids))):
        assert (one.log_probs[0] - wanted).abs().max().item() <= TOLERANCE
    assert got.report.get("reused_tokens", 0) == 0
    assert nothing_is_held(sliced)
    exact = Given(scenario.prompt.chunks)  # of what vLLM computed after the failure, the store has exact segments
    error = sliced.answer(exact.ask("prefix"))[0].log_probs[0] - reference.log_probs(exact.ids)
    assert error.abs().max().item() <= TOLERANCE
    # Once segments can be read again, they are used again.
    mended = computed_alone()
    mended.precompute(sliced)
    assert sliced.answer(mended.prompt.ask("cacheblend", 0.15))[0].report["reused_tokens"] > 0


@pytest.fixture(scope="module")
def observed(checkpoint):
    """A server whose scheduler lives in this process, where it can be looked at."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with serving(checkpoint("llama"), environment=environment, extra={"weave_step_tokens": 1}, **SLICED) as served:
        yield served


def test_two_hundred_requests_with_aborts_leak_nothing(observed, reference):
    """Woven, exact and plain, over the same few chunks, ended at any step of their life."""
    rng = Random(7)
    scenario: Scenario = computed_alone()
    scenario.precompute(observed)
    assert nothing_is_held(observed)
    core = observed.llm.llm_engine.engine_core.engine_core
    free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    running: dict[str, Given | None] = {}
    sent, finished, aborted, checked = 0, 0, 0, 0
    while sent < 200 or running:
        while sent < 200 and len(running) < 12:
            chunks = rng.sample(scenario.prompt.chunks, rng.randint(1, 4))
            if rng.random() < 0.2:
                chunks.insert(rng.randint(0, len(chunks)), tokens(rng.randint(10, 60)))
            prompt = Given(chunks)
            kind = rng.choice(["cacheblend", "cacheblend", "epic", "full-reuse", "prefix", "plain", "wrong"])
            count = rng.randint(1, 6)
            if kind in ("plain", "wrong"):
                ask = Ask(prompt.ids, {"chunks": 1} if kind == "wrong" else None, count)
            else:
                ask = prompt.ask(kind, rng.choice([0.0, 0.15, 1.0]), new_tokens=count)
            running[observed.send(ask)] = prompt if kind in ("plain", "prefix", "wrong") else None
            sent += 1
        for name, got in observed.step().items():
            prompt = running.pop(name)
            finished += 1
            if prompt is not None:  # exact, whatever goes on around it
                error = (got.log_probs[0] - reference.log_probs(prompt.ids)).abs().max().item()
                assert error <= TOLERANCE
                checked += 1
        for name in [name for name in running if rng.random() < 0.05]:
            observed.abort(name)
            del running[name]
            aborted += 1
    observed.finish()
    assert min(aborted, checked, finished) > 20
    assert nothing_is_held(observed)
    assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert not core.scheduler.requests
    side = core.scheduler.connector._scheduler
    assert not side._requests
    assert not side._refused


def test_the_scheduler_knows_what_the_workers_hold(observed):
    scenario = computed_alone()
    scenario.precompute(observed)
    core = observed.llm.llm_engine.engine_core.engine_core
    stored = core.scheduler.connector._scheduler._stored
    assert observed.steps_until(lambda: set(stored._copies) == set(observed.worker("chunkweave_stored")[0]))
