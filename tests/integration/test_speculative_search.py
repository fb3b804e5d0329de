"""Search and prefill side by side over an `AsyncEngine`, as in the server: answers are those without speculation."""

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave import Answer, AsyncEngine, BatchingConfig, Engine, Request, SamplingParams
from chunkweave.retrieval.retrievers import RetrievalStage, RetrievedChunk
from chunkweave.retrieval.speculation import Retriever, SpeculationCounts
from tests.integration.test_batching_core import CHUNKS, until

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
                yield RetrievalStage(chunks, number, number == len(self.stages), 0.0, 0)
        finally:
            self.ended.set()

    @staticmethod
    def _retrieved(places: Sequence[int]) -> tuple[RetrievedChunk, ...]:
        return tuple(
            RetrievedChunk(CHUNKS[place], "d", place, rank, 1.0 / rank, "", {})
            for rank, place in enumerate(places, start=1)
        )


@pytest.fixture
def engine(model) -> Engine:
    return Engine(model)


def plain(model, places: Sequence[int], sampling: SamplingParams = FEW):
    """The answer of an engine that has nothing stored."""
    return Engine(model).generate(
        QUESTION, [CHUNKS[place] for place in places], max_new_tokens=sampling.max_new_tokens, method="full"
    )


class Searching:
    """Answers over one corpus, each with a search of its own."""

    def __init__(self, batching: AsyncEngine, corpus: ScriptedCorpus, *, pending: int | None = None, batch: int = 1):
        self.batching, self.corpus = batching, corpus
        self.retriever = Retriever(
            lambda: batching.stats.pending if pending is None else pending, max_prefill_batch=batch
        )

    @property
    def counts(self) -> SpeculationCounts:
        return self.retriever.speculation.counts

    async def answer(self, sampling: SamplingParams = FEW, **options) -> Answer:
        async def submit(chunks, speculative):
            request = Request(QUESTION, [retrieved.chunk for retrieved in chunks], None, sampling)
            return self.batching.submit(request, speculative=speculative, **options)

        ahead = self.retriever.question(submit)
        try:
            found = await self.retriever.search(self.corpus, QUESTION, 1, on_stage=ahead.on_stage)
            stream = await ahead.final(found.chunks)
            if stream is None:
                stream = await ahead.start(found.chunks, speculative=False)
            else:
                stream.confirm()
            return [event.answer async for event in stream][-1]
        finally:
            await ahead.aclose()


def run(engine: Engine, corpora: Sequence[ScriptedCorpus], work, *, config: BatchingConfig | None = None, **options):
    """`work(batching, *searches)` over a fresh asynchronous engine, which holds nothing at the end."""

    async def main():
        async with AsyncEngine(engine, config) as batching:
            searches = [Searching(batching, corpus, **options) for corpus in corpora]
            result = await work(batching, *searches)
            await until(lambda: batching.stats.running + batching.stats.waiting == 0)
            assert batching.stats.blocks_reserved == 0
            batching._core.check()
            for search in searches:
                await search.retriever.close()
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

    before = faiss.omp_get_max_threads()
    run(engine, [Corpus([[0, 3]], free=True)], lambda batching, search: search.answer())
    assert seen == [1]
    assert faiss.omp_get_max_threads() == before


@pytest.mark.parametrize(("pending", "stages"), [(1, True), (2, False)])
def test_a_search_has_no_stages_while_requests_queue_up(engine, model, pending, stages):
    corpus = ScriptedCorpus([[0, 3], [2, 1], [2, 1]], free=True)
    answer = run(engine, [corpus], lambda batching, search: search.answer(), pending=pending)
    assert answer.token_ids == plain(model, [2, 1]).token_ids
    assert corpus.ended.is_set() is stages


def test_a_list_that_changes_ends_what_runs_and_the_final_one_is_computed_anew(engine, model):
    corpus, many = ScriptedCorpus([[0, 3], [2, 1]]), SamplingParams(max_new_tokens=60)

    async def work(batching, search):
        asked = asyncio.create_task(search.answer(many))
        corpus.release(1)
        await until(lambda: batching.stats.running == 1)
        corpus.release(2)
        answer = await asked
        assert batching.stats.aborted == 1
        assert search.counts == SpeculationCounts(stages=2, started=1, terminated=1, regenerated=1)
        return answer

    assert run(engine, [corpus], work).token_ids == plain(model, [2, 1], many).token_ids


def test_what_two_lists_share_in_front_is_computed_once(engine):
    corpus = ScriptedCorpus([[0, 3], [0, 1]])

    async def work(batching, search):
        asked = asyncio.create_task(search.answer())
        corpus.release(1)
        await until(lambda: batching.stats.finished == 1)
        corpus.release(2)
        return await asked

    report = run(engine, [corpus], work).report
    assert [chunk.kv_source for chunk in report.chunks] == ["prefix-exact", "prefix-exact", "computed"]


def test_cancelling_a_question_ends_search_and_speculation(engine):
    corpus = ScriptedCorpus([[0, 3], [0, 3], [2, 1]])

    async def work(batching, search):
        asked = asyncio.create_task(search.answer(SamplingParams(max_new_tokens=400)))
        corpus.release(1)
        await until(lambda: batching.stats.running == 1)
        asked.cancel()
        corpus.release(2)
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert corpus.ended.is_set()
        await until(lambda: batching.stats.running + batching.stats.waiting == 0)
        assert batching.stats.finished == 0
        assert search.retriever.speculation.running == 0
        assert not corpus.gates[2].is_set()

    run(engine, [corpus], work)


stage_lists = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(
    questions=st.lists(stage_lists, min_size=1, max_size=3),
    method=st.sampled_from(["prefix", "full"]),
    batch=st.integers(1, 3),
    hurried=st.booleans(),
)
def test_answers_are_those_without_speculation(model, questions, method, batch, hurried):
    """Whatever the stages name, in whichever steps they come, and whoever else asks meanwhile."""
    corpora = [ScriptedCorpus(stages, free=hurried) for stages in questions]

    async def work(batching, *searches):
        asked = [asyncio.create_task(search.answer(method=method)) for search in searches]
        for stage in range(1, 6):
            for corpus in corpora:
                corpus.release(stage)
            await asyncio.sleep(0.005)
        return await asyncio.gather(*asked)

    answers = run(Engine(model), corpora, work, config=BatchingConfig(max_running=2, step_tokens=60), batch=batch)
    for stages, answer in zip(questions, answers, strict=True):
        assert answer.token_ids == plain(model, stages[-1]).token_ids
        assert answer.report.method == method
