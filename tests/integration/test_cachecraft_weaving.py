"""Cache-Craft on tensors: its plans against full prefill, its profiles against the model's own attention weights, and
the stop of unfocused chunks against a loop that is written out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from chunkweave.config import CaptureConfig, ReuseConfig, StoreConfig
from chunkweave.conversation.answer import Durations
from chunkweave.engine.decode import make_report
from chunkweave.engine.runner import Prefilled, Runner
from chunkweave.fusion.capture import AttentionCapture, PartCapture, evenly_spread
from chunkweave.fusion.rows import ActiveRows
from chunkweave.kv.request_cache import Placement, RequestCache
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.loading import LoadedModel
from chunkweave.planning.method import make_method, prefer_mean, required_spans, reuse_every_hit
from chunkweave.planning.plan import KVSource, Pass, Plan, RecomputeScore, StopUnfocused
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave.store.index import PromptLookup, RequestUse
from chunkweave.store.store import TieredStore
from chunkweave.types import Geometry, Scattered
from chunkweave.weaving.stores import open_store
from tests.integration.weaving import Bench, close, make_bench, make_prompt, run_pass
from tests.toys import toy_model

SIZES = (17, 23, 9, 31)
EVERYTHING = CaptureConfig(profile=True, layers=None, heads=None, variant_fraction=0.5)
HALF = CaptureConfig(variant_fraction=0.5)
FP32 = 1e-4


def store_on(folder: Path, loaded: LoadedModel) -> TieredStore[SegmentSource]:
    """Memory over a folder."""
    return open_store(StoreConfig(cache_dir=folder), loaded.fingerprint, loaded.model.device)


@pytest.fixture
def qwen() -> Bench:
    return make_bench(toy_model("qwen3"))


class Chosen:
    """A method that recomputes given tokens of given parts (by place in the prompt), and may stop unfocused ones.

    If it is `scored`, what it recomputes of a part is what the part needs here, as `cachecraft` says of its own choice.
    """

    name = "chosen"

    def __init__(self, tokens: dict[int, Sequence[int]], *, stop: bool = False, scored: bool = False) -> None:
        self._tokens = tokens
        self._stop = stop
        self._scored = scored

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        parts = reuse_every_hit(lookup, prefer_mean)
        if self._scored:
            scores = {i: RecomputeScore(1.0, 0.0, 0.5, len(tokens)) for i, tokens in self._tokens.items()}
            parts = tuple(replace(part, score=scores.get(i)) for i, part in enumerate(parts))
        candidates = tuple(Scattered(parts[i].span.start, tuple(tokens)) for i, tokens in self._tokens.items())
        chunks = tuple(part.span for part in parts if part.part.kind is PartKind.CHUNK)
        rules = (StopUnfocused(chunks, parts[-1].span),) if self._stop else ()
        return Plan(self.name, parts, (Pass(required_spans(parts), candidates, rules),))


class FiresAt:
    """Stands in for the tracker: names the focused chunks at one layer, and keeps what it was shown."""

    def __init__(self, layer: int, focused: Sequence[int]) -> None:
        self._layer, self._focused = layer, frozenset(focused)
        self.shown: list[Sequence[float]] = []

    def __call__(self, *_arguments) -> "FiresAt":
        return self

    def update(self, mass: Sequence[float]) -> frozenset[int] | None:
        self.shown.append(mass)
        return self._focused if len(self.shown) == self._layer + 1 else None


def own_attention(bench: Bench, ids: Sequence[int], past: DynamicCache | None = None) -> torch.Tensor:
    """The attention weights of the Hugging Face model itself, `[layers, heads, queries, keys]` in float64."""
    ours = bench.loaded.model.model
    model = AutoModelForCausalLM.from_config(ours.config, attn_implementation="eager").eval()
    model.load_state_dict(ours.state_dict())
    with torch.inference_mode():
        out = model(torch.tensor([ids]), past_key_values=past, output_attentions=True)
    return torch.cat(out.attentions).double()


def check_profiles(prefilled: Prefilled, weights: torch.Tensor, first: int, config: CaptureConfig) -> None:
    """Every capture's profile against sums of the model's `weights`, whose first query stands at `first`."""
    layers, heads = evenly_spread(config.layers, weights.shape[0] - 1), evenly_spread(config.heads, weights.shape[1])
    mean = weights[list(layers)][:, list(heads)].mean((0, 1))
    parts = prefilled.plan.parts
    assert prefilled.captures
    for capture in prefilled.captures:
        own = capture.part.span
        rows = mean[own.start - first : own.stop - first].clone()
        rows[range(len(own)), list(own.positions())] = 0.0
        before = [part for part in parts if part.span.stop <= own.start]
        chunks = [part for part in before if part.part.kind is PartKind.CHUNK]
        others = [part for part in before if part not in chunks]
        profile = prefilled.attention.profile(capture.part, capture.recomputed)
        assert profile.chunks == tuple(part.part.id for part in chunks)
        assert profile.lengths == tuple(len(part.part) for part in chunks)
        on = [rows[:, part.span.start : part.span.stop] for part in chunks]
        assert profile.inter == pytest.approx([mass.sum().item() for mass in on], abs=FP32)
        assert profile.intra == pytest.approx(rows[:, own.start : own.stop].sum().item(), abs=FP32)
        sink = sum(rows[:, part.span.start : part.span.stop].sum().item() for part in others)
        assert profile.sink == pytest.approx(sink, abs=FP32)
        outward = sum((mass.sum(1) for mass in on), torch.zeros(len(own), dtype=torch.float64))
        assert profile.outward == pytest.approx(outward.tolist(), abs=FP32)


# --- the method at its ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [(), (1,), (0, 3)])
def test_recomputing_all_of_every_chunk_equals_full_prefill(bench, missing):
    prompt = bench.precompute(make_prompt(SIZES, system=6), without=missing)
    woven = bench.log_probs(prompt, "cachecraft:no-overlap", alpha=100.0, focus=False)
    close(woven, bench.own_log_probs(prompt))


def test_recomputing_nothing_equals_full_reuse(bench):
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    close(bench.log_probs(prompt, "cachecraft", alpha=0.0), bench.log_probs(prompt, "full-reuse"))


ODD_SIZES = (17, 23, 1, 31)

ODD_PROMPTS = {
    "the first chunk was a later one": ([(1, 0)], (0, 3)),
    "one chunk": ([(1, 0)], (0,)),
    "a chunk twice": ([(0, 1)], (1, 0, 1)),
    "computed alone": ([(0,), (1,)], (3, 1, 0)),
    "a single token": ([(0, 2), (2, 1)], (3, 1, 2, 0)),
    "all new": ([], (0, 1, 2)),
    "exact and in other contexts": ([(0, 1), (3, 1), (1,)], (0, 1, 3)),
    "a new chunk before an old context": ([(0, 1)], (3, 0, 1)),
}


@pytest.mark.parametrize("system", [0, 6])
@pytest.mark.parametrize("case", sorted(ODD_PROMPTS))
def test_odd_prompts_are_woven_and_equal_full_prefill_where_all_is_recomputed(case, system):
    bench = make_bench(toy_model("llama"))
    stored, order = ODD_PROMPTS[case]
    for earlier in stored:
        bench.prefill(make_prompt(ODD_SIZES, system=system, order=earlier), "full", keep=True)
    prompt = make_prompt(ODD_SIZES, system=system, order=order)
    whole = bench.log_probs(prompt, "cachecraft:no-overlap", alpha=100.0, focus=False)
    close(whole, bench.own_log_probs(prompt))
    woven = bench.prefill(prompt, "cachecraft", keep=True)
    report = make_report(woven, bench.loaded.model.geometry, Durations(1.0, 0.0, 0.0), 1)
    by_source = report.prefix_exact_tokens + report.reused_tokens + report.recomputed_tokens + report.computed_tokens
    assert by_source == len(prompt)
    again = bench.prefill(prompt, "cachecraft")
    assert again.plan.tokens(KVSource.COMPUTED) == 1 + 5, "BOS and the question; everything else is stored now"


def test_variants_with_context_are_fixed_as_planned(bench):
    bench.prefill(make_prompt(SIZES, system=6), "full", keep=True)
    prompt = make_prompt(SIZES, system=6, order=(3, 1, 0, 2))
    woven = bench.prefill(prompt, "cachecraft", focus=False)
    scores = {part.span: part.score for part in woven.plan.parts if part.score is not None}
    assert len(scores) == 4
    assert [score.cfo < 1.0 for score in scores.values()] == [True] * 4
    assert any(score.tokens for score in scores.values())
    for span, score in scores.items():
        assert sum(span.start <= p < span.stop for run in woven.recomputed for p in run.positions()) == score.tokens


def test_the_store_hears_what_each_reuse_was_worth(qwen, monkeypatch):
    heard: list[RequestUse] = []
    monkeypatch.setattr(qwen.runner.store, "note_request", heard.append)
    qwen.prefill(make_prompt(SIZES, system=6), "full", keep=True)
    prompt = make_prompt(SIZES, system=6, order=(0, 3, 1, 2))
    parts = qwen.prefill(prompt, "cachecraft", focus=False).plan.parts
    qwen.prefill(prompt, "full-reuse")
    exact = {part.segment: len(part.span) for part in parts if part.kv_source is KVSource.EXACT}
    scores = [(part.segment, part.score, 1 / len(part.span)) for part in parts if part.score is not None]
    woven = {segment: 1 / max(score.cci * (1 - score.overlap), least) for segment, score, least in scores}
    assert [one.path.saved for one in heard] == [{}, pytest.approx(exact | woven), exact | dict.fromkeys(woven, 1.0)]
    assert (len(exact), len(woven)) == (2, 3)


# --- profiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [EVERYTHING, CaptureConfig(profile=True, layers=2, heads=2)], ids=["all", "some"])
def test_profiles_of_a_first_computation_equal_the_models_own_attention(bench, config):
    bench.runner.capture = config
    prompt = make_prompt(SIZES, system=6)
    full = bench.prefill(prompt, "full")
    assert len(full.captures) == 5
    check_profiles(full, own_attention(bench, prompt.token_ids), 0, config)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_profiles_of_a_chunk_computed_between_reused_ones_equal_the_models_own_attention(family):
    bench = make_bench(toy_model(family))
    bench.runner.capture = EVERYTHING
    prompt = bench.precompute(make_prompt(SIZES), without=[2])
    woven = bench.prefill(prompt, "full-reuse")
    (capture,) = woven.captures
    span = capture.part.span
    past = DynamicCache()
    for layer in range(4):
        keys, values = woven.cache.view(layer, span.start)
        past.update(keys.transpose(0, 1)[None].clone(), values.transpose(0, 1)[None].clone(), layer)
    weights = own_attention(bench, prompt.parts[3].token_ids, past)
    check_profiles(woven, weights, span.start, EVERYTHING)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_profiles_of_a_chunk_woven_whole_equal_the_models_own_attention(family):
    bench = make_bench(toy_model(family))
    bench.runner.capture = EVERYTHING
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    woven = bench.prefill(prompt, "cacheblend", ratio=1.0)
    assert [capture.part.kv_source for capture in woven.captures] == [KVSource.COMPUTED, *[KVSource.REUSED] * 4]
    check_profiles(woven, own_attention(bench, prompt.token_ids), 0, EVERYTHING)


def test_what_capturing_computes_is_counted(qwen):
    qwen.runner.capture = CaptureConfig(profile=True, layers=2, heads=3)
    prompt = make_prompt(SIZES, system=6)
    full = qwen.prefill(prompt, "full")
    followed = range(1, 1 + 6 + sum(SIZES))  # what is stored: neither BOS nor the question
    scores = 3 * sum(position + 1 for position in followed)
    layers = evenly_spread(2, 3)
    assert [layer.captured_scores for layer in full.work] == [scores * (layer in layers) for layer in range(4)]
    qwen.runner.capture = CaptureConfig(profile=False)
    assert not any(layer.captured_scores for layer in qwen.prefill(prompt, "full").work)


def test_profiles_are_stored_with_their_segments_and_survive_a_restart(tmp_path):
    loaded = toy_model("llama")
    prompt = make_prompt(SIZES, system=6)

    store = store_on(tmp_path, loaded)
    runner = Runner(loaded.model, store)
    prefilled = runner.prefill(prompt, make_method("full"), profiles=True)
    runner.store_new(prefilled)
    kept = {record.id: record.attention for record in store.records()}
    profile = prefilled.attention.profile(prefilled.captures[3].part, range(9))
    assert profile in kept.values()
    store.close()
    again = store_on(tmp_path, loaded)
    assert {record.id for record in again.records()} == kept.keys()
    for record in again.records():
        held, before = record.attention, kept[record.id]
        assert (held.chunks, held.lengths) == (before.chunks, before.lengths)
        assert held.inter == pytest.approx(before.inter)
        assert (held.intra, held.sink) == pytest.approx((before.intra, before.sink))
        assert held.outward == pytest.approx(before.outward)
    again.close()


# --- woven segments ------------------------------------------------------------------------------------------------


def stored_woven(bench: Bench, prompt: Prompt, place: int):
    context = prompt.contexts()[place]
    return [r for r in bench.runner.store.records() if (r.chunk_id, r.context) == (prompt.parts[place].id, context)]


def test_a_method_without_scores_leaves_a_variant_only_where_all_its_kv_is_fresh(bench):
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    woven = bench.runner.prefill(prompt, Chosen({3: range(22), 5: range(31)}))  # 22 of 23, and all
    bench.runner.store_new(woven)
    assert not stored_woven(bench, prompt, 3)
    assert stored_woven(bench, prompt, 5)


def test_a_largely_recomputed_chunk_is_stored_as_an_inexact_variant_of_this_context(bench):
    bench.runner.capture = HALF
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    tokens = (*range(7), *range(9, 16))  # 14 of 23
    woven = bench.runner.prefill(prompt, Chosen({3: tokens, 5: range(15)}, scored=True))
    (kept,) = [capture for capture in woven.captures if capture.part.kv_source is KVSource.REUSED]
    assert kept.recomputed == tokens
    bench.runner.store_new(woven)
    (record,) = stored_woven(bench, prompt, 3)
    assert not record.exact
    assert record.generation == 1
    assert not stored_woven(bench, prompt, 5)  # 15 of 31 are less than half
    span = prompt.spans()[3]
    stored = bench.runner.store.get(record.id)
    positions = torch.tensor(list(span.positions()))
    for layer in range(4):
        keys, values = woven.cache.view(layer, span.stop)
        raw = stored.layer(layer)
        close(bench.loaded.model.rotate_keys(layer, raw[0], positions), keys[span.start :], 1e-5)
        close(raw[1], values[span.start :], 0.0)
    bench.runner.store.check()


@pytest.mark.parametrize(("ratio", "captured"), [(0.7, False), (1.0, True)])
def test_what_a_rule_drops_tokens_of_is_not_followed(qwen, ratio, captured):
    """Which tokens a rule keeps is not known beforehand, and following all parts takes time."""
    qwen.runner.capture = HALF
    prompt = qwen.precompute(make_prompt(SIZES, system=6))
    woven = qwen.prefill(prompt, "cacheblend", ratio=ratio)
    assert any(capture.part.kv_source is KVSource.REUSED for capture in woven.captures) is captured


def test_a_stored_woven_prompt_is_answered_alike_without_recomputing(qwen):
    qwen.runner.capture = HALF
    prompt = qwen.precompute(make_prompt(SIZES, system=6))
    first = qwen.prefill(prompt, "cachecraft", alpha=1.9, focus=False, keep=True)
    assert all(stored_woven(qwen, prompt, place) for place in (3, 4, 5))
    second = qwen.prefill(prompt, "cachecraft", alpha=1.9, focus=False)
    assert sum(map(len, second.recomputed)) < sum(map(len, first.recomputed))
    assert [part.score.tokens for part in second.plan.parts if part.score is not None][1:] == [0, 0, 0]
    close(second.logits, first.logits, 1e-3)


def test_a_woven_profile_has_fresh_mass_where_it_was_recomputed_and_old_mass_elsewhere(qwen):
    qwen.runner.capture = EVERYTHING
    qwen.prefill(make_prompt(SIZES, system=6), "full", keep=True)
    prompt = make_prompt(SIZES, system=6, order=(1, 2, 0, 3))
    woven = qwen.runner.prefill(prompt, Chosen({5: range(20)}, scored=True))
    (capture,) = woven.captures
    before = capture.woven_from.attention
    profile = woven.attention.profile(capture.part, capture.recomputed, before)
    fresh = woven.attention.profile(capture.part, capture.recomputed)
    assert profile.outward[:20] == fresh.outward[:20]
    assert profile.outward[20:] == pytest.approx(before.outward[20:])  # the same three chunks, in another order
    assert fresh.outward[20:] == (0.0,) * 11
    assert sum(profile.inter) == pytest.approx(sum(profile.outward), abs=FP32)
    qwen.runner.store_new(woven)
    (record,) = stored_woven(qwen, prompt, 5)
    assert record.attention == profile


def test_a_woven_segment_of_chunks_that_were_read_from_disk(tmp_path):
    loaded = toy_model("qwen2")
    prompt = make_prompt(SIZES)

    first, second = (make_bench(loaded) for _ in range(2))
    first.runner.store = store_on(tmp_path, loaded)
    first.precompute(prompt)
    first.runner.store.close()
    second.runner.store = store_on(tmp_path, loaded)
    second.runner.capture = HALF
    woven = second.runner.prefill(prompt, Chosen({3: range(0, 9, 2), 4: range(9, 31)}, scored=True))
    assert len(woven.loaded) == 4
    second.runner.store_new(woven)
    for place in (3, 4):
        (record,) = stored_woven(second, prompt, place)
        raw = second.runner.store.get(record.id).layer(3)[1]
        close(raw, woven.cache.view(3, prompt.spans()[place].stop)[1][-len(raw) :], 0.0)
    second.runner.store.close()


def test_no_woven_segments_if_they_are_not_wanted_or_stored_already(qwen):
    prompt = qwen.precompute(make_prompt(SIZES))
    qwen.runner.capture = CaptureConfig(profile=True, variant_fraction=None)
    assert qwen.prefill(prompt, "cacheblend", ratio=1.0).captures == ()
    qwen.runner.capture = CaptureConfig(profile=True)
    assert len(qwen.prefill(prompt, "cacheblend", ratio=1.0, keep=True).captures) == 3
    assert qwen.prefill(prompt, "cacheblend", ratio=1.0).captures == ()


def test_a_chunk_whose_recomputation_stops_midway_is_not_stored(qwen, monkeypatch):
    monkeypatch.setattr("chunkweave.fusion.capture.FocusTracker", FiresAt(1, [0, 2, 3]))
    prompt = qwen.precompute(make_prompt(SIZES))
    woven = qwen.runner.prefill(prompt, Chosen({2: range(23), 4: range(31)}, stop=True))
    assert [capture.part.span for capture in woven.captures] == [prompt.spans()[4]]
    qwen.runner.store_new(woven)
    assert not stored_woven(qwen, prompt, 2)


# --- the stop of unfocused chunks ----------------------------------------------------------------------------------

CHOSEN = {2: tuple(range(0, 17, 2)), 3: (0, 1, 2, 20, 22), 4: tuple(range(9)), 5: (30, 4, 5)}


@torch.inference_mode()
def written_out(bench: Bench, woven: Prefilled, chosen: dict[int, Sequence[int]], stop_layer: int, focused) -> tuple:
    """Logits and work of a loop without any of the library's: plain softmax, a hidden state for each position.

    From `stop_layer` on the chosen tokens of chunks that are not `focused` keep their cached KV.
    """
    model, parts = bench.loaded.model, woven.plan.parts
    g, total = model.geometry, woven.plan.prompt_tokens
    everywhere = torch.arange(total)
    required = {p for part in parts if part.kv_source is KVSource.COMPUTED for p in part.span.positions()}
    active = {parts[i].span.start + token for i, tokens in chosen.items() for token in tokens}
    kept = {p for p in active for i in focused if p in parts[2 + i].span.positions()}
    ids = torch.tensor([token for part in parts for token in part.part.token_ids])
    hidden, work = model.embed(ids).clone(), 0
    for layer in range(g.num_layers):
        chosen_now = active if layer < stop_layer else kept
        work += len(chosen_now)
        rows = torch.tensor(sorted(required | chosen_now))
        keys, values = (torch.zeros(total, g.num_kv_heads, g.head_dim) for _ in range(2))
        for part in parts:
            if part.segment is not None:
                raw = bench.runner.store.get(part.segment).layer(layer)
                keys[part.span.start : part.span.stop], values[part.span.start : part.span.stop] = raw
        q, k, v = model.qkv(layer, hidden[rows])
        keys[rows], values[rows] = k, v
        keys, q = model.rotate_keys(layer, keys, everywhere), model.rotate_queries(layer, q, rows)
        group = g.num_heads // g.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) / g.head_dim**0.5
        weights = scores.masked_fill(everywhere > rows[:, None], -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))
        hidden[rows] = model.finish(layer, hidden[rows], attended.reshape(len(rows), -1))
    return model.logits(hidden[-1:])[0], work, sorted(kept)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("focused", [(0, 3), (), (0, 1, 2, 3)])
def test_stopping_at_a_layer_equals_a_loop_that_is_written_out(bench, monkeypatch, layer, focused):
    monkeypatch.setattr("chunkweave.fusion.capture.FocusTracker", FiresAt(layer, focused))
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    woven = bench.runner.prefill(prompt, Chosen(CHOSEN, stop=True))
    logits, work, kept = written_out(bench, woven, CHOSEN, layer + 1, focused)
    close(woven.logits, logits, 1e-3)
    recomputed = [p for span in woven.recomputed for p in span.positions()]
    chosen = sorted(woven.plan.parts[i].span.start + token for i, tokens in CHOSEN.items() for token in tokens)
    assert recomputed == kept
    assert woven.recompute_work == work
    assert woven.stop.layer == layer + 1
    assert woven.stop.focused == tuple(woven.plan.parts[2 + i].span for i in focused)
    dropped = [p for span in woven.stop.dropped for p in span.positions()]
    assert dropped == sorted(set(chosen) - set(kept))
    fixed = woven.plan.computed_tokens_of(woven.plan.passes[0])
    done = [fixed + len(chosen)] * (layer + 1) + [fixed + len(kept)] * (3 - layer)
    assert [w.kept_tokens for w in woven.work] == [w.entered_tokens for w in woven.work] == done
    assert [w.finished_tokens for w in woven.work] == [*done[:-1], 1]
    assert woven.recompute_work == 4 * len(kept) + (layer + 1) * len(dropped)
    report = make_report(woven, bench.loaded.model.geometry, Durations(1.0, 0.0, 0.0), 1)
    assert [chunk.recomputed_tokens for chunk in report.chunks] == [
        0,
        *(len(CHOSEN[2 + i]) if i in focused else 0 for i in range(4)),
    ]
    assert report.recompute_fraction == pytest.approx(work / (4 * sum(SIZES)))


def test_a_missing_chunk_is_computed_to_the_end_however_little_it_is_looked_at(bench, monkeypatch):
    monkeypatch.setattr("chunkweave.fusion.capture.FocusTracker", FiresAt(1, [3]))
    prompt = bench.precompute(make_prompt(SIZES, system=6), without=[1])
    chosen = {place: tokens for place, tokens in CHOSEN.items() if place != 3}
    woven = bench.runner.prefill(prompt, Chosen(chosen, stop=True))
    logits, work, kept = written_out(bench, woven, chosen, 2, [3])
    close(woven.logits, logits, 1e-3)
    assert woven.recompute_work == work
    assert [p for span in woven.recomputed for p in span.positions()] == kept
    assert [capture.part.span for capture in woven.captures] == [prompt.spans()[1], prompt.spans()[3]]


def test_the_tracker_is_shown_the_questions_own_attention(bench, monkeypatch):
    tracker = FiresAt(99, ())
    monkeypatch.setattr("chunkweave.fusion.capture.FocusTracker", tracker)
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    everything = {2 + i: range(size) for i, size in enumerate(SIZES)}
    woven = bench.runner.prefill(prompt, Chosen(everything, stop=True))
    assert woven.stop is None
    question = own_attention(bench, prompt.token_ids)[:, :, -5:].mean(1).sum(1)
    chunks = prompt.spans()[2:-1]
    expected = [[question[layer, c.start : c.stop].sum().item() for c in chunks] for layer in range(3)]
    assert len(tracker.shown) == 3  # the last layer is finished for one token only
    for shown, mass in zip(tracker.shown, expected, strict=True):
        assert shown == pytest.approx(mass, abs=FP32)


def test_the_real_tracker_stops_by_the_real_attention():
    bench = make_bench(toy_model("llama", num_hidden_layers=8))
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    woven = bench.prefill(prompt, "cachecraft:no-overlap", alpha=1.5)
    free = bench.prefill(prompt, "cachecraft:no-overlap", alpha=1.5, focus=False)
    assert woven.stop is not None
    assert 3 <= woven.stop.layer < 8
    assert woven.recompute_work < free.recompute_work
    for span in woven.recomputed:
        assert any(chunk.start <= span.start < chunk.stop for chunk in woven.stop.focused)


def test_nothing_is_watched_if_nothing_could_be_dropped(qwen, monkeypatch):
    tracker = FiresAt(0, ())
    monkeypatch.setattr("chunkweave.fusion.capture.FocusTracker", tracker)
    prompt = qwen.precompute(make_prompt(SIZES))
    woven = qwen.runner.prefill(prompt, Chosen({}, stop=True))
    assert (tracker.shown, woven.stop) == ([], None)


# --- batches -------------------------------------------------------------------------------------------------------


def rows_of(bench: Bench, prompt: Prompt, plan: Plan) -> tuple[ActiveRows, tuple[PartCapture, ...], AttentionCapture]:
    model = bench.loaded.model
    placements = [Placement(p.span, bench.runner.store.get(p.segment)) for p in plan.parts if p.segment is not None]
    cache = RequestCache(model.geometry, len(prompt), placements, dtype=model.dtype, device=model.device)
    rows = ActiveRows.of_pass(cache, torch.tensor(prompt.token_ids), plan.passes[0], dtype=model.dtype)
    computed = [p for p in plan.parts if p.kv_source is KVSource.COMPUTED and p.part.id is not None]
    captures = tuple(PartCapture(part, model.geometry, model.dtype, device=model.device) for part in computed)
    attention = AttentionCapture(plan.parts, model.geometry, EVERYTHING, device=model.device)
    rows.keep(captures, attention)
    return rows, captures, attention


def test_requests_of_one_batch_narrow_and_capture_each_for_itself(bench, monkeypatch):
    prompts = [make_prompt(SIZES, system=6), make_prompt((12, 20, 8), seed=5), make_prompt(SIZES, system=6, seed=7)]
    bench.precompute(prompts[0])
    bench.precompute(prompts[1], without=[2])
    methods = [
        Chosen(CHOSEN, stop=True),
        Chosen({2: (1, 2, 5)}),
        make_method("cacheblend", ReuseConfig(recompute_ratio=0.3, check_layers=(1, 2))),
    ]
    plans = [
        method.plan(bench.runner.store.lookup(prompt), bench.loaded.model.geometry)
        for prompt, method in zip(prompts, methods, strict=True)
    ]
    monkeypatch.setattr("chunkweave.fusion.capture.FocusTracker", lambda *_: FiresAt(1, [1]))
    with torch.inference_mode():
        apart = [rows_of(bench, prompt, plan) for prompt, plan in zip(prompts, plans, strict=True)]
        hidden = torch.cat([run_pass(bench.loaded.model, [rows]) for rows, _, _ in apart])
        together = [rows_of(bench, prompt, plan) for prompt, plan in zip(prompts, plans, strict=True)]
        at_once = run_pass(bench.loaded.model, [rows for rows, _, _ in together])
    close(at_once, hidden, 1e-3)
    for (rows, captures, attention), (own_rows, own_captures, own_attention_) in zip(together, apart, strict=True):
        assert rows.positions.tolist() == own_rows.positions.tolist()
        assert rows.work == own_rows.work
        assert rows.stop == own_rows.stop
        for capture, own in zip(captures, own_captures, strict=True):
            close(capture.segment().kv, own.segment().kv, 1e-3)
            profile, expected = (a.profile(capture.part, capture.recomputed) for a in (attention, own_attention_))
            assert profile.inter == pytest.approx(expected.inter, abs=FP32)
            assert profile.outward == pytest.approx(expected.outward, abs=FP32)
    assert together[0][0].stop is not None
    assert [len(captures) for _, captures, _ in together] == [1, 1, 5]
