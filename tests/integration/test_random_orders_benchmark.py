"""The benchmark of random orders: what is shuffled, and what its rows say."""

import json
import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import random_orders

from chunkweave import Engine
from chunkweave.calibration.fidelity import make_tasks
from chunkweave.calibration.questions import bundled_examples
from chunkweave_lab.fidelity import FidelityConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def test_chunks_change_places_and_nothing_else_does():
    with Engine.load("reader") as engine:
        examples = bundled_examples(6)
        prompt = make_tasks(engine, examples, examples[:1], FidelityConfig((), chunks=3))[0].prompt
    orders = [random_orders.shuffled(prompt, Random(seed)) for seed in range(5)]
    assert len({order.token_ids for order in orders}) > 1
    for order in orders:
        assert sorted(part.token_ids for part in order.parts) == sorted(part.token_ids for part in prompt.parts)
        assert (order.parts[:2], order.parts[-1]) == (prompt.parts[:2], prompt.parts[-1])


def test_random_orders_are_held_against_the_given_one_by_question():
    def measured(f1: float) -> dict[str, float]:
        return {"nll": 1.0, "f1": f1, "rouge_l": 1.0}

    questions = [[measured(1.0), measured(0.5), measured(0.5)], [measured(0.0), measured(0.0), measured(1.0)]]
    row = next(one for one in random_orders.rows_of(questions) if one["measure"] == "f1")
    assert (row["given"], row["random"], row["random_minus_given"]) == (0.5, 0.5, 0.0)
    assert row["deviation_within_a_question"] == 0.25


def test_a_run_writes_its_rows(tmp_path):
    out = tmp_path / "orders.json"
    random_orders.main(["--model", "reader", "--questions", "2", "--orders", "2", "--chunks", "3", "--out", str(out)])
    rows = {row["measure"]: row for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}
    assert rows["rouge_l"]["given"] == 1.0
    assert rows["nll"]["given"] > 0.0
