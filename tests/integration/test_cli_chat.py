"""`chunkweave chat`: questions from standard input, one conversation."""

import json
from pathlib import Path

import pytest

from chunkweave.cli import chat as chat_module
from chunkweave.cli.options import ModelOptions
from chunkweave.errors import UsageError
from tests.integration.command_line import invoke, succeed, text_files

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = ("chat", "--model", "reader", "--max-new-tokens", 4)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    texts = {f"d{i}.md": f"Document {i} tells of the lighthouse. " * 5 for i in range(3)}
    return text_files(tmp_path / "docs", texts)


def test_lines_of_input_are_turns_and_documents_are_sent_once(documents, tmp_path):
    out = tmp_path / "chat.json"
    result = succeed(*CHAT, "--docs", documents, "--json", "--out", out, stdin="When?\n\nAnd why?\nSo?")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["question"] for answer in answers] == ["When?", "And why?", "So?"]
    assert [answer["report"]["chunks_not_sent"] for answer in answers] == [0, 3, 3]
    history = [answer["report"]["history_tokens"] for answer in answers]
    assert history == sorted(set(history))
    assert json.loads(out.read_text(encoding="utf-8")) == {"model": "reader", "turns": answers}


def test_for_people_each_answer_says_what_was_kept(documents):
    result = succeed(*CHAT, "--docs", documents, stdin="When?\nAnd why?\n")
    assert "history 0 tokens; 0 chunks" in result.stdout
    assert "3 chunks" in result.stdout
    assert "first token after" in result.stdout


def test_a_corpus_is_asked_for_every_question(documents, tmp_path):
    corpus = tmp_path / "corpus"
    assert invoke("ingest", documents, "--corpus", corpus).exit_code == 0
    result = succeed(*CHAT, "--corpus", corpus, "--top-k", 2, "--json", stdin="Document 0?\nDocument 0, again?\n")
    first, second = map(json.loads, result.stdout.splitlines())
    assert len(first["report"]["chunks"]) == 3
    assert second["report"]["chunks_not_sent"] >= 1


def test_without_questions_or_with_a_bad_one(documents):
    assert invoke(*CHAT, stdin="").exit_code == 0
    assert invoke(*CHAT, "--top-k", 2, stdin="").exit_code == 2


def test_the_oldest_turns_are_left_out_where_they_do_not_fit(tmp_path):
    (tmp_path / "long.md").write_text("The lighthouse keeper writes. " * 260, encoding="utf-8")
    questions = "".join(f"Who writes in the year {number} of the lighthouse, and why?\n" for number in range(40))
    result = succeed(*CHAT, "--docs", tmp_path, "--no-deduplicate", "--json", stdin=questions)
    history = [json.loads(line)["report"]["history_tokens"] for line in result.stdout.splitlines()]
    assert len(history) == 40
    assert history[0] == 0 < history[1]
    assert max(history) <= history[-1] + 60, "what fits is sent, and no more"
    assert len(set(history[-3:])) < 3, "the window moves"


def test_an_answer_begins_with_its_first_word(tmp_path):
    (tmp_path / "choir.md").write_text("The Selmond Choir is led by Otto Gunmark.", encoding="utf-8")
    result = succeed(*CHAT, "--docs", tmp_path, stdin="Who leads the Selmond Choir?\n")
    assert result.stdout.startswith("Otto Gunmark\n")
    assert "invented worlds" not in result.stderr


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_the_reader_is_warned_of_once_when_it_is_asked_about_other_text(command, tmp_path):
    text = "Vaccination campaigns throughout Scandinavia required meticulous refrigeration logistics. " * 5
    (tmp_path / "health.md").write_text(text, encoding="utf-8")
    questions = ("Why?", "How?")
    asked = {"ask": questions, "chat": ()}[command]
    options = ("--model", "reader", "--max-new-tokens", 2, "--docs", tmp_path)
    result = succeed(command, *options, *asked, stdin="\n".join(questions))
    assert " ".join(result.stderr.split()).count("reads only its own invented worlds") == 1


@pytest.mark.parametrize("usual", ["smollm2", "reader"])
def test_the_model_is_smollm2_where_it_is_installed(usual, monkeypatch):
    opened = []

    def open_model(options, **_):
        opened.append(options.model.model)
        raise UsageError("no further")

    monkeypatch.setattr(chat_module, "usual_model", lambda: usual)
    monkeypatch.setattr(ModelOptions, "open", open_model)
    invoke("chat", stdin="Why?\n")
    assert opened == [usual]
