"""The bundled corpus: the passages of a few held-out worlds, and questions about them, as two JSONL files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from random import Random
from typing import Any

from chunkweave.eval.datasets import Example
from chunkweave.eval.worlds.questions import sample_request
from chunkweave.eval.worlds.records import QuestionKind, Request, Split
from chunkweave.eval.worlds.world import generate_world
from chunkweave.types import Chunk

_PASSAGES, _QUESTIONS = "passages.jsonl", "questions.jsonl"
_CHUNKS = 6
_KINDS = (
    QuestionKind.COMMON,
    QuestionKind.SINGLE,
    QuestionKind.ALIAS,
    QuestionKind.BRIDGE,
    QuestionKind.NOT_STATED,
)
"""What is asked about each world, in this order."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages, and questions that come with the six of them that retrieval might bring, in random order."""

    passages: tuple[Chunk, ...]
    questions: tuple[Example, ...]


def make_corpus(worlds: int = 8, seed: int = 0) -> Corpus:
    """The corpus of a seed: every passage of `worlds` test worlds, and one question of each of five kinds a world."""
    rng = Random(f"corpus {seed}")
    passages: list[Chunk] = []
    questions: list[Example] = []
    for _ in range(worlds):
        world = generate_world(rng.getrandbits(48), Split.TEST)
        passages += [Chunk(passage.text, passage.source) for passage in world.passages]
        questions += [_example(sample_request(world, rng, _CHUNKS, kind)) for kind in _KINDS]
    return Corpus(tuple(passages), tuple(questions))


def write_corpus(corpus: Corpus, folder: Path) -> None:
    """Write `{text, source}` a line, and `{question, passages, answers, kind}`, passages by line number from 0."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = {passage: line for line, passage in enumerate(corpus.passages)}
    _write(folder / _PASSAGES, ({"text": chunk.text, "source": chunk.source} for chunk in corpus.passages))
    _write(
        folder / _QUESTIONS,
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


def bundled_corpus() -> Corpus:
    """The corpus that comes with the package."""
    with as_file(files("chunkweave") / "assets" / "corpus") as folder:
        passages = tuple(Chunk(row["text"], row["source"]) for row in _read(folder / _PASSAGES))
        questions = tuple(
            Example(
                row["question"],
                tuple(passages[line] for line in row["passages"]),
                tuple(row["answers"]),
                row["kind"],
            )
            for row in _read(folder / _QUESTIONS)
        )
    return Corpus(passages, questions)


def _example(request: Request) -> Example:
    return Example(request.question, request.chunks, request.answers, str(request.kind))


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _read(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())
