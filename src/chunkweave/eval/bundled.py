"""The documents that come with the package, and questions about them: a data set that is always there."""

import json
from dataclasses import dataclass
from importlib.resources import as_file, files
from random import Random

from chunkweave.chunking.documents import read_documents
from chunkweave.eval.datasets import Example
from chunkweave.types import Chunk


@dataclass(frozen=True, slots=True)
class BundledQuestion:
    """A question over the bundled documents, the answers that count as right, the documents that hold them."""

    text: str
    answers: tuple[str, ...]
    sources: tuple[str, ...]


def bundled_documents() -> tuple[list[tuple[str, str]], list[BundledQuestion]]:
    """(name, text) of every bundled document, and the questions about them."""
    with as_file(files("chunkweave") / "assets" / "documents") as folder:
        documents = [(document.name, document.text) for document in read_documents([folder])]
        entries = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    questions = [
        BundledQuestion(entry["question"], tuple(entry["answers"]), tuple(entry["sources"])) for entry in entries
    ]
    return documents, questions


def bundled_examples(count: int, *, seed: int = 0) -> list[Example]:
    """The bundled questions in turn, each over all documents in an order of its own, until there are `count`."""
    documents, questions = bundled_documents()
    chunks = [Chunk(text, name) for name, text in documents]
    rng = Random(seed)
    asked = [questions[i % len(questions)] for i in range(count)]
    return [Example(q.text, tuple(rng.sample(chunks, len(chunks))), q.answers) for q in asked]
