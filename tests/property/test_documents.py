"""Tables, encodings and markup that Hypothesis draws: every cell's text is in a chunk, behind the header row."""

import csv
import io
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkweave.prompt.documents import SplitConfig, split_located
from chunkweave.retrieval.conversion import Conversion, FileRead
from chunkweave.retrieval.documents import CorpusDocument
from tests.document_files import read_bytes
from tests.unit.chunking_tokenizers import bundled

SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

words = st.text(alphabet="abcdefghijklmnopqrstuvwxyzäöüé", min_size=1, max_size=8)
cells = st.lists(words, min_size=1, max_size=3).map(" ".join)
encodings = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"])


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    columns = draw(st.integers(2, 5))
    names = draw(st.lists(words, min_size=columns, max_size=columns, unique=True))
    rows = draw(st.lists(st.lists(cells, min_size=columns, max_size=columns), min_size=1, max_size=40))
    return [names, *rows]


@pytest.fixture(scope="module")
def conversion() -> Iterator[Conversion]:
    with Conversion() as process:
        yield process


def chunks_of(document: CorpusDocument) -> list[str]:
    """The chunks of a document; none has more tokens than it may."""
    tokenizer, config = bundled(), SplitConfig(256)
    chunks = [piece for _, piece in split_located(document.text, tokenizer, config, document.tables)]
    assert max(len(tokenizer.encode(chunk)) for chunk in chunks) <= config.max_tokens
    return chunks


def check_table(read: FileRead, table: list[list[str]], header: str) -> None:
    assert not read.left_out
    (document,) = read.documents
    chunks = chunks_of(document)
    assert all(chunk.startswith(header) for chunk in chunks)
    assert document.text.count(header) == 1, "it is written once, not into each row"
    text = " ".join(" ".join(chunks).split())
    assert all(cell in text for row in table for cell in row)


@SOME
@given(table=tables(), delimiter=st.sampled_from(",;\t|"), encoding=encodings)
def test_every_cell_of_a_csv_file_is_in_a_chunk_behind_the_header_row(conversion, table, delimiter, encoding) -> None:
    written = io.StringIO()
    csv.writer(written, delimiter=delimiter).writerows(table)
    read = read_bytes(conversion, "a.csv", written.getvalue().encode(encoding), bounded=True)
    check_table(read, table, " | ".join(table[0]))


@SOME
@given(table=tables(), closed=st.booleans(), encoding=encodings)
def test_every_cell_of_a_web_page_is_in_a_chunk_behind_the_header_row(conversion, table, closed, encoding) -> None:
    names, *rows = table
    page = "<html><body><table><tr>" + "".join(f"<th>{name}" + "</th>" * closed for name in names)
    page += "".join("<tr>" + "".join(f"<td>{cell}" + "</td>" * closed for cell in row) for row in rows)
    read = read_bytes(conversion, "a.html", page.encode(encoding), bounded=True)
    check_table(read, table, "| " + " | ".join(names) + " |")


@SOME
@given(items=st.lists(cells, min_size=1, max_size=20), closed=st.booleans())
def test_every_item_of_a_list_is_a_line(conversion, items, closed) -> None:
    page = "<html><ul>" + "".join(f"<li>{item}" + "</li>" * closed for item in items) + "</ul>"
    (document,) = read_bytes(conversion, "a.html", page.encode(), bounded=True).documents
    assert document.text.splitlines() == [f"- {item}" for item in items]


@SOME
@given(data=st.binary(max_size=3000), name=st.sampled_from(["a.txt", "a.csv", "a.html", "a.md", "a.jsonl", "a"]))
def test_any_bytes_are_read_or_refused_with_a_reason(conversion, data, name) -> None:
    read = read_bytes(conversion, name, data, bounded=True)
    assert bool(read.documents) != bool(read.left_out)
    assert "converter" not in read.left_out
    assert sum(len(document.text) for document in read.documents) <= 3 * len(data) + 100


@SOME
@given(
    markup=st.lists(
        st.sampled_from(["<div>", "</p>", "<td colspan=9>", "<table>", "<li>", "&lt;", "word ", "<!--", "]]>"])
    )
)
def test_any_markup_is_read_or_refused_with_a_reason(conversion, markup) -> None:
    read = read_bytes(conversion, "a.html", f"<html>{''.join(markup)}".encode(), bounded=True)
    assert bool(read.documents) != bool(read.left_out)
    assert "memory" not in read.left_out
