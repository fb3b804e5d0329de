"""Uploads that would take the server's time and memory: refused soon, and another tenant does not notice."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from benchmarks.server_process import peak_rss_bytes, resident_bytes

from tests.document_files import docx, paragraph, pdf
from tests.server.conftest import KEYS, bearer
from tests.server.toy_server import toy_server

pytestmark = pytest.mark.timed

REFUSED_S = 2.0
MEMORY_BYTES = 100 * 10**6
BESIDE = 3.0
FILES = "/v1/corpora/notes/documents/files"


def table(columns: int, name: int, rows: int) -> bytes:
    """A table that is small until the names of its columns are written into each row."""
    header = ",".join("n" * name + str(number) for number in range(columns))
    return (header + "\n" + (",".join("1" * columns) + "\n") * rows).encode()


HOSTILE = {
    "table.csv": table(100, 5000, 2000),
    "small.csv": table(100, 2000, 1000),
    "commas.csv": (b"a,b\n" + b"," * 99 + b"x\n") * 80_000,
    "punycode.html": b"<html><meta charset=punycode><p>" + b"a-\xff" * 200_000,
    "cells.html": b"<html><table>" + b"<tr><td colspan=1000 rowspan=1000>w" * 6_000,
}


class OtherTenant:
    """The answers of another tenant, one after another, in a thread."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, headers=bearer(KEYS["bolt"]), timeout=60)
        self.seconds: list[float] = []
        self._ended = threading.Event()

    def answer(self) -> None:
        body = {"messages": [{"role": "user", "content": "Who leads the choir?"}], "max_tokens": 4, "temperature": 0}
        begun = time.perf_counter()
        assert self._client.post("/v1/chat/completions", json=body).status_code == 200
        self.seconds.append(time.perf_counter() - begun)

    @contextmanager
    def asking(self) -> Iterator[list[float]]:
        self.seconds = []
        self._ended.clear()
        thread = threading.Thread(target=self._ask)
        thread.start()
        try:
            yield self.seconds
        finally:
            self._ended.set()
            thread.join()

    def _ask(self) -> None:
        while not self._ended.is_set():
            self.answer()
            time.sleep(0.02)

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, OtherTenant, int]]:
    folder = str(tmp_path_factory.mktemp("corpora"))
    with ExitStack() as stack:
        url, process = stack.enter_context(toy_server("engine", data_dir=folder))
        client = stack.enter_context(httpx.Client(base_url=url, headers=bearer(KEYS["acme"]), timeout=120))
        assert client.post("/v1/corpora", json={"name": "notes"}).status_code == 201
        other = OtherTenant(url)
        client.post(FILES, files={"files": ("warm.txt", b"The first upload loads what uploads need.")})
        yield client, other, process
        other.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_upload_is_refused_soon_and_others_do_not_notice(server, name: str) -> None:
    client, other, process = server
    with other.asking() as alone:
        time.sleep(3)
    before = resident_bytes(process)
    Path(f"/proc/{process}/clear_refs").write_text("5")  # the peak of what follows
    with other.asking() as beside:
        begun = time.perf_counter()
        refused = client.post(FILES, files={"files": (name, HOSTILE[name])})
        seconds = time.perf_counter() - begun
    assert refused.status_code in (400, 415)
    assert refused.json()["files"][0]["left_out"]
    assert seconds < REFUSED_S
    assert peak_rss_bytes(process) - before < MEMORY_BYTES
    assert max(beside) < BESIDE * max(alone), (beside, alone)


def ordinary_table() -> bytes:
    """A table of 8 MiB and 20 columns."""
    lines = [",".join(f"column {number}" for number in range(20))]
    row = ",".join(f"value {number:07d}" for number in range(20))
    lines += [row] * ((8 << 20) // (len(row) + 1) - 4)
    return "\n".join(lines).encode()


def ordinary_page() -> bytes:
    """A web page of 1 MiB."""
    text = "The ferry leaves the <b>northern</b> quay at nine, and returns at noon. "
    return b"<html><body>" + (f"<p>{text * 8}</p>\n".encode() * ((1 << 20) // (8 * len(text) + 8)))


ORDINARY = {
    "table.csv": ordinary_table,
    "page.html": ordinary_page,
    "report.pdf": lambda: pdf([f"Page {number} is about tides." for number in range(50)]),
    "letter.docx": lambda: docx(paragraph("The great storm came in March 1907.") * 500),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_files_are_taken(server, name: str) -> None:
    client, _, _ = server
    taken = client.post(FILES, files={"files": (name, ORDINARY[name]())}, params={"update": True}, timeout=600)
    assert taken.status_code == 200, taken.text
    assert client.post("/v1/corpora/notes/search", json={"query": "column 7", "top_k": 1}).status_code == 200
