"""Documents that do not fit into the context are searched; what cannot fit is refused before anything is computed."""

import json
from pathlib import Path

import pytest

from chunkweave import Engine
from tests.integration.command_line import invoke

pytestmark = pytest.mark.usefixtures("one_thread")

TOPICS = ("ferry", "lighthouse", "choir", "quarry", "viaduct", "harbour", "mill", "storm", "bees", "bylaws")
QUESTION = "What about the quarry?"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Ten documents of some 9,000 tokens each: more than any context here, and more of them than are searched for."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for topic in TOPICS:
        text = "\n\n".join(
            f"The {topic} was here in {year}, and the {topic} stayed. " * 10 for year in range(1900, 1970)
        )
        (folder / f"{topic}.md").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def precomputed(monkeypatch) -> list[int]:
    """How many chunks each call of `Engine.precompute` got; it computes none."""
    calls: list[int] = []
    monkeypatch.setattr(Engine, "precompute", lambda self, chunks, **_: calls.append(len(chunks)))
    return calls


ASK = ("ask", "--shape", "demo", "--max-new-tokens", 2)


def test_documents_that_do_not_fit_become_a_temporary_corpus(documents, precomputed):
    result = invoke(*ASK, "--docs", documents, "--precompute", "--json", QUESTION)
    assert result.exit_code == 0, result.output
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
    two = invoke(*ASK, "--docs", *three, "--top-k", 2, "--json", "The choir?")
    assert two.exit_code == 0, two.output
    (answer,) = json.loads(two.stdout)["answers"]
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
    result = invoke(*ASK, "--corpus", corpus, "--json", QUESTION)
    assert result.exit_code == 0, result.output
    assert 1 <= len(json.loads(result.stdout)["answers"][0]["retrieved"]) < 6
    refused = invoke(*ASK, "--corpus", corpus, "--precompute", "--top-k", 6, QUESTION)
    assert refused.exit_code == 2
    assert "fit into a prompt of" in refused.stderr
    assert precomputed == []


def test_a_chat_over_documents_that_do_not_fit_searches_them(documents):
    result = invoke(
        *("chat", "--shape", "demo", "--max-new-tokens", 2, "--docs", documents, "--json"), stdin=f"{QUESTION}\n"
    )
    assert result.exit_code == 0, result.output
    assert "temporary corpus" in result.stderr
    sources = [chunk["source"] for chunk in json.loads(result.stdout)["report"]["chunks"]]
    assert sources[1].startswith("quarry.md#")
    assert len(sources) <= 7
