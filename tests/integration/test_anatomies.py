"""Every declared family against its own forward: computed in full, recomputed in full, and shifted."""

import pytest
import torch
from transformers import DynamicCache

from chunkweave.chunking.prompt import PartKind, Prompt
from chunkweave.models.anatomy import FAMILIES
from chunkweave.testing import toy_model
from tests.integration.weaving import Bench, make_bench, make_prompt

CASES = {
    **{family: (family, {}) for family in FAMILIES},
    "cohere-with-norms": ("cohere", {"use_qk_norm": True}),
    "phi3-within-short-angles": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [4.0] * 8,
            },
            "original_max_position_embeddings": 128,
        },
    ),
    "phi-with-norms": ("phi", {"qk_layernorm": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "stablelm-with-norms": ("stablelm", {"qk_layernorm": True}),
}
SIZES = (17, 23, 9)
CLOSE = 1e-4


@pytest.fixture(scope="module", params=sorted(CASES))
def bench(request) -> Bench:
    family, changes = CASES[request.param]
    return make_bench(toy_model(family, **changes))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max().item() <= CLOSE


def test_full_prefill_equals_the_models_own_forward(bench):
    bench.loaded.model.verify()
    prompt = make_prompt(SIZES, system=6)
    close(bench.log_probs(prompt, "full"), bench.own_log_probs(prompt))


def test_everything_recomputed_equals_the_models_own_forward(bench):
    prompt = make_prompt(SIZES, system=6, seed=1)
    bench.precompute(prompt)
    close(bench.log_probs(prompt, "cacheblend", ratio=1.0), bench.own_log_probs(prompt))


def test_nothing_recomputed_equals_chunks_that_the_model_itself_computed_at_their_places(bench):
    prompt = Prompt(make_prompt(SIZES, seed=2).parts[1:])
    for part in prompt.parts[:-1]:
        bench.prefill(Prompt((part,)), "full", keep=True)
    close(bench.log_probs(prompt, "full-reuse"), at_their_places(bench, prompt))


def at_their_places(bench: Bench, prompt: Prompt) -> torch.Tensor:
    """Attention depends on distances alone, so a chunk can be computed where it will stand, with nothing before it."""
    model, past = bench.loaded.model.model, DynamicCache()
    with torch.inference_mode():
        for part, span in zip(prompt.parts, prompt.spans(), strict=True):
            positions = torch.arange(span.start, span.stop)[None]
            ids = torch.tensor([part.token_ids])
            if part.kind is PartKind.QUESTION:
                logits = model(ids, position_ids=positions, past_key_values=past).logits[0, -1]
                return torch.log_softmax(logits.float(), -1)
            own = model(ids, position_ids=positions, past_key_values=DynamicCache(), use_cache=True).past_key_values
            for number, layer in enumerate(own.layers):
                past.update(layer.keys, layer.values, number)
    raise AssertionError("a prompt has a question")
