"""First tokens and chosen positions of each model family, against a reference of its own and our own engine."""

from contextlib import contextmanager, suppress

import pytest

from tests.vllm.checkpoints import make_checkpoint
from tests.vllm.own_engine import own_engine
from tests.vllm.prompts import behind_an_instruction, computed_alone, computed_in_context, one_missing
from tests.vllm.reference_families import NearTieError, reference_of
from tests.vllm.serving import IN_PROCESS, serving

TOLERANCE = 5e-4
FAMILIES = {
    "qwen3_moe": {},
    "mixtral": {},
    "phi3": {},
    "mistral": {"sliding_window": 48},
    "gemma3_text": {},
    "gemma": {},
    "gemma2": {},
    "qwen2_moe": {},
    "olmoe": {},
    "glm4": {},
    "nemotron": {},
    "stablelm": {},
    "exaone4": {},
    "cohere": {},
    "gpt_oss": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {},
    "glm": {},
    "phi": {},
    "phi3 longrope": {
        "original_max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + place / 8 for place in range(16)],
            "long_factor": [4.0] * 16,
            "original_max_position_embeddings": 1024,
        },
    },
}
"""With what is changed in their configurations; the first word is the family."""
CASES = {
    "nothing": (computed_alone, "cacheblend", 0.0),
    "some": (computed_alone, "cacheblend", 0.15),
    "all": (computed_alone, "cacheblend", 1.0),
    "in context": (computed_in_context, "cacheblend", 0.15),
    "instruction": (behind_an_instruction, "cacheblend", 0.3),
    "one missing": (lambda: one_missing(2), "cacheblend", 0.15),
    "by the question": (computed_in_context, "query", 0.2),
    "by the question, one missing": (lambda: one_missing(2), "query", 0.2),
}
"""Scenario, method and recompute ratio."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    with served_and_known(tmp_path_factory.mktemp("family"), request.param) as three:
        yield three


@contextmanager
def served_and_known(folder, family):
    """A server, what its model computes, and our own engine with it."""
    make_checkpoint(folder, family.split()[0], **FAMILIES.get(family, {}))
    own = own_engine(folder)  # before vLLM changes classes of transformers in this process
    with serving(folder, max_num_batched_tokens=64, max_num_seqs=16, **IN_PROCESS) as served:
        assert served.worker("chunkweave_state")[0]["weaves"]
        yield served, reference_of(folder), own


def without_ties(draw):
    """What `draw` makes of a new prompt; those on which rounding chooses experts are passed over."""
    for _ in range(20):
        with suppress(NearTieError):
            return draw()
    raise AssertionError("experts nearly tie on every prompt")


@pytest.mark.parametrize("case", CASES)
def test_first_tokens_and_chosen_positions(family, case):
    agree(*family, case)


def agree(served, reference, own, case):
    """A server, the reference and, if there is one, our own engine."""
    make_scenario, method, ratio = CASES[case]

    def expect():
        scenario = make_scenario()
        pieces = scenario.pieces(reference)
        if own is None:
            wanted = reference.weave(pieces, method, ratio)
            return scenario, wanted, wanted
        own.precompute(scenario)
        chosen = own.prefill(scenario.prompt, method, {"ratio": ratio})
        if method == "query":  # the reference is told what to compute again
            return scenario, chosen, reference.weave(pieces, "random", 0.0, chosen=chosen.recomputed)
        return scenario, chosen, reference.weave(pieces, method, ratio)

    scenario, chosen, wanted = without_ties(expect)
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask(method, ratio))[0]
    assert "error" not in got.report
    assert got.report["recomputed"] == chosen.recomputed == wanted.recomputed
    for log_probs in (chosen.log_probs, wanted.log_probs):
        assert (got.log_probs[0] - log_probs).abs().max().item() <= TOLERANCE


def test_plain_requests_and_exact_prefixes(family):
    agree_exactly(*family)


def agree_exactly(served, reference, _own):
    def expect():
        scenario = behind_an_instruction()
        return scenario, reference.log_probs(scenario.prompt.ids)

    scenario, wanted = without_ties(expect)
    scenario.precompute(served)
    for ask in (scenario.prompt.plain(), scenario.prompt.ask("prefix")):
        assert (served.answer(ask)[0].log_probs[0] - wanted).abs().max().item() <= TOLERANCE
