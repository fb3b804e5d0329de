"""Woven first tokens against the reference and against chunkweave's own engine, for every family and way of serving."""

from functools import partial
from math import ceil

import pytest
import torch
from transformers import AutoModelForCausalLM

from chunkweave.models.fingerprint import fingerprint_folder
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.loading import LoadedModel, bundled_tokenizer
from chunkweave.prompt.parts import Prompt
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.device import DeviceTier, HostMemory, moved_into
from chunkweave.tiers.host import HostTier
from chunkweave.vllm import worker
from chunkweave.vllm.request import Defaults, parse
from tests.integration.weaving import Bench, make_bench
from tests.vllm.checkpoints import BOS
from tests.vllm.conftest import SLICED
from tests.vllm.prompts import (
    Given,
    Scenario,
    behind_an_instruction,
    computed_alone,
    computed_in_context,
    one_missing,
    tokens,
)
from tests.vllm.reference import Reference, Woven
from tests.vllm.serving import IN_PROCESS, Got, serving

TOLERANCE = 5e-4
BLOCK_SIZE = 32
RATIOS = (0.0, 0.05, 0.15, 0.5, 1.0)
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


def compare(got: Got, woven: Woven) -> None:
    assert (got.log_probs[0] - woven.log_probs).abs().max().item() <= TOLERANCE
    assert got.report is not None
    assert got.report["recomputed"] == woven.recomputed


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_cacheblend(way, name, ratio):
    served, folder = way
    reference, scenario = Reference(folder), SCENARIOS[name]()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask("cacheblend", ratio))[0]
    compare(got, reference.weave(scenario.pieces(reference), "cacheblend", ratio))


@pytest.mark.parametrize("method", ["full-reuse", "epic", "random"])
@pytest.mark.parametrize("name", ["alone", "in-context", "middle-missing"])
def test_other_methods(way, method, name):
    served, folder = way
    reference, scenario = Reference(folder), SCENARIOS[name]()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask(method, 0.3))[0]
    pieces = scenario.pieces(reference)
    if method == "random":  # which tokens are drawn is checked against our own engine; here that they are used
        shares = [ceil(0.3 * len(piece.token_ids)) for piece in pieces if piece.stored and not piece.exact]
        assert len(got.report["recomputed"]) == sum(shares)
    compare(got, reference.weave(pieces, method, 0.3, chosen=got.report["recomputed"]))


def test_a_later_check_layer(way):
    served, folder = way
    reference, scenario = Reference(folder), computed_alone()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask("cacheblend", 0.2, check_layers=[2]))[0]
    compare(got, reference.weave(scenario.pieces(reference), "cacheblend", 0.2, check_layer=2))


BLOCK_BYTES = 32 * 4 * 2 * 2 * 32 * 4
"""A block of 32 tokens: 4 layers of keys and values, 2 heads of 32 dimensions, float32."""


def small_device(config, _fingerprint, device, streams, _cost) -> TieredStore:
    """The CPU's memory stands in for a GPU's, in which four blocks fit; the rest goes to the host's."""
    budget_bytes = 4 * BLOCK_BYTES
    on_device = SegmentStore(DeviceTier(device, budget_bytes=budget_bytes, streams=streams), budget_bytes=budget_bytes)
    host = SegmentStore(HostTier(partial(moved_into, HostMemory())), budget_bytes=config.host_budget_bytes)
    return TieredStore([Level("device", on_device), Level("host", host)])


def test_what_lies_on_the_device_is_woven_from_there_and_the_rest_from_the_host(checkpoint, monkeypatch):
    monkeypatch.setattr(worker, "open_store", small_device)
    reference, scenario = Reference(checkpoint("llama")), computed_alone()
    with serving(checkpoint("llama"), **SLICED, **IN_PROCESS) as served:
        scenario.precompute(served)
        served.worker("chunkweave_state")  # when all of it is copied
        got = served.answer(scenario.prompt.ask("cacheblend", 0.3))[0]
        assert served.worker("chunkweave_check") == [True]
    compare(got, reference.weave(scenario.pieces(reference), "cacheblend", 0.3))
    assert set(got.report["hits"]) - {"vllm"} == {"device", "host"}


@pytest.mark.parametrize("name", SCENARIOS)
def test_prefix_is_exact(way, name):
    served, folder = way
    scenario = SCENARIOS[name]()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask("prefix"))[0]
    assert (got.log_probs[0] - Reference(folder).log_probs(scenario.prompt.ids)).abs().max().item() <= TOLERANCE
    exact = 1 + sum(map(len, scenario.exact))
    assert got.report["prefix_exact_tokens"] == (exact // BLOCK_SIZE * BLOCK_SIZE if scenario.exact else 0)


def test_prefix_from_the_store_answers_to_the_bit_as_vllms_own_prefix_cache_does(checkpoint):
    """In bfloat16, where another number of tokens to compute is rounded otherwise, and so are keys rotated twice."""
    first = [
        Given([tokens(40 + number), tokens(61), tokens(30 + 3 * number)], system=tokens(12)) for number in range(10)
    ]
    again = [Given(one.chunks, tokens(5 + 3 * number), one.system) for number, one in enumerate(first)]
    with serving(checkpoint("llama"), dtype="bfloat16") as served:
        cached = []
        for one, other in zip(first, again, strict=True):
            served.answer(one.plain())
            before = served.metric("vllm:prefix_cache_hits")
            got = served.answer(other.plain(8))[0]
            cached.append((got, served.metric("vllm:prefix_cache_hits") - before))
        assert served.blocks_are_free()
        for one in first:
            served.answer(one.ask("prefix"))
        assert served.blocks_are_free()
        for other, (own, hits) in zip(again, cached, strict=True):
            got = served.answer(other.ask("prefix", None, 8))[0]
            assert got.report["local_tokens"] == 0, "it is from the store"
            assert got.report["computed_tokens"] == len(other.ids) - hits
            assert got.tokens == own.tokens
            assert torch.equal(got.log_probs, own.log_probs)


def test_several_woven_and_plain_requests_at_once(way):
    served, folder = way
    reference = Reference(folder)
    scenarios = [computed_alone(), one_missing(1), computed_in_context(), behind_an_instruction(), one_missing(0)]
    for scenario in scenarios:
        scenario.precompute(served)
    plain = [Given([tokens(70)]), Given([tokens(150)]), scenarios[0].prompt]
    woven = [
        scenario.prompt.ask("cacheblend", ratio, new_tokens=5)
        for scenario, ratio in zip(scenarios, RATIOS, strict=True)
    ]
    asks = [woven[0], plain[0].plain(5), woven[1], woven[2], plain[1].plain(5), woven[3], plain[2].plain(5), woven[4]]
    answers = dict(zip(map(id, asks), served.answer(*asks), strict=True))
    for scenario, ask, ratio in zip(scenarios, woven, RATIOS, strict=True):
        compare(answers[id(ask)], reference.weave(scenario.pieces(reference), "cacheblend", ratio))
    for prompt, ask in zip(plain, (asks[1], asks[4], asks[6]), strict=True):
        error = (answers[id(ask)].log_probs[0] - reference.log_probs(prompt.ids)).abs().max().item()
        assert error <= TOLERANCE
        assert answers[id(ask)].report is None


@pytest.fixture(scope="module")
def own(way) -> Bench:
    """Our own engine with the same checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(way[1], dtype=torch.float32, attn_implementation="sdpa")
    fingerprint = fingerprint_folder(way[1], model.config, "float32")
    return make_bench(LoadedModel(HuggingFaceModel(model.eval()), bundled_tokenizer(), fingerprint, "own"))


def as_prompt(given: Given, own: Bench) -> Prompt:
    params = {"chunks": given.spans}
    fingerprint = own.loaded.fingerprint
    return parse(params, given.ids, fingerprint=fingerprint, salt="", start=(BOS,), defaults=Defaults()).prompt


@pytest.mark.parametrize(
    ("method", "ratio"),
    [("cacheblend", 0.15), ("cacheblend", 0.5), ("epic", 0.15), ("random", 0.15), ("full-reuse", 0)],
)
@pytest.mark.parametrize("name", ["alone", "in-context", "middle-missing"])
def test_the_same_as_our_own_engine(way, own, method, ratio, name):
    served, _ = way
    scenario: Scenario = SCENARIOS[name]()
    scenario.precompute(served)
    for first in {id(prompt): prompt for prompt in scenario.seen.values()}.values():
        own.prefill(as_prompt(first, own), "full", keep=True)
    prefilled = own.prefill(as_prompt(scenario.prompt, own), method, ratio=ratio)
    got = served.answer(scenario.prompt.ask(method, ratio))[0]
    log_probs = torch.log_softmax(prefilled.logits, -1)
    assert (got.log_probs[0] - log_probs).abs().max().item() <= TOLERANCE
    assert got.tokens == [int(prefilled.logits.argmax())]
    assert got.report["recomputed"] == [position for span in prefilled.recomputed for position in span.positions()]
