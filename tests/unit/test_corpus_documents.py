"""Files into documents of a corpus, and what is said of files that are none."""

import json
from io import BytesIO
from random import Random

import pytest

from chunkweave.errors import DocumentError
from chunkweave.retrieval import formats
from chunkweave.retrieval.conversion import Conversion, FileRead
from chunkweave.retrieval.documents import CorpusDocument, checked_documents
from chunkweave.retrieval.reading import documents_of, read_files
from chunkweave.retrieval.sections import Section
from tests.document_files import read_bytes
from tests.unit.retrieval_fakes import memory_corpus
from tests.unit.test_reading import write


def lines(*rows: object) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def one_file(name: str, data: bytes) -> FileRead:
    """As it is read when it is uploaded."""
    with Conversion() as conversion:
        return read_bytes(conversion, name, data, bounded=True)


def test_folders_hold_text_and_lines(tmp_path):
    write(tmp_path / "notes/b.md", "B")
    write(tmp_path / "notes/sub/a.txt", "A")
    write(tmp_path / "notes/sub/c.jsonl", lines({"text": "C1"}, {"text": "C2", "id": "second"}))
    write(tmp_path / "notes/.hidden.jsonl", "not read")
    write(tmp_path / "notes/lines.ndjson", "\ufeff" + lines({"text": "D1"}) + "\n\r\n" + lines({"text": "D2"}))
    assert [(one.id, one.text) for one in documents_of(read_files([tmp_path / "notes"]))] == [
        ("b.md", "B"),
        ("lines.ndjson:1", "D1"),
        ("lines.ndjson:4", "D2"),
        ("sub/a.txt", "A"),
        ("sub/c.jsonl:1", "C1"),
        ("second", "C2"),
    ]


def test_what_a_line_may_say(tmp_path):
    row = {"_id": 7, "text": "T", "source": "The tower", "metadata": {"year": 1904}, "page": 3}
    path = write(tmp_path / "c.jsonl", lines(row, {"text": "U", "title": "", "id": "u", "source": "S"}))
    assert documents_of(read_files([path])) == [
        CorpusDocument("7", "T", "The tower", {"page": 3, "year": 1904}),
        CorpusDocument("u", "U", "", {"source": "S"}),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_a_line_may_be_a_document_of_langchain(tmp_path, seed):
    draw = Random(seed)
    metadata = draw.choice([None, {}, {"source": "a.md"}, {"source": "a.md", "title": "The tower", "page": 3}])
    row = {"page_content": f"T{seed}", "metadata": metadata, "type": "Document", "id": draw.choice([None, "7"])}
    name = draw.choice(["c.jsonl", "lines", "lines.txt"])
    (read,) = documents_of(read_files([write(tmp_path / name, lines(row))]))
    title = (metadata or {}).get("title", "")
    assert read == CorpusDocument(row["id"] or f"{name}:1", f"T{seed}", title, metadata or {})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{oops", "not JSON"),
        (b'{"text": "\xff"}', "not UTF-8: bad byte at offset 10"),
        (b"[1]", 'not an object with a "text"'),
        (b'{"title": "x"}', 'not an object with a "text"'),
        (b'{"text": 3}', 'not an object with a "text"'),
        (b'{"page_content": 3}', 'not an object with a "text"'),
        (b'{"text": "x", "metadata": [1]}', '"metadata" is no object'),
        (b'{"text": "  "}', "the text is empty"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path, line, reason):
    path = write(tmp_path / "c.jsonl", lines({"text": "fine"}).encode() + b"\n" + line + b"\n")
    (read,) = read_files([path])
    assert [one.text for one in read.documents] == ["fine"]
    assert read.lines_left_out[0].startswith("line 3: ")
    assert reason in read.reason
    with pytest.raises(DocumentError, match=r"c\.jsonl"):
        documents_of([read], strict=True)


def test_a_digest_is_that_of_all_but_the_id():
    one = CorpusDocument("a", "text", "title", {"b": 1, "a": [2]})
    assert one.digest == CorpusDocument("z", "text", "title", {"a": [2], "b": 1}).digest
    others = [CorpusDocument("a", "Text", "title", one.metadata), CorpusDocument("a", "text", "", one.metadata)]
    assert one.digest not in {other.digest for other in [*others, CorpusDocument("a", "text", "title")]}


def test_where_sections_begin_is_no_part_of_a_digest():
    plain = CorpusDocument("a", "text")
    assert CorpusDocument("a", "text", sections=(Section(0, 1),)).digest == plain.digest


def test_bytes_become_the_documents_that_a_file_would(tmp_path):
    lines = b'\xef\xbb\xbf{"text": "one", "id": "a"}\n\n{"text": "two", "year": 1904}\n'
    for name, data in (("notes.md", b"\xef\xbb\xbfone\r\ntwo"), ("lines.jsonl", lines)):
        (tmp_path / name).write_bytes(data)
        assert [one_file(name, data)] == read_files([tmp_path / name])


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
    assert said in one_file("a.jsonl", line.encode()).left_out


def test_the_most_that_may_be_kept_is_taken():
    largest = CorpusDocument("a" * 512, "text", "t" * 1024, {"x": "y" * ((16 << 10) - len('{"x": ""}'))})
    assert checked_documents([largest]) == [largest]


@pytest.mark.parametrize(("suffix", "data"), [(".jsonl", b'{"text": "one"}'), (".txt", b"one")])
def test_a_name_of_a_file_is_an_id_and_bounded_too(suffix, data):
    assert "the id of document" in one_file("a" * 600 + suffix, data).left_out


def test_a_line_that_is_too_long_is_left_out_before_it_is_parsed(monkeypatch):
    parse_line = formats.parse_line

    def parsed(line, usual_id):
        assert len(line) < 1000, "it was parsed"
        return parse_line(line, usual_id)

    monkeypatch.setattr(formats, "parse_line", parsed)
    reader = formats.FileReader({}, bounded=True)
    file = BytesIO(b'{"text": "one"}\n[' + b"1," * (2 << 20) + b"1]\n")
    assert [document.text for document in reader.documents("a.jsonl", file)] == ["one"]
    assert reader.reasons[0].startswith("line 2: it has")


def test_of_many_bad_lines_the_first_are_named():
    read = one_file("a.jsonl", b'{"text": "one"}\n' + b"{\n" * 1000)
    assert (len(read.lines_left_out), read.num_lines_left_out) == (20, 1000)


@pytest.mark.parametrize("line", [b"\n", b'{"text": "a"}\n'], ids=["empty", "documents"])
def test_a_file_has_so_many_lines(line):
    assert "100000 lines" in one_file("a.jsonl", line * 100_000 + b'{"text": "last"}\n').left_out


def test_a_text_that_is_too_long_is_left_out():
    assert "make several documents" in one_file("a.txt", b"word " * (2 << 20)).left_out
