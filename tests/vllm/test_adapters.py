"""LoRA adapters: each one's chunks are its own, and weaves compute with it, whatever else is in a step."""

from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest

from tests.integration.adapter_files import write_adapter
from tests.vllm.conftest import SLICED
from tests.vllm.prompts import Given, alone, computed_alone, tokens
from tests.vllm.serving import Served, serving

TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def make_adapter(checkpoint):
    """Writes adapters for the tiny Llama whose answers differ from its own by far."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    targets = ["q_proj", "v_proj", "k_proj", "o_proj"]
    return lambda folder, seed: write_adapter(folder, model, seed=seed, size=0.2, targets=targets)


@pytest.fixture(scope="module")
def adapters(make_adapter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(f"n{n}", n, str(make_adapter(folder / str(n), n))) for n in (1, 2)]


OPTIONS = {**SLICED, "enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def adapted(checkpoint):
    with serving(checkpoint("llama"), **OPTIONS, max_loras=2) as served:
        yield served


@pytest.fixture(scope="module")
def unplugged(checkpoint):
    with serving(checkpoint("llama"), plugged=False, **OPTIONS, max_loras=2) as served:
        yield served


def stored(served: Served, scenario, lora: LoRARequest | None) -> None:
    for chunk in scenario.prompt.chunks:
        served.answer(replace(alone(chunk).ask(), lora=lora))


@pytest.mark.parametrize("method", ["cacheblend", "query", "prefix"])
def test_all_recomputed_is_what_vllm_computes_with_the_adapter(adapted, unplugged, adapters, method):
    for lora in (None, *adapters):
        scenario = computed_alone()
        stored(adapted, scenario, lora)
        ratio = None if method == "prefix" else 1.0
        got = adapted.answer(replace(scenario.prompt.ask(method, ratio), lora=lora))[0]
        wanted = unplugged.answer(replace(scenario.prompt.plain(), lora=lora))[0]
        assert got.report["prefix_exact_tokens"] + got.report["recomputed_tokens"] > 0
        assert (got.log_probs - wanted.log_probs).abs().max().item() <= TOLERANCE


def test_woven_beside_requests_of_others_it_is_as_woven_alone(adapted, adapters):
    """All have adapters: beside these, vLLM's CPU kernels compute rows without one with the last of them."""
    scenario = computed_alone()
    for lora in adapters:
        stored(adapted, scenario, lora)
    asks = [replace(scenario.prompt.ask("cacheblend", 0.15, 3), lora=lora) for lora in adapters]
    others = [replace(Given([tokens(70)]).plain(12), lora=lora) for lora in reversed(adapters)]
    lone = [adapted.answer(ask)[0] for ask in (*others, *asks)]
    for got, wanted in zip(adapted.answer(*others, *asks), lone, strict=True):
        assert got.tokens == wanted.tokens
        assert (got.log_probs - wanted.log_probs).abs().max().item() <= TOLERANCE
    assert lone[2].tokens != lone[3].tokens


def test_one_that_has_no_place_is_computed_by_vllm(checkpoint, unplugged, adapters):
    first, second = adapters
    with serving(checkpoint("llama"), **OPTIONS, max_loras=1, max_cpu_loras=2) as served:
        scenario = computed_alone()
        stored(served, scenario, first)
        ask = replace(scenario.prompt.ask("cacheblend", 1.0), lora=first)
        running = served.send(replace(Given([tokens(20)]).plain(30), lora=second))
        served.step()
        name = served.send(ask)
        got = served.finish()
        wanted = unplugged.answer(replace(scenario.prompt.plain(), lora=first))[0]
        assert running in got
        assert (got[name].log_probs - wanted.log_probs).abs().max().item() <= TOLERANCE


def test_changed_files_are_never_reused(adapted, make_adapter, tmp_path):
    lora = LoRARequest("changing", 3, str(make_adapter(tmp_path / "one", 5)))
    scenario = computed_alone()
    stored(adapted, scenario, lora)
    make_adapter(tmp_path / "other", 6)
    (tmp_path / "other" / "adapter_model.safetensors").rename(tmp_path / "one" / "adapter_model.safetensors")
    report = adapted.answer(replace(scenario.prompt.ask("full-reuse"), lora=lora))[0].report
    assert "have changed since its first request" in report["error"]
