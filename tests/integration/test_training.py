"""The trainer of the bundled reader, at a size that trains in seconds."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

TRAINING = Path(__file__).resolve().parents[2] / "training"
sys.path.insert(0, str(TRAINING))

from reader_data import RowMaker, Stage, held_out_rows, stage_at  # noqa: E402
from reader_model import PRESETS, Batch, Reader, Targets, _attend_in_kernel, _attend_in_steps  # noqa: E402
from reader_tokenizer import train_tokenizer  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from chunkweave.engine.engine import Engine  # noqa: E402

CPU = torch.device("cpu")
PRESET = PRESETS["test"]


@pytest.fixture(scope="module")
def maker():
    return RowMaker(train_tokenizer(1200, worlds=8))


def run(*arguments):
    command = [sys.executable, str(TRAINING / "train_reader.py"), *map(str, arguments), "--threads", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("mask", [False, True])
def test_attention_in_steps_is_attention(mask):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    seen = torch.where(torch.rand(2, 1, 9, 9) > 0.3, 0.0, -30000.0) if mask else None
    torch.testing.assert_close(
        _attend_in_steps(query, key, value, seen), _attend_in_kernel(query, key, value, seen), atol=1e-5, rtol=1e-4
    )


def test_a_question_sees_its_context_and_itself_only(maker):
    rows = held_out_rows(maker, 1, 2, seed=3)
    row, batch = rows[0], Batch(rows, CPU)
    seen = batch.attention[0, 0] > -1
    first, last = row.answers[1][0], row.answers[1][1]
    query = batch.place(row, last - 1) - batch.context
    for other in range(row.context, len(row)):
        visible = bool(seen[query, batch.place(row, other)])
        assert visible == (row.owners[other] == row.owners[first] and other < last)
    assert seen[query, : row.context].all()


def test_the_start_copies_better_than_chance(maker):
    """The planted heads raise the repeated token far above its chance before any training."""
    reader = Reader(PRESETS["cpu"], 1200, CPU, seed=0)
    rows = [maker.copy_row(Random(n), 64) for n in range(16)]
    batch = Batch(rows, CPU)
    targets = Targets(batch, 0.0, torch.Generator().manual_seed(0))
    loss = reader.losses(batch, targets)[0] / int(targets.is_answer.sum())
    assert loss.item() < 6.4 < torch.log(torch.tensor(1200.0)).item()


def test_two_workers_take_the_step_that_one_takes(maker):
    rows = maker.batch(0, 700, 1024)
    losses, weights = [], []
    for workers in (1, 2):
        reader = Reader(replace(PRESET, text_share=1.0), 1200, CPU, seed=0, workers=workers)
        batches = [Batch(rows[part::workers], CPU) for part in range(workers)]
        losses.append(reader.learn(batches, torch.Generator().manual_seed(0), 1.0))
        weights.append(reader.master["model.layers.0.mlp.up_proj.weight"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    torch.testing.assert_close(weights[0], weights[1], atol=2e-3, rtol=0.1)


def test_every_stage_makes_batches_of_its_size(maker):
    for step in (0, 100, 700, 1400, 3000):
        stage = stage_at(step)
        assert isinstance(stage, Stage)
        rows = maker.batch(0, step, 4096)
        assert (len(rows) - 2) * max(map(len, rows)) <= 4096 * stage.step_share  # the rows of a world come in twos
        assert [row.ids for row in rows] == [row.ids for row in maker.batch(0, step, 4096)]


@pytest.mark.slow
def test_slices_add_up_to_one_run_and_the_export_loads(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run("train", "--preset", "test", "--checkpoint", whole)
    run("train", "--preset", "test", "--checkpoint", cut, "--stop-at", 2)
    run("train", "--preset", "test", "--checkpoint", cut)
    one, two = (load_file(folder / "checkpoint.safetensors") for folder in (whole, cut))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    run("test", "--preset", "test", "--checkpoint", whole, "--contexts", 1)
    run("export", "--preset", "test", "--checkpoint", whole, "--out", tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "4 of 4" in card
    assert "| common |" in card
    with Engine.load(tmp_path / "model") as engine:
        assert engine.generate("Which?", ["The Halvik Museum has 17 rooms."], max_new_tokens=2).token_ids is not None
