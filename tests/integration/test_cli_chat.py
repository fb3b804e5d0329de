"""`chunkweave chat`: questions from standard input, one conversation."""

import json
from pathlib import Path

import pytest

from tests.integration.command_line import invoke

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = ("chat", "--max-new-tokens", 4)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for i in range(3):
        (folder / f"d{i}.md").write_text(f"Document {i} tells of the lighthouse. " * 5, encoding="utf-8")
    return folder


def test_lines_of_input_are_turns_and_documents_are_sent_once(documents, tmp_path):
    out = tmp_path / "chat.json"
    result = invoke(*CHAT, "--docs", documents, "--deduplicate", "--json", "--out", out, stdin="When?\n\nAnd why?\nSo?")
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["question"] for answer in answers] == ["When?", "And why?", "So?"]
    assert [answer["report"]["chunks_not_sent"] for answer in answers] == [0, 3, 3]
    history = [answer["report"]["history_tokens"] for answer in answers]
    assert history == sorted(set(history))
    assert json.loads(out.read_text(encoding="utf-8")) == {"model": "reader", "turns": answers}


def test_for_people_each_answer_says_what_was_kept(documents):
    result = invoke(*CHAT, "--docs", documents, "--deduplicate", stdin="When?\nAnd why?\n")
    assert result.exit_code == 0, result.output
    assert "history 0 tokens; 0 chunks" in result.stdout
    assert "3 chunks" in result.stdout
    assert "first token after" in result.stdout


def test_a_corpus_is_asked_for_every_question(documents, tmp_path):
    corpus = tmp_path / "corpus"
    assert invoke("ingest", documents, "--corpus", corpus).exit_code == 0
    result = invoke(
        *CHAT, "--corpus", corpus, "--top-k", 2, "--deduplicate", "--json", stdin="Document 0?\nDocument 0, again?\n"
    )
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    assert len(first["report"]["chunks"]) == 3
    assert second["report"]["chunks_not_sent"] >= 1


def test_without_questions_or_with_a_bad_one(documents):
    assert invoke(*CHAT, stdin="").exit_code == 0
    refused = invoke(*CHAT, "--conversation-tokens", 40, "--docs", documents, stdin="When?\n")
    assert refused.exit_code == 2
    assert "new turn alone" in refused.stderr
    assert invoke(*CHAT, "--top-k", 2, stdin="").exit_code == 2
