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
from tests.server.conftest import Client, Serve

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


def add(client: Client, name: str, *documents: str):
    return client.post(f"/v1/corpora/{name}/documents", json={"documents": [{"text": d, "id": d} for d in documents]})


def ids(client: Client, name: str) -> list[str]:
    return [one["id"] for one in client.get(f"/v1/corpora/{name}/documents").json()["data"]]


@pytest.mark.parametrize("number", CODES)
def test_what_cannot_be_stored_is_said_and_changes_nothing(serve: Serve, tmp_path: Path, number: int):
    client = serve(data_dir=str(tmp_path))
    client.post("/v1/corpora", json={"name": "notes"})
    assert add(client, "notes", "one").status_code == 200
    with failing(number):
        refused = [
            client.post("/v1/corpora", json={"name": "other"}),
            add(client, "notes", "two"),
            client.post("/v1/corpora/notes/documents/files", files={"files": ("three.txt", b"three")}),
            client.delete("/v1/corpora/notes/documents/one"),
            client.delete("/v1/corpora/notes"),
        ]
        assert client.ask(chunkweave={"corpus": "notes"}).status_code == 200
    for response in refused:
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (507, CODES[number]), response.text
        assert "/data" not in error["message"]
        assert str(tmp_path) not in error["message"]
    assert [one["name"] for one in client.get("/v1/corpora").json()["data"]] == ["notes"]
    assert ids(client, "notes") == ["one"]
    assert add(client, "notes", "one", "two").json()["added"] == ["two"]
    assert client.post("/v1/corpora", json={"name": "other"}).status_code == 201


def test_an_upload_that_finds_no_room_is_not_the_clients_fault(client: Client, monkeypatch: pytest.MonkeyPatch):
    client.post("/v1/corpora", json={"name": "notes"})

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SpooledTemporaryFile, "write", refuse)
    refused = client.post("/v1/corpora/notes/documents/files", files={"files": ("one.txt", b"one")})
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full"), refused.text


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
    reuse = {"chunkweave": {"method": "full-reuse"}}
    client = serve(cache_dir=folder)
    assert client.ask(documents=[gone, kept], **reuse).status_code == 200
    assert client.engine.store.flush(10)
    files = FailingFiles(folder, getattr(errno, fault), WRITES, count=10**9)
    with failing_files(files):
        for _ in range(2):
            refused = client.post("/v1/cache/clear", json={"documents": [gone]})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "not_removed"), refused.text
            assert refused.json()["tiers"] == ["disk"]
            assert "disk" in error["message"]
        sources = {
            chunk["source"]: chunk["kv_source"] for chunk in report_of(client.ask(documents=[kept, gone], **reuse))
        }
        assert sources["document 1"] == "computed"
    assert files.failed
    client.engine.store.flush(10)
    assert client.post("/v1/cache/clear", json={"documents": [gone]}).status_code == 200
    later = serve(cache_dir=folder)
    sources = {chunk["source"]: chunk["kv_source"] for chunk in report_of(later.ask(documents=[kept, gone], **reuse))}
    assert sources["document 1"] == "computed"


def report_of(response) -> list[dict]:
    assert response.status_code == 200, response.text
    return response.json()["chunkweave"]["chunks"]
