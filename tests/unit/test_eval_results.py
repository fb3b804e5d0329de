import json
import os
import subprocess

import pytest

from chunkweave.calibration import results
from chunkweave.cli import console
from chunkweave.errors import UsageError


def make(**changes):
    values = {
        "benchmark": "ttft",
        "command": "chunkweave bench ttft",
        "seed": 5,
        "config": {"chunks": 6},
        "rows": [{"method": "full"}],
        "more": {"store": {"bytes": 1}},
    }
    return results.BenchmarkResult(**{**values, **changes})


def test_a_result_says_where_and_how_it_was_made():
    data = make().as_dict()
    assert {"machine", "versions", "commit", "seed", "config", "rows", "command", "complete", "store"} <= set(data)
    assert data["machine"]["cores"] >= 1
    assert "python" in data["versions"]
    json.dumps(data)


def test_peak_memory_is_at_least_what_is_held():
    peak = results.peak_rss_bytes()
    held = bytearray(os.urandom(1 << 16)) * 512
    assert peak is not None
    assert results.peak_rss_bytes() >= peak >= 1 << 20
    assert len(held) == 32 << 20


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    console.write_json(path, {"a": "ü"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ü"}
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_nan_never_gets_into_a_result(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.write_json(path, {"a": float("nan")})
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    console.check_writable(tmp_path / "new.json")
    with pytest.raises(UsageError, match="no folder"):
        console.check_writable(tmp_path / "missing" / "new.json")
    with pytest.raises(UsageError, match="it is a folder"):
        console.check_writable(tmp_path)


def test_a_commit_is_marked_where_more_than_the_docs_changed(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source, page = tmp_path / "src" / "source.py", tmp_path / "docs" / "page.md"
    for path in (source, page):
        path.parent.mkdir()
        path.write_text("", encoding="utf-8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(results, "__file__", str(source))
    assert results.commit() == git("rev-parse", "HEAD")
    page.write_text("changed", encoding="utf-8")
    assert results.commit() == git("rev-parse", "HEAD")
    source.write_text("changed", encoding="utf-8")
    assert results.commit() == f"{git('rev-parse', 'HEAD')}+"
