"""On an untested release of vLLM it weaves if all that the plug-in relies on is there, else vLLM serves alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from chunkweave_server.vllm_backend.process import free_port
from tests.vllm.fronts import PASSAGES, START, ask, front_process

RENAMED = """
from vllm.v1.core.block_pool import BlockHashToBlockMap

def change():
    found = BlockHashToBlockMap.get_one_block
    BlockHashToBlockMap.get_one_block = lambda self, block: found(self, block)
"""
"""A change that vLLM itself does not notice."""


@pytest.fixture
def release(tmp_path, monkeypatch):
    """Makes processes that start from now on see vLLM 0.99.0, changed by a plug-in of its own."""

    def make(change: str = "def change():\n    pass\n") -> None:
        info = tmp_path / "vllm-0.99.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0+cpu\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nchange = release_made_up:change\n")
        (tmp_path / "release_made_up.py").write_text(change)
        before = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), before))))

    return make


def answered(url: str) -> list[dict]:
    """The reports of two requests, the second one with the first one's documents in another order."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answers = [ask(client, documents) for documents in (PASSAGES, PASSAGES[::-1])]
    assert all(answer.choices[0].message.content for answer in answers)
    return [answer.model_extra["chunkweave"] for answer in answers]


def test_without_something_it_needs_vllm_serves_alone_and_status_says_why(release, tmp_path: Path):
    release(RENAMED)
    with front_process(tmp_path, free_port()) as front:
        first, second = answered(front.url)
        status = subprocess.run([sys.executable, "-c", START, "status", front.url], capture_output=True, text=True)
        off = json.loads(front.get("/v1/cache"))["off"]
    reason = "this is vLLM 0.99.0, where chunkweave's plug-in does not work (vllm.v1.core.block_pool."
    assert reason in front.log.read_text()
    assert list(off) == ["replica-0"]
    assert "get_one_block takes no key" in off["replica-0"]
    assert "replica-0 weaves nothing" in " ".join(status.stdout.split())
    for report in (first, second):
        assert reason in report["error"]
        assert report["reused_tokens"] + report["recomputed_tokens"] == 0


def test_with_everything_it_needs_it_weaves_with_a_warning(release, tmp_path: Path):
    release()
    with front_process(tmp_path, free_port()) as front:
        _, second = answered(front.url)
        assert json.loads(front.get("/v1/cache"))["off"] == {}
    assert "chunkweave was tested with vLLM 0.32.0 and 0.33.0, not with 0.99.0" in front.log.read_text()
    assert second["reused_tokens"] > 0
    assert "error" not in second
