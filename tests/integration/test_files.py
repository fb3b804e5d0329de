"""Files of every kind, through `ingest`, `corpus search` and `ask --docs`; and files that are made to do harm."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkweave.retrieval.file_kinds import NOT_READ
from tests.document_files import (
    GREEDY,
    HOSTILE,
    children_s,
    docx,
    outside_entity,
    paragraph,
    pdf,
    remote_picture_docx,
    remote_picture_html,
    write_files,
)
from tests.integration.command_line import invoke, json_of, succeed


def search(corpus: Path, question: str, top_k: int = 3) -> list[dict]:
    return json_of("corpus", "search", corpus, question, "--top-k", top_k)["retrieved"]


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], dict]:
    """A corpus of files of all kinds, what is said in each, and what `ingest --json` says of them."""
    folder = tmp_path_factory.mktemp("all")
    said = write_files(folder / "files")
    return folder / "corpus", said, json_of("ingest", folder / "files", "--corpus", folder / "corpus")


def test_one_ingest_reads_files_of_every_kind(ingested):
    corpus, said, result = ingested
    rows = {row["file"]: row for row in result["files"]}
    assert rows.keys() == {*said, "empty.txt", "picture.png"}
    left_out = {name: row["left_out"] for name, row in rows.items() if row["left_out"]}
    assert left_out == {"empty.txt": "it is empty", "picture.png": NOT_READ}
    kinds = {row["kind"] for row in rows.values()}
    assert kinds >= {"text", "Markdown", "JSON lines", "CSV", "HTML", "PDF", "DOCX"}
    assert {name for name, row in rows.items() if row["converted"]} == {
        *("page.html", "other.htm", "report.pdf", "memo.pdf", "wrong.txt", "letter.docx", "minutes.docx"),
    }
    assumed = {name: row["assumed"] for name, row in rows.items() if row["assumed"]}
    assert assumed == {"german.txt": "Windows-1252 was assumed", "chinese.txt": "GB18030 was assumed"}
    for text in said.values():
        assert any(text in " ".join(one["text"].split()) for one in search(corpus, text)), text


def test_chunks_keep_their_page_or_heading(ingested):
    corpus, _, _ = ingested
    (roof,) = search(corpus, "What colour has the roof of the pilot station?", 1)
    assert (roof["document"], roof["page"], roof["last_page"], roof["heading"]) == ("report.pdf", 1, 2, "")
    (storm,) = search(corpus, "When did the great storm come?", 1)
    assert (storm["document"], storm["page"], storm["heading"]) == ("letter.docx", None, "Storms")
    shown = invoke("corpus", "search", corpus, "Dogs on the southern quay", "--top-k", 1).stdout
    assert "rules.md, Animals" in " ".join(shown.split())


def test_a_chunk_of_a_pdf_has_its_pages(tmp_path):
    pages = ["\n".join(f"The {word} was painted in the year {year}." for year in range(1900, 1940)) for word in
             ("ferry", "tower", "crane")]  # fmt: skip
    (tmp_path / "paint.pdf").write_bytes(pdf(pages))
    json_of("ingest", tmp_path / "paint.pdf", "--corpus", tmp_path / "corpus", "--chunk-tokens", 64)
    found = search(tmp_path / "corpus", "The crane was painted", 30)
    assert {(one["page"], one["last_page"]) for one in found if "tower" not in one["text"]} == {(1, 1), (3, 3)}
    assert {one["last_page"] for one in found if "crane" in one["text"]} == {3}


def test_one_table_says_what_became_of_each_file(ingested):
    corpus, said, _ = ingested
    result = invoke("ingest", corpus.parent / "files", "--corpus", corpus)
    shown = " ".join(result.stdout.split())
    assert "picture.png" in shown
    assert NOT_READ in shown
    assert "Windows-1252 was assumed" in shown
    assert shown.count("unchanged") == len(said) + 1
    assert "2 of 21 files were left out, wholly or in part" in shown


def test_strict_makes_a_bad_file_an_error(tmp_path):
    (tmp_path / "good.txt").write_text("The ferry.", encoding="utf-8")
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4\nbroken")
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n', encoding="utf-8")
    refused = invoke("ingest", tmp_path, "--corpus", tmp_path / "corpus", "--strict")
    assert refused.exit_code == 1
    assert "bad.pdf" in refused.stderr
    assert "1 more" in refused.stderr
    assert "rows.jsonl: 1 lines left out: line 2: " in refused.stderr.replace("\n", " ")
    assert not (tmp_path / "corpus").exists()
    rows = {row["file"]: row for row in json_of("ingest", tmp_path, "--corpus", tmp_path / "corpus")["files"]}
    assert "damaged" in rows["bad.pdf"]["left_out"]
    assert rows["rows.jsonl"]["lines_left_out"][0].startswith("line 2: ")
    assert rows["rows.jsonl"]["result"] == {"added": 1}


def test_a_corpus_within_the_folder_is_no_document(tmp_path):
    (tmp_path / "good.txt").write_text("The ferry.", encoding="utf-8")
    for unchanged in (0, 1):
        result = json_of("ingest", tmp_path, "--corpus", tmp_path / "corpus")
        assert (result["unchanged"], len(result["files"])) == (unchanged, 1)


def test_ask_reads_the_same_kinds_and_says_what_it_leaves_out(tmp_path):
    (tmp_path / "memo.pdf").write_bytes(pdf(["The anchor weighs two tonnes."]))
    (tmp_path / "letter.docx").write_bytes(docx(paragraph("The great storm came in March 1907.")))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    ask = ("ask", "--set", "shape=demo", "--max-new-tokens", 1, "--docs", tmp_path, "--json")
    result = succeed(*ask, "Why?")
    chunks = json.loads(result.stdout)["answers"][0]["report"]["chunks"]
    assert [chunk["source"] for chunk in chunks[1:]] == ["letter.docx", "memo.pdf"]
    assert f"picture.png: {NOT_READ}" in result.stderr
    strict = invoke(*ask, "--set", "strict=true", "Why?")
    assert (strict.exit_code, "picture.png" in strict.stderr) == (1, True)


def test_without_the_extra_plain_kinds_are_read_and_the_others_name_it(ingested, tmp_path, monkeypatch):
    for package in ("pypdf", "mammoth", "html_to_markdown", "charset_normalizer", "defusedxml"):
        (tmp_path / "gone" / package).mkdir(parents=True)
        (tmp_path / "gone" / package / "__init__.py").write_text(f"raise ImportError(name={package!r})")
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "gone"), prepend=":")
    others, plain = ("memo.pdf", "letter.docx", "page.html", "german.txt"), ("wide.txt", "guide.md", "table.csv")
    files = [ingested[0].parent / "files" / name for name in (*others, *plain, "lines.ndjson")]
    rows = json_of("ingest", *files, "--corpus", tmp_path / "corpus")["files"]
    assert {row["file"] for row in rows if "pip install '.[documents]'" in row["left_out"]} == set(others)
    assert sum(row["result"].get("added", 0) for row in rows) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_files_made_to_do_harm_are_left_out_soon(tmp_path, name):
    (tmp_path / name).write_bytes(HOSTILE[name]())
    (tmp_path / "good.txt").write_text("The ferry.", encoding="utf-8")
    before = children_s()
    result = json_of("ingest", tmp_path, "--corpus", tmp_path / "corpus")
    assert children_s() - before < 5
    (row,) = (one for one in result["files"] if one["file"] == name)
    assert row["left_out"]
    assert result["added"] == 1


PEAKS = """
import json, resource, sys
from pathlib import Path
from chunkweave.retrieval.conversion import Conversion

file = Path(sys.argv[1])
unit = 1 if sys.platform == "darwin" else 1 << 10
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with file.open("rb") as opened, Conversion() as conversion:
    conversion.read(file.name, opened, bounded=True)
own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([own * unit, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit]))
"""
"""Prints how many bytes the peak of the reading process grows by, and the peak of the converting ones."""


@pytest.mark.slow
@pytest.mark.parametrize("name", GREEDY)
def test_the_memory_that_a_file_made_to_do_harm_takes_is_bounded(tmp_path, name):
    (tmp_path / name).write_bytes(GREEDY[name]())
    program = [sys.executable, "-c", PEAKS, str(tmp_path / name)]
    ended = subprocess.run(program, capture_output=True, text=True, check=True, timeout=900)
    reader, converter = json.loads(ended.stdout)
    assert 0 < converter < 640 << 20
    assert reader < 100 << 20


@pytest.fixture
def outside() -> Iterator[tuple[str, list[object]]]:
    """A URL on this machine, and the connections that were made to it."""
    made: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            try:
                while True:
                    made.append(server.accept())
            except OSError:
                return

        listening = threading.Thread(target=accept, daemon=True)
        listening.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/pier.png", made
        server.shutdown(socket.SHUT_RDWR)
        listening.join()


def test_nothing_outside_of_a_file_is_asked_for(tmp_path, outside):
    url, made = outside
    (tmp_path / "picture.docx").write_bytes(remote_picture_docx(url))
    (tmp_path / "picture.html").write_bytes(remote_picture_html(url))
    (tmp_path / "entity.docx").write_bytes(outside_entity(url))
    result = json_of("ingest", tmp_path, "--corpus", tmp_path / "corpus")
    rows = {row["file"]: row["left_out"] for row in result["files"]}
    assert "entities" in rows.pop("entity.docx")
    assert rows == {"picture.docx": "", "picture.html": ""}
    assert {one["text"] for one in search(tmp_path / "corpus", "pier")} == {"The picture shows the pier."}
    assert not made
