"""What is deleted over HTTP is reused by no later answer of real vLLM servers, in any tier, restarts included."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from chunkweave import Engine
from chunkweave.vllm.releases import vllm_version
from chunkweave_server.vllm_backend.removal import JOURNAL_FILE
from tests.vllm.fronts import QUESTION, FrontProcess, ask, front_process, told
from tests.vllm.test_front_means import SIX, ids_of, on_disk, warm, written

EXACT = {"method": "prefix", "order": "fixed"}
WOVEN = {"method": "full-reuse", "order": "fixed"}
TENANTS = "salt of another"


def local_hits(front: FrontProcess) -> float:
    """Tokens that vLLM has found in its own prefix cache so far."""
    return sum(
        float(value) for value in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (.*)$", front.get("/metrics"), re.M)
    )


def found(front: FrontProcess, passages: list[str], reuse=EXACT, **more) -> int:
    """Tokens of the passages that an answer did not compute, whatever the tier."""
    report = ask(front.client, passages, reuse=reuse, **more).model_extra["chunkweave"]
    chunks = [chunk for chunk in report["chunks"] if chunk["kv_source"] not in ("computed", "recomputed", "")]
    return sum(chunk["tokens"] for chunk in chunks)


def store(front: FrontProcess, folder: Path, passages: list[str], **more) -> None:
    """Have passages in every tier: vLLM's own cache, memory and disk."""
    for passage in passages:
        ask(front.client, [passage], reuse=EXACT, **more)
    ask(front.client, passages, reuse=EXACT, **more)
    ask(front.client, passages[::-1], reuse=WOVEN, **more)
    written(folder, ())
    assert found(front, passages, **more) > 0


def test_nothing_of_a_cleared_document_is_reused_and_others_are(front, front_folder):
    passages = told("in spring")
    store(front, front_folder, passages)
    store(front, front_folder, passages, cache_salt=TENANTS)
    before = local_hits(front)
    ask(front.client, passages, reuse=EXACT)
    assert local_hits(front) > before, "vLLM's own cache has it"
    done = front.clear(documents=passages[:1])
    assert (done.status_code, done.json()["segments_removed"] > 2) == (200, True), done.text
    assert front.clear(documents=passages[:1]).json() == {"segments_removed": 0}
    before = local_hits(front)
    report = ask(front.client, [passages[0]], reuse=WOVEN).model_extra["chunkweave"]
    assert [chunk["kv_source"] for chunk in report["chunks"]] == ["computed"]
    assert local_hits(front) == before
    assert found(front, passages[1:], reuse=WOVEN) > 0
    assert found(front, passages, cache_salt=TENANTS) > 0, "the same text under another salt"


def sources(front: FrontProcess, texts: Sequence[str]) -> list[str]:
    report = ask(front.client, list(texts), reuse=WOVEN).model_extra["chunkweave"]
    return [chunk["kv_source"] for chunk in report["chunks"]]


def test_what_was_removed_before_and_while_a_server_was_down_does_not_come_back(front, front_folder):
    """Neither a document that was deleted nor, of other documents, what has read it."""
    passages = told("in summer")
    store(front, front_folder, passages)
    texts = told("at harvest", SIX)
    with Engine.load("reader", dtype="float32") as engine:
        chunks = ids_of(engine, texts)
    warm(front, texts)
    readers = {record.chunk_id for record in written(front_folder, chunks) if chunks[0] in record.sources}
    assert readers
    done = front.clear(documents=texts[:1])
    assert (done.status_code, done.json()["segments_removed"] > len(readers)) == (200, True), done.text
    left = written(front_folder, chunks)
    assert {record.chunk_id for record in left} == set(chunks[1:]) - readers, "nothing else is touched"

    front.kill_server()
    refused = front.clear(documents=passages[:2])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_removed"), refused.text
    assert "replica-0" in refused.json()["error"]["message"]
    front.wait_until_ready()

    assert found(front, passages[:2]) == 0
    assert found(front, passages[2:], reuse=WOVEN) > 0
    assert not (front_folder / "data" / JOURNAL_FILE).exists()
    for text, chunk in zip(texts, chunks, strict=True):
        assert sources(front, [text]) == ["computed" if chunk in {chunks[0], *readers} else "reused"], text
    assert warm(front, texts[1:])["computed"] == len(readers)
    assert set(sources(front, texts[:0:-1])) <= {"reused", "prefix-exact"}
    assert not any(chunks[0] in record.sources for record in on_disk(front_folder))


def test_everything_is_cleared(front, front_folder):
    passages = told("in the first frost")
    store(front, front_folder, passages, cache_salt=TENANTS)
    assert front.clear(everything=True).json()["segments_removed"] > 0
    assert not list((front_folder / "kv").rglob("*.safetensors"))
    assert found(front, passages, cache_salt=TENANTS) == 0
    assert QUESTION not in (front_folder / "front.log").read_text()


@pytest.mark.skipif(
    vllm_version() != "0.32.0" and len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2,
    reason="from 0.33 on, vLLM on a CPU wants a memory node for each data-parallel rank",
)
def test_every_data_parallel_rank_removes_it(tmp_path):
    passages = told("in December")
    ranks = ("--data-parallel-size", "2", "--set", "routing=round-robin", "--data-dir", str(tmp_path / "data"))
    with front_process(tmp_path, *ranks) as front:
        asked = [ask(front.client, passages, reuse=EXACT).model_extra["chunkweave"] for _ in range(4)]
        assert {report["replica"] for report in asked} == {"replica-0.0", "replica-0.1"}
        assert sum(report["prefix_exact_tokens"] > 100 for report in asked) == 2
        assert front.clear(documents=passages).json()["segments_removed"] >= 6
        again = [ask(front.client, passages, reuse=EXACT).model_extra["chunkweave"] for _ in range(2)]
        assert {report["replica"] for report in again} == {"replica-0.0", "replica-0.1"}
        assert all(report["computed_tokens"] > 100 for report in again)
