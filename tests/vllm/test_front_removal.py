"""What is deleted over HTTP is reused by no later answer of real vLLM servers, in any tier, restarts included."""

import re
import time
from pathlib import Path

import pytest

from chunkweave.vllm.releases import vllm_version
from chunkweave_server.vllm_backend.removal import JOURNAL_FILE
from tests.server.conftest import wait_until
from tests.vllm.fronts import QUESTION, FrontProcess, ask, front_process, told

EXACT = {"method": "prefix", "order": "fixed"}
WOVEN = {"method": "full-reuse", "order": "fixed"}
TENANTS = "salt of another"


def options(folder: Path) -> tuple[str, ...]:
    """With small blocks: `prefix` and vLLM's own cache give whole ones."""
    folders = ("--cache-dir", str(folder / "kv"), "--data-dir", str(folder / "data"))
    return (*folders, "--host-budget", "256MiB", "--block-size", "16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("removal")


@pytest.fixture(scope="module")
def front(folder):
    with front_process(folder, *options(folder)) as running:
        yield running


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
    wait_until(lambda: bool(list((folder / "kv").rglob("*.safetensors"))), 30)
    time.sleep(1)
    assert found(front, passages, **more) > 0


def test_nothing_of_a_cleared_document_is_reused_and_others_are(front, folder):
    passages = told("in May")
    store(front, folder, passages)
    store(front, folder, passages, cache_salt=TENANTS)
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


def test_a_server_that_was_down_removes_it_before_it_answers(front, folder):
    passages = told("in August")
    store(front, folder, passages)
    front.kill_server()
    refused = front.clear(documents=passages[:2])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_removed"), refused.text
    assert "replica-0" in refused.json()["error"]["message"]
    front.wait_until_ready()
    assert found(front, passages[:2]) == 0
    assert found(front, passages[2:], reuse=WOVEN) > 0
    assert not (folder / "data" / JOURNAL_FILE).exists()


def test_a_removal_that_was_pending_is_done_by_the_next_front(tmp_path):
    passages = told("in September")
    with front_process(tmp_path, *options(tmp_path)) as front:
        store(front, tmp_path, passages)
        front.kill_server()
        assert front.clear(documents=passages[:2]).status_code == 503
        front.process.kill()
        front.process.wait(60)
    assert (tmp_path / "data" / JOURNAL_FILE).exists()
    with front_process(tmp_path, *options(tmp_path)) as front:
        assert found(front, passages[:2]) == 0
        assert found(front, passages[2:], reuse=WOVEN) > 0
        assert not (tmp_path / "data" / JOURNAL_FILE).exists()


def test_everything_is_cleared(front, folder):
    passages = told("in October")
    store(front, folder, passages, cache_salt=TENANTS)
    assert front.clear(everything=True).json()["segments_removed"] > 0
    assert not list((folder / "kv").rglob("*.safetensors"))
    assert found(front, passages, cache_salt=TENANTS) == 0
    assert QUESTION not in (folder / "front.log").read_text()


@pytest.mark.skipif(
    vllm_version() != "0.32.0" and len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2,
    reason="from 0.33 on, vLLM on a CPU wants a memory node for each data-parallel rank",
)
def test_every_data_parallel_rank_removes_it(tmp_path):
    passages = told("in December")
    ranks = ("--data-parallel-size", "2", "--routing", "round-robin", "--data-dir", str(tmp_path / "data"))
    with front_process(tmp_path, *ranks) as front:
        asked = [ask(front.client, passages, reuse=EXACT).model_extra["chunkweave"] for _ in range(4)]
        assert {report["replica"] for report in asked} == {"replica-0.0", "replica-0.1"}
        assert sum(report["prefix_exact_tokens"] > 100 for report in asked) == 2
        assert front.clear(documents=passages).json()["segments_removed"] >= 6
        again = [ask(front.client, passages, reuse=EXACT).model_extra["chunkweave"] for _ in range(2)]
        assert {report["replica"] for report in again} == {"replica-0.0", "replica-0.1"}
        assert all(report["computed_tokens"] > 100 for report in again)
