"""Reading documents, and the bundled ones."""

import json
import logging
from pathlib import Path

import pytest

from chunkweave.errors import DocumentError
from chunkweave.prompt.documents import Document, read_documents
from tests.unit.chunking_tokenizers import ASSETS


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def test_folders_are_walked_in_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "sub/c.rst", "sub/D.MD", ".hidden.md", ".git/e.md", "image.png", "page.html"):
        write(tmp_path / name, name)
    assert [document.name for document in read_documents([tmp_path])] == ["a.txt", "b.md", "sub/D.MD", "sub/c.rst"]


def test_a_named_file_is_read_whatever_its_suffix(tmp_path: Path) -> None:
    assert read_documents([write(tmp_path / "notes.log", "text")]) == [Document("notes.log", "text")]


def test_line_ends_and_byte_order_mark_leave_no_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_documents([path])[0].text == "one\ntwo\nthree\n"


def test_names_that_are_not_unique_become_paths(tmp_path: Path) -> None:
    one, two = write(tmp_path / "x" / "a.md", "1"), write(tmp_path / "y" / "a.md", "2")
    assert [document.name for document in read_documents([one, two])] == [one.as_posix(), two.as_posix()]


def test_a_file_reached_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.md", "text")
    assert read_documents([tmp_path, path]) == [Document("a.md", "text")]


def test_what_is_not_utf8_is_refused_with_name_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "latin.txt", b"caf\xe9 au lait")
    with pytest.raises(DocumentError, match=r"latin\.txt is not UTF-8: bad byte at offset 3"):
        read_documents([path])


def test_what_is_not_utf8_can_be_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "latin.txt", b"caf\xe9")
    write(tmp_path / "good.txt", "text")
    with caplog.at_level(logging.WARNING, "chunkweave"):
        assert read_documents([tmp_path], on_error="skip") == [Document("good.txt", "text")]
    assert "latin.txt" in caplog.text
    assert "offset 3" in caplog.text


def test_empty_files_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "empty.md", " \n")
    write(tmp_path / "good.md", "text")
    with caplog.at_level(logging.WARNING, "chunkweave"):
        assert [document.name for document in read_documents([tmp_path])] == ["good.md"]
    assert "empty.md is empty" in caplog.text


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_missing_paths_and_folders_without_text_are_refused(tmp_path: Path, on_error: str) -> None:
    with pytest.raises(DocumentError, match="no such file or folder"):
        read_documents([tmp_path / "nowhere"], on_error=on_error)  # type: ignore[arg-type]
    with pytest.raises(DocumentError, match=r"no \.txt, \.md, \.rst file in folder"):
        read_documents([tmp_path], on_error=on_error)  # type: ignore[arg-type]


def test_bundled_questions_rest_on_bundled_documents() -> None:
    documents = {document.name: document.text for document in read_documents([ASSETS / "documents"])}
    questions = json.loads((ASSETS / "documents" / "questions.json").read_text("utf-8"))
    assert len(documents) == len(questions) == 6
    assert all(330 <= len(text.split()) <= 460 for text in documents.values())
    for question in questions:
        assert question["question"].endswith("?")
        assert question["answers"]
        assert len(question["sources"]) >= 2
        assert set(question["sources"]) <= set(documents)
