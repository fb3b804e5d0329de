"""What the version before wrote to disk: segments and a corpus are read, a calibration record is refused by name."""

import shutil
from pathlib import Path

import pytest

from chunkweave import Chunk, Corpus, Engine, StoreConfig

WRITTEN = Path(__file__).parents[1] / "data" / "written-before"
CHUNKS = [Chunk("The Ger Tower has 200 steps.", source="ger"), Chunk("The Sel Tower has 201 steps.", source="sel")]
QUESTION = "How many steps has the Sel Tower?"


@pytest.fixture
def cache(tmp_path) -> Path:
    return Path(shutil.copytree(WRITTEN / "cache", tmp_path / "cache"))


def reader(cache: Path | None = None) -> Engine:
    store = None if cache is None else StoreConfig(cache_dir=cache)
    return Engine.load("reader", device="cpu", dtype="float32", store=store)


def ask(engine: Engine, chunks, method: str):
    return engine.generate(QUESTION, chunks, system="Answer.", max_new_tokens=4, method=method)


def test_segments_are_found_and_give_the_same_answer(cache):
    with reader(cache) as engine, reader() as fresh:
        answer = ask(engine, CHUNKS, "prefix")
        assert [chunk.kv_source for chunk in answer.report.chunks] == ["prefix-exact"] * 3
        assert {chunk.tier for chunk in answer.report.chunks} == {"disk"}
        assert answer.token_ids == ask(fresh, CHUNKS, "full").token_ids
        woven = ask(engine, CHUNKS[::-1], "full-reuse")
        assert [chunk.kv_source for chunk in woven.report.chunks[1:]] == ["reused", "reused"]
        engine.store.check()


def test_a_calibration_record_of_another_format_is_named_and_passed_over(cache, caplog):
    with reader(cache) as engine:
        assert engine.calibration is None or engine.calibration.questions != 4
    assert "is a calibration record of format 1; this version reads 2; it is not used" in caplog.text


def test_the_corpus_is_searched(tmp_path):
    corpus = Corpus.open(Path(shutil.copytree(WRITTEN / "corpus", tmp_path / "corpus")))
    [found] = corpus.search("Sel Tower steps", 1)
    assert "201 steps" in found.chunk.text
