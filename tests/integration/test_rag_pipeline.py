"""Corpus and engine together: what is retrieved is woven, what is removed is forgotten."""

import asyncio

import pytest

from chunkweave import (
    AsyncEngine,
    AsyncRagPipeline,
    Engine,
    RagAnswer,
    RagPipeline,
    ReuseConfig,
    SamplingParams,
    StoreConfig,
)
from chunkweave.calibration.questions import bundled_corpus
from chunkweave.config import CaptureConfig
from chunkweave.errors import TopKError, UsageError
from chunkweave.retrieval.corpus import Corpus
from chunkweave.retrieval.documents import CorpusDocument
from tests.toys import toy_model
from tests.unit.retrieval_fakes import SUBJECTS, SubjectEmbedder, document
from tests.unit.test_retrievers import Document, LangChainRetriever, LlamaIndexRetriever, NodeWithScore, TextNode

FEW = SamplingParams(max_new_tokens=4)


@pytest.fixture(scope="module")
def loaded():
    return toy_model()


@pytest.fixture
def pipeline(loaded):
    """Twelve documents, each computed in two contexts of one other: none has read all of the others."""
    engine = Engine(loaded, reuse=ReuseConfig(capture=CaptureConfig(context_count=2, context_tokens=1)))
    corpus = Corpus(SubjectEmbedder(), tokenizer=loaded.tokenizer)
    corpus.add([document(number) for number in range(12)])
    with engine:
        yield RagPipeline(engine, corpus, top_k=3)


@pytest.fixture
def best_first(pipeline):
    return RagPipeline(pipeline.engine, pipeline.corpus, top_k=3, order="fixed")


def test_an_answer_is_that_of_the_engine_over_what_was_retrieved(best_first):
    pipeline = best_first
    answer = pipeline.answer("What of the storm and the ferry?", sampling=FEW)
    found = pipeline.corpus.search("What of the storm and the ferry?", 3)
    assert answer.retrieved == found
    assert [one.rank for one in answer.retrieved] == [1, 2, 3]
    own = pipeline.engine.generate(
        "What of the storm and the ferry?", [one.chunk for one in found], max_new_tokens=4, method="full"
    )
    assert answer.answer.token_ids == own.token_ids
    assert answer.text == own.text
    assert [chunk.source for chunk in answer.report.chunks[1:]] == [one.document for one in found]
    assert answer.embed_s >= 0
    assert answer.search_s > 0
    told = answer.as_dict()
    assert [chunk["document"] for chunk in told["retrieved"]] == [one.document for one in found]
    assert told["report"]["method"] == "prefix"


def test_the_second_question_reuses_the_chunks_of_the_first(pipeline):
    assert pipeline.precompute() == 12
    answer = pipeline.answer("The storm?", sampling=FEW, method="full-reuse")
    assert [chunk.kv_source for chunk in answer.report.chunks[1:]] == ["reused"] * 3


def test_every_option_of_a_method_reaches_the_engine(pipeline):
    pipeline.precompute()
    options = {"method": "cacheblend", "recompute_ratio": 1.0, "check_layers": (2,)}
    answer = pipeline.answer("The storm?", sampling=FEW, **options)
    direct = pipeline.engine.generate(
        "The storm?", [one.chunk for one in answer.retrieved], max_new_tokens=4, **options
    )
    assert answer.report.recompute_fraction == direct.report.recompute_fraction
    with pytest.raises(UsageError, match="alpha"):
        pipeline.answer("The storm?", sampling=FEW, method="cachecraft", alpha=-1.0)
    with pytest.raises(UsageError, match="alpha"):
        list(pipeline.stream("The storm?", sampling=FEW, method="cachecraft", alpha=-1.0))


def test_a_stream_begins_with_the_chunks_and_ends_with_the_answer(pipeline):
    events = list(pipeline.stream("The storm?", sampling=FEW))
    assert events[0].retrieved == pipeline.corpus.search("The storm?", 3)
    assert all(event.retrieved is None for event in events[1:])
    assert [event.answer is None for event in events] == [True] * (len(events) - 1) + [False]
    assert "".join(event.text for event in events) == events[-1].answer.text
    again = pipeline.answer("The storm?", sampling=FEW)
    assert events[-1].answer.answer.token_ids == again.answer.token_ids


def test_the_order_in_the_prompt_is_the_callers(loaded, pipeline):
    backwards = RagPipeline(pipeline.engine, pipeline.corpus, top_k=3, order=lambda found: found[::-1])
    answer = backwards.answer("The storm?", sampling=FEW)
    assert [one.rank for one in answer.retrieved] == [3, 2, 1]
    sources = [one.document for one in pipeline.corpus.search("The storm?", 3)]
    assert [chunk.source for chunk in answer.report.chunks[1:]] == sources[::-1]
    for wrong in (lambda found: found[:2], lambda found: [found[0], *found[:2]]):
        with pytest.raises(UsageError, match="each once"):
            RagPipeline(pipeline.engine, pipeline.corpus, top_k=3, order=wrong).answer("The storm?")


def test_unless_order_is_free_the_best_chunks_stand_first(pipeline):
    found = pipeline.corpus.search("The storm and the ferry?", 3)
    free = RagPipeline(pipeline.engine, pipeline.corpus, top_k=3, order="free")
    events = list(free.stream("The storm and the ferry?", sampling=FEW))
    assert events[0].retrieved == found
    answer = events[-1].answer
    assert answer.report.order == "frequency"
    assert pipeline.answer("The storm and the ferry?", sampling=FEW).report.order == "original"
    ids = [chunk.id for chunk in answer.report.chunks[1:]]
    assert ids == sorted(ids), "nothing was asked for before: by id"
    assert answer.retrieved == tuple(found[chunk.rank] for chunk in answer.report.chunks[1:])
    assert [one.chunk.source for one in answer.retrieved] == [chunk.source for chunk in answer.report.chunks[1:]]
    with pytest.raises(UsageError, match="unknown order 'loose'"):
        RagPipeline(pipeline.engine, pipeline.corpus, order="loose")


def test_how_many_chunks(pipeline):
    assert len(pipeline.retrieve("storm", top_k=5).chunks) == 5
    assert len(RagPipeline(pipeline.engine, pipeline.corpus).retrieve("storm").chunks) == 6
    with pytest.raises(TopKError, match="13 best of 12"):
        pipeline.answer("storm", top_k=13)
    for wrong in (0, -1):
        with pytest.raises(UsageError, match="at least 1"):
            pipeline.answer("storm", top_k=wrong)
        with pytest.raises(UsageError, match="at least 1"):
            RagPipeline(pipeline.engine, pipeline.corpus, top_k=wrong)
    with pytest.raises(UsageError, match="question is empty"):
        pipeline.answer(" ")


def test_few_documents_are_all_given_and_none_is_plain_generation(loaded):
    corpus = Corpus(SubjectEmbedder(), tokenizer=loaded.tokenizer)
    with Engine(loaded) as engine:
        pipeline = RagPipeline(engine, corpus)
        assert pipeline.answer("The storm?", sampling=FEW).retrieved == ()
        corpus.add([document(0), document(1)])
        assert len(pipeline.answer("The storm?", sampling=FEW).retrieved) == 2


def test_removing_a_document_removes_its_kv_and_what_was_computed_after_it(best_first):
    pipeline = best_first
    pipeline.precompute()
    pipeline.answer("The storm and the ferry?", sampling=FEW)
    store, builder = pipeline.engine.store, pipeline.engine.builder
    victim = pipeline.corpus.search("The storm and the ferry?", 3)[0]
    gone, before = builder.chunk_part(victim.chunk).id, set(store.records())
    doomed = {record for record in before if gone in {record.chunk_id, *record.sources}}
    assert any(record.chunk_id == gone for record in doomed)
    assert any(gone in record.context for record in doomed)
    assert any(record.contexts for record in doomed if record.chunk_id != gone)
    assert any(record.contexts for record in before - doomed)
    change = pipeline.remove([victim.document])
    assert [chunk.text for chunk in change.gone] == [victim.chunk.text]
    assert set(store.records()) == before - doomed
    store.check()
    assert victim.document not in {one.document for one in pipeline.answer("The storm?", sampling=FEW).retrieved}


def test_removing_a_document_removes_its_kv_from_disk(loaded, tmp_path):
    corpus = Corpus(SubjectEmbedder(), tokenizer=loaded.tokenizer)
    corpus.add([document(0), document(1)])
    with Engine(loaded, store=StoreConfig(cache_dir=tmp_path)) as engine:
        pipeline = RagPipeline(engine, corpus)
        pipeline.precompute()
        engine.store.flush()
        before = len(list(tmp_path.rglob("*.safetensors")))
        pipeline.remove(["d0"])
        engine.store.flush()
        assert len(list(tmp_path.rglob("*.safetensors"))) == before - 2, "and the mean of the other, which has read it"


def test_tenants_do_not_share_what_they_compute(loaded):
    corpus = Corpus(SubjectEmbedder(), tokenizer=loaded.tokenizer)
    corpus.add([document(number) for number in range(len(SUBJECTS))])
    with Engine(loaded) as engine:
        one, two = (RagPipeline(engine, corpus, top_k=2, cache_salt=salt) for salt in ("one", "two"))
        one.precompute()
        sources = {chunk.kv_source for chunk in two.answer("storm", sampling=FEW, method="full-reuse").report.chunks}
        assert sources == {"computed"}
        two.remove(["d0"])
        assert len([record for record in engine.store.records() if record.source == "d0"]) == 1, "that of the other"


def test_the_bundled_reader_answers_from_the_bundled_corpus():
    bundled = bundled_corpus()
    with Engine.load("reader") as engine:
        corpus = Corpus(tokenizer=engine.loaded.tokenizer)
        corpus.add([CorpusDocument(f"p{i}", one.text, one.source) for i, one in enumerate(bundled.passages)])
        assert len(corpus) == len(bundled.passages)
        pipeline = RagPipeline(engine, corpus)
        asked = [question for question in bundled.questions if question.kind == "single"]
        right = 0
        for question in asked:
            answer = pipeline.answer(question.question, sampling=SamplingParams(max_new_tokens=16))
            texts = [one.chunk.text for one in answer.retrieved]
            assert any(one.text in texts for one in question.chunks if question.answers[0] in one.text)
            right += answer.text.strip() in question.answers
        assert right >= 1, "what it answers among look-alikes is the reader's affair; that it sees them is ours"


CHOIR, TOWER = "The choir is led by Otto.", "The tower has 230 steps."
RETRIEVERS = [
    LangChainRetriever([Document(TOWER, {"source": "tower"}), Document(CHOIR, {"source": "choir"})]),
    LlamaIndexRetriever([NodeWithScore(TextNode(TOWER, "tower"), 0.9), NodeWithScore(TextNode(CHOIR, "choir"), 0.1)]),
]


@pytest.mark.parametrize("retriever", RETRIEVERS, ids=["LangChain", "LlamaIndex"])
def test_a_retriever_stands_where_a_corpus_does(loaded, retriever):
    with Engine(loaded) as engine:
        pipeline = RagPipeline(engine, retriever)
        answer = pipeline.answer("Who leads?", sampling=FEW, method="full-reuse")
        assert [one.document for one in answer.retrieved] == ["tower", "choir"]
        own = engine.generate("Who leads?", [TOWER, CHOIR], max_new_tokens=4, method="full")
        assert answer.answer.token_ids == own.token_ids
        again = pipeline.answer("Who else?", sampling=FEW, method="full-reuse")
        assert [chunk.kv_source for chunk in again.report.chunks[1:]] == ["prefix-exact"] * 2
        assert len(pipeline.answer("Who?", top_k=1, sampling=FEW).retrieved) == 1
        for refused in (pipeline.precompute, lambda: pipeline.remove(["tower"])):
            with pytest.raises(UsageError, match="does not list its chunks"):
                refused()


@pytest.mark.parametrize("retriever", RETRIEVERS, ids=["LangChain", "LlamaIndex"])
def test_so_it_does_for_many_questions_at_a_time(loaded, retriever):
    async def ask(engine: Engine) -> list[RagAnswer]:
        async with AsyncEngine(engine) as batching:
            pipeline = AsyncRagPipeline(batching, retriever)
            return await asyncio.gather(*(pipeline.answer(question, sampling=FEW) for question in ("Who?", "What?")))

    with Engine(loaded) as engine:
        answers = asyncio.run(ask(engine))
    assert [[one.document for one in answer.retrieved] for answer in answers] == [["tower", "choir"]] * 2


def test_what_is_neither_corpus_nor_retriever_is_refused(loaded):
    with Engine(loaded) as engine, pytest.raises(UsageError, match="neither a corpus nor a retriever"):
        RagPipeline(engine, "notes")
