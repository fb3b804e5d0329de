"""Weights of 8 bits (compressed-tensors): woven answers are held to vLLM's own, and segments are apart."""

import pytest
from transformers import AutoConfig

from chunkweave.models.fingerprint import fingerprint_folder
from tests.vllm.checkpoints import make_checkpoint, quantize_checkpoint
from tests.vllm.conftest import SLICED
from tests.vllm.prompts import computed_alone, computed_in_context, one_missing
from tests.vllm.reference import Reference
from tests.vllm.serving import IN_PROCESS, serving

TOLERANCE, OWN_TOLERANCE = 0.3, 0.1
"""In bfloat16, with activations rounded to 8 bits; held to unrounded activations, and to vLLM's own answers."""


class Dequantized(Reference):
    """Computes with the rounded weights in float32; activations are not rounded."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        for name in [name for name in self.weights if f"{name}_scale" in self.weights]:
            self.weights[name] = self.weights[name] * self.weights.pop(f"{name}_scale")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("whole"), "llama", initializer_range=0.08)


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory):
    return quantize_checkpoint(whole, tmp_path_factory.mktemp("int8"))


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder, **SLICED, **IN_PROCESS, dtype="bfloat16") as running:
        assert running.worker("chunkweave_state")[0]["weaves"]
        yield running


@pytest.mark.parametrize("make", [computed_alone, computed_in_context, lambda: one_missing(2)])
@pytest.mark.parametrize("method", ["cacheblend", "query"])
def test_all_recomputed_is_vllms_own_answer(served, make, method):
    scenario = make()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask(method, 1.0, 4))[0]
    own = served.answer(scenario.prompt.plain(4))[0]
    assert got.report["recomputed_tokens"] > 0
    assert got.tokens == own.tokens
    assert (got.log_probs - own.log_probs).abs().max().item() <= OWN_TOLERANCE


@pytest.mark.parametrize(("method", "ratio"), [("full-reuse", 0.0), ("cacheblend", 0.15), ("query", 0.2)])
def test_woven_answers_follow_from_the_rounded_weights(served, folder, method, ratio):
    reference, scenario = Dequantized(folder), computed_in_context()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask(method, ratio))[0]
    how = "cacheblend" if method == "cacheblend" else "random"
    woven = reference.weave(scenario.pieces(reference), how, ratio, chosen=got.report["recomputed"])
    assert (got.log_probs[0] - woven.log_probs).abs().max().item() <= TOLERANCE
    full = reference.log_probs(scenario.prompt.ids)
    assert (got.log_probs[0] - full).abs().max().item() > 2 * TOLERANCE


def test_segments_of_rounded_weights_are_apart(whole, folder):
    names = {fingerprint_folder(one, AutoConfig.from_pretrained(one), "bfloat16") for one in (whole, folder)}
    assert len(names) == 2
