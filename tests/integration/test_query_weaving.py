"""The method `query`: what it recomputes is what the question reads, and all of it is full prefill."""

import time
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import pytest
import torch

from chunkweave.config import Combine, QueryConfig, ReuseConfig, WatchedLayers
from chunkweave.fusion.rows import ActiveRows
from chunkweave.kv.request_cache import Placement, RequestCache
from chunkweave.kv.segment import SegmentSource
from chunkweave.planning.methods.query import QueryAware
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from tests.integration.weaving import Bench, alone, make_bench, make_prompt, run_pass
from tests.toys import Link, ThrottledTier, toy_model

SIZES = (17, 23, 9, 31)
RULES = [
    (QueryConfig(), {}),
    (QueryConfig(tail=None, layers=WatchedLayers.ALL), {"over_heads": Combine.SUM}),
    (QueryConfig(tail=1, layers=WatchedLayers.FIRST_THIRD), {}),
    (QueryConfig(tail=3, layers=WatchedLayers.LATE), {"over_tokens": Combine.MAX, "over_heads": Combine.SUM}),
    (QueryConfig(tail=None), {"over_layers": Combine.MAX, "layers": (0, 2)}),
]
"""Settings of the method, and what its plan is made to watch otherwise."""


class Watching(QueryAware):
    """`query` whose plans watch otherwise."""

    def __init__(self, config: ReuseConfig, watched: dict) -> None:
        super().__init__(config)
        self.watched = watched

    def plan(self, lookup, geometry) -> Plan:
        made = super().plan(lookup, geometry)
        watching, *rest = made.passes
        watch = replace(watching.watch, **self.watched)
        rest = [replace(one, watch=one.watch and watch) for one in rest]
        return replace(made, passes=(replace(watching, watch=watch, depth=watch.layers[-1] + 1), *rest))


@pytest.fixture
def llama() -> Bench:
    return make_bench(toy_model("llama"))


def recomputed(prefilled) -> list[int]:
    return [position for span in prefilled.recomputed for position in span.positions()]


def candidates_of(plan) -> list[int]:
    return [position for span in plan.spans(KVSource.REUSED) for position in span.positions()]


def best(scores: torch.Tensor, among: list[int], count: int) -> list[int]:
    return sorted(sorted(among, key=lambda position: (-float(scores[position]), position))[:count])


def explicit_reading(bench: Bench, prompt, method: QueryAware, hidden: Sequence[int] = ()) -> torch.Tensor:
    """What the question gives each position, by an explicit softmax over the reused cache; `hidden` keys left out."""
    weights = explicit_attention(bench, bench.prefill(prompt, "full-reuse"), hidden)
    watch = method.plan(bench.runner.store.lookup(prompt), bench.loaded.model.geometry).passes[0].watch
    read = torch.stack([weights[layer] for layer in watch.layers])
    read = read[:, :, -len(watch.question) :]
    read = read.amax(1) if watch.over_heads is Combine.MAX else read.mean(1)
    read = read.amax(1) if watch.over_tokens is Combine.MAX else read.sum(1)
    return read.amax(0) if watch.over_layers is Combine.MAX else read.sum(0)


@torch.inference_mode()
def explicit_attention(bench: Bench, prefilled, hidden: Sequence[int] = ()) -> list[torch.Tensor]:
    """Attention weights of the question over a finished cache, `[heads, queries, keys]` a layer, all written out."""
    model, prompt = bench.loaded.model, prefilled.prompt
    positions = torch.arange(prompt.spans()[-1].start, len(prompt))
    unseen = torch.arange(len(prompt)) > positions[:, None]
    unseen[:, list(hidden)] = True
    states, found = model.embed(torch.tensor(prompt.parts[-1].token_ids)), []
    for layer in range(model.geometry.num_layers):
        q, k, v = model.qkv(layer, states)
        keys, values = (kept.clone() for kept in prefilled.cache.view(layer, len(prompt)))
        keys[positions], values[positions] = model.rotate_keys(layer, k, positions), v
        q, group = model.rotate_queries(layer, q, positions), q.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) / q.shape[-1] ** 0.5
        found.append(scores.masked_fill(unseen, -torch.inf).softmax(-1))
        attended = torch.einsum("hqk,khd->qhd", found[-1], values.repeat_interleave(group, 1))
        states = model.finish(layer, states, attended.reshape(len(positions), -1))
    return found


def watching(query: QueryConfig, watched: dict | None = None, ratio: float = 0.1) -> Watching:
    return Watching(ReuseConfig(recompute_ratio=ratio, query=query), watched or {})


def stage_one(bench: Bench, prompt, method: QueryAware) -> torch.Tensor:
    """The evidence of the first pass alone."""
    runner, model = bench.runner, bench.loaded.model
    plan = method.plan(runner.store.lookup(prompt), model.geometry)
    placements = [Placement(part.span, runner.store.get(part.segment)) for part in plan.parts if part.segment]
    with torch.inference_mode():
        cache = RequestCache(model.geometry, len(prompt), placements, dtype=model.dtype, device=model.device)
        ids = torch.tensor(prompt.token_ids)
        rows = ActiveRows.of_pass(cache, ids, plan.passes[0], dtype=model.dtype, answers=False)
        run_pass(model, [rows])
    return rows.evidence


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("question", [1, 5, 300])
def test_the_first_pass_reads_what_an_explicit_softmax_says(llama, rule, question):
    prompt = llama.precompute(make_prompt(SIZES, system=6, question=question))
    candidates = candidates_of(llama.prefill(prompt, "full-reuse").plan)
    found, explicit = stage_one(llama, prompt, watching(*rule)), explicit_reading(llama, prompt, watching(*rule))
    torch.testing.assert_close(found[candidates], explicit[candidates], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("question", [1, 12])
def test_it_recomputes_what_the_question_reads_most(bench, rule, question):
    prompt = bench.precompute(make_prompt(SIZES, system=6, question=question))
    woven = bench.runner.prefill(prompt, watching(*rule), new_tokens=16)
    candidates = candidates_of(woven.plan)
    read = explicit_reading(bench, prompt, watching(*rule))
    assert recomputed(woven) == best(read, candidates, ceil(0.1 * len(candidates)))


def test_a_missing_chunk_is_hidden_from_the_first_pass(llama):
    """The oracle's question sees every key but those of the missing chunk; so does ours, and it costs nothing."""
    prompt = make_prompt(SIZES, system=6)
    llama.precompute(make_prompt(SIZES[:3], system=6))
    query = QueryConfig(tail=None, layers=WatchedLayers.ALL)
    missing = list(prompt.spans()[5].positions())
    read, expected = (
        stage_one(llama, prompt, watching(query)),
        explicit_reading(llama, prompt, watching(query), missing),
    )
    woven = llama.prefill(prompt, "query", ratio=0.1, query=query)
    candidates = candidates_of(woven.plan)
    assert not set(missing) & set(candidates)
    assert (read - expected)[candidates].abs().max() < 1e-5
    assert read[missing].abs().max() == 0
    computed = woven.plan.tokens(KVSource.COMPUTED)
    assert {work.kept_tokens for work in woven.work[:4]} == {computed - len(missing)}


def test_its_work_is_a_question_and_the_chosen_tokens(bench):
    """No dense layer: the recomputed share of work is the ratio itself, and the first pass ends where it is watched."""
    prompt = bench.precompute(make_prompt(SIZES))
    prefilled = bench.runner.prefill(prompt, watching(QueryConfig(), {"layers": (0, 1)}), new_tokens=16)
    layers = bench.loaded.model.geometry.num_layers
    reused = prefilled.plan.tokens(KVSource.REUSED)
    assert prefilled.recompute_work == layers * ceil(0.1 * reused)
    question = len(prompt) - reused - prefilled.plan.tokens(KVSource.EXACT)
    assert [work.kept_tokens for work in prefilled.work[:2]] == [question, question]
    assert [work.finished_tokens for work in prefilled.work[:2]] == [question, 0]
    assert len(prefilled.work) == 2 + layers


@pytest.mark.parametrize("query", [query for query, _ in RULES])
@pytest.mark.parametrize("question", [1, 300])
@pytest.mark.parametrize("sizes", [(), (1,), (12,)])
def test_few_chunks_and_odd_questions_are_no_special_case(llama, sizes, question, query):
    prompt = llama.precompute(make_prompt(sizes, system=6, question=question))
    difference = llama.log_probs(prompt, "query", ratio=1.0, query=query) - llama.own_log_probs(prompt)
    assert difference.abs().max() < 1e-4
    woven = llama.prefill(prompt, "query", ratio=0.05, query=query)
    assert len(recomputed(woven)) == min(1, len(sizes))
    assert woven.logits.isfinite().all()


def test_an_exact_prefix_is_no_candidate(bench):
    prompt = make_prompt(SIZES, system=6)
    bench.prefill(type(prompt)((*prompt.parts[:4], prompt.parts[-1])), "full", keep=True)
    for part in prompt.parts[4:-1]:
        bench.prefill(alone(part), "full", keep=True)
    prefilled = bench.prefill(prompt, "query", ratio=0.5)
    exact = {position for span in prefilled.plan.spans(KVSource.EXACT) for position in span.positions()}
    assert exact
    assert not exact & set(recomputed(prefilled))


class Watched(ThrottledTier):
    """A throttled tier that notes which layer was read when."""

    def __init__(self, link: Link, events: list) -> None:
        super().__init__(link)
        self._events = events

    def get(self, segment):
        source = super().get(segment)
        return None if source is None else Noting(source, self._events)


class Noting:
    def __init__(self, source, events) -> None:
        self._source, self._events = source, events
        self.tokens, self.nbytes, self.keys_at = source.tokens, source.nbytes, source.keys_at

    def layer(self, index, scratch=None):
        layer = self._source.layer(index, scratch)
        self._events.append(("loaded", index))
        return layer


@pytest.mark.parametrize(("layers", "waits_for"), [("all-layers", 4), ("third", 2)])
def test_the_question_follows_the_layers_as_they_load(layers, waits_for, monkeypatch):
    """Each layer of the first pass computes while later ones load, and the second pass waits for none that it had."""
    loaded = toy_model("llama")
    events: list = []
    link = Link(1e15)
    store: TieredStore[SegmentSource] = TieredStore(
        [Level("slow", SegmentStore(Watched(link, events), budget_bytes=1 << 30))]
    )
    bench = make_bench(loaded)
    bench.runner.store = store
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    expected = make_bench(loaded)
    expected.precompute(prompt)
    link.bytes_per_s = sum(record.nbytes for record in store.records()) / 0.4
    own = loaded.model.qkv

    def noting(layer, hidden):
        events.append(("computed", layer))
        return own(layer, hidden)

    events.clear()
    monkeypatch.setattr(loaded.model, "qkv", noting)
    started = time.perf_counter()
    woven = bench.prefill(prompt, f"query:{layers}", ratio=0.1)
    assert time.perf_counter() - started > 0.3
    computed = [i for i, event in enumerate(events) if event[0] == "computed"]
    assert [events[i][1] for i in computed] == [*range(waits_for), *range(4)]
    for place, number in enumerate(computed[: waits_for + 4]):
        layer = events[number][1]
        in_before = [event for event in events[:number] if event == ("loaded", layer)]
        assert len(in_before) == len(SIZES), f"computation {place} began before its layer was in"
    assert ("loaded", waits_for - 1) in events[: computed[waits_for]]
    if waits_for < 4:
        assert ("loaded", 3) not in events[: computed[waits_for]], "the second pass waited for all layers"
    assert torch.equal(woven.logits, expected.prefill(prompt, f"query:{layers}", ratio=0.1).logits)
