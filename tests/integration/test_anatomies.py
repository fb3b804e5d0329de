"""Every declared family against its own forward: computed in full, recomputed in full, and shifted."""

import pytest
import torch
from transformers import DynamicCache

from chunkweave.calibration.fidelity import log_probabilities
from chunkweave.kv.segment import SegmentKV
from chunkweave.models.anatomy import FAMILIES
from chunkweave.models.huggingface import _halves_turned, _WideAngles
from chunkweave.planning.method import make_method
from chunkweave.planning.outcome import full_prefill_flops, prefill_flops
from chunkweave.prompt.parts import PartKind, Prompt
from tests.integration.weaving import Bench, close, make_bench, make_prompt
from tests.toys import toy_model

WINDOWED = ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "olmo3", "exaone4", "cohere2", "gpt_oss")
SCALED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
"""Kinds of RoPE whose angles depend on the position alone."""
CASES = {
    **{family: (family, {}) for family in FAMILIES},
    **{
        f"llama-{kind}": ("llama", {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}})
        for kind, more in SCALED.items()
    },
    **{f"{family}-in-windows": (family, {"sliding_window": 16}) for family in WINDOWED},
    "qwen2-in-windows": ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
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


@pytest.fixture(scope="module", params=sorted(CASES))
def bench(request) -> Bench:
    family, changes = CASES[request.param]
    return make_bench(toy_model(family, **changes))


def test_full_prefill_equals_the_models_own_forward(bench):
    bench.loaded.model.verify()
    prompt = make_prompt(SIZES, system=6)
    close(bench.log_probs(prompt, "full"), bench.own_log_probs(prompt))


def test_keys_come_back_from_where_they_were_rotated_to(bench):
    model = bench.loaded.model
    if model.anatomy.norms_behind_rope:
        pytest.skip("a norm follows")
    keys = torch.randn(9, model.geometry.num_kv_heads, model.geometry.head_dim)
    positions = torch.arange(40, 49)
    for layer in range(model.geometry.num_layers):
        close(model.unrotate_keys(layer, model.rotate_keys(layer, keys, positions), positions), keys)


@torch.inference_mode()
def test_many_tokens_are_rotated_as_few_are_to_the_bit(bench):
    model = bench.loaded.model
    heads, kv_heads, dim = (getattr(model.geometry, name) for name in ("num_heads", "num_kv_heads", "head_dim"))
    for _ in range(3):  # other positions at what may be the same address
        positions = torch.randint(0, 90, (20_000 // dim,))
        for layer in range(model.geometry.num_layers):
            for rotate, count in ((model.rotate_keys, kv_heads), (model.rotate_queries, heads)):
                states = torch.randn(len(positions), count, dim)
                pieces = zip(states.split(70), positions.split(70), strict=True)
                in_pieces = torch.cat([rotate(layer, some, at) for some, at in pieces])
                assert torch.equal(rotate(layer, states, positions), in_pieces)


@torch.inference_mode()
def test_rotating_whole_rows_rounds_as_rotating_halves_does():
    cos, sin, states = (torch.randn(shape).bfloat16() for shape in ((500, 64), (500, 64), (500, 3, 64)))
    positions = torch.arange(500)
    wide = _WideAngles().get("", positions, 3, cos, sin)
    assert torch.equal(_halves_turned(states, *wide), _halves_turned(states, cos[:, None], sin[:, None]))
    with torch.inference_mode(mode=False):
        assert _WideAngles().get("", positions, 3, cos, sin) is None, "it could not be part of a graph"


def test_segments_with_rotated_keys_are_woven_like_others(bench):
    model = bench.loaded.model
    if model.anatomy.norms_behind_rope:
        pytest.skip("a norm follows")
    prompt = bench.precompute(make_prompt(SIZES, system=6, seed=5))
    expected = bench.log_probs(prompt, "full-reuse")
    store = bench.runner.store
    for record in store.records():
        kv = store.get(record.id).kv.clone()
        positions = torch.arange(100, 100 + len(record))
        for layer in range(model.geometry.num_layers):
            kv[layer, 0] = model.rotate_keys(layer, kv[layer, 0], positions)
        store.remove(record.id)
        store.insert(record, SegmentKV(kv, keys_at=100))
    close(bench.log_probs(prompt, "full-reuse"), expected)


def test_decoding_goes_on_as_the_model_itself_does(bench):
    prompt = bench.precompute(make_prompt(SIZES, system=6, seed=3))
    woven = bench.decode(bench.prefill(prompt, "cacheblend", ratio=1.0), 12)
    with torch.inference_mode():
        ids = list(prompt.token_ids)
        for _ in range(12):
            ids.append(int(bench.loaded.model.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert woven == ids[len(prompt) :]


def test_what_is_expected_of_a_given_answer_is_what_the_model_itself_expects(bench):
    """As fidelity is measured: tokens behind the prompt, which share its cache."""
    prompt, answer = make_prompt(SIZES, system=6, seed=4), (11, 222, 3333, 44)
    (ours,) = log_probabilities(bench.loaded.model, bench.prefill(prompt, "full"), answer)
    with torch.inference_mode():
        ids = torch.tensor([[*prompt.token_ids, *answer[:-1]]])
        theirs = bench.loaded.model.model(ids, use_cache=False).logits[0, -len(answer) :]
    close(ours, torch.log_softmax(theirs.double(), -1))


def test_everything_recomputed_equals_the_models_own_forward(bench):
    prompt = bench.precompute(make_prompt(SIZES, system=6, seed=1))
    close(bench.log_probs(prompt, "cacheblend", ratio=1.0), bench.own_log_probs(prompt))


def test_nothing_recomputed_equals_chunks_that_the_model_itself_computed_at_their_places(bench):
    prompt = Prompt(make_prompt(SIZES, seed=2).parts[1:])
    for part in prompt.parts[:-1]:
        bench.prefill(Prompt((part,)), "full", keep=True)
    close(bench.log_probs(prompt, "full-reuse"), at_their_places(bench, prompt))


def test_the_work_is_that_of_tokens_that_see_no_further_than_their_windows(bench):
    geometry, prompt = bench.loaded.model.geometry, make_prompt(SIZES, system=6)
    work = bench.runner.prefill(prompt, make_method("full"), capture=False).work
    assert prefill_flops(geometry, list(work)) == full_prefill_flops(geometry, len(prompt))
    tokens, window = len(prompt), geometry.window(0) or len(prompt)
    assert work[0].visible_keys == sum(min(at + 1, window) for at in range(tokens))


@pytest.mark.parametrize(("family", "looked_at"), [("gemma3_text", [1, 3]), ("mistral", [0, 1, 2, 3])])
def test_what_the_question_reads_is_asked_of_layers_that_see_it(family, looked_at):
    """In Gemma 3 every other layer sees all; in Mistral none does, so that none knows better."""
    bench = make_bench(toy_model(family, sliding_window=16))
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    work = bench.prefill(prompt, "query", ratio=0.3).work
    assert [layer for layer in range(4) if work[layer].evidence_keys] == looked_at


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


def test_our_rope_kernel_is_not_used_where_a_gradient_is_needed(monkeypatch):
    """It has none: training an adapter on a GPU would miss what queries and keys say."""
    model, calls = toy_model().model, []

    def in_one_launch(states, *_args):
        calls.append(states.requires_grad)
        return states

    monkeypatch.setattr(model, "_turn_halves", in_one_launch)
    states = torch.randn(3, model.geometry.num_kv_heads, model.geometry.head_dim, requires_grad=True)
    positions = torch.tensor([0, 4, 5])
    model.rotate_keys(0, states, positions).sum().backward()
    assert states.grad is not None
    assert calls == []
    with torch.inference_mode():
        model.rotate_keys(0, states, positions)
    assert calls == [True]
