"""On an untested release of vLLM without something that the plug-in relies on, vLLM serves alone, and says why."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.vllm.fronts import PASSAGES, START, ask, front_process

RENAMED = """
from vllm.v1.core.block_pool import BlockHashToBlockMap

def change():
    get_one_block = BlockHashToBlockMap.get_one_block
    BlockHashToBlockMap.get_one_block = lambda self, block: get_one_block(self, block)
"""
"""A change that vLLM itself does not notice."""


def write_release(folder: Path, change: str) -> None:
    """Make processes that have `folder` on their path see vLLM 0.99.0, changed by a plug-in of its own."""
    info = folder / "vllm-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0+cpu\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nchange = release_made_up:change\n")
    (folder / "release_made_up.py").write_text(change)


def test_without_something_it_needs_vllm_serves_alone_and_status_says_why(tmp_path, monkeypatch):
    write_release(tmp_path, RENAMED)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    with front_process(tmp_path) as front:
        answers = [ask(front.client, documents) for documents in (PASSAGES, PASSAGES[::-1])]
        status = subprocess.run([sys.executable, "-c", START, "status", front.url], capture_output=True, text=True)
        off = json.loads(front.get("/v1/cache"))["off"]
    reason = "this is vLLM 0.99.0, where chunkweave's plug-in does not work (vllm.v1.core.block_pool."
    assert reason in front.log.read_text()
    assert list(off) == ["replica-0"]
    assert "get_one_block takes no key" in off["replica-0"]
    assert "replica-0 weaves nothing" in " ".join(status.stdout.split())
    for answer in answers:
        assert answer.choices[0].message.content
        report = answer.model_extra["chunkweave"]
        assert reason in report["error"]
        assert report["reused_tokens"] + report["recomputed_tokens"] == 0
