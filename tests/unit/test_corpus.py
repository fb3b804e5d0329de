"""The corpus: what it finds, what it keeps, what it refuses."""

import os
import random
import re
import resource
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from chunkweave.errors import (
    CorpusError,
    DimensionMismatchError,
    DocumentError,
    DuplicateDocumentError,
    EmbedderMismatchError,
    EmptyDocumentError,
    TopKError,
    UnknownDocumentError,
    UsageError,
)
from chunkweave.prompt.documents import SplitConfig
from chunkweave.retrieval import corpus as corpus_module
from chunkweave.retrieval import corpus_store, searcher
from chunkweave.retrieval.corpus import Corpus
from chunkweave.retrieval.corpus_store import CorpusStore, StoredDocument, StoredSettings
from chunkweave.retrieval.documents import CorpusDocument
from chunkweave.retrieval.indexes import IndexConfig, IndexKind
from tests.unit.retrieval_fakes import (
    SPLIT,
    SUBJECTS,
    LetterTokenizer,
    SubjectEmbedder,
    document,
    memory_corpus,
    new_corpus,
    opened,
)


def indexed(documents: int, folder: Path | None = None, **config: int) -> Corpus:
    """A corpus of so many documents with an IVF index."""
    index = IndexConfig(IndexKind.IVF, **config)
    corpus = memory_corpus(index=index) if folder is None else new_corpus(folder, index=index)
    corpus.add([document(number) for number in range(documents)])
    corpus.build_index()
    return corpus


def contents(corpus: Corpus) -> dict[str, tuple]:
    return {one.id: (one.title, one.chunks, dict(one.metadata)) for one in corpus.documents}


def test_a_search_finds_the_subject_with_ranks_scores_and_where_it_stands():
    corpus = memory_corpus()
    long = "The ferry sails at nine. The ferry sails at ten. The ferry sails home. The storm came late."
    corpus.add([document(0), CorpusDocument("log", long, "Log", {"year": 1904}), document(3, "garden")])
    found = corpus.search("When does the ferry sail?", 2)
    assert [one.rank for one in found] == [1, 2]
    assert [one.document for one in found] == ["log", "log"]
    assert found[0].score == pytest.approx(1.0)
    assert (found[0].title, found[0].metadata) == ("Log", {"year": 1904})
    assert found[0].chunk.source == f"log#{found[0].place}"
    assert "ferry" in found[0].chunk.text
    assert corpus.search("the garden", 1)[0].chunk.source == "d3", "a document of one chunk is called by its id alone"
    assert found[0].as_dict()["score"] == pytest.approx(1.0)


def test_stages_end_with_what_a_search_finds():
    corpus = memory_corpus(index=IndexConfig(IndexKind.IVF, lists=4, probes=4))
    corpus.add([document(number) for number in range(40)])
    assert [stage.last for stage in corpus.search_stages("storm", 3)] == [True], "no search waits for an index"
    corpus.build_index()
    stages = list(corpus.search_stages("storm", 3))
    assert [stage.last for stage in stages] == [False, False, False, True]
    assert stages[-1].chunks == corpus.search("storm", 3)
    assert all(stage.seconds >= 0 for stage in stages)
    assert sum(stage.distances for stage in stages) == 40 + 4


def test_stage_times_leave_out_what_the_caller_does(monkeypatch):
    corpus = indexed(40, lists=4, probes=4)
    now_s = 0.0
    monkeypatch.setattr(searcher, "perf_counter", lambda: now_s)
    real = searcher.Searcher._retrieved

    def slow(self, hits):
        nonlocal now_s
        now_s += 3.0
        return real(self, hits)

    monkeypatch.setattr(searcher.Searcher, "_retrieved", slow)
    times = []
    for stage in corpus.search_stages("storm", 3):
        times.append(stage.seconds)
        now_s += 10.0
    assert times == [3.0] * 4


def test_a_text_of_several_documents_is_found_once():
    corpus = memory_corpus(index=IndexConfig(IndexKind.IVF, lists=2, probes=2))
    copies = [CorpusDocument(f"copy{number}", "The storm came late.") for number in range(30)]
    corpus.add([*copies, document(0, "storm"), document(1, "ferry")])
    corpus.build_index()
    found = corpus.search("storm", 3)
    assert len({one.chunk.text for one in found}) == len(found) == 3
    assert [one.rank for one in found] == [1, 2, 3]
    assert list(corpus.search_stages("storm", 3))[-1].chunks == found
    many = memory_corpus()
    many.add([*copies, *(CorpusDocument(f"more{n}", "The storm came late.") for n in range(10)), document(0, "storm")])
    assert len(many.search("The storm came late.", 2)) == 1, "of 32 rows, all are copies"
    every = corpus.search("storm", 30)
    assert len(every) == 3, "there are no more texts"


def test_a_vector_may_stand_for_the_question():
    corpus = memory_corpus()
    corpus.add([document(number) for number in range(6)])
    assert corpus.search(corpus.embed_query("choir"), 1) == corpus.search("choir", 1)


def test_removed_documents_are_gone_from_search_and_disk(tmp_path):
    corpus = new_corpus(tmp_path)
    corpus.add([document(0, text="The secret harbour."), document(1, text="The open lighthouse.")])
    change = corpus.remove(["d0"])
    assert change.removed == ("d0",)
    assert [chunk.text for chunk in change.gone] == ["The secret harbour."]
    assert corpus.search("harbour", 1)[0].document == "d1"
    assert "d0" not in opened(tmp_path)
    assert b"secret" not in bytes_of(tmp_path)
    corpus.remove(["d1"])
    assert len(opened(tmp_path)) == 0


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


class NoiseEmbedder(SubjectEmbedder):
    """Vectors whose bytes no other text's vector has."""

    def _vector(self, text: str) -> np.ndarray:
        vector = np.random.default_rng(crc32(text.encode())).standard_normal(self.dimension).astype(np.float32)
        return vector / np.linalg.norm(vector)


def test_nothing_of_a_removed_or_replaced_document_stays_in_the_folder(tmp_path):
    """Text, names, metadata and vectors; also with an index, and while another process has the corpus open."""
    draw = random.Random(0)
    config = IndexConfig(IndexKind.IVF, lists=8, probes=8, flat_up_to=1)
    settings = {"split": SplitConfig(900), "index": config, "tokenizer": LetterTokenizer()}
    corpus = Corpus.create(tmp_path, NoiseEmbedder(), **settings)
    marks: dict[str, str] = {}
    removed: set[str] = set()
    vectors = {}
    for step in range(60):
        gone = [name for name in marks if draw.random() < 0.15]
        removed |= {marks.pop(name) for name in gone}
        corpus.remove(gone)
        documents = []
        for name in draw.sample([f"document-{number}" for number in range(60)], 5):
            mark = f"mark{draw.getrandbits(60):015x}"
            removed |= {marks[name]} if name in marks else set()
            marks[name] = mark
            text = " ".join(f"{mark}.{number}" for number in range(draw.choice([1, 1, 3, 20, 60, 300])))
            documents.append(CorpusDocument(name, text, f"title {mark}", {"note": f"note {mark}"}))
        corpus.update(documents)
        for one in documents:
            vectors[marks[one.id]] = corpus.embed_query(corpus.document(one.id).chunks[0]).tobytes()
        corpus.build_index()
        if step % 20 == 0:
            reader = Corpus.open(tmp_path, NoiseEmbedder(), tokenizer=LetterTokenizer())
            assert len(reader.search("mark", 3)) == 3
        found = bytes_of(tmp_path)
        assert [mark for mark in marks.values() if mark.encode() not in found] == []
        assert [mark for mark in removed if mark.encode() in found] == []
        assert [mark for mark in removed if vectors[mark] in found] == []
    assert len(reader) > 3, "it has what it read"
    assert {one.id for one in Corpus.open(tmp_path, NoiseEmbedder(), tokenizer=LetterTokenizer()).documents} == {*marks}


def test_balancing_the_tables_leaves_no_copy_of_removed_text(tmp_path):
    """SQLite's secure_delete alone leaves copies in pages whose rows were moved: this fails without the rows' pads."""
    draw = random.Random(0)
    store = CorpusStore(tmp_path)
    store.create(StoredSettings("none", "none", 1, 40, 0, IndexConfig()))
    documents: list[StoredDocument] = []
    removed: set[bytes] = set()
    for step in range(240):
        leaving = draw.sample(documents, min(len(documents), draw.randint(0, 6)))
        documents = [one for one in documents if one not in leaving]
        removed |= {one.digest.encode() for one in leaving}
        coming = []
        for number in range(draw.randint(0, 6)):
            mark = f"mark{draw.getrandbits(60):015x}"
            text = f"{mark} lorem ipsum " * draw.choice([0, 1, 2, 3, 5, 8])
            coming.append(StoredDocument(mark, mark, mark, (text,), number=10 * step + number + 1))
        store.commit(step, leaving, coming, np.zeros((len(coming), 1), dtype=np.float32))
        documents += coming
        if step % 3 == 0:
            found = set(re.findall(rb"mark[0-9a-f]{15}", bytes_of(tmp_path)))
            assert not found & removed
    assert len(removed) > 500


def test_text_that_another_document_has_is_not_gone():
    corpus = memory_corpus()
    corpus.add([document(0, text="The same harbour."), document(1, text="The same harbour."), document(2)])
    assert corpus.remove(["d0"]).gone == ()
    assert [chunk.text for chunk in corpus.remove(["d1"]).gone] == ["The same harbour."]


def test_update_replaces_what_differs_and_embeds_nothing_else(tmp_path):
    embedder = SubjectEmbedder()
    corpus = Corpus.create(tmp_path, embedder, split=SPLIT, tokenizer=LetterTokenizer())
    corpus.add([document(0), document(1), document(2)])
    embedder.embedded.clear()
    change = corpus.update([document(1), document(0, text="Now the choir."), document(9)])
    assert (change.added, change.replaced, change.unchanged) == (("d9",), ("d0",), ("d1",))
    assert [chunk.text for chunk in change.gone] == ["Note 0 on the harbour."]
    assert embedder.embedded == ["Now the choir.", "Note 9 on the ferry."]
    assert corpus.search("choir", 1)[0].document == "d0"
    assert contents(opened(tmp_path)) == contents(corpus)
    assert corpus.update([document(1)]).unchanged == ("d1",)
    titled = CorpusDocument("d1", document(1).text, "Another title", {"number": 1})
    assert corpus.update([titled]).replaced == ("d1",), "a title counts too"


def test_changes_in_memory_and_on_disk_end_the_same(tmp_path):
    on_disk, in_memory = new_corpus(tmp_path), memory_corpus()
    for corpus in (on_disk, in_memory):
        for start in range(0, 60, 7):
            corpus.add([document(number) for number in range(start, start + 7)])
        corpus.remove(["d3", "d30", "d31"])
        corpus.update([document(5, "choir"), document(99)])
    assert contents(on_disk) == contents(in_memory) == contents(opened(tmp_path))
    assert opened(tmp_path).split == SPLIT
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.sqlite"]
    for subject in SUBJECTS:
        assert on_disk.search(subject, 20) == in_memory.search(subject, 20) == opened(tmp_path).search(subject, 20)


def test_an_index_of_earlier_vectors_is_not_used(tmp_path):
    corpus = new_corpus(tmp_path, index=IndexConfig(IndexKind.IVF))
    corpus.add([document(0, "harbour"), document(1, "storm")])
    corpus.build_index()
    corpus.remove(["d0"])
    corpus.add([document(2, "choir")])  # as many chunks as before
    assert opened(tmp_path).search("choir", 1)[0].document == "d2"
    assert opened(tmp_path).search("storm", 1)[0].document == "d1"


def test_progress_counts_documents():
    seen = []
    memory_corpus().update([document(number) for number in range(150)], progress=lambda *step: seen.append(step))
    assert seen[0] == (64, 150)
    assert seen[-1] == (150, 150)
    assert seen == sorted(seen)


def test_a_corpus_that_grows_past_its_size_is_searched_flat_until_its_index_is_made(tmp_path):
    corpus = indexed(50, folder=tmp_path, flat_up_to=50)
    assert corpus.searched_by is IndexKind.FLAT
    assert not corpus.index_outdated
    corpus.add([document(50, "storm")])
    assert corpus.index_outdated
    before = corpus.search("storm", 5)
    assert corpus.searched_by is IndexKind.FLAT, "a search makes no index"
    corpus.build_index()
    assert corpus.searched_by is IndexKind.IVF
    assert not corpus.index_outdated
    assert {one.document for one in corpus.search("storm", 9)} >= {one.document for one in before}
    assert opened(tmp_path).search("storm", 9) == corpus.search("storm", 9)
    corpus.remove(["d50"])
    assert corpus.searched_by is IndexKind.FLAT, "it has the size of a flat one again"
    assert "d50" not in {one.document for one in corpus.search("storm", 20)}


def test_an_index_on_disk_is_used_for_a_corpus_that_has_grown_since(tmp_path, monkeypatch):
    corpus = indexed(60, folder=tmp_path, lists=3, probes=3, flat_up_to=10)
    corpus.add([document(number, "choir") for number in range(60, 70)])
    again = opened(tmp_path)
    monkeypatch.setattr(searcher, "build_index", lambda *args: pytest.fail("it is there"))
    again.build_index()
    assert again.searched_by is IndexKind.IVF
    assert {one.document for one in again.search("choir", 20)} == {f"d{n}" for n in (*range(4, 60, 6), *range(60, 70))}


def test_lists_are_learned_anew_when_there_should_be_half_as_many_again():
    corpus = indexed(120, flat_up_to=10)  # 120 // 39 = 3 lists
    corpus.add([document(number) for number in range(120, 170)])
    assert not corpus.index_outdated, "170 // 39 = 4"
    corpus.add([document(number) for number in range(170, 200)])
    assert corpus.index_outdated, "200 // 39 = 5"
    corpus.build_index()
    assert not corpus.index_outdated


def test_an_index_is_made_beside_changes():
    corpus = memory_corpus(index=IndexConfig(IndexKind.IVF, lists=3, probes=3, flat_up_to=10))
    corpus.add([document(number) for number in range(60)])
    made = corpus.make_index()
    corpus.add([document(60, "storm")])
    corpus.take_index(made)
    assert corpus.searched_by is IndexKind.IVF
    assert "d60" in {one.document for one in corpus.search("storm", 20)}, "it gets what came meanwhile"
    corpus.remove(["d0"])
    made = corpus.make_index()
    corpus.remove(["d2"])
    corpus.take_index(made)
    assert corpus.searched_by is IndexKind.FLAT, "its rows are other ones"
    assert "d2" not in {one.document for one in corpus.search("storm", 20)}
    corpus.build_index()
    assert corpus.searched_by is IndexKind.IVF
    assert "d2" not in {one.document for one in corpus.search("storm", 20)}


def test_without_faiss_a_corpus_past_its_size_stays_flat(monkeypatch):
    corpus = memory_corpus(index=IndexConfig(IndexKind.IVF, flat_up_to=10))
    monkeypatch.setattr(searcher, "available", lambda kind: kind is IndexKind.FLAT)
    corpus.add([document(number) for number in range(60)])
    assert not corpus.index_outdated
    assert len(corpus.search("storm", 20)) == 20
    assert corpus.searched_by is IndexKind.FLAT


def changed(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "corpus.sqlite")) as connection, connection:
        assert connection.execute(statement).rowcount != 0


@pytest.mark.parametrize("change", ["lists = zeroblob(40)", "centroids = zeroblob(28)", "config = '{}'"])
def test_a_damaged_index_is_made_again_with_a_line_in_the_log(tmp_path, caplog, change):
    corpus = indexed(6, folder=tmp_path)
    changed(tmp_path, f"UPDATE ivf SET {change}")
    again = opened(tmp_path)
    assert again.search("storm", 1) == corpus.search("storm", 1)
    assert "checksum" in caplog.text
    again.build_index()
    assert opened(tmp_path).search("storm", 1) == corpus.search("storm", 1)
    assert len(caplog.records) == 1


def test_an_index_of_a_later_commit_is_not_used(tmp_path):
    corpus = new_corpus(tmp_path, index=IndexConfig(IndexKind.IVF, lists=2, probes=2))
    corpus.add([document(number) for number in range(9)])
    reader = opened(tmp_path)
    corpus.add([document(number) for number in range(9, 40)])
    corpus.build_index()
    assert len(reader.search("storm", 9)) == 9
    reader.build_index()
    assert len(opened(tmp_path).search("storm", 40)) == 40, "the older reader has not replaced the index"


def test_a_corpus_of_another_embedder_is_refused(tmp_path):
    new_corpus(tmp_path).add([document(0)])
    with pytest.raises(EmbedderMismatchError, match=r"subjects \(subjects-7\), not by words"):
        Corpus.open(tmp_path, SubjectEmbedder("words"))
    with pytest.raises(EmbedderMismatchError):
        Corpus.open(tmp_path, SubjectEmbedder(dimension=9))


def test_duplicate_ids_are_refused_before_anything_is_added():
    corpus = memory_corpus()
    corpus.add([document(0)])
    with pytest.raises(DuplicateDocumentError, match="'d0' already"):
        corpus.add([document(1), document(0)])
    for call in (corpus.add, corpus.update):
        with pytest.raises(DuplicateDocumentError, match="two documents have the id 'd2'"):
            call([document(2), document(3), document(2)])
    assert [one.id for one in corpus.documents] == ["d0"]


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (CorpusDocument("x", ""), EmptyDocumentError, "'x' is empty"),
        (CorpusDocument("x", " \n\t"), EmptyDocumentError, "'x' is empty"),
        (CorpusDocument(" ", "text"), DocumentError, "no id"),
        (CorpusDocument("x", "text", metadata={"when": object()}), DocumentError, "no JSON object"),
        (CorpusDocument("x", "text", metadata={"score": float("nan")}), DocumentError, "no JSON object"),
        (CorpusDocument("x", "half \ud800"), DocumentError, "surrogate"),
        (CorpusDocument("x", "text", "half \udc00"), DocumentError, "surrogate"),
    ],
)
def test_documents_that_cannot_be_kept_are_refused(bad, error, match):
    corpus = memory_corpus()
    with pytest.raises(error, match=match):
        corpus.add([document(0), bad])
    assert len(corpus) == 0


def test_more_chunks_than_there_are_and_unknown_documents_are_refused():
    corpus = memory_corpus()
    with pytest.raises(TopKError, match="nothing to search"):
        corpus.search("storm", 1)
    corpus.add([document(0), document(1)])
    for call in (corpus.search, corpus.search_stages):
        with pytest.raises(TopKError, match="3 best of 2 chunks"):
            call("storm", 3)
        with pytest.raises(UsageError, match="at least 1"):
            call("storm", 0)
    with pytest.raises(UnknownDocumentError, match="'d7'"):
        corpus.remove(["d0", "d7"])
    assert len(corpus) == 2
    with pytest.raises(DimensionMismatchError, match=r"\[1, 3\]"):
        corpus.search(np.ones(3, dtype=np.float32), 1)


def test_an_embedder_that_lies_about_its_vectors_is_refused(monkeypatch):
    corpus = memory_corpus()
    monkeypatch.setattr(corpus.embedder, "embed_documents", lambda texts: np.ones((len(texts), 3), dtype=np.float32))
    with pytest.raises(DimensionMismatchError, match=r"expected vectors \[1, 7\], got \[1, 3\]"):
        corpus.add([document(0)])
    monkeypatch.setattr(corpus.embedder, "embed_documents", lambda texts: np.full((len(texts), 7), np.nan))
    with pytest.raises(DimensionMismatchError, match="finite"):
        corpus.add([document(0)])
    assert len(corpus) == 0


def test_what_is_no_corpus_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="chunkweave ingest"):
        Corpus.open(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"other files \(notes.txt\)"):
        Corpus.create(tmp_path)
    new_corpus(tmp_path / "corpus")
    with pytest.raises(UsageError, match="already"):
        new_corpus(tmp_path / "corpus")
    with pytest.raises(CorpusError, match="no corpus can be made"):
        new_corpus(tmp_path / "notes.txt")
    (tmp_path / "foreign").mkdir()
    with closing(sqlite3.connect(tmp_path / "foreign" / "corpus.sqlite")) as connection:
        connection.execute("CREATE TABLE mine (a)")
    with pytest.raises(CorpusError, match="of another program"):
        new_corpus(tmp_path / "foreign")


def test_a_writer_that_waits_too_long_is_not_told_of_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_store, "_LOCK_TIMEOUT_S", 0.05)
    corpus = new_corpus(tmp_path)
    with closing(sqlite3.connect(tmp_path / "corpus.sqlite")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM documents").fetchall()
        with pytest.raises(CorpusError, match="another process uses it: try again"):
            corpus.add([document(0)])
    corpus.add([document(0)])
    assert len(opened(tmp_path)) == 1


def test_a_creation_that_was_interrupted_is_no_corpus_and_may_be_repeated(tmp_path):
    (tmp_path / "corpus.sqlite").touch()
    assert not Corpus.exists(tmp_path)
    with closing(sqlite3.connect(tmp_path / "corpus.sqlite")) as connection:
        connection.execute("PRAGMA page_size = 1024")
        connection.execute("PRAGMA auto_vacuum = FULL")
    assert not Corpus.exists(tmp_path)
    with pytest.raises(CorpusError, match="chunkweave ingest"):
        opened(tmp_path)
    new_corpus(tmp_path).add([document(0)])
    assert Corpus.exists(tmp_path)
    assert len(opened(tmp_path)) == 1


DAMAGE = {
    "text": "UPDATE documents SET record = replace(record, 'harbour', 'seaport')",
    "vectors": "UPDATE documents SET vectors = zeroblob(length(vectors)) WHERE number = 3",
    "row": "DELETE FROM documents WHERE number = 3",
    "settings": "UPDATE corpus SET settings = '{}'",
    "index": """UPDATE corpus SET settings = replace(settings, '"kind": "flat"', '"kind": "tree"')""",
    "generation": "DELETE FROM corpus",
    "table": "DROP TABLE documents",
    "version": "PRAGMA user_version = 99",
}


@pytest.mark.parametrize("damage", ["cut", "noise", "head", *DAMAGE])
def test_damage_is_named(tmp_path, damage):
    new_corpus(tmp_path).add([document(number) for number in range(9)])
    path = tmp_path / "corpus.sqlite"
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "noise":
        path.write_bytes(data[:1024] + random.Random(1).randbytes(len(data) - 1024))
    elif damage == "head":
        path.write_bytes(b"noise" * 1000)
    else:
        changed(tmp_path, DAMAGE[damage])
    with pytest.raises(CorpusError, match="make the corpus again") as caught:
        opened(tmp_path)
    assert str(path) in str(caught.value)


def test_a_flipped_byte_is_named_or_changes_nothing(tmp_path):
    corpus = new_corpus(tmp_path)
    corpus.add([document(number) for number in range(9)])
    path = tmp_path / "corpus.sqlite"
    data, draw, named = path.read_bytes(), random.Random(2), 0
    for _ in range(300):
        at = draw.randrange(1024, len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
        try:
            assert contents(opened(tmp_path)) == contents(corpus)
        except (CorpusError, EmbedderMismatchError):
            named += 1
    assert named > 20


def test_two_writers_do_not_undo_each_other(tmp_path):
    first = new_corpus(tmp_path)
    second = opened(tmp_path)
    first.add([document(0)])
    with pytest.raises(CorpusError, match="another process changed the corpus"):
        second.add([document(1)])
    assert [one.id for one in opened(tmp_path).documents] == ["d0"]


def test_a_reader_takes_whole_commits_while_another_process_writes(tmp_path):
    corpus = new_corpus(tmp_path)
    corpus.add([document(number, text="Text 0.") for number in range(20)])
    finished, seen = threading.Event(), set()

    def write() -> None:
        for version in range(1, 60):
            corpus.update([document(number, text=f"Text {version}.") for number in range(20)])
        finished.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not finished.is_set():
        texts = {one.chunks for one in opened(tmp_path).documents}
        assert len(texts) == 1
        seen |= texts
    writer.join()
    assert len(seen) > 1


class DyingConnection(sqlite3.Connection):
    """Its process ends, as if it were killed, before a statement."""

    statements_left = 0

    def execute(self, statement: str, *values) -> sqlite3.Cursor:
        if not statement.startswith("PRAGMA"):
            type(self).statements_left -= 1
            if type(self).statements_left < 0:
                os._exit(9)
        return super().execute(statement, *values)


def test_text_of_a_change_that_died_is_gone(tmp_path, monkeypatch):
    """Also where there was room for it, of a document that was removed before."""
    store = CorpusStore(tmp_path)
    store.create(StoredSettings("letters", "f", 1, 8, 0, IndexConfig()))

    def stored(word: str) -> StoredDocument:
        return StoredDocument(word, "", "", (f"{word} " * 300_000,), number=1)

    vector = np.zeros((1, 1), np.float32)
    assert store.commit(store.commit(0, (), [stored("former")], vector), [stored("former")], (), vector[:0]) == 2
    child = os.fork()
    if child == 0:
        DyingConnection.statements_left = 3  # BEGIN, the check, the counts
        monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=DyingConnection))
        store.commit(2, (), [stored("secret")], vector)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    file = tmp_path / "corpus.sqlite"
    assert b"secret" in file.read_bytes(), "it died after it had written"
    assert store.read().documents == ()
    assert b"secret" not in file.read_bytes()
    assert file.stat().st_size < 100_000


@pytest.mark.parametrize("change", ["add", "remove", "update"])
def test_a_writer_that_dies_loses_nothing_that_was_committed(tmp_path, monkeypatch, change):
    corpus = new_corpus(tmp_path)
    corpus.add([document(number) for number in range(5)])
    before = contents(corpus)
    calls = {"add": lambda: corpus.add([document(7)]), "remove": lambda: corpus.remove(["d2"])}
    calls["update"] = lambda: corpus.update([document(3, "choir"), document(8)])
    real = sqlite3.connect
    died = 0
    for statements in range(10):
        child = os.fork()
        if child == 0:
            DyingConnection.statements_left = statements
            monkeypatch.setattr(sqlite3, "connect", partial(real, factory=DyingConnection))
            calls[change]()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        died += 1
        after = opened(tmp_path)
        assert contents(after) == before
        assert len(after.search("storm", 5)) == 5
    assert died >= 4, "before BEGIN, the check, the change and COMMIT"
    assert contents(opened(tmp_path)) != before
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.sqlite"]


def test_a_failing_disk_changes_nothing(tmp_path):
    corpus = new_corpus(tmp_path)
    corpus.add([document(0)])
    size = (tmp_path / "corpus.sqlite").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 2048, limits[1]))
    try:
        with pytest.raises(CorpusError, match=r"corpus\.sqlite: .*(disk|full)"):
            corpus.add([document(number) for number in range(1, 99)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.sqlite"]
    assert [one.id for one in corpus.documents] == ["d0"]
    assert contents(opened(tmp_path)) == contents(corpus)
    corpus.add([document(1)])
    assert len(opened(tmp_path)) == 2


def test_an_interrupted_ingest_goes_on_from_the_last_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_COMMIT_CHUNKS", 10)
    embedder = SubjectEmbedder()
    corpus = Corpus.create(tmp_path, embedder, split=SPLIT, tokenizer=LetterTokenizer())
    documents = [document(number) for number in range(35)]

    def interrupted(done, total):
        if done >= 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpus.update(documents, progress=interrupted)
    assert corpus.num_documents == 20
    again = opened(tmp_path)
    change = again.update(documents)
    assert len(change.unchanged) == 20
    assert len(again.embedder.embedded) == 15
    assert list(contents(again)) == [one.id for one in documents]
