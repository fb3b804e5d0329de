"""Woven first tokens against the reference and against chunkweave's own engine, for every family and way of serving.

Also what methods that look at attention choose. All are asked of one server for each way.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from math import ceil
from pathlib import Path

import pytest
import torch

from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.device import DeviceTier, HostMemory, moved_into
from chunkweave.tiers.host import HostTier
from chunkweave.vllm import worker
from tests.vllm.conftest import SLICED
from tests.vllm.environment import RUNNER_V2
from tests.vllm.own_engine import own_engine
from tests.vllm.prompts import (
    Given,
    Scenario,
    behind_an_instruction,
    computed_alone,
    computed_in_context,
    one_missing,
    question_as_chunks,
    tokens,
)
from tests.vllm.reference import Reference, Woven
from tests.vllm.serving import IN_PROCESS, TWO_RANKS, Got, serving

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
    "question-twice": question_as_chunks,
}
WAYS = {
    "llama-sliced": ("llama", {}),
    "qwen2-uncached": ("qwen2", {"enable_prefix_caching": False}),
    "qwen3-compiled": ("qwen3", {"enforce_eager": False}),
    "llama-two-ranks": ("llama", TWO_RANKS),
}

ATTENTION_METHODS = {
    "query-.05": ("query", {"ratio": 0.05}),
    "query-.3": ("query", {"ratio": 0.3}),
    "query-1": ("query", {"ratio": 1.0}),
    "query-all-tokens-late": ("query:whole:late", {"ratio": 0.2}),
    "query-stored": ("query:stored", {"ratio": 0.2}),
    "cachecraft-1": ("cachecraft:alpha=1", {}),
    "cachecraft-.5": ("cachecraft:alpha=0.5", {}),
    "cachecraft-unfocused": ("cachecraft:alpha=0.8:no-focus", {}),
    "set-cache": ("set-cache", {}),
}
METHODS = {
    **{f"cacheblend-{ratio}": ("cacheblend", {"ratio": ratio}) for ratio in RATIOS},
    **{method: (method, {"ratio": 0.3}) for method in ("full-reuse", "epic", "random")},
    **ATTENTION_METHODS,
}
BEYOND_REFERENCE = {"cachecraft-1", "cachecraft-.5", "set-cache"}
"""It is told positions only: not which were dropped on the way up, nor which were computed before the others."""

SOME_SCENARIOS, SOME_METHODS = tuple(SCENARIOS), tuple(METHODS)
if RUNNER_V2:  # its kernels are interpreted, and it takes no part in what a method chooses
    SOME_SCENARIOS = ("in-context", "middle-missing")
    SOME_METHODS = (
        "cacheblend-0.15",
        "cacheblend-1.0",
        "epic",
        "full-reuse",
        "query-.3",
        "cachecraft-1",
    )


@pytest.fixture(scope="module", params=WAYS)
def way(request, checkpoint):
    """A server and the folder of its model."""
    family, options = WAYS[request.param]
    folder = checkpoint(family)
    if request.param == "llama-sliced":
        yield request.getfixturevalue("sliced"), folder
        return
    with serving(folder, **options) as served:
        yield served, folder


def compare(got: Got, woven: Woven) -> None:
    assert (got.log_probs[0] - woven.log_probs).abs().max().item() <= TOLERANCE
    assert got.report is not None
    assert got.report["recomputed"] == woven.recomputed


@pytest.fixture(scope="module")
def own(way):
    """Our own engine with the same checkpoint."""
    return own_engine(way[1])


def ask(scenario: Scenario, key: str, new_tokens: int = 1, **more):
    method, options = METHODS[key]
    return scenario.prompt.ask(method, new_tokens=new_tokens, **options, **more)


@pytest.mark.parametrize("name", SOME_SCENARIOS)
@pytest.mark.parametrize("key", SOME_METHODS, ids=lambda key: f"attention-{key}" if key in ATTENTION_METHODS else key)
def test_the_same_as_our_own_engine_and_the_reference(way, own, key, name):
    served, folder = way
    reference, scenario, (method, options) = Reference(folder), SCENARIOS[name](), METHODS[key]
    scenario.precompute(served, capture=key in ATTENTION_METHODS)
    own.precompute(scenario)
    wanted = own.prefill(scenario.prompt, method, options)
    got = served.answer(ask(scenario, key))[0]
    assert "error" not in got.report
    assert got.report["recomputed"] == wanted.recomputed
    assert got.report["recompute_fraction"] == pytest.approx(wanted.recompute_fraction)
    assert got.tokens == [int(wanted.log_probs.argmax())]
    assert (got.log_probs[0] - wanted.log_probs).abs().max().item() <= TOLERANCE
    if key in BEYOND_REFERENCE:
        return
    pieces = scenario.pieces(reference)
    if key in ATTENTION_METHODS or method == "random":  # which the reference is told
        compare(got, reference.weave(pieces, "random", 0.0, chosen=wanted.recomputed))
    else:
        compare(got, reference.weave(pieces, method, options["ratio"]))
    if method == "random":
        shares = [ceil(0.3 * len(piece.token_ids)) for piece in pieces if piece.stored and not piece.exact]
        assert len(wanted.recomputed) == sum(shares)


def test_a_later_check_layer(way):
    served, folder = way
    reference, scenario = Reference(folder), computed_alone()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask("cacheblend:layers=2", 0.2))[0]
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


@pytest.mark.parametrize("kept", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_prefix_from_the_store_answers_to_the_bit_as_vllms_own_prefix_cache_does(checkpoint, kept):
    """In bfloat16, where another number of tokens to compute is rounded otherwise, and so are keys rotated twice."""
    first = [
        Given([tokens(40 + number), tokens(61), tokens(30 + 3 * number)], system=tokens(12)) for number in range(10)
    ]
    again = [Given(one.chunks, tokens(5 + 3 * number), one.system) for number, one in enumerate(first)]
    with serving(checkpoint("llama"), dtype="bfloat16", kv_cache_dtype=kept) as served:
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


# ---------------------------------------------------------------- methods that look at attention


@pytest.mark.parametrize("key", ["query-.05", "cachecraft-1"])
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
        wanted = own.prefill(one.prompt, *ATTENTION_METHODS[key])
        got = served.answer(ask(one, key, capture=False))[0]
        assert (got.log_probs[0] - wanted.log_probs).abs().max().item() <= TOLERANCE
        found = got.report.get("recomputed", [])  # vLLM's own cache may have all there is to weave
        assert found == [position for position in wanted.recomputed if position in set(found)]
        if not got.report.get("local_tokens", 1):
            assert found == wanted.recomputed


@pytest.mark.parametrize("key", ["query-.05", "cachecraft-1"])
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
    wanted = own.prefill(scenario.prompt, *ATTENTION_METHODS[key])
    whole, rest = (served.answer(ask(scenario, key, capture=False))[0] for _ in range(2))
    assert (whole.report["local_tokens"], rest.report["local_tokens"]) == (0, 96)
    assert rest.report["recomputed"] == [position for position in whole.report["recomputed"] if position >= 96]
    assert whole.report["recomputed"] == wanted.recomputed
    assert (rest.log_probs[0] - wanted.log_probs).abs().max().item() <= TOLERANCE


def test_all_methods_and_plain_requests_at_once(way, own):
    served, folder = way
    reference = Reference(folder)
    scenarios = [make() for make in islice(cycle(SCENARIOS.values()), len(METHODS))]
    for scenario in scenarios:
        scenario.precompute(served, capture=True)
        own.precompute(scenario)
    plain = [Given([tokens(70)]), Given([tokens(150)]), scenarios[0].prompt]
    woven = [ask(scenario, key, new_tokens=4) for scenario, key in zip(scenarios, METHODS, strict=True)]
    got = served.answer(*woven[:5], *(prompt.plain(4) for prompt in plain), *woven[5:])
    plain_got = got[5:8]
    for answer, scenario, (method, options) in zip(got[:5] + got[8:], scenarios, METHODS.values(), strict=True):
        wanted = own.prefill(scenario.prompt, method, options)
        assert answer.report["recomputed"] == wanted.recomputed
        assert (answer.log_probs[0] - wanted.log_probs).abs().max().item() <= TOLERANCE
    for answer, prompt in zip(plain_got, plain, strict=True):
        assert (answer.log_probs[0] - reference.log_probs(prompt.ids)).abs().max().item() <= TOLERANCE
        assert answer.report is None


@pytest.mark.parametrize("name", ["in-context", "instruction", "last-missing"])
def test_what_is_stored_is_what_our_own_engine_stores(way, own, name):
    """New chunks with what they attend to, and chunks that were recomputed whole as variants of this context."""
    served, _ = way
    scenario = SCENARIOS[name]()
    before = set(own.records()), set(served.worker("chunkweave_records")[0])
    scenario.precompute(served, capture=True)
    own.precompute(scenario)
    served.answer(scenario.prompt.ask("cachecraft:alpha=4:no-focus"))
    own.prefill(scenario.prompt, "cachecraft:alpha=4:no-focus", {}, keep=True)
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
    moved = served.answer(Given([blind[2], blind[0], blind[1]]).ask("cachecraft:no-focus"))[0].report
    assert len(moved["recomputed"]) > len(blind[1]) + len(blind[2])


# ---------------------------------------------------------------- half precision


class Half:
    """The reference with weights in bfloat16, and how far its answers are off if every value is rounded once more."""

    def __init__(self, folder: Path) -> None:
        self.reference, *self._near = (Reference(folder) for _ in range(4))
        for number, one in enumerate((self.reference, *self._near)):
            generator = torch.Generator().manual_seed(number)
            for name, exact in one.weights.items():
                error = 2**-8 * (2 * torch.rand(exact.shape, generator=generator) - 1) if number else 0
                one.weights[name] = exact.bfloat16().float() * (1 + error)

    def bounded(self, weave: Callable[[Reference], torch.Tensor]) -> tuple[torch.Tensor, float]:
        """What `weave` has of the reference, and a bound of bfloat16's error.

        bfloat16 rounds by up to 2 ** -8 of a value. Weights that are off by as much show how roundings add up over the
        layers. Activations are rounded as often, and the largest of 1000 errors varies: four times that is the bound.
        Errors of reuse are several times as large (`test_in_bfloat16_the_bound_tells_reuse_from_full_prefill`).
        """
        wanted = weave(self.reference)
        return wanted, 4 * max((weave(near) - wanted).abs().max().item() for near in self._near)


@pytest.fixture(scope="module")
def half(checkpoint):
    with serving(checkpoint("llama"), dtype="bfloat16", **SLICED, **IN_PROCESS) as served:
        assert served.worker("chunkweave_state")[0]["weaves"]
        yield served, Half(checkpoint("llama"))


@pytest.mark.parametrize("name", SOME_SCENARIOS)
@pytest.mark.parametrize(("method", "ratio"), [("full-reuse", 0), ("cacheblend", 0.15), ("query", 0.2), ("epic", 0.3)])
def test_in_bfloat16_only_roundings_differ(half, name, method, ratio):
    """Near ties are chosen otherwise, so the reference is told what is recomputed."""
    served, exact = half
    scenario = SCENARIOS[name]()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask(method, ratio))[0]
    chosen = got.report["recomputed"]
    wanted, bound = exact.bounded(
        lambda reference: reference.weave(scenario.pieces(reference), "random", 0.0, chosen=chosen).log_probs
    )
    assert (got.log_probs[0] - wanted).abs().max().item() <= bound
    if method == "cacheblend":
        pieces = scenario.pieces(exact.reference)
        assert len(set(chosen) & set(exact.reference.weave(pieces, method, ratio).recomputed)) >= 0.8 * len(chosen)


def test_in_bfloat16_the_bound_tells_reuse_from_full_prefill(half):
    served, exact = half
    scenario = computed_in_context()
    scenario.precompute(served)
    reused, full = (served.answer(scenario.prompt.ask(method))[0].log_probs[0] for method in ("full-reuse", "full"))
    wanted, bound = exact.bounded(lambda reference: reference.log_probs(scenario.prompt.ids))
    assert (full - wanted).abs().max().item() <= bound < (reused - wanted).abs().max().item()
