"""The benchmark of conversations, as small as it gets."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import conversations

pytestmark = pytest.mark.usefixtures("one_thread")


def test_it_compares_deduplication_with_none_turn_by_turn(tmp_path, capsys):
    out = tmp_path / "conversations.json"
    size = [
        "--conversations",
        "2",
        "--turns",
        "3",
        "--chunks",
        "8",
        "--pool",
        "12",
        "--max-new-tokens",
        "4",
        "--methods",
        "prefix",
    ]
    conversations.main(["--model", "reader", *size, "--out", str(out)])
    assert "prefix, deduplicated" in capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    assert "| prefix, all chunks sent |" in conversations.tables(result)["conversations"]
    deduplicated, everything = result["rows"]
    assert deduplicated["tokens_not_sent"] > 0 == everything["tokens_not_sent"]
    assert deduplicated["computed_tokens"] < everything["computed_tokens"]
    assert deduplicated["prompt_tokens"] < everything["prompt_tokens"]
    assert 0 < result["workload"]["repeated_chunk_share"] < 1
    (pair,) = result["deduplication"]
    assert pair["turns_compared"] > 0
    assert pair["f1_difference_low"] <= pair["f1_difference"] <= pair["f1_difference_high"]
