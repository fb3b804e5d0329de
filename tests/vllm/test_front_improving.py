"""Chunks that a real vLLM server computes anew in idle time, over HTTP."""

import json
import time
from collections import Counter
from collections.abc import Callable

from tests.server.conftest import wait_until
from tests.vllm.fronts import TWO_SMALL_CONTEXTS, FrontProcess, ask, front_process, told
from tests.vllm.test_front_means import REUSE, SIX, on_disk


def contexts(front: FrontProcess, texts: list[str]) -> list[int]:
    report = ask(front.client, texts, reuse=REUSE).model_extra["chunkweave"]
    return [chunk["contexts"] for chunk in report["chunks"]]


def until(front: FrontProcess, holds: Callable[[dict], bool]) -> None:
    def it_holds() -> bool:
        time.sleep(0.2)  # the server is to be idle
        return holds(json.loads(front.get("/v1/cache"))["improving"])

    wait_until(it_holds, 120)


def test_chunks_of_requests_become_means_which_are_renewed_and_computed_without_what_is_deleted(tmp_path):
    options = ["--cache-dir", str(tmp_path / "kv"), "--improve-share=1", "--block-size", "16"]
    texts = told("in autumn", SIX)
    with front_process(tmp_path, *options, first=TWO_SMALL_CONTEXTS) as front:
        assert contexts(front, texts[:2]) == [0, 0]
        until(front, lambda now: now["improved"] == 2)
        assert contexts(front, texts[1::-1]) == [1, 1]
        contexts(front, texts[2:])
        until(front, lambda now: now["improved"] == len(texts) + 2 and not now["queued"])
        assert contexts(front, texts[::-1]) == [2] * len(texts)
        done = front.clear(documents=texts[:1]).json()
        assert done["chunks_queued"] > 0
        assert done["segments_removed"] > done["chunks_queued"]
        until(front, lambda now: not now["queued"])
        assert contexts(front, texts[:0:-1]) == [2] * (len(texts) - 1)
    means = Counter(record.chunk_id for record in on_disk(tmp_path) if record.contexts)
    assert sorted(means.values()) == [1] * (len(texts) - 1), "each has one, also where it was renewed"
