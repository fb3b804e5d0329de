"""Generates the bundled corpus from worlds, and larger ones of the same kind."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from worlds.questions import sample_request
from worlds.records import QuestionKind, Split
from worlds.world import generate_world

from chunkweave.calibration.questions import PASSAGES_FILE, QUESTIONS_FILE, Corpus, Example
from chunkweave.types import Chunk

_CHUNKS = 6
_KINDS = (
    QuestionKind.COMMON,
    QuestionKind.SINGLE,
    QuestionKind.ALIAS,
    QuestionKind.BRIDGE,
    QuestionKind.NOT_STATED,
)
"""The kinds of question about each world, in this order."""


def make_corpus(worlds: int = 8, seed: int = 0) -> Corpus:
    """The corpus of a seed: every passage of `worlds` test worlds, and one question of each of five kinds a world."""
    rng = Random(f"corpus {seed}")
    passages: list[Chunk] = []
    questions: list[Example] = []
    for _ in range(worlds):
        world = generate_world(rng.getrandbits(48), Split.TEST)
        passages += [Chunk(passage.text, passage.source) for passage in world.passages]
        requests = (sample_request(world, rng, _CHUNKS, kind) for kind in _KINDS)
        questions += [Example(one.question, one.chunks, one.answers, str(one.kind)) for one in requests]
    return Corpus(tuple(passages), tuple(questions))


def write_corpus(corpus: Corpus, folder: Path) -> None:
    """Write `{text, source}` a line, and `{question, passages, answers, kind}`, passages by line number from 0."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = {passage: line for line, passage in enumerate(corpus.passages)}
    _write(folder / PASSAGES_FILE, ({"text": chunk.text, "source": chunk.source} for chunk in corpus.passages))
    _write(
        folder / QUESTIONS_FILE,
        (
            {
                "question": example.question,
                "passages": [lines[chunk] for chunk in example.chunks],
                "answers": list(example.answers),
                "kind": example.kind,
            }
            for example in corpus.questions
        ),
    )


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
