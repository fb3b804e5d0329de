"""Search and prefill side by side: what is started, kept, ended and computed anew, and that answers stay the same."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave import (
    AsyncEngine,
    AsyncRagPipeline,
    BatchingConfig,
    Corpus,
    Engine,
    OrderingConfig,
    RagPipeline,
    SamplingParams,
)
from chunkweave.engine.runner import Runner
from chunkweave.errors import ChunkweaveError, DeadlineError, QueueFullError, TopKError, UsageError
from chunkweave.retrieval.retrievers import RetrievalStage, RetrievedChunk
from chunkweave.retrieval.speculation import SpeculationCounts
from tests.integration.test_batching_core import CHUNKS
from tests.toys import toy_model
from tests.unit.retrieval_fakes import SubjectEmbedder, document

QUESTION = "When does the ferry leave?"
FEW = SamplingParams(max_new_tokens=5)


class ScriptedCorpus:
    """A search whose stages name what they are told to, each when the test lets it."""

    def __init__(self, stages: Sequence[Sequence[int]], *, free: bool = False) -> None:
        self.stages = [self._retrieved(places) for places in stages]
        self.gates = [threading.Event() for _ in stages]
        self.ended = threading.Event()
        if free:
            self.release(len(stages))

    def release(self, stages: int) -> None:
        for gate in self.gates[:stages]:
            gate.set()

    def __len__(self) -> int:
        return len(CHUNKS)

    def embed_query(self, question: str) -> np.ndarray:
        return np.zeros(1, dtype=np.float32)

    def search(self, question: np.ndarray, k: int) -> tuple[RetrievedChunk, ...]:
        return self.stages[-1]

    def search_stages(self, question: np.ndarray, k: int):
        try:
            for number, (gate, chunks) in enumerate(zip(self.gates, self.stages, strict=True), start=1):
                assert gate.wait(20)
                yield RetrievalStage(chunks, number, number == len(self.stages), 0.0, 0, 0)
        finally:
            self.ended.set()

    @staticmethod
    def _retrieved(places: Sequence[int]) -> tuple[RetrievedChunk, ...]:
        return tuple(
            RetrievedChunk(CHUNKS[place], "d", place, rank, 1.0 / rank, "", {})
            for rank, place in enumerate(places, start=1)
        )


@pytest.fixture(scope="module")
def loaded():
    return toy_model("llama")


@pytest.fixture
def engine(loaded) -> Engine:
    return Engine(loaded)


def plain(loaded, places: Sequence[int], sampling: SamplingParams = FEW):
    """The answer of an engine that has nothing stored."""
    return Engine(loaded).generate(
        QUESTION, [CHUNKS[place] for place in places], max_new_tokens=sampling.max_new_tokens, method="full"
    )


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came")


def run(engine: Engine, corpus, work, *, config: BatchingConfig | None = None, **options):
    """`work(pipeline, batching)` over a fresh asynchronous engine, which holds nothing at the end."""

    async def main():
        async with AsyncEngine(engine, config) as batching:
            result = await work(AsyncRagPipeline(batching, corpus, **options), batching)
            await until(lambda: batching.stats.running + batching.stats.waiting == 0)
            assert batching.stats.blocks_reserved == 0
            batching._core.check()
        engine.store.check()
        return result

    return asyncio.run(main())


def test_a_search_takes_no_core_that_the_model_computes_on(engine):
    """Helpers of faiss would spin there while they wait for one another."""
    faiss = pytest.importorskip("faiss")
    seen = []

    class Corpus(ScriptedCorpus):
        def embed_query(self, question: str) -> np.ndarray:
            seen.append(faiss.omp_get_max_threads())
            return super().embed_query(question)

    async def work(pipeline, batching):
        return await pipeline.answer(QUESTION, sampling=FEW)

    before = faiss.omp_get_max_threads()
    run(engine, Corpus([[0, 3]], free=True), work)
    assert seen == [1]
    assert faiss.omp_get_max_threads() == before


@pytest.mark.parametrize(("pending", "stages"), [(1, True), (2, False)])
def test_a_search_has_no_stages_while_requests_queue_up(engine, monkeypatch, pending, stages):
    corpus = ScriptedCorpus([[0, 3], [2, 1], [2, 1]], free=True)

    async def work(pipeline, batching):
        stats = replace(batching.stats, pending=pending)
        with monkeypatch.context() as patched:
            patched.setattr(AsyncEngine, "stats", property(lambda _: stats))
            answer = await pipeline.answer(QUESTION, sampling=FEW)
        assert [chunk.place for chunk in answer.retrieved] == [2, 1]

    run(engine, corpus, work)
    assert corpus.ended.is_set() is stages


def test_a_match_at_the_end_is_returned_at_once(engine, loaded):
    """The whole answer is there before the search has ended; no step is made for it afterwards."""
    corpus = ScriptedCorpus([[0, 3], [2, 1], [2, 1], [2, 1]])

    async def work(pipeline, batching):
        asked = asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW))
        corpus.release(1)
        await until(lambda: pipeline.counts.started == 1)
        corpus.release(2)
        await until(lambda: batching.stats.finished == 1)
        corpus.release(3)
        await until(lambda: pipeline.counts.kept == 1)
        assert not asked.done(), "nothing is shown before the search has confirmed it"
        steps = batching.stats.steps
        corpus.release(4)
        answer = await asked
        assert batching.stats.steps == steps
        assert pipeline.counts == SpeculationCounts(stages=4, started=2, kept=1, terminated=1, matched=1)
        return answer

    answer = run(engine, corpus, work)
    assert answer.answer.token_ids == plain(loaded, [2, 1]).token_ids
    assert answer.retrieved == corpus.stages[-1]
    assert (answer.pipelining.started, answer.pipelining.terminated, answer.pipelining.matched) == (2, 1, True)
    assert 0 < answer.pipelining.overlap_s < answer.search_s < answer.ttft_s
    assert answer.non_overlapping_search_s == answer.search_s - answer.pipelining.overlap_s
    assert answer.as_dict()["pipelining"]["matched"] is True


@pytest.mark.parametrize("ordering", ["frequency", "original"])
def test_with_a_free_order_the_same_chunks_are_a_match_however_they_are_ranked(loaded, ordering):
    corpus = ScriptedCorpus([[0, 3], [3, 0]])

    async def work(pipeline, batching):
        asked = asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW))
        corpus.release(1)
        await until(lambda: pipeline.counts.started == 1)
        corpus.release(2)
        return await asked

    engine = Engine(loaded, ordering=OrderingConfig(ordering))
    answer = run(engine, corpus, work, order="free")
    assert (answer.pipelining.terminated, answer.pipelining.matched) == (
        (0, True) if ordering == "frequency" else (1, False)
    )
    assert {one.place: one.rank for one in answer.retrieved} == {3: 1, 0: 2}
    ranks = [chunk.rank for chunk in answer.report.chunks if chunk.rank is not None]
    assert [corpus.stages[-1][rank] for rank in ranks] == list(answer.retrieved)


def test_a_list_that_changes_ends_what_runs_and_the_final_one_is_computed_anew(engine, loaded):
    corpus = ScriptedCorpus([[0, 3], [2, 1]])

    async def work(pipeline, batching):
        asked = asyncio.create_task(pipeline.answer(QUESTION, sampling=SamplingParams(max_new_tokens=60)))
        corpus.release(1)
        await until(lambda: batching.stats.running == 1)
        corpus.release(2)
        answer = await asked
        assert batching.stats.aborted == 1
        assert pipeline.counts == SpeculationCounts(stages=2, started=1, terminated=1, regenerated=1)
        return answer

    answer = run(engine, corpus, work)
    assert answer.answer.token_ids == plain(loaded, [2, 1], SamplingParams(max_new_tokens=60)).token_ids
    assert (answer.pipelining.matched, answer.pipelining.overlap_s) == (False, 0.0)


def test_what_two_lists_share_in_front_is_computed_once(engine):
    corpus = ScriptedCorpus([[0, 3], [0, 1]])

    async def work(pipeline, batching):
        asked = asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW))
        corpus.release(1)
        await until(lambda: batching.stats.finished == 1)
        corpus.release(2)
        return await asked

    report = run(engine, corpus, work).report
    assert [chunk.kv_source for chunk in report.chunks] == ["prefix-exact", "prefix-exact", "computed"]


def test_load_switches_speculation_off(engine, loaded, monkeypatch):
    """Another question's prefill is pending all the while."""
    gate, real = threading.Event(), Runner.step
    monkeypatch.setattr(Runner, "step", lambda self, *rows, **how: (gate.wait(20), real(self, *rows, **how))[1])
    corpus = ScriptedCorpus([[2, 1], [2, 1], [2, 1]])

    async def work(pipeline, batching):
        other = asyncio.create_task(AsyncRagPipeline(batching, ScriptedCorpus([[4]], free=True)).answer("Who?"))
        await until(lambda: batching.stats.pending == 1)
        asked = asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW))
        for stage in (1, 2):
            corpus.release(stage)
            await until(lambda stage=stage: pipeline.counts.stages == stage)
        corpus.release(3)
        await until(lambda: pipeline.counts.stages == 3)
        gate.set()
        await other
        answer = await asked
        assert pipeline.counts == SpeculationCounts(stages=3, deferred=2, late=1)
        return answer

    assert run(engine, corpus, work).answer.token_ids == plain(loaded, [2, 1]).token_ids


def test_more_room_in_the_pool_lets_several_questions_speculate(engine, monkeypatch):
    gate, real = threading.Event(), Runner.step
    monkeypatch.setattr(Runner, "step", lambda self, *rows, **how: (gate.wait(20), real(self, *rows, **how))[1])
    corpora = [ScriptedCorpus([[place], [place]]) for place in range(3)]

    async def work(pipeline, batching):
        pipeline_of = [AsyncRagPipeline(batching, corpus, max_prefill_batch=2) for corpus in corpora]
        asked = []
        for number, (own, corpus) in enumerate(zip(pipeline_of, corpora, strict=True)):
            asked.append(asyncio.create_task(own.answer(QUESTION, sampling=FEW)))
            corpus.release(1)
            await until(lambda own=own: own.counts.stages == 1)
            assert batching.stats.pending == min(number + 1, 2)
        assert [own.counts.started for own in pipeline_of] == [1, 1, 0]
        gate.set()
        for corpus in corpora:
            corpus.release(2)
        return await asyncio.gather(*asked)

    assert [answer.pipelining.matched for answer in run(engine, corpora[0], work)] == [True, True, False]


def test_a_speculation_that_fails_costs_time_only(engine, loaded, monkeypatch):
    corpus = ScriptedCorpus([[2, 1], [2, 1], [2, 1]])
    real, broken = Runner.step, [True]

    def step(self, decoding, prefilling, **how):
        if broken[0]:
            raise RuntimeError("a kernel failed")
        return real(self, decoding, prefilling, **how)

    monkeypatch.setattr(Runner, "step", step)

    async def work(pipeline, batching):
        asked = asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW))
        corpus.release(1)
        await until(lambda: batching.stats.failed == 1)
        corpus.release(2)
        await until(lambda: batching.stats.failed == 2)
        broken[0] = False
        corpus.release(3)
        answer = await asked
        assert (pipeline.counts.started, pipeline.counts.matched, pipeline.counts.regenerated) == (2, 0, 1)
        return answer

    assert run(engine, corpus, work).answer.token_ids == plain(loaded, [2, 1]).token_ids


def test_one_that_fails_after_it_was_confirmed_is_computed_anew_too(engine, loaded, monkeypatch):
    corpus = ScriptedCorpus([[2, 1], [2, 1]])
    real, gate, calls = Runner.step, threading.Event(), []

    def step(self, decoding, prefilling, **how):
        gate.wait(20)
        calls.append(1)
        if len(calls) <= 2:
            raise RuntimeError("a kernel failed")
        return real(self, decoding, prefilling, **how)

    monkeypatch.setattr(Runner, "step", step)

    async def work(pipeline, batching):
        asked = asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW))
        corpus.release(1)
        await until(lambda: batching.stats.running == 1)
        corpus.release(2)
        await until(lambda: pipeline.counts.matched == 1)
        gate.set()
        answer = await asked
        assert batching.stats.failed == 1
        return answer

    answer = run(engine, corpus, work)
    assert answer.answer.token_ids == plain(loaded, [2, 1]).token_ids
    assert not answer.pipelining.matched


def test_a_prompt_that_does_not_fit_is_the_final_lists_error_only(engine, loaded):
    corpus = ScriptedCorpus([[0, 1, 2, 3, 4], [0]], free=False)

    async def work(pipeline, batching):
        asked = asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW))
        corpus.release(1)
        await until(lambda: pipeline.counts.stages == 1)
        corpus.release(2)
        return await asked

    length = plain(loaded, [0]).report.prompt_tokens
    answer = run(engine, corpus, work, config=BatchingConfig(kv_tokens=length + 20, block_tokens=1))
    assert answer.answer.token_ids == plain(loaded, [0]).token_ids
    assert (answer.pipelining.started, answer.pipelining.matched) == (0, False)


@pytest.mark.parametrize("after", ["a stage", "the chunks", "a piece"])
def test_closing_the_generator_ends_search_and_speculation(engine, after):
    corpus = ScriptedCorpus([[0, 3], [0, 3], [2, 1]])

    async def work(pipeline, batching):
        events = pipeline.stream(QUESTION, sampling=SamplingParams(max_new_tokens=400))
        if after == "a stage":
            first = asyncio.create_task(anext(events))
            corpus.release(1)
            await until(lambda: batching.stats.running == 1)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            corpus.release(2)
        else:
            corpus.release(3)
            assert (await anext(events)).retrieved == corpus.stages[-1]
            if after == "a piece":
                assert (await anext(events)).answer is None
            await events.aclose()
        await until(corpus.ended.is_set)
        await until(lambda: batching.stats.running + batching.stats.waiting == 0)
        assert batching.stats.finished == 0
        assert pipeline._retriever.speculation.running == 0
        assert not corpus.gates[2].is_set() or after != "a stage"

    run(engine, corpus, work)


def test_deadlines_cover_the_search_too(engine):
    corpus = ScriptedCorpus([[0], [0]])

    async def work(pipeline, batching):
        with pytest.raises(DeadlineError):
            await pipeline.answer(QUESTION, deadline_s=0.05)
        corpus.release(2)
        assert (await pipeline.answer(QUESTION, sampling=FEW, deadline_s=60)).text is not None
        for wrong in (0, -1.0, float("nan")):
            with pytest.raises(UsageError, match="deadline_s"):
                await pipeline.answer(QUESTION, deadline_s=wrong)

    run(engine, corpus, work)


def test_back_pressure_reaches_the_caller(engine, monkeypatch):
    gate, real = threading.Event(), Runner.step
    monkeypatch.setattr(Runner, "step", lambda self, *rows, **how: (gate.wait(20), real(self, *rows, **how))[1])
    corpus = ScriptedCorpus([[0], [0]], free=True)

    async def work(pipeline, batching):
        first = asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW))
        await until(lambda: batching.stats.running == 1 and batching.stats.speculating == 0)
        second = asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW))
        await until(lambda: batching.stats.waiting == 1 and batching.stats.speculating == 0)
        with pytest.raises(QueueFullError):
            await pipeline.answer(QUESTION, sampling=FEW)
        gate.set()
        await asyncio.gather(first, second)

    run(engine, corpus, work, config=BatchingConfig(max_waiting=1, max_running=1))


stage_lists = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(
    questions=st.lists(stage_lists, min_size=1, max_size=3),
    method=st.sampled_from(["prefix", "full"]),
    batch=st.integers(1, 3),
    hurried=st.booleans(),
)
def test_answers_are_those_without_speculation(loaded, questions, method, batch, hurried):
    """Whatever the stages name, in whichever steps they come, and whoever else asks meanwhile."""
    corpora = [ScriptedCorpus(stages, free=hurried) for stages in questions]

    async def work(_, batching):
        pipelines = [AsyncRagPipeline(batching, corpus, order="fixed", max_prefill_batch=batch) for corpus in corpora]
        asked = [asyncio.create_task(pipeline.answer(QUESTION, sampling=FEW, method=method)) for pipeline in pipelines]
        for stage in range(1, 6):
            for corpus in corpora:
                corpus.release(stage)
            await asyncio.sleep(0.005)
        return await asyncio.gather(*asked)

    answers = run(Engine(loaded), corpora[0], work, config=BatchingConfig(max_running=2, step_tokens=60))
    for stages, answer in zip(questions, answers, strict=True):
        assert answer.answer.token_ids == plain(loaded, stages[-1]).token_ids
        assert answer.report.method == method


def test_over_a_real_corpus_it_answers_as_the_other_pipeline(loaded):
    corpus = Corpus(SubjectEmbedder(), tokenizer=loaded.tokenizer)
    corpus.add([document(number) for number in range(12)])
    options = {"top_k": 3, "order": lambda found: found[::-1], "system": "Answer.", "cache_salt": "tenant"}
    own = RagPipeline(Engine(loaded), corpus, **options).answer("The storm and the ferry?", sampling=FEW)

    async def work(pipeline, batching):
        found = await pipeline.answer("The storm and the ferry?", sampling=FEW)
        events = [event async for event in pipeline.stream("The storm and the ferry?", sampling=FEW)]
        without = AsyncRagPipeline(batching, corpus, speculate=False, **options)
        with pytest.raises(TopKError):
            await pipeline.answer("storm", top_k=13)
        with pytest.raises(UsageError, match="empty"):
            await pipeline.answer(" ")
        wrong = AsyncRagPipeline(batching, corpus, order=lambda found: found[:1])
        with pytest.raises(UsageError, match="each once"):
            await wrong.answer("storm")
        return found, events, await without.answer("The storm and the ferry?", sampling=FEW)

    found, events, without = run(Engine(loaded), corpus, work, **options)
    assert found.retrieved == own.retrieved == events[0].retrieved == without.retrieved
    assert found.answer.token_ids == own.answer.token_ids == without.answer.token_ids
    assert [event.answer is None for event in events] == [True] * (len(events) - 1) + [False]
    assert "".join(event.text for event in events) == own.text
    assert without.pipelining is None
    assert without.non_overlapping_search_s == without.search_s
    assert own.ttft_s == pytest.approx(own.embed_s + own.search_s + own.report.ttft_s)
    for wrong in ({"top_k": 0}, {"max_prefill_batch": 0}, {"max_searches": 0}):
        with pytest.raises(UsageError):
            AsyncRagPipeline(None, corpus, **wrong)


def test_without_documents_it_is_plain_generation(loaded):
    corpus = Corpus(SubjectEmbedder(), tokenizer=loaded.tokenizer)

    async def work(pipeline, batching):
        return await pipeline.answer(QUESTION, sampling=FEW)

    answer = run(Engine(loaded), corpus, work)
    assert answer.retrieved == ()
    assert answer.answer.token_ids == plain(loaded, []).token_ids


def test_an_engine_that_closes_ends_the_answer(engine):
    corpus = ScriptedCorpus([[0], [1]])

    async def main():
        batching = AsyncEngine(engine)
        pipeline = AsyncRagPipeline(batching, corpus)
        asked = asyncio.create_task(pipeline.answer(QUESTION))
        corpus.release(1)
        await until(lambda: pipeline.counts.stages == 1)
        batching.close()
        corpus.release(2)
        with pytest.raises(ChunkweaveError, match="closed"):
            await asked

    asyncio.run(main())


def test_a_generator_that_is_not_begun_does_nothing(engine):
    corpus = ScriptedCorpus([[0]])

    async def work(pipeline, batching):
        async with aclosing(pipeline.stream(QUESTION)):
            pass
        assert pipeline.counts == SpeculationCounts()

    run(engine, corpus, work)
