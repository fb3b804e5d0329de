"""Weights of 8 and 4 bits: woven answers are held to vLLM's own, and segments are apart."""

import pytest
from transformers import AutoConfig

from chunkweave.models.fingerprint import fingerprint_folder
from tests.vllm.checkpoints import QUANTIZATIONS, make_checkpoint, quantize_checkpoint
from tests.vllm.conftest import SLICED
from tests.vllm.prompts import computed_alone, computed_in_context, one_missing
from tests.vllm.reference import Reference
from tests.vllm.serving import IN_PROCESS, WIDE, serving

TOLERANCE, OWN_TOLERANCE = 0.3, 0.1
"""In bfloat16, some with activations rounded to 8 bits; held to unrounded activations, and to vLLM's own answers."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("whole"), "llama", initializer_range=0.08)


@pytest.fixture(scope="module", params=QUANTIZATIONS)
def folders(request, whole, tmp_path_factory):
    """With weights of few bits, and with the same rounded weights in float32."""
    return quantize_checkpoint(whole, tmp_path_factory.mktemp("quantized"), request.param)


@pytest.fixture(scope="module")
def served(folders):
    if not WIDE:
        pytest.skip("without AVX-512 vLLM has no weights of 4 bits, and its answers with 8 bits are far off")
    with serving(folders[0], **SLICED, **IN_PROCESS, dtype="bfloat16") as running:
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
    alike = next((at for at, (one, other) in enumerate(zip(got.tokens, own.tokens, strict=True)) if one != other), 3)
    assert (got.log_probs - own.log_probs)[: alike + 1].abs().max().item() <= OWN_TOLERANCE, "up to a tie"


@pytest.mark.parametrize(("method", "ratio"), [("full-reuse", 0.0), ("cacheblend", 0.15), ("query", 0.2)])
def test_woven_answers_follow_from_the_rounded_weights(served, folders, method, ratio):
    reference, scenario = Reference(folders[1]), computed_in_context()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask(method, ratio))[0]
    how = "cacheblend" if method == "cacheblend" else "random"
    woven = reference.weave(scenario.pieces(reference), how, ratio, chosen=got.report["recomputed"])
    assert (got.log_probs[0] - woven.log_probs).abs().max().item() <= TOLERANCE
    full = reference.log_probs(scenario.prompt.ids)
    assert (got.log_probs[0] - full).abs().max().item() > 2 * TOLERANCE


def test_segments_of_rounded_weights_are_apart(whole, folders):
    names = {fingerprint_folder(one, AutoConfig.from_pretrained(one), "bfloat16") for one in (whole, folders[0])}
    assert len(names) == 2
