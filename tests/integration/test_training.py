"""The trainer of the bundled reader, at a size that trains in seconds."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

TRAINING = Path(__file__).resolve().parents[2] / "training"
sys.path.insert(0, str(TRAINING))

from ask_questions import plausible, task  # noqa: E402
from paragraphs import Asked, Paragraph, names_and_numbers, read_paragraphs, squad_of  # noqa: E402
from reader_data import RowMaker, Stage, held_out_rows, stage_at  # noqa: E402
from reader_model import PRESETS, Batch, Reader, Targets, _attend_in_kernel, _attend_in_steps  # noqa: E402
from reader_scores import decoded_f1, exact_matches  # noqa: E402
from reader_tokenizer import train_tokenizer  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from train_reader_adapter import AnsweredPrompts, as_asked  # noqa: E402

from chunkweave import Chunk  # noqa: E402
from chunkweave.engine.engine import Engine  # noqa: E402
from chunkweave_lab.adapt.prompts import PromptSizes  # noqa: E402
from chunkweave_lab.worlds.questions import ask_about  # noqa: E402
from chunkweave_lab.worlds.records import QuestionKind, Split  # noqa: E402
from chunkweave_lab.worlds.world import generate_world  # noqa: E402

CPU = torch.device("cpu")
PRESET = PRESETS["test"]


@pytest.fixture(scope="module")
def maker():
    return RowMaker(train_tokenizer(1200, worlds=8))


def run(*arguments):
    command = [sys.executable, str(TRAINING / "train_reader.py"), *map(str, arguments), "--threads", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_any_text_survives_the_tokenizer(maker):
    for text in ("The Halvik Museum has 17 rooms.", "Ein Äther-Ölfaß 漢字 \U0001f600\n\tx"):
        tokenizer = maker._tokenizer
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids).strip() == text.strip()


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


def test_scores_of_an_untrained_reader_are_low_and_by_kind(maker):
    reader = Reader(PRESET, 1200, CPU, seed=0)
    rows = held_out_rows(maker, 2, 3, seed=0, answer_room=8)
    assert exact_matches(reader, rows)["all"] < 0.1
    assert decoded_f1(reader, rows, maker._tokenizer)["all"] < 0.5


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


TEXT = "The Harbour Bridge was built by Anna Vale in 1870. Its 34 arches are of granite from the quarry near Selby."


def test_paragraphs_come_back_from_their_file(tmp_path):
    paragraph = Paragraph(Chunk(TEXT, "Bridge#0"), (Asked("Who built the Harbour Bridge?", "Anna Vale", 32),))
    (tmp_path / "asked.json").write_text(json.dumps(squad_of([paragraph])), encoding="utf-8")
    [found] = read_paragraphs(tmp_path / "asked.json")
    assert (found.chunk.text, found.asked) == (TEXT, paragraph.asked)


def test_names_and_numbers_are_found_where_they_are():
    found = names_and_numbers(TEXT)
    assert [name for name, _ in found] == ["Harbour Bridge", "Anna Vale", "1870", "34", "Selby"]
    assert all(TEXT[start:].startswith(name) for name, start in found)


def test_the_asker_is_shown_an_answer_with_the_words_around_it():
    shown = "The Harbour Bridge was built by Anna Vale in ____ . Its 34 arches are of granite from the"
    wanted = f'Write a question that is answered by "1870", the blank in: {shown}'
    assert task(TEXT, "1870", TEXT.index("1870")) == wanted


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Who built the Harbour Bridge in 1870?", "Anna Vale"),
        ("How many arches of granite has it?", "34"),
    ],
)
def test_questions_are_kept_that_can_be_right(question, answer):
    asked = Asked(question, answer, TEXT.index(answer))
    assert plausible(TEXT, [asked]) == [asked]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("How many arches of granite has it?", "Selby"),  # asks for a number
        ("Who built the Harbour Bridge?", "1870"),  # does not
        ("Who painted the famous picture?", "Anna Vale"),  # is about something else
        ("Who?", "Anna Vale"),  # about nothing
    ],
)
def test_questions_are_left_out_that_cannot_be_right(question, answer):
    assert plausible(TEXT, [Asked(question, answer, TEXT.index(answer))]) == []


def test_of_two_answers_to_one_question_neither_is_kept():
    both = [Asked("Who built the Harbour Bridge?", name, TEXT.index(name)) for name in ("Anna Vale", "Selby")]
    assert plausible(TEXT, both) == []


def test_questions_about_worlds_are_of_all_kinds_and_different():
    world = generate_world(7, Split.TRAIN)
    passages = list(world.passages[:9])
    worded = [one for _ in range(3) for one in ask_about(passages, Random(0), world.split, absent=world.passages[9:])]
    asked = as_asked(worded, Random(1), 24)
    assert len({one.text for one in asked}) == len(asked) == 24
    assert sum(one.kind is QuestionKind.NOT_STATED for one in asked) < 8
    only = [one for one in worded if one.kind is QuestionKind.NOT_STATED]
    assert as_asked(only, Random(1), 24) == [], "what is not stated is asked beside other questions only"


def test_answered_prompts_are_over_worlds_and_over_each_file():
    files = [
        [Paragraph(Chunk(f"{name} {i}", name), (Asked(f"{name} {i}?", str(i), 0),)) for i in range(9)] for name in "ab"
    ]
    sizes = PromptSizes(least_chunks=3, most_chunks=6, questions=8)
    source = AnsweredPrompts(files, Split.TRAIN, sizes, seed="s", worlds=0.25)
    prompts = [source.prompt(index) for index in range(40)]
    texts = [prompt for prompt in prompts if prompt.chunks[0].source in "ab"]
    assert len(texts) == 30
    for prompt in prompts:
        assert 3 <= len(prompt.chunks) <= 6
        assert 1 <= len(prompt.questions) == len(prompt.answers) <= 8
    assert {prompt.chunks[0].source for prompt in texts} == {"a", "b"}
    for prompt in texts:
        assert {chunk.text + "?" for chunk in prompt.chunks} == set(prompt.questions)
    assert source.prompt(5) == prompts[5]
