"""A server whose disk is full, or that may not write to it: it says which, keeps what it had, and goes on later."""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import pytest

from chunkweave_server.backend import Stage
from tests.integration.failing_files import WRITES, FailingFiles
from tests.integration.failing_files import failing as failing_files
from tests.server.conftest import Client, Serve, error_of, report_of

CODES = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EROFS: "disk_read_only",
    errno.EACCES: "disk_read_only",
}


class FullDisk(sqlite3.Connection):
    """Says of a full disk that it is full, and of a used-up quota no more than that it cannot be written."""

    number = errno.ENOSPC

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement == "COMMIT":
            error = sqlite3.OperationalError("not written")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL if self.number == errno.ENOSPC else sqlite3.SQLITE_IOERR_WRITE
            raise error
        return super().execute(statement, *values)


@contextmanager
def failing(number: int) -> Iterator[None]:
    """Nothing can be written, made or renamed meanwhile."""
    connect = sqlite3.connect

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/data/somewhere")

    def connected(name: str, **options: Any) -> sqlite3.Connection:
        if CODES[number] == "disk_read_only":
            return connect(name.replace("mode=rw", "mode=ro"), **options)
        connection = connect(name, **options, factory=FullDisk)
        connection.number = number
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connected)
        patch.setattr(os, "fsync", refuse)
        patch.setattr(Path, "mkdir", refuse)
        patch.setattr(Path, "rename", refuse)
        if CODES[number] == "disk_read_only":
            patch.setattr(Path, "unlink", refuse)
        yield


@pytest.mark.parametrize("number", CODES)
def test_what_cannot_be_stored_is_said_and_changes_nothing(serve: Serve, tmp_path: Path, number: int):
    client = serve(data_dir=str(tmp_path))
    client.make_corpus(documents=[{"id": "one", "text": "one"}])
    with failing(number):
        refused = [
            client.post("/v1/corpora", json={"name": "other"}),
            client.add(["two"]),
            client.post("/v1/corpora/notes/documents/files", files={"files": ("three.txt", b"three")}),
            client.delete("/v1/corpora/notes/documents/one"),
            client.delete("/v1/corpora/notes"),
        ]
        assert client.ask(chunkweave={"corpus": "notes"}).status_code == 200
    for response in refused:
        assert error_of(response) == (507, CODES[number]), response.text
        message = response.json()["error"]["message"]
        assert "/data" not in message
        assert str(tmp_path) not in message
    assert [one["name"] for one in client.get("/v1/corpora").json()["data"]] == ["notes"]
    assert [one["id"] for one in client.get("/v1/corpora/notes/documents").json()["data"]] == ["one"]
    assert client.add([{"id": "one", "text": "one"}, {"id": "two", "text": "two"}]).json()["added"] == ["two"]
    client.make_corpus("other")


def test_an_upload_that_finds_no_room_is_not_the_clients_fault(notes: Client, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SpooledTemporaryFile, "write", refuse)
    refused = notes.post("/v1/corpora/notes/documents/files", files={"files": ("one.txt", b"one")})
    assert error_of(refused) == (507, "disk_full"), refused.text


def test_a_server_that_is_not_ready_says_when_to_ask_again(client: Client):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.service, "stage", Stage.STOPPING)
        for response in (client.get("/ready"), client.ask(documents=["a"])):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0


@pytest.mark.backend("engine")
@pytest.mark.parametrize("fault", ["EROFS", "ENOSPC", "EIO"])
def test_a_removal_that_fails_on_disk_removes_from_memory_and_names_the_disk(serve: Serve, tmp_path: Path, fault: str):
    """A cache folder that has become read-only: 503 `not_removed`, and the text is used neither now nor later."""
    folder, gone, kept = tmp_path / "kv", "The ferry leaves at seven. " * 4, "The choir sings on Sundays. " * 4
    client = serve(cache_dir=folder)
    assert kv_source(client, gone, kept) == "computed"
    assert client.engine.store.flush(10)
    files = FailingFiles(folder, getattr(errno, fault), WRITES, count=10**9)
    with failing_files(files):
        for _ in range(2):
            refused = client.clear(gone)
            assert error_of(refused) == (503, "not_removed"), refused.text
            assert refused.json()["tiers"] == ["disk"]
            assert "disk" in refused.json()["error"]["message"]
        assert kv_source(client, kept, gone) == "computed"
    assert files.failed
    client.engine.store.flush(10)
    assert client.clear(gone).status_code == 200
    assert kv_source(serve(cache_dir=folder), kept, gone) == "computed"


def kv_source(client: Client, *documents: str) -> str:
    """Where the KV of the last document of a request comes from."""
    report = report_of(client.ask(documents=documents, chunkweave={"method": "full-reuse"}))
    sources = {chunk["source"]: chunk["kv_source"] for chunk in report["chunks"]}
    return sources[f"document {len(documents) - 1}"]
