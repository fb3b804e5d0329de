"""Documents that do not fit into the context are searched; what cannot fit is refused before anything is computed."""

import json
from pathlib import Path

import pytest

from chunkweave import Engine
from tests.integration.command_line import invoke, json_of, refusal, succeed, text_files

pytestmark = pytest.mark.usefixtures("one_thread")

TOPICS = ("ferry", "lighthouse", "choir", "quarry", "viaduct", "harbour", "mill", "storm", "bees", "bylaws")
YEARS = range(1900, 1970)
QUESTION = "What about the quarry?"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Ten documents of some 9,000 tokens each: more than any context here, and more of them than are searched for."""
    line = "The {0} was here in {1}, and the {0} stayed. "
    texts = {f"{topic}.md": "\n\n".join(line.format(topic, year) * 10 for year in YEARS) for topic in TOPICS}
    return text_files(tmp_path / "docs", texts)


@pytest.fixture
def precomputed(monkeypatch) -> list[int]:
    """How many chunks each call of `Engine.precompute` got; it computes none."""
    calls: list[int] = []
    monkeypatch.setattr(Engine, "precompute", lambda self, chunks, **_: calls.append(len(chunks)))
    return calls


ASK = ("ask", "--set", "shape=demo", "--max-new-tokens", 2)


def test_documents_that_do_not_fit_become_a_temporary_corpus(documents, precomputed):
    result = succeed(*ASK, "--docs", documents, "--precompute", "--json", QUESTION)
    said = " ".join(result.stderr.split())
    assert "more than fit into a prompt of" in said
    assert "the nearest chunks in a temporary corpus (how many: --top-k)" in said
    assert "chunkweave ingest DOCS --corpus FOLDER" in said
    (answer,) = json.loads(result.stdout)["answers"]
    assert 1 <= len(answer["retrieved"]) <= 6
    assert answer["retrieved"][0]["document"] == "quarry.md"
    assert len(answer["report"]["chunks"]) == 1 + len(answer["retrieved"])
    assert precomputed == [len(answer["retrieved"])], "only what is asked over"


def test_documents_that_fit_are_all_sent_unless_a_number_is_asked_for(documents):
    three = [documents / f"{topic}.md" for topic in TOPICS[:3]]
    for document in three:
        document.write_text(document.read_text(encoding="utf-8")[:300], encoding="utf-8")
    whole = invoke(*ASK, "--docs", *three, "--json", QUESTION)
    assert len(json.loads(whole.stdout)["answers"][0]["report"]["chunks"]) == 4
    assert "temporary corpus" not in whole.stderr
    (answer,) = json_of(*ASK, "--docs", *three, "--top-k", 2, "The choir?")["answers"]
    assert answer["retrieved"][0]["document"] == "choir.md"
    assert len(answer["report"]["chunks"]) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--top-k", 60), "chunks fit into a prompt of"),
        (
            ("--chunk-tokens", 100_000),
            "`chunkweave ingest DOCS --corpus FOLDER --chunk-tokens 128`, then `--corpus FOLDER",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_computed(documents, precomputed, options, said):
    refused = invoke(*ASK, "--docs", documents, "--precompute", *options, QUESTION)
    assert refused.exit_code == 2
    assert said in " ".join(refused.stderr.split())
    assert "--top-k" in refused.stderr
    assert precomputed == []


def test_of_a_corpus_as_many_chunks_are_sent_as_fit(documents, tmp_path, precomputed):
    corpus = tmp_path / "corpus"
    assert invoke("ingest", documents, "--corpus", corpus, "--chunk-tokens", 2500).exit_code == 0
    assert 1 <= len(json_of(*ASK, "--corpus", corpus, QUESTION)["answers"][0]["retrieved"]) < 6
    assert "fit into a prompt of" in refusal(*ASK, "--corpus", corpus, "--precompute", "--top-k", 6, QUESTION)
    assert precomputed == []


def test_a_chat_over_documents_that_do_not_fit_searches_them(documents):
    result = succeed(
        *("chat", "--set", "shape=demo", "--max-new-tokens", 2, "--docs", documents, "--json"), stdin=f"{QUESTION}\n"
    )
    assert "temporary corpus" in result.stderr
    sources = [chunk["source"] for chunk in json.loads(result.stdout)["report"]["chunks"]]
    assert sources[1].startswith("quarry.md#")
    assert len(sources) <= 7
