"""What is deleted over HTTP is removed by every vLLM server behind the front, also by one that was away meanwhile."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from chunkweave_server.vllm_backend import removal
from chunkweave_server.vllm_backend.removal import JOURNAL_FILE, RemovalTimes
from tests.server.conftest import ADMIN_KEY, KEYS, bearer, error_of, key_ring, later, report_of, vllm_of, wait_until
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import DOCUMENTS, MORE, Front, running_front

WOVEN = {"chunkweave": {"method": "cacheblend:ratio=0.2", "order": "fixed"}}
Start = Callable[..., Front]


@pytest.fixture
def start(fakes: tuple[FakeVllm, FakeVllm]) -> Iterator[Start]:
    """Starts fronts before both servers."""
    with ExitStack() as stack:
        yield lambda **values: stack.enter_context(running_front(*fakes, **{"routing": "round-robin", **values}))


def spread(front: Front, fakes: tuple[FakeVllm, FakeVllm], documents: list[str], key: str | None = None) -> None:
    """Ask until both servers have stored the documents."""
    before = [len(fake.stored) for fake in fakes]
    for _ in range(4):
        front.ask(documents=documents, key=key, **WOVEN).raise_for_status()
    assert all(len(fake.stored) >= count + len(documents) for fake, count in zip(fakes, before, strict=True))


def reused(front: Front, *documents: str, key: str | None = None) -> int:
    """Most tokens that one of some questions reuses; none of them stores what the next one asks about."""
    reports = [report_of(front.ask(documents=[one], key=key, **WOVEN)) for one in documents]
    return max(report["reused_tokens"] + report["recomputed_tokens"] for report in reports)


def until_up(front: Front) -> None:
    wait_until(lambda: all(replica.up for replica in vllm_of(front.service).fleet.replicas))


def test_cleared_documents_leave_every_replica_and_others_stay(fakes, start):
    front = start()
    spread(front, fakes, [*DOCUMENTS, MORE])
    done = front.clear(*DOCUMENTS)
    assert (done.status_code, done.json()) == (200, {"segments_removed": 4})
    assert [len(fake.stored) for fake in fakes] == [1, 1]
    assert reused(front, DOCUMENTS[0]) == 0
    assert reused(front, MORE) > 0
    assert front.clear(everything=True).json()["segments_removed"] >= 2
    assert not any(fake.stored for fake in fakes)
    (command,) = {json.dumps(fake.removals[-1]["kv_transfer_params"]) for fake in fakes}
    assert json.loads(command) == {"chunkweave": {"forget": {"everything": True}}}


def test_a_deleted_document_and_a_deleted_corpus_leave_every_replica(fakes, start):
    front = start()
    front.make_corpus(documents=[{"id": str(number), "text": text} for number, text in enumerate(DOCUMENTS)])
    about = {"chunkweave": {**WOVEN["chunkweave"], "corpus": "notes", "top_k": 2}}
    for _ in range(4):
        front.ask(**about).raise_for_status()
    assert [len(fake.stored) for fake in fakes] == [2, 2]
    assert front.delete("/v1/corpora/notes/documents/0").json()["segments_removed"] == 2
    assert front.delete("/v1/corpora/notes").json()["segments_removed"] == 2
    assert not any(fake.stored for fake in fakes)


def test_a_replica_that_fails_is_named_and_removes_it_before_it_answers_again(fakes, start):
    front = start()
    spread(front, fakes, DOCUMENTS)
    fakes[1].silent = True
    refused = front.clear(*DOCUMENTS)
    assert error_of(refused) == (503, "not_removed")
    assert (refused.json()["segments_removed"], refused.headers["retry-after"]) == (2, refused.headers["retry-after"])
    assert "upstream-1" in refused.json()["error"]["message"]
    wait_until(lambda: not vllm_of(front.service).fleet.replicas[1].up)
    assert 'replica_removals_pending{model_name="m",replica="upstream-1"} 1.0' in front.get("/metrics").text
    asked = len(fakes[1].seen)
    for _ in range(4):
        front.ask(documents=DOCUMENTS, **WOVEN).raise_for_status()
        front.ask("Without documents?").raise_for_status()
    assert len(fakes[1].seen) == asked, "it gets no request, with documents or without"
    fakes[1].silent = False
    wait_until(lambda: not fakes[1].stored)
    until_up(front)
    assert front.clear(*DOCUMENTS).status_code == 200


def test_a_removal_that_a_replica_missed_outlives_the_front(fakes, start, tmp_path):
    data = tmp_path / "data"
    with ExitStack() as stack:
        front = stack.enter_context(running_front(*fakes, routing="round-robin", data_dir=str(data)))
        spread(front, fakes, [*DOCUMENTS, MORE])
        assert not (data / JOURNAL_FILE).exists()
        fakes[1].silent = True
        assert front.clear(*DOCUMENTS).status_code == 503
        noted = (data / JOURNAL_FILE).read_text()
        assert not any(word in noted for text in DOCUMENTS for word in text.split() if len(word) > 4), "ids, no text"
        assert (data / JOURNAL_FILE).stat().st_mode & 0o077 == 0
    order: list[str] = []
    fakes[1].silent = False
    fakes[1].behave = lambda _: order.append(f"asked, {len(fakes[1].removals)} removed")
    before = len(fakes[1].removals)
    front = start(data_dir=str(data))
    until_up(front)
    assert len(fakes[1].removals) == before + 1
    assert len(fakes[1].stored) == 1, "the other document is there yet"
    assert not (data / JOURNAL_FILE).exists()
    for _ in range(2):
        front.ask(documents=DOCUMENTS, **WOVEN).raise_for_status()
    assert order[0] == f"asked, {before + 1} removed"


@pytest.mark.parametrize("noted", ["{", '{"format": 2}', '{"format": 1, "pending": {"x": [{}]}}'])
def test_behind_a_journal_that_cannot_be_read_everything_is_removed(fakes, start, tmp_path, noted):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / JOURNAL_FILE).write_text(noted)
    for fake in fakes:
        fake.stored.add(("", (1, 2, 3)))
    front = start(data_dir=str(tmp_path / "data"))
    until_up(front)
    assert not any(fake.stored for fake in fakes)
    assert not (tmp_path / "data" / JOURNAL_FILE).exists()


def test_copies_that_a_replica_could_not_delete_and_one_without_the_plug_in_are_not_a_success(fakes, start):
    front = start()
    spread(front, fakes, DOCUMENTS)
    fakes[0].left = 3
    refused = front.clear(*DOCUMENTS)
    assert error_of(refused) == (503, "not_removed")
    assert (refused.json()["segments_removed"], refused.json()["segments_left"]) == (4, 3)
    fakes[0].left, fakes[1].plugged = 0, False
    refused = front.clear(*DOCUMENTS)
    assert error_of(refused) == (503, "not_removed")
    assert "upstream-1" in refused.json()["error"]["message"]
    fakes[1].plugged = True
    assert front.clear(*DOCUMENTS).status_code == 200


def test_tenants_remove_their_own_and_command_no_plug_in(fakes, start):
    front = start(keys=key_ring())
    for key in KEYS.values():
        spread(front, fakes, DOCUMENTS, key)
    assert front.clear(*DOCUMENTS, key=KEYS["bolt"]).json() == {"segments_removed": 4}
    assert reused(front, *DOCUMENTS, key=KEYS["acme"]) > 0
    before = [len(fake.removals) for fake in fakes]
    for said in ({"forget": {"everything": True}}, {"stored": {"chunks": [[1]]}}):
        command = {"model": "m", "max_tokens": 1, "kv_transfer_params": {"chunkweave": said}}
        chat = {**command, "messages": [{"role": "user", "content": "x"}]}
        asked = {"completions": {**command, "prompt": "x"}, "chat/completions": chat, "responses": chat}
        for path, body in asked.items():
            refused = front.post(f"/v1/{path}", json=body, headers=bearer(KEYS["acme"]))
            assert error_of(refused) == (403, "not_admin"), path
    assert [len(fake.removals) for fake in fakes] == before
    assert front.clear(everything=True, key=ADMIN_KEY).status_code == 200


def test_what_a_request_stores_while_its_document_is_deleted_is_removed_when_it_ends(fakes, start):
    front = start()
    for fake in fakes:
        fake.gate.clear()
    asking = later(front.ask, documents=DOCUMENTS, **WOVEN)
    wait_until(lambda: any(fake.stored for fake in fakes))
    assert front.clear(DOCUMENTS[0]).json() == {"segments_removed": 1}
    ours = next(fake for fake in fakes if fake.stored)
    ours.stored |= {
        ("", tuple(ids)) for ids in ours.removals[-1]["kv_transfer_params"]["chunkweave"]["forget"]["chunks"]
    }
    for fake in fakes:
        fake.gate.set()
    asking.result()
    wait_until(lambda: len(ours.stored) == 1)


def test_each_rank_gets_the_command(vllm):
    ranks = ("--data-parallel-size", "2")
    with running_front(vllm, of_vllm=ranks, routing="round-robin") as front:
        front.clear(*DOCUMENTS).raise_for_status()
        assert sorted(command["rank"] for command in vllm.removals) == ["0", "1"]


def test_ranks_that_the_front_does_not_know_of_are_not_passed_over(vllm):
    vllm.engines = 2
    with running_front(vllm) as front:
        refused = front.clear(*DOCUMENTS)
        assert error_of(refused) == (503, "not_removed")
        assert "other ranks of upstream-0" in refused.json()["error"]["message"]


def test_many_chunks_are_several_commands_and_each_is_named_once(fakes, start):
    front = start()
    texts = [f"{MORE} Number {number}. " + "The mill was built anew. " * 60 for number in range(110)]
    front.make_corpus("much", texts, chunk_tokens=512)
    front.delete("/v1/corpora/much").raise_for_status()
    for fake in fakes:
        forgets = [command["kv_transfer_params"]["chunkweave"]["forget"]["chunks"] for command in fake.removals]
        sent = [tuple(ids) for chunks in forgets for ids in chunks]
        assert len(forgets) > 1
        assert max(sum(map(len, chunks)) for chunks in forgets) <= 1 << 15
        assert len(sent) == len(set(sent)) >= 110


def test_a_replica_that_does_not_answer_in_time_costs_no_more_than_that(fakes, start, monkeypatch):
    monkeypatch.setattr(removal, "RemovalTimes", partial(RemovalTimes, answer_s=0.3, pause_s=0.1))
    front = start()
    spread(front, fakes, DOCUMENTS)
    hung = fakes[1]
    hung.slow_s = 30.0
    begun_s = time.monotonic()
    refused = front.clear(*DOCUMENTS)
    assert (refused.status_code, refused.json()["segments_removed"]) == (503, 2)
    assert time.monotonic() - begun_s < 10
    asked = len(hung.seen)
    front.ask(documents=DOCUMENTS, **WOVEN).raise_for_status()
    assert len(hung.seen) == asked
    hung.slow_s = 0.0
    until_up(front)
    assert not hung.stored
