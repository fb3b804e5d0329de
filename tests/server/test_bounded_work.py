"""Every field of every body, filled with as much as a body may have: refused quickly, and others do not notice.

A server in a process of its own: its slowest answer to another tenant meanwhile, and its memory, have bounds.
CHUNKWEAVE_BOUNDED_WORK=all tries every way to fill every field, else each field is filled in two of these ways.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.server_process import peak_rss_bytes, resident_bytes

from chunkweave_server.app import create_app
from tests.document_files import docx, paragraph, pdf
from tests.server.conftest import KEYS, bearer, toy_service
from tests.server.fake_vllm import FakeVllm
from tests.server.toy_server import toy_server

pytestmark = pytest.mark.timed

MIB = 1 << 20
BODY_BYTES, UPLOAD_BYTES = 4 * MIB, 64 * MIB
REFUSED_S = 1.0
BESIDE_S = 0.25
MEMORY_BYTES = 200 * 10**6
TRIES = 3

SCHEMA = create_app(toy_service()).openapi()
BODIES = {
    path: next(iter(operation["requestBody"]["content"].values()))["schema"]
    for path, operations in SCHEMA["paths"].items()
    for operation in operations.values()
    if "application/json" in operation.get("requestBody", {}).get("content", {})
}
INGEST = "/v1/corpora/{name}/documents"
HERE = "@here@"


def keys_of(count: int) -> str:
    return "{" + ",".join(f'"{number:x}":1' for number in range(count)) + "}"


WAYS = {
    "numbers": lambda size: "[" + "1," * (size // 2) + "1]",
    "objects": lambda size: "[" + "{}," * (size // 3) + "{}]",
    "keys": lambda size: keys_of(size // 10),
    "lists": lambda size: "[" + "[]," * (size // 3) + "[]]",
    "texts": lambda size: "[" + '"",' * (size // 3) + '""]',
    "objects with keys": lambda size: "[" + ",".join([keys_of(1000)] * (size // 9000 + 1)) + "]",
    "deep": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "text": lambda size: '"' + "a, " * (size // 3) + '"',
    "escapes": lambda size: '"' + "\\u00e9" * (size // 6) + '"',
    "digits": lambda size: "9" * size,
}
EVERY = os.environ.get("CHUNKWEAVE_BOUNDED_WORK") == "all"


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return SCHEMA["components"]["schemas"][name] if name else schema


def kinds(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [resolved(one) for one in schema.get("anyOf", [schema])]


def least(schema: dict[str, Any]) -> Any:
    """A value that a schema allows."""
    kind = next(one for one in kinds(schema) if one.get("type") != "null")
    if "const" in kind or "enum" in kind:
        return kind.get("const", kind.get("enum", [None])[0])
    if kind.get("type") == "object":
        return {name: least(kind["properties"][name]) for name in kind.get("required", ())}
    if kind.get("type") == "array":
        return [least(kind["items"])] * kind.get("minItems", 0)
    return {"string": "x", "integer": kind.get("minimum", 1), "number": 0.5, "boolean": False}.get(kind.get("type"))


def filled(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field below a schema by its place, with a value that has `HERE` there and is valid elsewhere."""
    for kind in kinds(schema):
        if kind.get("type") == "object":
            if kind.get("additionalProperties"):
                yield "(unknown)", {**least(kind), "x-hint": HERE}
            for name, inner in kind.get("properties", {}).items():
                yield name, {**least(kind), name: HERE}
                for place, value in filled(inner):
                    yield f"{name}.{place}", {**least(kind), name: value}
        elif kind.get("type") == "array" and isinstance(kind.get("items"), dict):
            for place, value in filled(kind["items"]):
                yield f"[0].{place}", [value]


def attacks(path: str) -> Iterator[tuple[str, bytes]]:
    """Bodies of the largest size for an endpoint, by what they do."""
    size = UPLOAD_BYTES if path == INGEST else BODY_BYTES
    fields = dict(filled(BODIES[path]))
    turns = itertools.cycle(WAYS) if not EVERY else None
    yield from ((f"whole {way}", whole.encode()) for way, whole in ((w, fill(size)) for w, fill in WAYS.items()))
    for place, value in fields.items():
        ways = WAYS if turns is None else [next(turns)] if size == UPLOAD_BYTES else [next(turns), next(turns)]
        for way in ways:
            before, _, behind = json.dumps({**also(path), **value}).partition(f'"{HERE}"')
            room = size - len(before) - len(behind) - 64
            yield f"{place}: {way}", f"{before}{WAYS[way](room)}{behind}".encode()


def also(path: str) -> dict[str, Any]:
    """What makes a request the server's own, also before vLLM, and short."""
    return {"documents": ["x"], "max_tokens": 1} if "completions" in path else {}


class Neighbour:
    """Another tenant that asks all the time."""

    def __init__(self, url: str) -> None:
        self.times_s: list[float] = []
        self._url = url
        self._asks = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    @contextmanager
    def asking(self) -> Iterator["Neighbour"]:
        self._thread.start()
        self._asks.wait(timeout=60)
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()

    def _ask(self) -> None:
        body = {"prompt": "When does it leave?", "documents": ["The ferry leaves at nine."], "max_tokens": 2}
        with httpx.Client(base_url=self._url, headers=bearer(KEYS["bolt"]), timeout=60) as client:
            while not self._ended.is_set():
                self._asks.set()
                begun_s = time.perf_counter()
                reply = client.post("/v1/completions", json=body)
                self.times_s.append(time.perf_counter() - begun_s)
                assert reply.status_code == 200, reply.text
                time.sleep(0.005)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    with FakeVllm() as fake, toy_server(request.param, fake.url, max_answer_tokens=8) as running:
        made = httpx.post(f"{running[0]}/v1/corpora", json={"name": "notes"}, headers=bearer(KEYS["acme"]))
        assert made.status_code == 201, made.text
        yield running


@pytest.fixture(scope="module")
def alone_s(server: tuple[str, int]) -> float:
    """What the neighbour's slowest request takes when nobody else asks."""
    with Neighbour(server[0]).asking() as neighbour:
        time.sleep(1.5)
    return max(neighbour.times_s)


def sent(client: httpx.Client, path: str, body: bytes, kind: str = "application/json") -> tuple[httpx.Response, float]:
    """The answer, and the seconds from the body's last byte on."""
    last_s = 0.0

    def pieces() -> Iterator[bytes]:
        nonlocal last_s
        for start in range(0, len(body), MIB):
            last_s = time.perf_counter()
            yield body[start : start + MIB]

    headers = {"content-type": kind, "content-length": str(len(body))}
    reply = client.post(path.format(name="notes"), content=pieces(), headers=headers)
    return reply, time.perf_counter() - last_s


def hold(server: tuple[str, int], alone_s: float, path: str, named: Iterable[tuple[str, bytes]], **kind: str) -> int:
    """Send bodies and hold what they cost against the bounds; returns how many there were."""
    url, pid = server
    most_s = max(3 * alone_s, alone_s + BESIDE_S)
    before_bytes, bodies = resident_bytes(pid), 0
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak of what follows
    with httpx.Client(base_url=url, headers=bearer(KEYS["acme"]), timeout=300) as client:
        for name, body in named:
            bodies += 1
            for _ in range(TRIES):  # this machine may be busy with something else
                with Neighbour(url).asking() as neighbour:
                    reply, took_s = sent(client, path, body, **kind)
                slowest_s = max(neighbour.times_s, default=0.0)
                if slowest_s <= most_s and (took_s <= REFUSED_S or reply.status_code < 400):
                    break
            else:
                pytest.fail(f"{name}: {took_s:.3f} s, beside it {slowest_s:.3f} s: {reply.text[:300]}")
            assert reply.status_code < 500, (name, reply.text)
    grown_bytes = peak_rss_bytes(pid) - before_bytes
    assert grown_bytes < MEMORY_BYTES
    return bodies


ANSWERS = sorted(path for path in BODIES if "completions" in path)
WHERE = [("engine", path) for path in sorted(BODIES)] + [("vllm", path) for path in ANSWERS]
"""The other endpoints are the same for both backends."""


@pytest.mark.parametrize(("server", "path"), WHERE, indirect=["server"])
def test_nothing_of_a_body_costs_others_much(server: tuple[str, int], alone_s: float, path: str):
    assert hold(server, alone_s, path, attacks(path)) > 10


FORM = 'content-disposition: form-data; name="files"; filename="{}"\r\n\r\n'


def uploads() -> Iterator[tuple[str, bytes]]:
    """Files of the largest size that are wrong, and forms that are."""

    def form(*parts: bytes) -> bytes:
        return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"

    lines = FORM.format("a.jsonl").encode()
    for way, fill in WAYS.items():
        yield f"one line of {way}", form(lines + fill(UPLOAD_BYTES - 1024).encode())
    yield "many wrong lines", form(lines + b"1\n" * (UPLOAD_BYTES // 2 - 512))
    yield "many empty objects", form(lines + b"{}\n" * (UPLOAD_BYTES // 3 - 512))
    yield "ends of lines", form(lines + b"\r\n" * (UPLOAD_BYTES // 2 - 512))
    yield "no text", form(FORM.format("a.txt").encode() + b"\xff" * (UPLOAD_BYTES - 1024))
    yield "almost ends of parts", form(lines + b"\r\n--" * (UPLOAD_BYTES // 4 - 512))
    yield "many files", form(*[FORM.format("a.txt").encode() + b"x"] * 50_000)
    yield "a long name", form(FORM.format("a" * MIB + ".txt").encode() + b"x")
    yield "a long header", form(b"x-y: " + b"a" * (8 * MIB) + b"\r\n" + lines + b"x")
    yield "a field", form(b'content-disposition: form-data; name="files"\r\n\r\n' + b"x" * (UPLOAD_BYTES - 1024))
    yield "no form", b"x" * (UPLOAD_BYTES - 1024)


def no_uploads() -> Iterator[tuple[str, bytes]]:
    """Forms of the largest size that are no upload."""
    yield "fields", b"a=1&" * MIB
    yield "methods", b"methods=full&" * (BODY_BYTES // 13)
    yield "names", b"a" * BODY_BYTES


@pytest.mark.parametrize("server", ["engine"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "forms", "least"),
    [
        pytest.param("multipart/form-data; boundary=b", uploads, 16, id="uploads"),
        pytest.param("application/x-www-form-urlencoded", no_uploads, 3, id="no uploads"),
    ],
)
def test_no_form_costs_others_much(server: tuple[str, int], alone_s: float, kind: str, forms: Any, least: int):
    assert hold(server, alone_s, f"{INGEST}/files", forms(), kind=kind) >= least


def valid() -> Iterator[tuple[str, str, Any]]:
    """Bodies of the largest size that the schema allows, by endpoint."""
    question = [{"role": "user", "content": "When?"}]
    words = "The ferry leaves at nine, and again at noon. "
    yield "/v1/completions", "one text", {"prompt": words * (BODY_BYTES // len(words) - 2)}
    yield "/v1/chat/completions", "documents", {"messages": question, "documents": [words * 1450] * 60}
    yield "/v1/chat/completions", "short documents", {"messages": question, "documents": ["a" * 410] * 9_000}
    turns = [{"role": ("user", "assistant")[n % 2], "content": words * 9} for n in range(9_001)]
    yield "/v1/chat/completions", "messages", {"messages": turns, "documents": ["x"]}
    parts = [{"type": "text", "text": words * 20}] * 4000
    hints = [{**question[0], **{f"x-{n}": 1 for n in range(200)}}] * 450
    yield "/v1/chat/completions", "hints", {"messages": hints, "documents": ["x"]}
    yield "/v1/chat/completions", "parts", {"messages": [{"role": "user", "content": parts}], "documents": ["x"]}
    tools = [{"type": "function", "function": {"name": f"f{n}", "description": words * 80}} for n in range(1000)]
    yield "/v1/chat/completions", "tools", {"messages": question, "documents": ["x"], "tools": tools}
    yield "/v1/chat/completions", "bias", {"messages": question, "logit_bias": {str(n): 1 for n in range(90_000)}}
    yield "/v1/embeddings", "many texts", {"input": ["a b c"] * 2048}
    yield "/v1/cache/warm", "documents", {"documents": [words * 1450] * 60}
    yield "/v1/corpora/{name}/search", "a question", {"query": words * (BODY_BYTES // len(words) - 2)}
    yield INGEST, "a text", {"documents": [{"id": "a", "text": words * 90_000}], "update": True}
    yield INGEST, "texts", {"documents": [f"{n} {words * 8}" for n in range(10_000)], "update": True}


VALID = [("engine", *one) for one in valid()] + [("vllm", *one) for one in valid() if one[0] in ANSWERS]


@pytest.mark.parametrize(
    ("server", "path", "name", "body"), VALID, indirect=["server"], ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_valid_body_of_the_largest_size_costs_others_no_more(
    server: tuple[str, int], alone_s: float, path: str, name: str, body: Any
):
    assert hold(server, alone_s, path, [(name, json.dumps({**also(path), **body}).encode())])


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


@pytest.mark.parametrize("server", ["engine"], indirect=True)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_upload_is_refused_soon_and_others_do_not_notice(server: tuple[str, int], name: str) -> None:
    """It would take the server's time and memory."""
    url, pid = server
    upload(url, "warm.txt", b"The first upload loads what uploads need.")
    with Neighbour(url).asking() as alone:
        time.sleep(3)
    before_bytes = resident_bytes(pid)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak of what follows
    with Neighbour(url).asking() as beside:
        begun_s = time.perf_counter()
        refused = upload(url, name, HOSTILE[name])
        took_s = time.perf_counter() - begun_s
    assert refused.status_code in (400, 415)
    assert refused.json()["files"][0]["left_out"]
    assert took_s < 2 * REFUSED_S
    assert peak_rss_bytes(pid) - before_bytes < MEMORY_BYTES / 2
    assert max(beside.times_s) < 3 * max(alone.times_s), (beside.times_s, alone.times_s)


def upload(url: str, name: str, data: bytes) -> httpx.Response:
    sent, headers = {"files": (name, data)}, bearer(KEYS["acme"])
    where = f"{url}/v1/corpora/notes/documents/files?update=true"
    return httpx.post(where, files=sent, headers=headers, timeout=600)


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
@pytest.mark.parametrize("server", ["engine"], indirect=True)
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_files_are_taken(server: tuple[str, int], name: str) -> None:
    taken = upload(server[0], name, ORDINARY[name]())
    assert taken.status_code == 200, taken.text
