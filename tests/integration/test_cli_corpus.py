"""`ingest`, `corpus` and `ask --corpus` as they are called."""

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from chunkweave.retrieval.corpus import Corpus
from tests.integration.command_line import invoke, json_of, refusal, succeed, text_files

SUBJECTS = ("harbour", "lighthouse", "storm", "ferry")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    texts = {f"{subject}.md": f"All about the {subject} of Halvik. " * 12 for subject in SUBJECTS}
    rows = [{"id": f"row-{i}", "text": f"Entry {i} of the choir.", "title": f"Entry {i}"} for i in range(3)]
    return text_files(tmp_path / "notes", {**texts, "rows.jsonl": "\n".join(map(json.dumps, rows))})


@pytest.fixture
def corpus(tmp_path: Path, notes: Path) -> Path:
    succeed("ingest", notes, "--corpus", tmp_path / "corpus")
    return tmp_path / "corpus"


def test_ingest_counts_and_goes_on_where_it_was(tmp_path, notes):
    folder = tmp_path / "corpus"
    first = json_of("ingest", notes, "--corpus", folder, "--chunk-tokens", 32)
    assert (first["added"], first["replaced"], first["unchanged"], first["documents"]) == (7, 0, 0, 7)
    assert (first["embedder"], first["index"]) == ("hashed-ngrams", "flat")
    assert first["chunks"] > 7
    (notes / "new.txt").write_text("The garden.", encoding="utf-8")
    out = tmp_path / "result.json"
    second = json_of("ingest", notes, "--corpus", folder, "--out", out)
    assert (second["added"], second["unchanged"], second["documents"]) == (1, 7, 8)
    assert json.loads(out.read_text()) == second
    assert "0 added, 0 replaced, 8 unchanged" in invoke("ingest", notes, "--corpus", folder).stdout


def test_a_changed_file_takes_update(corpus, notes):
    (notes / "storm.md").write_text("The storm was long ago.", encoding="utf-8")
    refused = invoke("ingest", notes, "--corpus", corpus)
    assert refused.exit_code == 1
    assert "'storm.md'" in refused.stderr
    assert "--update" in refused.stderr
    assert json_of("ingest", notes, "--corpus", corpus, "--update")["replaced"] == 1
    assert (
        json_of("corpus", "search", corpus, "storm", "--top-k", 1)["retrieved"][0]["text"] == "The storm was long ago."
    )


def test_a_corpus_keeps_the_settings_it_was_made_with(corpus, notes):
    for option, value in (
        ("--embedder", "minilm"),
        ("--index", "ivf"),
        ("--chunk-tokens", 64),
        ("--overlap-tokens", 4),
    ):
        assert f"was created with {option}" in refusal("ingest", notes, "--corpus", corpus, option, value)
    succeed("ingest", notes, "--corpus", corpus, "--index", "flat", "--chunk-tokens", 512)


def test_an_index_is_made_and_kept(tmp_path, notes):
    folder = tmp_path / "corpus"
    assert json_of("ingest", notes, "--corpus", folder, "--index", "ivf")["index"] == "ivf"
    with closing(sqlite3.connect(folder / "corpus.sqlite")) as connection:
        assert connection.execute("SELECT count(*) FROM ivf").fetchone() == (1,)
    assert json_of("corpus", "search", folder, "choir", "--top-k", 1)["retrieved"][0]["title"].startswith("Entry")


def test_what_is_wrong_with_a_call(tmp_path, notes, corpus):
    assert invoke("ingest", "--corpus", corpus).exit_code == 2
    assert invoke("ingest", notes, "--corpus", tmp_path / "x", "--index", "tree").exit_code == 2
    assert invoke("ingest", notes, "--corpus", notes).exit_code == 2
    assert invoke("corpus", "list", tmp_path / "nowhere").exit_code == 1
    assert invoke("corpus", "remove", corpus, "storm").exit_code == 2
    Corpus.create(tmp_path / "empty")
    for call in (
        ("corpus", "search", tmp_path / "empty"),
        ("ask", "--set", "shape=demo", "--corpus", tmp_path / "empty"),
    ):
        assert "nothing to search" in refusal(*call, "storm")


def test_list_search_and_remove(corpus):
    listed = json_of("corpus", "list", corpus)
    assert [one["id"] for one in listed["documents"]] == [
        "ferry.md",
        "harbour.md",
        "lighthouse.md",
        "row-0",
        "row-1",
        "row-2",
        "storm.md",
    ]
    assert len(json_of("corpus", "list", corpus, "--limit", 2)["documents"]) == 2
    assert "Entry 1" in invoke("corpus", "list", corpus).stdout
    found = json_of("corpus", "search", corpus, "When does the ferry sail?", "--top-k", 2)
    assert found["retrieved"][0]["document"] == "ferry.md"
    assert len(found["stages"]) == 1, "so few vectors are compared at once"
    shown = invoke("corpus", "search", corpus, "ferry", "--stages").stdout
    assert "stage 1 of 1" in shown
    removed = json_of("corpus", "remove", corpus, "ferry.md", "row-1")
    assert removed["removed"] == ["ferry.md", "row-1"]
    assert [one["source"] for one in removed["gone"]] == ["ferry.md", "row-1"]
    assert "ferry.md" not in Corpus.open(corpus)


def test_ask_takes_its_documents_from_the_corpus(corpus):
    ask = ("ask", "--set", "shape=demo", "--max-new-tokens", 3, "--corpus", corpus)
    two = ("--top-k", 2, "--set", "order=fixed")
    answers = json_of(*ask, *two, "Where is the ferry?", "Where is the storm?")["answers"]
    assert [answer["retrieved"][0]["document"] for answer in answers] == ["ferry.md", "storm.md"]
    assert [chunk["source"] for chunk in answers[0]["report"]["chunks"][1:]] == [
        one["document"] for one in answers[0]["retrieved"]
    ]
    assert len(json_of(*ask, "Why?")["answers"][0]["retrieved"]) == 6
    warm = json_of(*ask, "--top-k", 2, "--precompute", "--method", "full-reuse", "Where is the ferry?")["answers"][0]
    assert [chunk["kv_source"] for chunk in warm["report"]["chunks"][1:]] == ["reused", "reused"]


def test_more_chunks_than_there_are_are_all_of_them(corpus):
    found = succeed("corpus", "search", corpus, "storm", "--top-k", 100)
    assert "the corpus has 7 chunks: all are taken" in found.stderr
    ask = ("ask", "--set", "shape=demo", "--max-new-tokens", 1, "--corpus", corpus, "--top-k", 99, "--json")
    result = succeed(*ask, "Why?", "Where?")
    assert len(json.loads(result.stdout)["answers"][0]["retrieved"]) == 7
    assert result.stderr.count("all are taken") == 1


def test_ask_orders_chunks_if_it_is_asked_to(corpus, notes):
    ask = ("ask", "--set", "shape=demo", "--max-new-tokens", 2)
    found = json_of(*ask, "--corpus", corpus, "--top-k", 3, "--set", "order=free", "Where is it?", "And the ferry?")[
        "answers"
    ]
    assert [answer["report"]["order"] for answer in found] == ["frequency"] * 2
    for answer in found:
        stood = [answer["retrieved"][chunk["rank"]]["document"] for chunk in answer["report"]["chunks"][1:]]
        assert stood == [chunk["source"] for chunk in answer["report"]["chunks"][1:]]
    shown = invoke(*ask, "--corpus", corpus, "--top-k", 3, "--set", "order=free", "Where is the ferry?")
    assert "rank" in shown.stdout
    fixed = json_of(*ask, "--corpus", corpus, "--top-k", 3, "Where is the ferry?")["answers"][0]
    assert fixed["report"]["order"] == "original"
    assert [chunk["rank"] for chunk in fixed["report"]["chunks"]] == [None, 0, 1, 2]
    documents = json_of(*ask, "--docs", notes / "ferry.md", "Where is the ferry?")["answers"][0]
    assert documents["report"]["order"] == "original"
    for wrong in ("order=loose", "ordering=alphabetical", "promotion_threshold=0"):
        assert invoke(*ask, "--corpus", corpus, "--set", wrong, "Why?").exit_code == 2


def test_ask_wants_documents_or_a_corpus(corpus, notes):
    for wrong in (("--corpus", corpus, "--docs", notes), ("--top-k", 3)):
        assert "either --docs or --corpus" in refusal("ask", "--set", "shape=demo", *wrong, "Why?")


def test_no_model_and_no_faiss_is_loaded_to_look_into_a_corpus(corpus, monkeypatch):
    for name in ("faiss", "sentence_transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    succeed("corpus", "list", corpus)
    succeed("corpus", "search", corpus, "storm")


def test_a_missing_extra_is_named(tmp_path, notes, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert "pip install '.[retrieval]'" in refusal("ingest", notes, "--corpus", tmp_path / "corpus", "--index", "ivf")
    assert not (tmp_path / "corpus").exists(), "nothing is embedded for nothing"
