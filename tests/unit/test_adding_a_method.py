"""The page on adding a method, an ordering and a policy: its package and its test work as they are printed."""

import json
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

from chunkweave import plugins
from chunkweave.plugins import load_plugin_files
from tests.outside import FILE, block, install_our_weaving, outside_environment

ANSWER = """
import json
from chunkweave import Engine, OrderingConfig, StoreConfig
from chunkweave.plugins import METHODS, ORDERINGS, POLICIES
from our_weaving import LargestFirst

ranked, own = [], LargestFirst.on_insert
LargestFirst.on_insert = lambda self, record: (ranked.append(record.id), own(self, record))
store, ordering = StoreConfig(policy="largest-first"), OrderingConfig("shortest-first")
chunks = ["The tower is old, and the stairs are steep.", "Otto leads."]
with Engine.load("reader", method="chunk-ends", order="free", store=store, ordering=ordering) as engine:
    engine.precompute(chunks)
    usual = engine.generate("Who leads?", chunks, max_new_tokens=2).report
    named = engine.generate("Who leads?", chunks, method="chunk-ends:ratio=1.0", max_new_tokens=2).report
    full = engine.generate("Who leads?", chunks, method="full", max_new_tokens=2)
print(json.dumps({
    "method": [usual.method, named.method],
    "order": usual.order,
    "ranks": [part.rank for part in usual.chunks if part.rank is not None],
    "recomputed": [usual.recomputed_tokens > 0, named.recomputed_tokens > usual.recomputed_tokens],
    "ranked": {*ranked} >= {record.id for record in engine.store.records()},
    "names": [METHODS.listed, ORDERINGS.listed, POLICIES.listed],
}))
"""


@pytest.mark.slow
def test_the_pages_package_brings_one_of_each(tmp_path: Path):
    folder = install_our_weaving(tmp_path)
    made = subprocess.run(
        [sys.executable, "-c", ANSWER], env=outside_environment(folder), capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["method"] == ["chunk-ends", "chunk-ends"]
    assert (found["order"], found["ranks"]) == ("shortest-first", [1, 0])
    assert found["recomputed"] == [True, True]
    assert found["ranked"], "by the policy, everything that is stored"
    for name, listed in zip(("chunk-ends", "shortest-first", "largest-first"), found["names"], strict=True):
        assert name in listed


def test_the_pages_test_of_the_pages_method_passes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plugins, "_FILES", {})
    (tmp_path / "chunk_ends.py").write_text(FILE, encoding="utf-8")
    load_plugin_files([str(tmp_path / "chunk_ends.py")])
    file = tmp_path / "test_chunk_ends.py"
    file.write_text(block("from chunkweave.planning.plan import Pass"), encoding="utf-8")
    tests = [value for name, value in run_path(str(file)).items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()
