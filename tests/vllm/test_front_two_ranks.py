"""The front before a model that two ranks share: tenants stay apart in every tier, and a rank may be killed."""

import time
from pathlib import Path

import pytest

from tests.vllm.fronts import PASSAGES, ask, children, front_process, killed_under_load

FOUND = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "local_tokens")


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-ranks")
    options = ("--tensor-parallel-size", "2", "--replica-env", "0:VLLM_CPU_OMP_THREADS_BIND=0|1")
    with front_process(folder, *options, "--cache-dir", str(folder / "kv")) as running:
        yield running


def found_tokens(told) -> int:
    report = told.model_extra["chunkweave"]
    return sum(report.get(name, 0) for name in FOUND)


def second_rank(server: int) -> int:
    """Of the processes below a server that compute: the engine core's children that are not Python's own helpers."""
    below = [one for child in children(server) for one in (child, *children(child))]
    _, second = [one for one in below if b"Worker" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return second


def test_what_one_salt_has_stored_no_other_finds(client):
    ask(client, PASSAGES, cache_salt="one")
    assert found_tokens(ask(client, PASSAGES[::-1], cache_salt="one")) > 0
    assert found_tokens(ask(client, PASSAGES[::-1], cache_salt="another")) == 0
    assert found_tokens(ask(client, PASSAGES[::-1])) == 0


def test_a_rank_that_is_killed_under_load_is_started_again_and_finds_what_was_written(client, front):
    before = ask(client, PASSAGES[::-1], cache_salt="kept")
    time.sleep(1)  # it is written behind the answer
    killed_under_load(front, second_rank)
    after = ask(client, PASSAGES[::-1], cache_salt="kept")
    assert after.choices[0].message.content == before.choices[0].message.content
    assert found_tokens(after) > 0, "what was committed does not serve"
