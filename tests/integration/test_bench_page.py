"""`bench ... --html`: a result as one file that needs no other."""

import base64
import re
import sys
from pathlib import Path

import pytest

from chunkweave_lab.cli import bench
from tests.integration.command_line import invoke

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install -e '.[bench]'")

SMALL = ["--shape", "demo", "--questions", 2, "--chunks", 2, "--recompute-ratio", "0.1,0.5"]
RUNS = {
    "ttft": (["--chunk-tokens", 16], 1),
    "quality": (["--max-new-tokens", 2, "--deviations", 0], 1),
    "fidelity": (["--chunk-tokens", 16, "--new-tokens", 2, "--free", 0, "--deviations", 1], 2),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_report_has_the_table_the_pictures_and_the_command(tmp_path: Path, monkeypatch, name):
    more, pictures = RUNS[name]
    monkeypatch.setattr(sys, "argv", ["chunkweave", "bench", name])
    page = tmp_path / "report.html"
    done = invoke("bench", name, *SMALL, "--methods", "cacheblend", *more, "--html", page)
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href)=\"(?!data:)|url\(|https?:", text) == [], "from elsewhere"
    methods = re.findall(r"<tr><td>([^<]*)</td>", text)
    assert methods[0] == "full"
    assert methods[-2:] == ["cacheblend@0.1", "cacheblend@0.5"]
    drawn = re.findall(r"<img src=\"data:image/svg\+xml;base64,([^\"]*)\"", text)
    assert len(drawn) == pictures
    for one in drawn:
        assert base64.b64decode(one).rstrip().endswith(b"</svg>")
    assert f"chunkweave bench {name}" in text
    assert "Interrupted" not in text


def test_what_cannot_be_drawn_or_written_is_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch):
    nowhere = invoke("bench", "ttft", "--model", "no-such-model", "--html", tmp_path / "no" / "report.html")
    assert nowhere.exit_code == 2
    assert "there is no folder" in " ".join(nowhere.stderr.split())
    monkeypatch.setattr(
        bench, "require_matplotlib", lambda: (_ for _ in ()).throw(bench.UsageError("needs matplotlib"))
    )
    without = invoke("bench", "ttft", "--model", "no-such-model", "--html", tmp_path / "report.html")
    assert without.exit_code == 2
    assert "needs matplotlib" in without.stderr
