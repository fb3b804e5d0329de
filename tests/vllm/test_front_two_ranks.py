"""The front before a model that two ranks share: tenants stay apart in every tier, and a rank may be killed."""

import os
import signal
import time
from pathlib import Path

import openai
import pytest

from chunkweave_server.vllm_backend.process import free_port
from tests.vllm.fronts import CLEAN, PASSAGES, alive, ask, children, front_process, load

FOUND = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "local_tokens")


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-ranks")
    options = ("--tensor-parallel-size", "2", "--replica-env", "0:VLLM_CPU_OMP_THREADS_BIND=0|1")
    with front_process(folder, free_port(), *options, "--connector", f"cache_dir={folder / 'kv'}") as running:
        yield running


@pytest.fixture(scope="module")
def client(front):
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


def found_tokens(told) -> int:
    report = told.model_extra["chunkweave"]
    return sum(report.get(name, 0) for name in FOUND)


def ranks(pid: int) -> list[int]:
    """Processes below a server that compute: those of the engine core's children that are not Python's own helpers."""
    below = [one for child in children(pid) for one in (child, *children(child))]
    return [one for one in below if b"Worker" in Path(f"/proc/{one}/cmdline").read_bytes()]


def test_what_one_salt_has_stored_no_other_finds(client):
    ask(client, PASSAGES, cache_salt="one")
    assert found_tokens(ask(client, PASSAGES[::-1], cache_salt="one")) > 0
    assert found_tokens(ask(client, PASSAGES[::-1], cache_salt="another")) == 0
    assert found_tokens(ask(client, PASSAGES[::-1])) == 0


def test_a_rank_that_is_killed_under_load_is_started_again_and_finds_what_was_written(client, front):
    before = ask(client, PASSAGES[::-1], cache_salt="kept")
    time.sleep(1)  # it is written behind the answer
    with load(client) as outcomes:
        time.sleep(2)
        (server,) = front.servers()
        workers = ranks(server)
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        until = time.monotonic() + 60
        while front.ready():
            assert time.monotonic() < until, "nobody noticed"
            time.sleep(0.1)
        front.wait_until_ready()
        time.sleep(2)
    assert set(outcomes) <= CLEAN, set(outcomes)
    assert outcomes[-1] == "answered"
    assert len(set(outcomes)) > 1, "nobody was told"
    assert not any(alive(pid) for pid in workers), "ranks outlive their server"
    after = ask(client, PASSAGES[::-1], cache_salt="kept")
    assert after.choices[0].message.content == before.choices[0].message.content
    assert found_tokens(after) > 0, "what was committed does not serve"
