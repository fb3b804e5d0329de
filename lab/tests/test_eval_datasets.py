import json
import os
from pathlib import Path

import pytest

from chunkweave.errors import DocumentError
from chunkweave.types import Chunk
from chunkweave_lab.datasets import SUMMARIZE, SUMMARIZE_DIALOGUE, load_dataset

SHARED = Path(os.environ.get("CHUNKWEAVE_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def write(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def squad(count: int) -> dict:
    paragraphs = [
        {"context": f"text {i}", "qas": [{"question": f"question {i}?", "answers": [{"text": "a"}, {"text": "a"}]}]}
        for i in range(count)
    ]
    return {"version": "1.1", "data": [{"title": "Title", "paragraphs": paragraphs}]}


def test_musique_titles_become_first_lines_and_sources(tmp_path):
    ctxs = [{"title": "Ada", "text": "She wrote."}, {"title": "", "text": "Nobody."}]
    path = write(tmp_path, "m.json", [{"question": "Who?", "answers": ["Ada", "ada", "Ada"], "ctxs": ctxs}])
    (example,) = load_dataset(path)
    assert example.question == "Who?"
    assert example.answers == ("Ada", "ada")
    assert example.chunks == (Chunk("Ada\nShe wrote.", "Ada"), Chunk("Nobody.", "passage 1"))


def test_squad_question_gets_its_paragraph_among_others(tmp_path):
    path = write(tmp_path, "s.json", squad(20))
    examples = load_dataset(path, squad_chunks=4, seed=3)
    assert len(examples) == 20
    for i, example in enumerate(examples):
        texts = [chunk.text for chunk in example.chunks]
        assert f"text {i}" in texts
        assert len(set(texts)) == 4
        assert example.answers == ("a",)
    places = [[chunk.text for chunk in example.chunks].index(f"text {i}") for i, example in enumerate(examples)]
    assert len(set(places)) > 1, "the paragraph that answers must not always stand in the same place"


def test_squad_draws_depend_on_the_seed_alone(tmp_path):
    path = write(tmp_path, "s.json", squad(20))
    assert load_dataset(path, seed=1) == load_dataset(path, seed=1)
    assert load_dataset(path, seed=1) != load_dataset(path, seed=2)


def test_squad_with_fewer_paragraphs_than_chunks_uses_all(tmp_path):
    path = write(tmp_path, "s.json", squad(3))
    assert all(len(example.chunks) == 3 for example in load_dataset(path, squad_chunks=10))


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.data"])
def test_jsonl_is_found_by_content_too(tmp_path, name):
    rows = [
        {"question": "One?", "chunks": ["a", {"text": "b", "source": "s"}], "answers": ["1"], "kind": "bridge"},
        {"question": "Two?", "chunks": ["c\u2028d"]},
    ]
    path = write(tmp_path, name, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    first, second = load_dataset(path)
    assert first.chunks == (Chunk("a", "passage 0"), Chunk("b", "s"))
    assert (first.answers, first.kind) == (("1",), "bridge")
    assert second.chunks[0].text == "c\u2028d"
    assert second.answers == ()


def test_a_single_jsonl_line_in_a_json_file(tmp_path):
    path = write(tmp_path, "one.json", {"question": "One?", "chunks": ["a"]})
    assert [example.question for example in load_dataset(path)] == ["One?"]


PASSAGE = {"title": "Ada", "text": "She wrote."}
ENTRIES = {
    "hotpotqa": (
        {
            "_id": "5a",
            "question": "Who?",
            "answer": "Ada",
            "type": "bridge",
            "context": [["Ada", ["She wrote. ", " She read."]], ["Ben", ["He sang."]]],
            "supporting_facts": [["Ada", 0]],
        },
        ("Who?", ("Ada\nShe wrote. She read.", "Ben\nHe sang."), ("Ada",), "bridge"),
    ),
    "2wikimqa, as Hugging Face has it": (
        {
            "question": "Who?",
            "answer": "Ada",
            "type": "comparison",
            "context": {"title": ["Ada"], "sentences": [["She wrote.", "She read."]]},
            "supporting_facts": {"title": ["Ada"], "sent_id": [0]},
        },
        ("Who?", ("Ada\nShe wrote. She read.",), ("Ada",), "comparison"),
    ),
    "natural questions": (
        {"question": "Who?", "answers": ["Ada", "A. L."], "positive_ctxs": [PASSAGE, PASSAGE], "negative_ctxs": []},
        ("Who?", ("Ada\nShe wrote.",), ("Ada", "A. L."), ""),
    ),
    "samsum": (
        {"id": "13", "dialogue": "Ada: Hi\nBen: Ho", "summary": "They greet."},
        (SUMMARIZE_DIALOGUE, ("Ada: Hi\nBen: Ho",), ("They greet.",), ""),
    ),
    "multi-news": (
        {"document": "One thing. ||||| Another. |||||", "summary": "Two things."},
        (SUMMARIZE, ("One thing.", "Another."), ("Two things.",), ""),
    ),
    "longbench": (
        {
            "input": "Who?",
            "context": "Passage 1:\nAda\nShe wrote.\nPassage 2:\nBen",
            "answers": ["Ada"],
            "dataset": "x",
        },
        ("Who?", ("Ada\nShe wrote.", "Ben"), ("Ada",), "x"),
    ),
    "longbench's summaries": (
        {"input": "", "context": "A whole report.", "answers": ["Short."]},
        (SUMMARIZE, ("A whole report.",), ("Short.",), ""),
    ),
    "mtrag": (
        {
            "input": [
                {"speaker": "user", "text": "Hi?"},
                {"speaker": "agent", "text": "Ho."},
                {"speaker": "user", "text": "Who?"},
            ],
            "contexts": [{"document_id": "d7", "text": "She wrote."}],
            "targets": [{"speaker": "agent", "text": "Ada"}],
        },
        ("Who?", ("She wrote.",), ("Ada",), ""),
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("form", ["lines", "list"])
def test_published_formats_are_found_by_their_fields(tmp_path, name, form):
    entry, (question, chunks, answers, kind) = ENTRIES[name]
    content = f"{json.dumps(entry)}\n" * 2 if form == "lines" else [entry, entry]
    examples = load_dataset(write(tmp_path, "d.jsonl" if form == "lines" else "d.json", content))
    assert len(examples) == 2
    for one in examples:
        assert (one.question, tuple(chunk.text for chunk in one.chunks)) == (question, chunks)
        assert (one.answers, one.kind) == (answers, kind)


def test_a_passage_that_answers_stands_anywhere_among_those_that_do_not(tmp_path):
    others = [{"title": f"T{n}", "text": "Something else."} for n in range(30)]
    entries = [
        {"question": f"Who {n}?", "answers": ["Ada"], "positive_ctxs": [PASSAGE], "hard_negative_ctxs": others}
        for n in range(20)
    ]
    examples = load_dataset(write(tmp_path, "nq.json", entries))
    assert {len(one.chunks) for one in examples} == {10}
    places = {[chunk.source for chunk in one.chunks].index("Ada") for one in examples}
    assert len(places) > 3


GOOD_LINE = json.dumps({"question": "q", "chunks": ["c"]})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.jsonl", f"{GOOD_LINE}\n{{broken", r"d\.jsonl:2: not JSON"),
        ("d.jsonl", f'{GOOD_LINE}\n{{"chunks": ["c"]}}', r"d\.jsonl:2: no 'question'"),
        ("d.jsonl", '{"question": "q", "chunks": []}', r"d\.jsonl:1: there are no chunks"),
        ("d.jsonl", '{"question": "q", "chunks": [7]}', r"d\.jsonl:1: "),
        ("d.jsonl", '{"question": "q", "chunks": [" "]}', r"d\.jsonl:1: chunk 0 is empty"),
        ("d.jsonl", '{"question": "", "chunks": ["c"]}', r"d\.jsonl:1: question is empty"),
        ("d.jsonl", '{"question": "q", "chunks": ["c"], "answers": "a"}', r"d\.jsonl:1: answers are not a list"),
        ("d.jsonl", "[1]", r"d\.jsonl:1: not an object"),
        ("d.jsonl", "", r"has no question"),
        ("d.json", "[]", r"has no question"),
        ("d.json", "[{]", r"d\.json:1: not JSON"),
        ("d.json", "3", r"neither a list"),
        ("d.json", [{"question": "q", "answers": []}], r"d\.json: entry 0: no 'ctxs'"),
        ("d.json", [{"question": "q", "answers": [], "ctxs": [{"title": "t"}]}], r"entry 0: no 'text'"),
        ("d.json", {"data": [{"title": "t"}]}, r"article 0: no list 'paragraphs'"),
        ("d.json", {"data": [{"paragraphs": [{"qas": []}]}]}, r"article 0, paragraph 0: no 'context'"),
        (
            "d.json",
            {"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q"}]}]}]},
            r"article 0, paragraph 0, question 0: no 'answers'",
        ),
        ("d.json", {"data": []}, r"has no question"),
        ("d.json", [{"document": "|||||", "summary": "s"}], r"entry 0: there are no chunks"),
        ("d.json", [{"input": [], "contexts": [], "targets": []}], r"entry 0: there is no question of the user"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_place(tmp_path, name, content, said):
    with pytest.raises(DocumentError, match=said):
        load_dataset(write(tmp_path, name, content))


def test_a_file_that_is_not_there_or_not_utf8_is_named(tmp_path):
    path = tmp_path / "d.jsonl"
    with pytest.raises(DocumentError, match=r"d\.jsonl: No such file"):
        load_dataset(path)
    path.write_bytes(b"abc\xff")
    with pytest.raises(DocumentError, match=r"d\.jsonl is not UTF-8: bad byte at offset 3"):
        load_dataset(path)


@pytest.mark.parametrize(("name", "questions"), [("musique_150.json", 150), ("xquad.en.json", 1190)])
def test_the_real_files(name, questions):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not at hand; set CHUNKWEAVE_DATA to its folder")
    examples = load_dataset(path)
    assert len(examples) == questions
    assert all(len(example.chunks) == 10 and example.answers for example in examples)
