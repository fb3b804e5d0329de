"""Uploaded files of every kind, over both backends, and files that are made to do harm."""

import time
from collections.abc import Mapping

import pytest

from chunkweave.retrieval.file_kinds import NOT_READ
from tests.document_files import HOSTILE, children_s, pdf, readable_files
from tests.server.conftest import Client, error_of, later

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(64)


def upload(client: Client, files: Mapping[str, bytes], **params: object):
    sent = [("files", (name, data)) for name, data in files.items()]
    return client.post("/v1/corpora/notes/documents/files", files=sent, params=params)


def test_files_of_every_kind_are_read_and_found(notes: Client):
    files = readable_files()
    answer = upload(notes, {name: data for name, (data, _) in files.items()} | {"empty.txt": b"", "x.png": PICTURE})
    assert answer.status_code == 200
    rows = {row["file"]: row for row in answer.json()["files"]}
    assert {name: row["left_out"] for name, row in rows.items() if row["left_out"]} == {
        "empty.txt": "it is empty",
        "x.png": NOT_READ,
    }
    assert rows["german.txt"]["assumed"] == "Windows-1252 was assumed"
    assert (rows["wrong.txt"]["kind"], rows["wrong.txt"]["converted"]) == ("PDF", True)
    for _, said in files.values():
        found = notes.search(said, top_k=3).json()["data"]
        assert any(said in " ".join(one["text"].split()) for one in found), said
    body = notes.ask("What roof has the pilot station?", chunkweave={"corpus": "notes", "top_k": 1}).json()
    (found,) = body["chunkweave"]["retrieved"]
    assert (found["document"], found["page"], found["last_page"]) == ("report.pdf", 1, 2)


def test_a_kind_that_is_not_read_is_415_with_the_reason(notes: Client):
    refused = upload(notes, {"x.png": PICTURE})
    assert error_of(refused) == (415, "unreadable_file")
    assert f"x.png: {NOT_READ}" in refused.json()["error"]["message"]
    assert refused.json()["files"][0]["left_out"] == NOT_READ
    for data in (b"%PDF-1.4 broken", b"", b" \n"):
        assert (upload(notes, {"a.pdf": data}).status_code, data) == (400, data)


def test_a_batch_takes_the_others_and_strict_takes_none(notes: Client):
    files = {"a.txt": b"The ferry.", "x.png": PICTURE}
    assert upload(notes, files, strict=True).status_code == 415
    assert notes.get("/v1/corpora/notes").json()["documents"] == 0
    taken = upload(notes, files)
    assert (taken.status_code, taken.json()["added"]) == (200, ["a.txt"])
    assert [row["result"] for row in taken.json()["files"]] == [{"added": 1}, {}]


def test_two_documents_of_one_id_are_one(notes: Client):
    twice = upload(notes, {"a.jsonl": b'{"text": "one", "id": "x"}\n{"text": "two", "id": "x"}\n'})
    assert (twice.status_code, twice.json()["added"]) == (200, ["x"])
    assert "id" in twice.json()["files"][0]["lines_left_out"][0]


@pytest.mark.slow
@pytest.mark.backend("engine")
@pytest.mark.parametrize("name", HOSTILE)
def test_files_made_to_do_harm_are_refused_and_the_server_answers_meanwhile(notes: Client, name: str):
    upload(notes, {"memo.pdf": pdf(["The anchor weighs two tonnes."])})
    data, before = HOSTILE[name](), children_s()
    refused = later(upload, notes, {name: data})
    answered = 0
    while not refused.done():
        assert notes.search("anchor", top_k=1).json()["data"][0]["document"] == "memo.pdf"
        answered += 1
        time.sleep(0.05)
    assert error_of(refused.result()) == (400, "bad_file")
    assert children_s() - before < 5
    assert answered
