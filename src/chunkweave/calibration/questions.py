"""Questions with passages: bundled ones, from the user's documents, and from data sets in our format. No torch."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.resources import as_file, files
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from chunkweave.errors import DocumentError, UsageError
from chunkweave.retrieval.embedders import HashedNgramEmbedder
from chunkweave.retrieval.indexes import FlatIndex
from chunkweave.types import Chunk

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Example:
    """A question, the chunks to answer it from, and the answers that count as right.

    `kind` is the data set's own name for what answering takes, empty if it has none.
    """

    question: str
    chunks: tuple[Chunk, ...]
    answers: tuple[str, ...]
    kind: str = ""


def own_format(entry: Mapping[str, Any]) -> Example:
    """Read `{question, chunks: [text or {text, source}], answers, kind}`; answers and kind are optional."""
    chunks = tuple(
        chunk_of(chunk, "", place)
        if isinstance(chunk, str)
        else chunk_of(chunk["text"], str(chunk.get("source") or ""), place)
        for place, chunk in enumerate(entry["chunks"])
    )
    question = text_of(entry["question"], "question")
    return Example(question, some(chunks), texts_of(entry.get("answers", [])), str(entry.get("kind") or ""))


def text_of(value: object, what: str) -> str:
    """`value` as a text that is not empty.

    Raises:
        TypeError: it is not a text.
        ValueError: it is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} is not a text but {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{what} is empty")
    return value


def texts_of(values: object) -> tuple[str, ...]:
    """A list of answers without duplicates. Raises the errors of `text_of`."""
    if not isinstance(values, list):
        raise TypeError(f"answers are not a list but {type(values).__name__}")
    return tuple(dict.fromkeys(text_of(value, "answer") for value in values))


def chunk_of(text: object, source: str, place: int) -> Chunk:
    """A question's chunk number `place`. Raises the errors of `text_of`."""
    return Chunk(text_of(text, f"chunk {place}"), source or f"passage {place}")


def some(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """The chunks.

    Raises:
        ValueError: there are none.
    """
    if not chunks:
        raise ValueError("there are no chunks")
    return chunks


def read_text(path: Path, kind: str) -> str:
    """A UTF-8 file as text.

    Raises:
        DocumentError: it cannot be read; the message names it as a `kind`.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8: bad byte at offset {error.start}") from error
    except OSError as error:
        raise DocumentError(f"cannot read the {kind} {path}: {error.strerror or error}") from error


def json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The values of JSON lines, each with its place for error messages: `FILE:LINE`. Blank lines are left out.

    Raises:
        DocumentError: a line is not JSON.
    """
    # Not splitlines(): JSON strings may contain line separators such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise DocumentError(f"{path}:{number}: not JSON: {error.msg}") from error
        yield f"{path}:{number}", data


def read_entry(where: str, data: object, read: Callable[[dict[str, Any]], _Read]) -> _Read:
    """One entry through its format's reader.

    Raises:
        DocumentError: it is not an object, or the reader refuses it; the message begins with `where`.
    """
    if not isinstance(data, dict):
        raise DocumentError(f"{where}: not an object but {type(data).__name__}")
    try:
        return read(data)
    except KeyError as error:
        raise DocumentError(f"{where}: no {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DocumentError(f"{where}: {error}") from error


_DATASETS = "chunkweave.datasets"
"""Entry points of readers of other data sets: functions of name, count, chunks per question and seed."""


def dataset_examples(name: Path, *, count: int, chunks: int, seed: int) -> list[Example]:
    """The questions of a data set: JSON lines in our format are read here, others by another package's reader.

    Readers of other packages get `count`, and `chunks` passages a question where a data set does not say how many.

    Raises:
        DocumentError: the file cannot be read, has an unknown format, or has no question.
        UsageError: the package that reads such data sets is not installed.
    """
    if name.suffix.lower() == ".jsonl" and name.exists():
        lines = list(json_lines(name, read_text(name, "data set")))
        if lines and all(isinstance(entry, dict) and "chunks" in entry for _, entry in lines):
            return [read_entry(where, entry, own_format) for where, entry in lines]
    readers = entry_points(group=_DATASETS)
    if not readers:
        raise UsageError(f"only JSON lines with `question` and `chunks` are read without chunkweave-lab, not {name}")
    examples: list[Example] = next(iter(readers)).load()(name, count=count, chunks=chunks, seed=seed)
    return examples


@dataclass(frozen=True, slots=True)
class BundledQuestion:
    """A question about the bundled documents, its right answers, and the documents that contain them."""

    text: str
    answers: tuple[str, ...]
    sources: tuple[str, ...]


HARBOUR = "documents"
VALLEY = "valley"
"""Folders of bundled documents: long ones whose questions need two, and short ones for the demo's small model."""


def bundled_documents(which: str = HARBOUR) -> tuple[list[tuple[str, str]], list[BundledQuestion]]:
    """(name, text) of every bundled document of a folder, and the questions about them."""
    with as_file(files("chunkweave") / "assets" / which) as folder:
        documents = [(file.name, file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.md"))]
        entries = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    questions = [
        BundledQuestion(entry["question"], tuple(entry["answers"]), tuple(entry["sources"])) for entry in entries
    ]
    return documents, questions


def bundled_examples(count: int, *, seed: int = 0, which: str = HARBOUR) -> list[Example]:
    """`count` of a folder's questions, in turn, each over all its documents in its own random order."""
    documents, questions = bundled_documents(which)
    chunks = [Chunk(text, name) for name, text in documents]
    rng = Random(seed)
    chosen = [questions[i % len(questions)] for i in range(count)]
    return [Example(q.text, tuple(rng.sample(chunks, len(chunks))), q.answers) for q in chosen]


def digest_of(examples: Sequence[Example]) -> str:
    """BLAKE2b-128 of the questions, their chunks and answers, in order: 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        for text in (example.question, *(chunk.text for chunk in example.chunks), *example.answers):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_SENTENCE_WORDS = range(10, 41)
"""Number of words in a drawn sentence: enough that its beginning identifies it."""


def document_examples(
    chunks: Sequence[Chunk], *, chunks_each: int, count: int, seed: int, questions: Sequence[str] = ()
) -> list[Example]:
    """Questions about the user's documents, each with its nearest chunks, shuffled with `seed`.

    Without `questions`, `count` sentences are drawn: the question is the first half of the sentence, the right answer
    the second half, and its chunk is among the chunks. The bundled embedder (hashed n-grams) finds the nearest chunks.

    Raises:
        UsageError: there are too few chunks, or too few sentences of 10 to 40 words.
    """
    if len(chunks) < chunks_each:
        raise UsageError(f"the documents have {len(chunks)} chunks, but {chunks_each} per prompt are needed")
    rng = Random(seed)
    questions_with_answers: list[tuple[str, str, int | None]] = [(question, "", None) for question in questions]
    questions_with_answers += [] if questions else _sentences(chunks, count, rng)
    embedder = HashedNgramEmbedder()
    index = FlatIndex(embedder.embed_documents([chunk.text for chunk in chunks]))
    examples = []
    for question, answer, source_row in questions_with_answers:
        near = [int(row) for row in index.search(embedder.embed_query(question), chunks_each).rows]
        if source_row is not None and source_row not in near:
            near[-1] = source_row
        rng.shuffle(near)
        answers = (answer,) if answer else ()
        examples.append(Example(question, tuple(chunks[row] for row in near), answers))
    return examples


def sentence_questions(text: str) -> Iterator[tuple[str, str]]:
    """For each sentence of 10 to 40 words, a question with its first half, and the second half."""
    for sentence in _SENTENCE_END.split(text):
        words = sentence.split()
        if len(words) in _SENTENCE_WORDS:
            half = len(words) // 2
            beginning = " ".join(words[:half])
            yield f'How does this sentence of the passages go on: "{beginning} ..."', " ".join(words[half:])


def _sentences(chunks: Sequence[Chunk], count: int, rng: Random) -> Iterator[tuple[str, str, int]]:
    """`count` questions about sentences, each with the rest of the sentence and the index of its chunk."""
    whole = [(*pair, row) for row, chunk in enumerate(chunks) for pair in sentence_questions(chunk.text)]
    if len(whole) < count:
        raise UsageError(
            f"the documents have {len(whole)} sentences of 10 to 40 words, but {count} are needed; give more "
            "documents, fewer questions, or your own questions"
        )
    yield from rng.sample(whole, count)


PASSAGES_FILE = "passages.jsonl"
QUESTIONS_FILE = "questions.jsonl"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages, and questions each with six passages that retrieval might return, in random order."""

    passages: tuple[Chunk, ...]
    questions: tuple[Example, ...]


def bundled_corpus() -> Corpus:
    """The corpus that comes with the package."""
    with as_file(files("chunkweave") / "assets" / "corpus") as folder:
        passages = tuple(Chunk(row["text"], row["source"]) for row in _read(folder / PASSAGES_FILE))
        questions = tuple(
            Example(
                row["question"],
                tuple(passages[line] for line in row["passages"]),
                tuple(row["answers"]),
                row["kind"],
            )
            for row in _read(folder / QUESTIONS_FILE)
        )
    return Corpus(passages, questions)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())
