"""The benchmark of contexts: that it says what was put into it, of made-up segments and of a small model's."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import contextualization

pytestmark = pytest.mark.usefixtures("one_thread")


def segment(chunk: str, score: float, deviation: float) -> dict[str, object]:
    """A segment whose scores are all the same."""
    scores = dict.fromkeys(contextualization.SCORES, score)
    measured = {"deviation": deviation, "last_layer": -deviation, "outward_rank": 0.5, "intra": 2.0, "inter": 1.0}
    return {"chunk": chunk, "place": 1, "scores": scores, "top": [0.1, 0.2, 0.3, 0.4, 0.6], **measured}


def test_a_score_that_tells_the_deviation_is_found():
    told = [segment("a", 0.1, 1.0), segment("a", 0.2, 2.0), segment("b", 0.9, 4.0), segment("b", 0.8, 3.0)]
    question = {"segments": told, "growing": [0.1, 0.3], "parts": {"chunk": 30, "question": 5}}
    question["focus"] = {"layer": 3, "chunks": 2, "layers": 30}
    rows = contextualization.summarize([question, question])
    score = next(row for row in rows if row["name"] == "CCI (1 - beta')" and row["group"] == "scores")
    assert (score["correlation"], score["last_layer"]) == pytest.approx((1.0, -1.0))
    pair = next(row for row in rows if row["name"] == "CCI (1 - beta')" and row["group"] == "pairs")
    assert (pair["pairs"], pair["lower_deviates_less"]) == (4, 1.0)
    assert [row["deviation"] for row in rows if row["group"] == "growing"] == pytest.approx([0.1, 0.3])
    assert next(row for row in rows if row["group"] == "masses")["mean"] == pytest.approx(2.0)
    assert next(row for row in rows if row["group"] == "focus")["by_0.25"] == 1.0
    assert {"contextualization", "growing"} == set(contextualization.tables({"rows": rows}))


def test_a_small_model_is_measured_and_a_run_goes_on_from_its_samples(tmp_path):
    out, samples = tmp_path / "contexts.json", tmp_path / "samples.jsonl"
    run = ["--model", "reader", "--questions", "2", "--chunks", "3", "--new-tokens", "1"]
    run += ["--samples", str(samples), "--out", str(out)]
    contextualization.main(run)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    behind = [row["deviation"] for row in rows if row["group"] == "growing"]
    assert len(behind) == 3
    assert 0.0 < behind[0] < behind[-1]  # the instruction alone, then other chunks too
    assert next(row for row in rows if row["group"] == "scores")["segments"] >= 2
    contextualization.main(run)
    assert json.loads(out.read_text(encoding="utf-8"))["rows"] == rows
    assert len(samples.read_text(encoding="utf-8").splitlines()) == 3
