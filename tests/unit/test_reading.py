"""Reading files and folders: kinds by content, encodings, names, and what is said of what is left out."""

import gzip
import io
import json
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkweave.calibration.questions import bundled_documents
from chunkweave.errors import DocumentError, EmptyDocumentError
from chunkweave.prompt.tables import Table
from chunkweave.retrieval.conversion import Conversion, FileRead
from chunkweave.retrieval.formats import check_archive
from chunkweave.retrieval.reading import documents_of, read_files
from tests.document_files import docx, paragraph, pdf, read_bytes
from tests.unit.chunking_tokenizers import ASSETS


@pytest.fixture(scope="module")
def conversion() -> Iterator[Conversion]:
    with Conversion() as process:
        yield process


def zipped(name: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(name, "text")
    return packed.getvalue()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def names(reads: list[FileRead]) -> list[str]:
    return [document.id for read in reads for document in read.documents]


def test_folders_are_walked_in_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "sub/c.rst", "sub/D.MD", ".hidden.md", ".git/e.md", "notes.log", "Makefile"):
        write(tmp_path / name, name)
    assert names(read_files([tmp_path])) == ["Makefile", "a.txt", "b.md", "notes.log", "sub/D.MD", "sub/c.rst"]


def test_names_that_are_not_unique_become_paths(tmp_path: Path) -> None:
    one, two = write(tmp_path / "x" / "a.md", "1"), write(tmp_path / "y" / "a.md", "2")
    assert names(read_files([one, two])) == [one.as_posix(), two.as_posix()]


def test_a_file_reached_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.md", "text")
    assert names(read_files([tmp_path, path])) == ["a.md"]


def test_missing_paths_are_refused_and_a_file_that_may_not_be_read_is_left_out(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(DocumentError, match="no such file or folder"):
        read_files([tmp_path / "nowhere"])
    with pytest.raises(EmptyDocumentError, match="no file is there"):
        documents_of(read_files([tmp_path]))
    write(tmp_path / "a.txt", "text")
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not permitted")))
    (read,) = read_files([tmp_path])
    assert read.left_out == "it cannot be read: not permitted"


def test_large_files_that_are_no_documents_are_not_read(tmp_path: Path) -> None:
    for name, begin in (("film.mp4", bytes(12)), ("weights.bin", b"PK\x03\x04"), ("huge.txt", b"text")):
        with (tmp_path / name).open("wb") as file:
            file.write(begin)
            file.truncate(2 << 30)
    said = {read.name: read.left_out for read in read_files([tmp_path])}
    assert all("a file may have 1073741824" in reason for reason in said.values())
    with (tmp_path / "film.mp4").open("r+b") as file:
        file.truncate(1 << 30)
    (read,) = read_files([tmp_path / "film.mp4"])
    assert "not read" in read.left_out


@pytest.mark.parametrize(
    ("data", "text", "assumed"),
    [
        (b"\xef\xbb\xbfone\r\ntwo\rthree\n", "one\ntwo\nthree\n", ""),
        ("naïve".encode(), "naïve", ""),
        ("naïve ferry".encode("utf-16"), "naïve ferry", ""),
        ("naïve ferry".encode("utf-32"), "naïve ferry", ""),
        (b"\xfe\xff" + "naïve ferry".encode("utf-16-be"), "naïve ferry", ""),
        ("“café” — déjà vu".encode("cp1252"), "“café” — déjà vu", "Windows-1252 was assumed"),
        ("渡轮九点".encode("gb18030"), "渡轮九点", "GB18030 was assumed"),
        ("é".encode() * 200 + b"\xe9 end", "é" * 200 + "\ufffd end", "UTF-8 was assumed: 1 wrong bytes"),
    ],
    ids=["BOM", "UTF-8", "UTF-16", "UTF-32", "UTF-16 BE", "1252", "GB18030", "cut UTF-8"],
)
def test_encodings_are_recognized_and_what_was_assumed_is_said(
    conversion: Conversion, data: bytes, text: str, assumed: str
) -> None:
    read = read_bytes(conversion, "a.txt", data)
    assert [document.text for document in read.documents] == [text], read.left_out
    assert read.assumed.startswith(assumed)
    assert bool(read.assumed) == bool(assumed)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", bytes(range(256)) * 8),
        ("a.txt", bytes(range(1, 9)) * 100),
        ("a.txt", "the ferry leaves".encode("utf-16-le")),
        ("a.xlsx", zipped("xl/workbook.xml")),
        ("a.zip", zipped("a.txt")),
        ("a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)),
        ("a.txt", b"{\\rtf1 hello}"),
        ("a.json", b'{"some": "object"}'),
        ("a.svg", b"<?xml version='1.0'?><svg/>"),
        ("a.gz", gzip.compress(b"text", mtime=0)),
        ("a.jpg", b"\xff\xd8\xff\xe0\x00\x10JFIF"),
    ],
)
def test_a_file_of_another_kind_is_left_out_with_the_kinds_that_are_read(
    conversion: Conversion, name: str, data: bytes
) -> None:
    read = read_bytes(conversion, name, data)
    assert read.left_out.startswith("it is of a kind that is not read; these are: text, Markdown, ")
    assert read.unreadable


def test_an_archive_that_is_cut_is_damaged(conversion: Conversion) -> None:
    read = read_bytes(conversion, "a.docx", b"PK\x03\x04 cut")
    assert ("damaged" in read.left_out, read.unreadable) == (True, False)


@pytest.mark.parametrize("data", [b"", b" \n\t", b"\xff\xfe", b"\xef\xbb\xbf\n"])
def test_an_empty_file_is_one_of_a_kind_that_is_read(conversion: Conversion, data: bytes) -> None:
    read = read_bytes(conversion, "a.txt", data)
    assert (read.left_out, read.unreadable) == ("it is empty", False)


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.pdf", b"just text", "text"),
        ("a.txt", b"A file of this kind begins with %PDF-1.4.", "text"),
        ("a.html", b"just text", "text"),
        ("a.md", b"<!DOCTYPE html><p>hello</p>", "HTML"),
        ("notes", b'{"text": "a line", "id": "x"}\n', "JSON lines"),
        ("app.log", b'{"level": "info"}\n', "text"),
        ("a.md", pdf(["hello"]), "PDF"),
        ("a.zip", docx(paragraph("hello")), "DOCX"),
    ],
)
def test_the_content_counts_more_than_the_name(conversion: Conversion, name: str, data: bytes, kind: str) -> None:
    assert str(read_bytes(conversion, name, data).kind) == kind


def test_a_web_page_is_in_the_encoding_that_it_declares(conversion: Conversion) -> None:
    page = "<html><head><meta charset='euc-kr'></head><body><p>페리는 출발합니다</p></body></html>".encode("euc-kr")
    (document,) = read_bytes(conversion, "a.html", page).documents
    assert document.text == "페리는 출발합니다", "without it this is taken for GB18030"


def test_a_csv_file_is_a_table_whose_header_row_has_names(conversion: Conversion) -> None:
    for data in (b"name,year\nTower,1904\n\nChoir,1998,new\n", b"name\tyear\nTower\t1904\nChoir\t1998\tnew\n"):
        (document,) = read_bytes(conversion, "a.csv", data).documents
        assert document.text == "name | year\nTower | 1904\nChoir | 1998 | new"
        assert document.tables == (Table(0, len("name | year\n"), len(document.text)),)
    (bare,) = read_bytes(conversion, "a.csv", b"1,2\n3,4\n").documents
    assert (bare.text, bare.tables) == ("1 | 2\n3 | 4", ())


def test_a_row_of_a_csv_file_is_bounded(conversion: Conversion) -> None:
    read = read_bytes(conversion, "a.csv", b"n," * 40_000 + b"\n1,2\n")
    assert "row 1 has 1" in read.left_out
    assert "too many empty cells" in read_bytes(conversion, "a.csv", (b"," * 99 + b"x\n") * 80_000).left_out


def test_tables_of_markdown_and_of_pages_are_found(conversion: Conversion) -> None:
    text = "intro\n\n| a | b |\n|---|:-:|\n| 1 | 2 |\n\nbehind\n\nc | d\n--- | ---\n3 | 4"
    (document,) = read_bytes(conversion, "a.md", text.encode()).documents
    assert [text[table.start : table.rows] for table in document.tables] == [
        "| a | b |\n|---|:-:|\n",
        "c | d\n--- | ---\n",
    ]
    assert [text[table.rows : table.stop] for table in document.tables] == ["| 1 | 2 |\n", "3 | 4"]
    (page,) = read_bytes(conversion, "a.html", b"<html><table><tr><th>a<th>b<tr><td>1<td>2</table>").documents
    assert page.text == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert len(page.tables) == 1


@pytest.mark.parametrize("charset", ["punycode", "idna", "utf-7", "rot-13", "bz2", "unicode_escape"])
def test_a_declared_charset_that_is_no_encoding_of_pages_is_not_used(conversion: Conversion, charset: str) -> None:
    page = f"<html><meta charset={charset}><p>".encode() + "Die Fähre fährt täglich.".encode("cp1252")
    read = read_bytes(conversion, "a.html", page)
    assert "it declares the encoding " in read.left_out
    valid = read_bytes(conversion, "a.html", f"<html><meta charset={charset}><p>Die Fähre".encode())
    assert valid.documents[0].text == "Die Fähre"


def test_a_doubtful_guess_is_reported(conversion: Conversion) -> None:
    read = read_bytes(conversion, "a.txt", "המעבורת יוצאת בתשע בבוקר".encode("cp1255"))
    assert "was assumed, perhaps wrongly" in read.assumed


def test_what_a_file_does_to_its_process_harms_no_other_file(conversion: Conversion) -> None:
    page = b"<html><table>" + b"<tr><td colspan=1000 rowspan=1000>w" * 100_000
    assert read_bytes(conversion, "a.html", page).left_out
    assert read_bytes(conversion, "b.txt", b"text").documents[0].text == "text"


def test_headings_in_blocks_of_code_are_none(conversion: Conversion) -> None:
    text = "intro\n# One\n```\n# not\n```\n## Two ##\n#no\n"
    (document,) = read_bytes(conversion, "a.md", text.encode()).documents
    assert [section.heading for section in document.sections] == ["One", "Two"]
    assert [text[section.start :].partition("\n")[0] for section in document.sections] == ["# One", "## Two ##"]


def test_bundled_questions_rest_on_bundled_documents() -> None:
    documents = dict(bundled_documents()[0])
    questions = json.loads((ASSETS / "documents" / "questions.json").read_text("utf-8"))
    assert len(documents) == len(questions) == 6
    assert all(330 <= len(text.split()) <= 460 for text in documents.values())
    for question in questions:
        assert question["question"].endswith("?")
        assert question["answers"]
        assert len(question["sources"]) >= 2
        assert set(question["sources"]) <= set(documents)


CONFINED = """
from chunkweave.retrieval.converter import confine
import os, socket, threading
confine(20, 1 << 30)
try:
    {attempt}
except (OSError, MemoryError) as error:
    print("refused", type(error).__name__)
else:
    print("done")
"""


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.socket()",
        "socket.create_connection(('127.0.0.1', 9))",
        "open('/etc/hostname')",
        "open('made', 'w')",
        "os.pipe()",
        "bytearray(2 << 30)",
    ],
)
def test_the_process_that_converts_has_no_network_no_files_and_bounded_memory(tmp_path: Path, attempt: str) -> None:
    program = [sys.executable, "-c", CONFINED.format(attempt=attempt)]
    ended = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, timeout=30)
    assert ended.stdout.startswith("refused"), ended.stderr
    assert not list(tmp_path.iterdir())


def test_the_process_that_converts_has_bounded_time() -> None:
    program = "from chunkweave.retrieval.converter import confine\nconfine(1, 1 << 30)\nwhile True: pass"
    ended = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert ended.returncode == -signal.SIGXCPU


def test_the_process_that_converts_gets_no_keys(monkeypatch, tmp_path: Path) -> None:
    write(tmp_path / "pypdf" / "__init__.py", "import os\nraise ImportError(name=os.environ.get('CHUNKWEAVE_API_KEY'))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CHUNKWEAVE_API_KEY", "secret")
    with Conversion() as process:
        assert "(None)" in read_bytes(process, "a.pdf", pdf(["text"])).left_out


def test_an_archive_is_judged_by_what_it_unpacks_to() -> None:
    check_archive(docx(paragraph("word " * 100_000)))
    for body, more in ((paragraph("a" * (65 << 20)), {}), (paragraph("a"), {f"{n}.xml": b"" for n in range(5000)})):
        with pytest.raises(DocumentError, match="packed too densely"):
            check_archive(docx(body, more=more))


def test_a_conversion_ends_when_it_is_stopped(conversion: Conversion) -> None:
    read = read_bytes(conversion, "a.pdf", pdf(["text"] * 50), stopped=lambda: True)
    assert read.left_out == "reading it was stopped"


ROGUE = """
import os, sys
from chunkweave.retrieval import converter
def take(descriptors, request, converters):
    line = {line!r}
    try:
        while True:
            os.write(descriptors[1], line)
            if not {endless}:
                os._exit(0)
    finally:
        os._exit(0)
converter._take = take
converter.main(int(sys.argv[-1]))
"""


@pytest.mark.parametrize(
    ("line", "endless"),
    [
        (b"[1]\n", False),
        (b"no JSON\n", False),
        (b'{"document": [1]}\n', False),
        (b'{"document": {"id": "a"}}\n', False),
        (b'{"document": {"id": "a", "text": "b", "tables": [[1]]}}\n', False),
        (b'{"kind": "none", "assumed": ""}\n', False),
        (b"", False),
        (b"endless " * 1000, True),
        (b'{"document": {"id": "a", "text": "b"}}\n' * 100, True),
    ],
)
def test_a_converter_that_a_file_took_over_can_only_leave_the_file_out(
    monkeypatch, tmp_path: Path, line: bytes, endless: bool
) -> None:
    rogue = write(tmp_path / "rogue", f"#!/bin/sh\nexec {sys.executable} {tmp_path}/rogue.py $4\n")
    write(tmp_path / "rogue.py", ROGUE.format(line=line, endless=endless))
    rogue.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(rogue))
    with Conversion() as conversion:
        read = read_bytes(conversion, "a.txt", b"text")
    assert read.left_out
    assert not read.documents
