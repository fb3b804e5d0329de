"""Files into documents of a corpus, and what is said of files that are none."""

import json
from pathlib import Path

import pytest

from chunkweave.errors import DocumentError, EmptyDocumentError
from chunkweave.retrieval import documents as documents_module
from chunkweave.retrieval.documents import (
    CorpusDocument,
    checked_documents,
    parse_corpus_documents,
    read_corpus_documents,
)
from tests.unit.retrieval_fakes import memory_corpus


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*rows: object) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def test_folders_hold_text_and_lines(tmp_path):
    write(tmp_path / "notes/b.md", "B")
    write(tmp_path / "notes/sub/a.txt", "A")
    write(tmp_path / "notes/sub/c.jsonl", lines({"text": "C1"}, {"text": "C2", "id": "second"}))
    write(tmp_path / "notes/.hidden.jsonl", "not read")
    write(tmp_path / "notes/picture.png", b"\xff")
    assert [(one.id, one.text) for one in read_corpus_documents([tmp_path / "notes"])] == [
        ("b.md", "B"),
        ("sub/a.txt", "A"),
        ("sub/c.jsonl:1", "C1"),
        ("second", "C2"),
    ]


def test_a_folder_of_lines_alone_will_do(tmp_path):
    write(tmp_path / "c.ndjson", "\ufeff" + lines({"text": "C1"}) + "\n\r\n" + lines({"text": "C2"}))
    found = read_corpus_documents([tmp_path, tmp_path / "c.ndjson"])
    assert [one.id for one in found] == ["c.ndjson:1", "c.ndjson:4"], "a file reached twice is read once"


def test_what_a_line_may_say(tmp_path):
    row = {"_id": 7, "text": "T", "source": "The tower", "metadata": {"year": 1904}, "page": 3}
    path = write(tmp_path / "c.jsonl", lines(row, {"text": "U", "title": "", "id": "u", "source": "S"}))
    assert read_corpus_documents([path]) == [
        CorpusDocument("7", "T", "The tower", {"page": 3, "year": 1904}),
        CorpusDocument("u", "U", "", {"source": "S"}),
    ]


@pytest.mark.parametrize(
    ("line", "error", "reason"),
    [
        (b"{oops", DocumentError, "not JSON"),
        (b'{"text": "\xff"}', DocumentError, "not UTF-8: bad byte at offset 10"),
        (b"[1]", DocumentError, 'not an object with a "text"'),
        (b'{"title": "x"}', DocumentError, 'not an object with a "text"'),
        (b'{"text": 3}', DocumentError, 'not an object with a "text"'),
        (b'{"text": "x", "metadata": [1]}', DocumentError, '"metadata" is no object'),
        (b'{"text": "  "}', EmptyDocumentError, "the text is empty"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_reason(tmp_path, line, error, reason, caplog):
    path = write(tmp_path / "c.jsonl", lines({"text": "fine"}).encode() + b"\n" + line + b"\n")
    with pytest.raises(error) as told:
        read_corpus_documents([path])
    assert str(told.value).startswith(f"{path}, line 3: ")
    assert reason in str(told.value)
    assert [one.text for one in read_corpus_documents([path], on_error="skip")] == ["fine"]
    assert f"{path}, line 3" in caplog.text


def test_files_that_cannot_be_read_are_named(tmp_path):
    write(tmp_path / "a.txt", b"caf\xe9")
    with pytest.raises(DocumentError, match=r"a\.txt is not UTF-8: bad byte at offset 3"):
        read_corpus_documents([tmp_path])
    for missing in ("gone.jsonl", "gone.txt", "gone"):
        with pytest.raises(DocumentError, match=missing):
            read_corpus_documents([tmp_path / missing])
    with pytest.raises(EmptyDocumentError, match="no document with text"):
        read_corpus_documents([write(tmp_path / "empty.txt", " ")])
    with pytest.raises(EmptyDocumentError, match="no document with text"):
        read_corpus_documents([write(tmp_path / "empty.jsonl", "")])


def test_a_digest_is_that_of_all_but_the_id():
    one = CorpusDocument("a", "text", "title", {"b": 1, "a": [2]})
    assert one.digest == CorpusDocument("z", "text", "title", {"a": [2], "b": 1}).digest
    others = [CorpusDocument("a", "Text", "title", one.metadata), CorpusDocument("a", "text", "", one.metadata)]
    assert one.digest not in {other.digest for other in [*others, CorpusDocument("a", "text", "title")]}


def test_bytes_become_the_documents_that_a_file_would(tmp_path):
    lines = b'\xef\xbb\xbf{"text": "one", "id": "a"}\n\n{"text": "two", "year": 1904}\n'
    for name, data in (("notes.md", b"\xef\xbb\xbfone\r\ntwo"), ("lines.jsonl", lines)):
        (tmp_path / name).write_bytes(data)
        assert parse_corpus_documents(name, data) == read_corpus_documents([tmp_path / name])


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("a.txt", b"\xff", DocumentError),
        ("a.jsonl", b"{", DocumentError),
        ("a.txt", b"  ", EmptyDocumentError),
        ("a.jsonl", b"", EmptyDocumentError),
    ],
)
def test_bytes_that_are_no_documents(name, data, error):
    with pytest.raises(error, match=name):
        parse_corpus_documents(name, data)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (CorpusDocument("a" * 513, "text"), "the id of document"),
        (CorpusDocument("a", "text", "t" * 1025), "the title of document 'a'"),
        (CorpusDocument("a", "text", metadata={"x": "y" * (16 << 10)}), "the metadata of document 'a'"),
        (CorpusDocument("a", "text", metadata={"x": "漢" * (6 << 10)}), "the metadata of document 'a'"),
    ],
    ids=["id", "title", "metadata", "metadata in UTF-8"],
)
def test_what_is_kept_beside_a_text_is_bounded_and_named(wrong, said):
    with pytest.raises(DocumentError, match=said) as refused:
        checked_documents([wrong])
    assert len(str(refused.value)) < 200
    with pytest.raises(DocumentError, match=said):
        memory_corpus().add([wrong])
    line = json.dumps({"id": wrong.id, "text": wrong.text, "title": wrong.title, "metadata": dict(wrong.metadata)})
    with pytest.raises(DocumentError, match=said):
        parse_corpus_documents("a.jsonl", line.encode())


def test_the_most_that_may_be_kept_is_taken():
    largest = CorpusDocument("a" * 512, "text", "t" * 1024, {"x": "y" * ((16 << 10) - len('{"x": ""}'))})
    assert checked_documents([largest]) == [largest]


def test_a_name_of_a_file_is_an_id_and_bounded_too():
    with pytest.raises(DocumentError, match="the id of document"):
        parse_corpus_documents("a" * 600 + ".jsonl", b'{"text": "one"}')
    with pytest.raises(DocumentError, match="the id of document"):
        parse_corpus_documents("a" * 600 + ".txt", b"one")


def test_a_line_that_is_too_long_is_refused_before_it_is_parsed(monkeypatch):
    def parsed(line, *args):
        assert len(line) < 1000, "it was parsed"
        return CorpusDocument("a", "text")

    monkeypatch.setattr(documents_module, "_parsed", parsed)
    with pytest.raises(DocumentError, match=r"a.jsonl, line 2 has .* bytes"):
        parse_corpus_documents("a.jsonl", b'{"text": "one"}\n[' + b"1," * (2 << 20) + b"1]\n")


def test_lines_are_read_one_by_one_and_the_first_bad_one_ends_it(monkeypatch):
    read, real = [], documents_module._parsed
    monkeypatch.setattr(documents_module, "_parsed", lambda *line: (read.append(line), real(*line))[1])
    data = b'{"text": "one", "id": "x"}\n{"id": 2}\n' + b'{"text": "three"}\n' * 1000
    with pytest.raises(DocumentError, match="line 2"):
        parse_corpus_documents("a.jsonl", data)
    assert len(read) == 2


@pytest.mark.parametrize("line", [b"\n", b'{"text": "a"}\n'], ids=["empty", "documents"])
def test_a_file_has_so_many_lines(line):
    with pytest.raises(DocumentError, match="100000 lines"):
        parse_corpus_documents("a.jsonl", line * 100_001)
