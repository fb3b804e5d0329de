"""Free chunk order in both engines: what is computed is what full prefill computes for the order that was chosen."""

import asyncio

import pytest
import torch

from chunkweave import AsyncEngine, Chunk, Engine, OrderingConfig, Request, SamplingParams
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.store.records import segment_id
from tests.integration.test_batching_core import STORED

CHUNKS = STORED
QUESTION = "When does the ferry leave?"


def ask(engine: Engine, chunks, **options):
    return engine.generate(QUESTION, chunks, max_new_tokens=4, order="free", **options)


def sources(answer) -> list[str]:
    return [chunk.source for chunk in answer.report.chunks[1:]]


def in_order(answer, chunks) -> list[Chunk]:
    return [chunks[chunk.rank] for chunk in answer.report.chunks[1:]]


def test_a_reordered_prompt_is_computed_as_in_full_prefill_of_that_order(model):
    with Engine(model, ordering=OrderingConfig("frequency")) as engine, Engine(model, method="full") as reference:
        for chunks in (CHUNKS[:3], CHUNKS[:3], CHUNKS[1:], CHUNKS[::-1], CHUNKS[1:3]):
            request = Request(QUESTION, chunks, order="free")
            prepared = engine.preparer.prepare(request, MethodRequest())
            prefilled = engine.runner.prefill(prepared.prompt, prepared.reuse_method)
            engine.runner.store_new(prefilled)
            stood = [chunks[rank] for _, rank in sorted(prepared.arranged.ranks.items())]
            prompt = reference.builder.build(QUESTION, stood)
            assert prompt == prepared.prompt
            own = reference.runner.prefill(prompt, reference.preparer.prepare(request, MethodRequest()).reuse_method)
            torch.testing.assert_close(prefilled.logits, own.logits, atol=2e-4, rtol=1e-4)
        engine.store.check()
        engine.store.tree.check()


def test_the_report_keeps_the_callers_ranks_and_names_the_ordering(model):
    with Engine(model) as engine:
        for _ in range(2):
            ask(engine, [CHUNKS[2]])
        answer = ask(engine, CHUNKS)
        assert sources(answer)[0] == "ferry"
        assert [CHUNKS[chunk.rank].source for chunk in answer.report.chunks[1:]] == sources(answer)
        assert answer.report.order == "frequency"
        assert answer.report.chunks[0].rank is None
        assert answer.report.as_dict()["chunks"][1]["rank"] == 2
        fixed = engine.generate(QUESTION, CHUNKS, max_new_tokens=2)
        assert sources(fixed) == [chunk.source for chunk in CHUNKS]
        assert [chunk.rank for chunk in fixed.report.chunks] == [None, 0, 1, 2, 3]
        assert fixed.report.order == "original"


def test_equal_sets_share_their_prefix_whatever_the_retriever_ranks_first(model):
    with Engine(model, order="free") as engine:
        for turn in range(4):
            chunks = CHUNKS[turn:] + CHUNKS[:turn]
            answer = engine.generate(QUESTION, chunks, max_new_tokens=2)
        total = sum(chunk.tokens for chunk in answer.report.chunks)
        assert answer.report.prefix_exact_tokens == total
    with Engine(model) as engine:
        for turn in range(4):
            chunks = CHUNKS[turn:] + CHUNKS[:turn]
            answer = engine.generate(QUESTION, chunks, max_new_tokens=2)
        assert [chunk.kv_source for chunk in answer.report.chunks] == ["prefix-exact", *["computed"] * 4]


def test_exact_paths_are_kept_once_their_chunks_are_asked_for_often_enough(model):
    with Engine(model, ordering=OrderingConfig(promotion_threshold=3)) as engine:
        kv_sources = [[chunk.kv_source for chunk in ask(engine, CHUNKS[:2]).report.chunks] for _ in range(4)]
        assert kv_sources[:3] == [["computed"] * 3, *[["prefix-exact", "computed", "computed"]] * 2]
        assert kv_sources[3] == ["prefix-exact"] * 3
        rare = ask(engine, CHUNKS)
        assert [chunk.kv_source for chunk in rare.report.chunks] == [*["prefix-exact"] * 3, "computed", "computed"]
        kept = {record.source for record in engine.store.records()}
        assert kept == {"system", "history", "pilots", "turn"}, (
            "the system part, what was promoted, and an answer behind it"
        )
        engine.generate(QUESTION, CHUNKS[2:], max_new_tokens=2)
        assert {"ferry", "fish"} <= {record.source for record in engine.store.records()}, "fixed order: as it comes"


def test_without_a_threshold_everything_is_kept(model):
    with Engine(model, ordering=OrderingConfig(promotion_threshold=None)) as engine:
        ask(engine, CHUNKS[:2])
        assert [chunk.kv_source for chunk in ask(engine, CHUNKS[:2]).report.chunks] == ["prefix-exact"] * 3


@pytest.mark.parametrize("method", ["cacheblend", "cachecraft", "query", "epic", "full-reuse"])
def test_a_promoted_chunk_is_computed_exactly_and_continues_the_prefix(model, method):
    ordering = OrderingConfig(continuation_threshold=2)
    with Engine(model, ordering=ordering) as engine, Engine(model, method="prefix") as reference:
        engine.precompute(CHUNKS)
        first = ask(engine, CHUNKS[:3], method=method)
        assert {chunk.kv_source for chunk in first.report.chunks[1:]} == {"reused"}
        for promoted in range(1, 4):
            answer = ask(engine, CHUNKS[:3], method=method)
            kv_sources = [chunk.kv_source for chunk in answer.report.chunks[1:]]
            assert kv_sources == ["prefix-exact"] * (promoted - 1) + ["computed"] + ["reused"] * (3 - promoted)
        assert [chunk.kv_source for chunk in ask(engine, CHUNKS[:3], method=method).report.chunks] == [
            "prefix-exact"
        ] * 4
        reference.generate(QUESTION, in_order(answer, CHUNKS[:3]), max_new_tokens=1)
        parts = [part.id for part in reference.builder.build(QUESTION, in_order(answer, CHUNKS[:3])).parts if part.id]
        for place, part in enumerate(parts):
            segment = segment_id(part, tuple(parts[:place]))
            mine, theirs = engine.store.get(segment, exact=True), reference.store.get(segment, exact=True)
            for layer in range(engine.loaded.model.geometry.num_layers):
                for own, other in zip(mine.layer(layer), theirs.layer(layer), strict=True):
                    torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
        engine.store.check()


def test_a_weaving_method_continues_a_prefix_only_if_requests_begin_with_it(model):
    with Engine(model, ordering=OrderingConfig(continuation_threshold=3)) as engine:
        engine.precompute(CHUNKS)
        asked = ([CHUNKS[0]], [CHUNKS[1], CHUNKS[0]], [CHUNKS[2], CHUNKS[0]], [CHUNKS[3], CHUNKS[0]])
        answers = [ask(engine, chunks, method="cacheblend") for chunks in asked]
        assert [sources(answer)[0] for answer in answers] == ["history"] * 4
        kv_sources = [[chunk.kv_source for chunk in answer.report.chunks[1:]] for answer in answers]
        assert kv_sources == [["reused"], ["reused"] * 2, ["computed", "reused"], ["prefix-exact", "reused"]]
    with Engine(model, ordering=OrderingConfig(continuation_threshold=None)) as engine:
        engine.precompute(CHUNKS)
        for _ in range(5):
            answer = ask(engine, CHUNKS[:2], method="cacheblend")
        assert {chunk.kv_source for chunk in answer.report.chunks[1:]} == {"reused"}


def test_nothing_is_promoted_for_a_fixed_order(model):
    with Engine(model) as engine:
        engine.precompute(CHUNKS)
        for _ in range(5):
            answer = engine.generate(QUESTION, CHUNKS, max_new_tokens=2, method="cacheblend")
            assert {chunk.kv_source for chunk in answer.report.chunks[1:]} == {"reused"}


def test_many_requests_at_once_are_counted_and_ordered_too(model):
    async def run(engine: Engine):
        async with AsyncEngine(engine) as batching:
            request = Request(QUESTION, CHUNKS[1:2], sampling=SamplingParams(max_new_tokens=2), order="free")
            for _ in range(2):
                await batching.submit(request).answer()
            whole = Request(QUESTION, CHUNKS, sampling=SamplingParams(max_new_tokens=2), order="free")
            return await batching.submit(whole).answer()

    with Engine(model) as engine:
        answer = asyncio.run(run(engine))
        assert sources(answer)[0] == "pilots"
        assert answer.report.chunks[1].kv_source == "prefix-exact"


def test_tenants_never_meet_in_counts(model):
    with Engine(model) as engine:
        for _ in range(3):
            ask(engine, [CHUNKS[3]], cache_salt="one")
        other = ask(engine, CHUNKS, cache_salt="two")
        ids = [chunk.id for chunk in other.report.chunks[1:]]
        assert ids == sorted(ids)


def test_a_request_that_is_refused_is_not_counted(model):
    with Engine(model) as engine:
        with pytest.raises(UsageError, match="unknown order"):
            engine.generate(QUESTION, CHUNKS, order="any")
        with pytest.raises(UsageError, match="context is 512"):
            engine.generate("word " * 600, CHUNKS)
        assert engine.preparer.arranger.table().requests == 0
    with pytest.raises(UsageError, match="there are: free, fixed"):
        Engine(model, order="loose")
    with pytest.raises(UnknownMethodError, match="unknown ordering"):
        Engine(model, ordering=OrderingConfig("alphabetical"))
    with pytest.raises(UsageError, match="at least 1, not 0"):
        OrderingConfig(promotion_threshold=0)
