"""Chunks computed beforehand: what is stored is the mean of what Hugging Face's own layers give in each context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from chunkweave import Chunk, Engine, ReuseConfig, StoreConfig
from chunkweave.config import CaptureConfig, ContextSource
from chunkweave.engine.runner import Runner
from chunkweave.errors import UsageError
from chunkweave.planning.method import make_method
from chunkweave.prompt.contexts import ContextPool
from chunkweave.prompt.parts import Prompt, PromptPart, is_neutral
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId
from chunkweave.weaving.means import Means, mean_profile
from tests.toys import toy_model

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS = [
    Chunk("The harbour of Skerrow was founded in 1871 by two brothers.", "history"),
    Chunk("Pilots board ships two miles west of the lighthouse of Skerrow.", "pilots"),
    Chunk("The ferry leaves the harbour at seven, at noon and at six.", "ferry"),
    Chunk("The lighthouse is lit at dusk, and its keeper is Ann Rowe.", "lighthouse"),
    Chunk("Two brothers fish for cod, and sell it at the harbour at noon.", "fish"),
    Chunk("Ann Rowe keeps bees behind the old chapel.", "bees"),
]
QUESTION = "When does the ferry leave?"


def engine_of(
    family: str = "llama", *, store: StoreConfig | None = None, method: str | None = None, **capture
) -> Engine:
    """Contexts of two chunks and one by default, so that a chunk reads some of the others and not all."""
    config = CaptureConfig(**{"context_count": 2, "context_tokens": 20, **capture})
    reuse = ReuseConfig(recompute_ratio=0.3, capture=config)
    return Engine(toy_model(family), store=store, method=method, reuse=reuse)


def parts_of(engine: Engine, chunks: Sequence[Chunk] = CHUNKS, cache_salt: str = "") -> list[PromptPart]:
    return [engine.builder.chunk_part(chunk, cache_salt=cache_salt) for chunk in chunks]


def means_of(engine: Engine) -> dict[ChunkId, SegmentRecord]:
    """The mean of each chunk; none has two."""
    found = [record for record in engine.store.records() if record.contexts]
    by_chunk = {record.chunk_id: record for record in found}
    assert len(by_chunk) == len(found)
    return by_chunk


def kv_of(engine: Engine, record: SegmentRecord) -> torch.Tensor:
    """`[layers, 2, tokens, kv_heads, head_dim]`, keys before RoPE."""
    source = engine.store.get(record.id)
    assert source is not None
    assert source.keys_at is None
    return torch.stack([source.layer(layer) for layer in range(engine.loaded.model.geometry.num_layers)]).float()


def contexts_of(engine: Engine, part: PromptPart, pool: ContextPool) -> list[tuple[PromptPart, ...]]:
    """What a chunk's mean is over, by hand: the ranks k, k + 2, ... of its nearest chunks, the nearest last."""
    ranked, found = pool.nearest(part), []
    for first in range(2):
        taken, tokens = [], 0
        for other in ranked[first::2]:
            if tokens < 20:
                taken.append(other)
                tokens += len(other)
        found.append(tuple(reversed(taken)))
    return found


@dataclass
class ByHand:
    """Computes with the Hugging Face model alone: its projections are watched, its cache is filled by hand."""

    engine: Engine

    def first_pass(self, part: PromptPart) -> torch.Tensor:
        """A chunk behind the instruction and neutral passages."""
        before = self.engine.preparer.preamble(self.engine.builder.opening())
        assert any(one.id is not None and is_neutral(one.id) for one in before)
        ids = [token for one in (*before, part) for token in one.token_ids]
        return self._run(ids, DynamicCache())[:, :, -len(part) :]

    def behind(self, context: Sequence[tuple[PromptPart, torch.Tensor]], part: PromptPart) -> torch.Tensor:
        """A chunk behind the instruction and others, whose given KV is moved to where they are now."""
        cache = DynamicCache()
        self._run([token for one in self.engine.builder.opening() for token in one.token_ids], cache)
        for _, kv in context:
            self._put(kv, cache)
        return self._run(list(part.token_ids), cache)

    def means(self, parts: Sequence[PromptPart], pool: ContextPool) -> dict[ChunkId, tuple[torch.Tensor, set[ChunkId]]]:
        """The means of chunks, one after the other, and what each has read.

        A context's chunks are as behind neutral passages, or as the means that they have already.
        """
        first: dict[ChunkId, torch.Tensor] = {}
        means: dict[ChunkId, tuple[torch.Tensor, set[ChunkId]]] = {}
        opening = self.engine.builder.opening()
        neutral = {one.id for one in self.engine.preparer.preamble(opening)}
        for part in parts:
            shares, read = [], set()
            for context in contexts_of(self.engine, part, pool):
                taken = []
                for one in context:
                    if one.id not in means and one.id not in first:
                        first[one.id] = self.first_pass(one)
                    taken.append((one, first[one.id] if one.id in first else means[one.id][0]))
                    read |= {one.id, opening[-1].id} | (neutral if one.id in first else means[one.id][1])
                shares.append(self.behind(taken, part))
            assert (shares[0] - shares[-1]).abs().max() > 0.01, "a context changes a chunk's KV"
            means[part.id] = torch.stack(shares).mean(0), read - {None}
        return means

    def _run(self, ids: list[int], cache: DynamicCache) -> torch.Tensor:
        """The KV of some tokens behind what is cached, which they join."""
        model, seen, hooks = self.engine.loaded.model.model, {}, []
        start, config = cache.get_seq_length(), self.engine.loaded.model.model.config

        def watch(layer: int, kind: int) -> Callable[..., None]:
            def hook(_module: object, _inputs: object, output: torch.Tensor) -> None:
                seen[layer, kind] = output.detach().reshape(len(ids), config.num_key_value_heads, -1)

            return hook

        for number, layer in enumerate(model.model.layers):
            keys = getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)
            hooks += [keys.register_forward_hook(watch(number, 0))]
            hooks += [layer.self_attn.v_proj.register_forward_hook(watch(number, 1))]
        try:
            with torch.inference_mode():
                positions = torch.arange(start, start + len(ids))
                model(torch.tensor([ids]), past_key_values=cache, use_cache=True, position_ids=positions[None])
        finally:
            for hook in hooks:
                hook.remove()
        layers = range(config.num_hidden_layers)
        return torch.stack([torch.stack([seen[layer, 0], seen[layer, 1]]) for layer in layers])

    def _put(self, kv: torch.Tensor, cache: DynamicCache) -> None:
        model, start = self.engine.loaded.model.model.model, cache.get_seq_length()
        cos, sin = model.rotary_emb(kv, torch.arange(start, start + kv.shape[2])[None])
        for layer, (keys, values) in enumerate(kv.transpose(2, 3)):  # [kv_heads, tokens, head_dim]
            half = keys.shape[-1] // 2
            turned = torch.cat([-keys[..., half:], keys[..., :half]], -1)
            cache.update((keys * cos + turned * sin)[None], values[None], layer)


@pytest.fixture(scope="module")
def warmed() -> Engine:
    """An engine that has computed all chunks; tests only look at it."""
    torch.set_num_threads(1)
    engine = engine_of()
    assert engine.precompute(CHUNKS) == len(CHUNKS)
    return engine


# --- the oracle


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_stored_is_the_mean_over_the_contexts_by_hand(family):
    engine = engine_of(family)
    assert engine.precompute(CHUNKS) == 6
    parts, means = parts_of(engine), means_of(engine)
    pool, system = ContextPool(parts), engine.builder.opening()[-1].id
    expected = ByHand(engine).means(parts, pool)
    assert set(means) == {part.id for part in parts}
    for part in parts:
        contexts, record = contexts_of(engine, part, pool), means[part.id]
        assert set(record.contexts) == {(system, *(one.id for one in context)) for context in contexts}
        assert len(contexts) == 2
        kv, read = expected[part.id]
        torch.testing.assert_close(kv_of(engine, record), kv, atol=2e-4, rtol=2e-4)
        assert record.sources == read


# --- what a mean is not


def test_a_mean_is_not_exact_and_on_no_exact_path(warmed):
    prompt = Prompt((*warmed.builder.opening(), *parts_of(warmed)))
    found = warmed.store.lookup(prompt)
    assert all(entry.exact is None for entry in found.parts[2:])
    assert all(len(entry.variants) == 1 and entry.variants[0].contexts for entry in found.parts[2:])
    assert not any(record.exact for record in means_of(warmed).values())
    answer = warmed.generate(QUESTION, CHUNKS, max_new_tokens=1, method="prefix")
    assert answer.report.prefix_exact_tokens == len(prompt.parts[1])
    assert answer.report.reused_tokens == 0


@pytest.mark.parametrize("method", ["prefix", "full"])
def test_exact_answers_do_not_change(method):
    fresh, warm = engine_of(), engine_of()
    warm.precompute(CHUNKS)
    for chunks in (CHUNKS, CHUNKS[::-1]):
        answers = [one.generate(QUESTION, chunks, max_new_tokens=8, method=method) for one in (fresh, warm)]
        assert answers[0].token_ids == answers[1].token_ids


def test_a_method_that_reuses_takes_the_mean(warmed):
    answer = warmed.generate(QUESTION, CHUNKS[::-1], max_new_tokens=1, method="full-reuse")
    ids = [chunk.variant for chunk in answer.report.chunks]
    means = means_of(warmed)
    assert [means[part.id].id for part in parts_of(warmed, CHUNKS[::-1])] == ids[-len(CHUNKS) :]


# --- computed once


FIRST_PASSES = 4
"""Of the six chunks: two have their mean already when they are in a context for the first time."""


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """The prompts that are computed."""
    seen: list[Prompt] = []
    real = Runner.start

    def start(self: Runner, prompt: Prompt, *arguments):
        seen.append(prompt)
        return real(self, prompt, *arguments)

    monkeypatch.setattr(Runner, "start", start)
    return seen


def test_again_computes_nothing(prefills):
    engine = engine_of()
    assert engine.precompute(CHUNKS) == 6
    assert len(prefills) == FIRST_PASSES + 6 * 2
    records, prefills[:] = set(engine.store.records()), []
    assert engine.precompute(CHUNKS) == 0
    assert engine.precompute(CHUNKS[::-1]) == 0
    assert engine.precompute(CHUNKS[:1], pool=ContextPool(parts_of(engine))) == 0
    assert engine.precompute(CHUNKS[:1]) == 0, "alone, too"
    assert prefills == []
    assert set(engine.store.records()) == records


def test_a_chunk_that_comes_twice_is_computed_once(prefills):
    engine = engine_of()
    assert engine.precompute([*CHUNKS, CHUNKS[0]]) == 6
    assert len(prefills) == FIRST_PASSES + 6 * 2


def test_first_passes_are_dropped_at_the_end(warmed):
    records = warmed.store.records()
    assert not [record for record in records if record.neutral and not is_neutral(record.chunk_id)]
    assert len([record for record in records if record.contexts]) == 6


def test_what_others_have_stored_is_not_dropped_with_them():
    engine = engine_of()
    engine.generate(QUESTION, CHUNKS[::-1], max_new_tokens=1)
    engine.precompute(["A chunk alone stays behind neutral passages."])
    before = set(engine.store.records())
    engine.precompute(CHUNKS)
    assert before <= set(engine.store.records())


@pytest.mark.parametrize("after", range(1, FIRST_PASSES + 6 * 2, 4))
def test_interrupted_it_ends_with_the_same_means(after, monkeypatch, warmed):
    """In the first pass, in the middle of a chunk's contexts, and between two chunks."""
    engine, real, count = engine_of(), Runner.store_new, 0

    def store_new(self, prefilled):
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        return real(self, prefilled)

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "store_new", store_new)
        with pytest.raises(KeyboardInterrupt):
            engine.precompute(CHUNKS)
    done = len(means_of(engine))
    assert done < 6
    assert engine.precompute(CHUNKS) == 6 - done
    assert means_of(engine).keys() == means_of(warmed).keys()
    assert not [record for record in engine.store.records() if record.neutral and record.chunk_id in means_of(engine)]
    for chunk, record in means_of(engine).items():
        torch.testing.assert_close(kv_of(engine, record), kv_of(warmed, means_of(warmed)[chunk]))


# --- where there are no contexts


def test_a_single_chunk_is_computed_behind_neutral_passages():
    engine = engine_of()
    assert engine.precompute(CHUNKS[:1]) == 1
    (part,) = parts_of(engine, CHUNKS[:1])
    (record,) = [one for one in engine.store.records() if one.chunk_id == part.id]
    assert record.neutral
    assert record.exact
    torch.testing.assert_close(kv_of(engine, record), ByHand(engine).first_pass(part), atol=2e-4, rtol=2e-4)
    assert engine.precompute(CHUNKS[:1]) == 0


def test_bundled_contexts_are_neutral_passages_alone():
    engine = engine_of(contexts=ContextSource.BUNDLED)
    assert engine.precompute(CHUNKS) == 6
    by_hand = ByHand(engine)
    preamble = engine.preparer.preamble(engine.builder.opening())
    for part in parts_of(engine):
        (record,) = [one for one in engine.store.records() if one.chunk_id == part.id]
        assert record.context == tuple(one.id for one in preamble if one.id is not None)
        assert (record.exact, record.read, record.contexts) == (True, (), ())
        torch.testing.assert_close(kv_of(engine, record), by_hand.first_pass(part), atol=2e-4, rtol=2e-4)
    assert engine.precompute(CHUNKS, pool=ContextPool(parts_of(engine))) == 0, "a pool changes nothing"


def test_without_neutral_passages_contexts_are_woven_from_chunks_alone(prefills):
    engine = engine_of(neutral_tokens=0)
    assert engine.precompute(CHUNKS) == 6
    assert len(prefills) == FIRST_PASSES + 6 * 2, "each first pass once"
    parts, means = parts_of(engine), means_of(engine)
    assert set(means) == {part.id for part in parts}
    assert not [one for record in means.values() for one in record.sources if is_neutral(one)]
    assert not [record for record in engine.store.records() if record.alone and record.chunk_id in means]


def long_chunk(engine: Engine, tokens: int) -> Chunk:
    """A chunk of about so many tokens."""
    text = "The pier is long. "
    each = len(engine.builder.chunk_part(text * 10)) / 10
    return Chunk(text * int(tokens / each), "pier")


def test_a_chunk_that_leaves_room_for_no_other_is_computed_behind_neutral_passages():
    engine = engine_of()
    long = long_chunk(engine, 475)
    (part,) = parts_of(engine, [long])
    room = engine.preparer.context_tokens - len(part) - 1 - sum(map(len, engine.builder.opening()))
    assert 0 <= room < min(map(len, parts_of(engine))), "the instruction fits, no other chunk does"
    assert engine.precompute([*CHUNKS, long]) == 7
    means = means_of(engine)
    assert len(means) == 6
    assert [record for record in engine.store.records() if record.chunk_id == part.id]
    assert engine.precompute([*CHUNKS, long]) == 0


def test_where_the_room_is_bounded_a_chunk_is_computed_behind_what_fits():
    engine = engine_of()
    part, *others = parts_of(engine)
    most = len(part) + sum(map(len, engine.builder.opening())) + 4
    (beforehand,) = engine.preparer.beforehand(part, [[other] for other in others], most_tokens=most)
    assert beforehand.mean is None
    assert engine.compute(beforehand)


def test_contexts_that_do_not_fit_are_left_out():
    """Of the nearest chunks only one fits: the other contexts would be empty, and the same."""
    engine = engine_of(context_count=8, context_tokens=1)
    short, long = Chunk("Piers.", "short"), long_chunk(engine, 475)
    part, little = parts_of(engine, [long, short])
    room = engine.preparer.context_tokens - len(part) - 1 - sum(map(len, engine.builder.opening()))
    assert len(little) <= room < min(map(len, parts_of(engine)))
    assert engine.precompute([long], pool=ContextPool(parts_of(engine, [long, short, *CHUNKS]))) == 1
    assert means_of(engine)[part.id].contexts == ((engine.builder.opening()[-1].id, little.id),)


# --- whose contexts


def test_a_pool_may_have_more_than_what_is_computed(prefills):
    engine = engine_of()
    pool = ContextPool(parts_of(engine))
    assert engine.precompute(CHUNKS[:2], pool=pool) == 2
    parts, means = parts_of(engine), means_of(engine)
    assert set(means) == {part.id for part in parts[:2]}
    for part in parts[:2]:
        near = {one.id for context in contexts_of(engine, part, pool) for one in context}
        assert near & {other.id for other in parts[2:]}
        assert near == {one for context in means[part.id].contexts for one in context[1:]}
    prefills.clear()
    assert engine.precompute(CHUNKS[:3], pool=pool) == 1
    assert prefills[-1].parts[-1] == parts[2]


def test_a_new_chunk_is_computed_behind_the_means_of_older_ones(prefills):
    """What contexts were woven from is dropped; the mean of a chunk takes its place if it has read little."""
    engine = engine_of()
    engine.precompute(CHUNKS[:5])
    older, prefills[:] = means_of(engine), []
    assert engine.precompute(CHUNKS[5:], pool=ContextPool(parts_of(engine))) == 1
    assert len(prefills) == 2, "no first pass"
    part = parts_of(engine)[5]
    record = means_of(engine)[part.id]
    near = {one for context in record.contexts for one in context[1:]}
    for chunk in near:
        assert older[chunk].sources <= record.sources, "what a mean has read, this one has read too"
    assert {chunk: one for chunk, one in means_of(engine).items() if chunk != part.id} == older


def test_salts_are_apart():
    engine = engine_of()
    for salt in ("a", "b"):
        assert engine.precompute(CHUNKS, cache_salt=salt) == 6
    for salt in ("a", "b"):
        own = {part.id for part in parts_of(engine, cache_salt=salt)}
        system = engine.builder.opening(cache_salt=salt)[-1].id
        for chunk in own:
            record = means_of(engine)[chunk]
            assert {one for context in record.contexts for one in context} <= {*own, system}
    first, second = (parts_of(engine, cache_salt=salt)[0] for salt in ("a", "b"))
    assert not means_of(engine)[first.id].sources & means_of(engine)[second.id].sources


def test_chunks_of_another_salt_are_no_contexts():
    engine = engine_of()
    with pytest.raises(UsageError, match="is not in the pool"):
        engine.precompute(CHUNKS, pool=ContextPool(parts_of(engine, cache_salt="a")), cache_salt="b")
    assert not means_of(engine)


# --- attention


def test_means_have_the_mean_of_their_attention_where_the_usual_method_scores_by_it(monkeypatch):
    engine = engine_of(method="cachecraft")
    shares: dict[ChunkId, list[SegmentRecord]] = {}
    real = Means.take

    def take(self, share, record, kv):
        shares.setdefault(record.chunk_id, []).append(record)
        return real(self, share, record, kv)

    monkeypatch.setattr(Means, "take", take)
    engine.precompute(CHUNKS)
    for chunk, mean in means_of(engine).items():
        first, second = (record.attention for record in shares[chunk])
        assert first is not None
        assert second is not None
        assert first != second
        assert mean.attention == mean_profile([first, second])
        assert set(mean.attention.chunks) == {one for context in mean.contexts for one in context[1:]}


def test_no_attention_is_kept_for_methods_that_score_nothing_by_it(warmed):
    assert {record.attention for record in means_of(warmed).values()} == {None}


def test_cachecraft_scores_a_mean_by_it():
    engine = engine_of(method="cachecraft")
    engine.precompute(CHUNKS)
    answer = engine.generate(QUESTION, CHUNKS, max_new_tokens=1, method="cachecraft:alpha=1.0")
    means = means_of(engine)
    last = answer.report.chunks[-1]
    assert last.variant == means[parts_of(engine)[-1].id].id
    assert last.reasons["overlap"] == pytest.approx(1.0), "all that its contexts had is before it now"


# --- what is removed


def test_a_mean_survives_on_disk(tmp_path, warmed):
    store = StoreConfig(cache_dir=tmp_path)
    with engine_of(store=store) as engine:
        engine.precompute(CHUNKS)
        assert engine.store.flush(30)
    with engine_of(store=store) as engine:
        means = means_of(engine)
        for chunk, record in means_of(warmed).items():
            assert means[chunk] == replace(record, nbytes=means[chunk].nbytes)
            torch.testing.assert_close(kv_of(engine, means[chunk]), kv_of(warmed, record))
        assert engine.precompute(CHUNKS) == 0
        answer = engine.generate(QUESTION, CHUNKS[::-1], max_new_tokens=1, method="full-reuse")
        assert {chunk.tier for chunk in answer.report.chunks[-6:]} == {"disk"}


def files(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*/??/*.safetensors")}


@pytest.mark.parametrize("again", [False, True], ids=["at once", "after a restart"])
def test_a_chunk_is_removed_with_all_that_has_read_it_and_nothing_else(tmp_path, again):
    engine = engine_of(store=StoreConfig(cache_dir=tmp_path))
    engine.precompute(CHUNKS)
    assert engine.store.flush(30)
    if again:
        engine.close()
        engine = engine_of(store=StoreConfig(cache_dir=tmp_path))
    before, gone = engine.store.records(), parts_of(engine)[5]
    doomed = {record.id for record in before if gone.id in {record.chunk_id, *record.sources}}
    readers = {record.chunk_id for record in before if gone.id in record.sources}
    assert 0 < len(readers) < 5, "some means have read it, others have not"
    assert engine.forget([CHUNKS[5]]) >= len(doomed)
    assert {record.id for record in engine.store.records()} == {record.id for record in before} - doomed
    assert engine.store.flush(30)
    assert files(tmp_path) == {record.id for record in before} - doomed
    engine.close()
    with engine_of(store=StoreConfig(cache_dir=tmp_path)) as engine:
        assert not [record for record in engine.store.records() if gone.id in {record.chunk_id, *record.sources}]
        assert engine.precompute(CHUNKS[:5]) == len(readers), "those alone are computed anew"
        assert not [record for record in engine.store.records() if gone.id in {record.chunk_id, *record.sources}]


def test_what_is_woven_from_a_mean_has_read_what_the_mean_has():
    engine = engine_of()
    engine.precompute(CHUNKS[:5])
    mean = means_of(engine)[parts_of(engine)[0].id]
    engine.generate(QUESTION, [CHUNKS[0], CHUNKS[5]], max_new_tokens=1, method="cacheblend")
    new = parts_of(engine)[5]
    (record,) = [one for one in engine.store.records() if one.chunk_id == new.id]
    assert not record.exact
    assert record.context[-1] == mean.chunk_id
    assert record.sources >= mean.sources
    other = next(one for one in mean.sources if one in {part.id for part in parts_of(engine)})
    assert other not in record.context
    engine.store.forget_chunks([other])
    assert engine.store.record(record.id) is None


def test_what_is_woven_anew_from_a_mean_has_read_what_the_mean_has():
    """A variant that cachecraft recomputed half of and stored."""
    engine = engine_of(method="cachecraft", variant_fraction=0.0)
    engine.precompute(CHUNKS[:5])
    means = means_of(engine)
    engine.generate(QUESTION, [CHUNKS[0], CHUNKS[5], CHUNKS[1]], max_new_tokens=1, method="cachecraft:alpha=0.6")
    last = parts_of(engine)[1]
    variants = [one for one in engine.store.records() if one.chunk_id == last.id and not one.contexts]
    assert any(one.generation > 0 for one in variants), "a part of its tokens was recomputed"
    for one in variants:
        assert one.sources >= means[last.id].sources | means[parts_of(engine)[0].id].sources


def test_what_was_woven_from_what_is_removed_meanwhile_is_not_stored():
    engine = engine_of()
    engine.precompute(CHUNKS[:5])
    mean = means_of(engine)[parts_of(engine)[0].id]
    read = next(one for one in mean.sources if one in {part.id for part in parts_of(engine)})
    prompt = engine.builder.build(QUESTION, [CHUNKS[0], CHUNKS[5]])
    prefilled = engine.runner.prefill(prompt, make_method("full-reuse"), counts_as_request=False)
    engine.store.forget_chunks([read])
    before = set(engine.store.records())
    assert engine.runner.store_new(prefilled) <= {record.id for record in before}
    assert not [one for one in engine.store.records() if one.chunk_id == parts_of(engine)[5].id]


def test_forgetting_in_the_middle_of_a_mean_begins_it_anew():
    """A chunk is computed in its first context when a chunk of that context is removed."""
    engine = engine_of()
    parts = parts_of(engine)
    pool = ContextPool(parts)
    for one in engine.preparer.prepare_beforehand(CHUNKS[0], pool=pool):
        engine.compute(one)
        if one.mean is not None:
            break
    gone = one.prompt.parts[-2]
    assert gone in parts
    engine.forget([CHUNKS[parts.index(gone)]])
    for one in engine.preparer.prepare_beforehand(CHUNKS[0], pool=pool, without={gone.id}):
        assert gone not in one.prompt.parts
        engine.compute(one)
    record = means_of(engine)[parts[0].id]
    assert gone.id not in record.sources
    left = ContextPool([part for part in parts if part != gone])
    expected, _ = ByHand(engine).means(parts[:1], left)[parts[0].id]
    torch.testing.assert_close(kv_of(engine, record), expected, atol=2e-4, rtol=2e-4)
