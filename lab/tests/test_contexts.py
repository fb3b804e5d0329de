"""The ways of the study: what each computes chunks behind, and what of it is averaged."""

import json
from pathlib import Path

import pytest
from tests.integration.command_line import invoke

from chunkweave import Chunk, Engine
from chunkweave.calibration.fidelity import Comparison, make_tasks, prepare
from chunkweave.calibration.prompts import Warmth
from chunkweave.calibration.questions import Example
from chunkweave.cli.calibrate import Half
from chunkweave.errors import UsageError
from chunkweave.prompt.parts import PartKind
from chunkweave_lab.contexts import ContextWarmth

PLACES = ("bridge", "mill", "quarry", "harbour", "school", "market")
EXAMPLES = [
    Example(
        f"Who keeps the {place} of Lindow?",
        (Chunk(f"The {place} of Lindow is kept by number {number}. It is old and made of stone.", place),),
        (f"number {number}",),
    )
    for number, place in enumerate(PLACES)
]


@pytest.fixture(scope="module")
def engine():
    with Engine.load("reader", method="full", dtype="float32") as opened:
        yield opened


def task(engine: Engine, way: str, *, by_retrieval: bool = True):
    """The first question over two chunks, with its chunks computed in that way in an empty store."""
    engine.store.clear()
    config = Comparison(("query",), warm=ContextWarmth.parse(way), chunks=2, by_retrieval=by_retrieval)
    tasks = make_tasks(engine, EXAMPLES, EXAMPLES, config)
    prepare(engine, tasks, 0, config.warm)
    return tasks[0]


def means(engine: Engine, asked):
    chunks = {part.id for part in asked.prompt.parts if part.kind is PartKind.CHUNK}
    return [record for record in engine.store.records() if record.contexts and record.chunk_id in chunks]


@pytest.mark.parametrize(
    "way",
    [
        "nearest:4",
        "nearest:1:exact",
        "random:2:tokens=100",
        "mixed:4",
        "nearest:2:tokens=100:exact",
    ],
)
def test_a_way_is_read_as_it_is_written(way):
    assert str(ContextWarmth.parse(way)) == way


def test_usual_ways_are_the_usual_ones_and_others_are_refused():
    assert ContextWarmth.parse("corpus") == Warmth.parse("corpus")
    for wrong in ("nearest:4:wide", "nearest:4:tokens=many", "far:2"):
        with pytest.raises(UsageError):
            ContextWarmth.parse(wrong)


@pytest.mark.parametrize(("way", "contexts"), [("nearest:3", 3), ("random:2", 2), ("mixed:2", 2)])
def test_chunks_are_means_over_so_many_contexts(engine, way, contexts):
    found = means(engine, task(engine, way))
    assert [len(record.contexts) for record in found] == [contexts] * 2
    assert all(record.attention is not None for record in found), "`stored` evidence is read from it"


def test_ways_with_the_same_contexts_compute_them_once(engine, monkeypatch):
    computed = []
    compute = ContextWarmth._compute

    def counted(self, *args):
        computed.append(str(self))
        return compute(self, *args)

    monkeypatch.setattr(ContextWarmth, "_compute", counted)
    asked = task(engine, "nearest:2")
    for way in ("nearest:2", "nearest:2:exact", "nearest:3"):
        engine.store.clear()
        ContextWarmth.parse(way).prepare(engine, asked.prompt, corpus=asked.corpus)
    assert computed == ["nearest:2"] * 2 + ["nearest:2:exact"] * 2 + ["nearest:3"] * 2


def test_contexts_of_grouped_questions_have_none_of_the_prompts_chunks(engine):
    asked = task(engine, "nearest:2", by_retrieval=False)
    own = {part.id for part in asked.prompt.parts if part.kind is PartKind.CHUNK}
    found = means(engine, asked)
    assert len(found) == 2
    assert all(own.isdisjoint(record.sources) for record in found)


def test_the_nearest_passages_of_the_whole_data_set_are_asked_over(engine):
    asked = task(engine, "alone")
    sources = [part.source for part in asked.prompt.parts if part.kind is PartKind.CHUNK]
    assert sources[0] == "bridge"
    assert len(set(sources)) == 2


def test_a_half_of_the_questions_is_drawn_and_all_passages_stay(tmp_path: Path):
    assert [list(range(7))[half.of(7)] for half in Half] == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2],
        [3, 4, 5, 6],
        [0, 2, 4, 6],
        [1, 3, 5],
    ]
    file = tmp_path / "data.jsonl"
    lines = [
        {"question": one.question, "chunks": [chunk.text for chunk in one.chunks], "answers": list(one.answers)}
        for one in EXAMPLES
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    options = ["--model", "reader", "--dataset", file, "--chunks", "2", "--methods", "full", "--warm", "nearest:2"]
    few = invoke("study", *options, "--half", "odd", "--questions", "4", "--prompts", "retrieval")
    assert few.exit_code == 2
    assert "3 questions" in few.stderr
