"""`analyze` as it is called."""

import json
from pathlib import Path

import pytest
from tests.integration.command_line import invoke, json_of


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    rows = [
        {
            "arrival_s": float(number),
            "system": {"id": "s", "tokens": 5},
            "chunks": [{"id": one, "tokens": 10} for one in chunks],
            "conversation_id": f"c{number % 2}",
        }
        for number, chunks in enumerate(["14567", "12345", "54321", "76541"])
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_overlap_savings_and_the_bound(trace, tmp_path):
    out = tmp_path / "analysis.json"
    found = json_of("analyze", "--trace", trace, "--out", out)
    assert json.loads(out.read_text()) == found
    assert found["overlap"]["total"] == pytest.approx((3 / 5 + 1 + 1) / 3)
    assert found["overlap"]["prefix"] == pytest.approx((1 / 5 + 0 + 0) / 3)
    assert found["repeated_across_turns"] == pytest.approx((3 / 5 + 3 / 5) / 2)
    saved = {row["ordering"]: row["saved_tokens"] for row in found["rows"]}
    assert list(saved) == ["original", "frequency"]
    assert saved["original"] == 10
    assert saved["original"] < saved["frequency"] <= found["bound_tokens"] == 130
    shown = invoke("analyze", "--trace", trace, "--promote", 2)
    assert "total overlap" in shown.stdout
    assert "60.0%" in shown.stdout


def test_what_cannot_be_analysed_is_said(trace, tmp_path):
    for orderings, message in (("sideways", "unknown ordering"), ("", "")):
        wrong = invoke("analyze", "--trace", trace, "--orderings", orderings)
        assert wrong.exit_code == 2
        assert message in " ".join(wrong.stderr.split())
    missing = invoke("analyze", "--trace", tmp_path / "none.jsonl")
    assert missing.exit_code == 1
    assert "cannot read" in missing.stderr
