"""Questions with their passages, read from the file formats that retrieval work uses."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from chunkweave.errors import DocumentError
from chunkweave.types import Chunk

_Read = TypeVar("_Read")

SQUAD_CHUNKS = 10
"""Passages given to a SQuAD question: its own paragraph and others, as many as MuSiQue's prepared sets have."""


@dataclass(frozen=True, slots=True)
class Example:
    """A question, the chunks to answer it from, and the answers that count as right.

    `kind` is the data set's own name for what answering takes, empty if it has none.
    """

    question: str
    chunks: tuple[Chunk, ...]
    answers: tuple[str, ...]
    kind: str = ""


def load_dataset(path: Path, *, squad_chunks: int = SQUAD_CHUNKS, seed: int = 0) -> list[Example]:
    """Read a data set; the format is found by looking.

    - MuSiQue JSON: `[{question, answers, ctxs: [{title, text}]}]`; a title becomes the first line of its passage.
    - SQuAD 1.1 JSON: `{data: [{title, paragraphs: [{context, qas}]}]}`; a question's chunks are its paragraph and
      `squad_chunks - 1` others, drawn and shuffled with `seed`.
    - JSONL: `{question, chunks: [text or {text, source}], answers, kind}` a line; answers and kind may be left out.

    Raises:
        DocumentError: the file cannot be read, is in none of these formats, or holds no question; the message names
            the file, the line or entry, and the reason.
    """
    text = _read(path)
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        examples = list(_jsonl(path, text))
    else:
        examples = _json(path, text, squad_chunks, seed)
    if not examples:
        raise DocumentError(f"{path} holds no question")
    return examples


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8: bad byte at offset {error.start}") from error
    except OSError as error:
        raise DocumentError(f"cannot read the data set {path}: {error.strerror or error}") from error


def _json(path: Path, text: str, squad_chunks: int, seed: int) -> list[Example]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return list(_jsonl(path, text))
        raise DocumentError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if isinstance(data, list):
        return [_entry(f"{path}: entry {i}", entry, _musique) for i, entry in enumerate(data)]
    if isinstance(data, dict) and isinstance(data.get("data"), list):
        return _squad(path, data["data"], squad_chunks, Random(seed))
    if isinstance(data, dict) and "question" in data:
        return list(_jsonl(path, json.dumps(data)))
    raise DocumentError(f"{path} is neither MuSiQue JSON (a list), SQuAD 1.1 JSON (with 'data') nor JSONL")


def _jsonl(path: Path, text: str) -> Iterator[Example]:
    # Not splitlines(): JSON strings may hold line separators such as U+2028 as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise DocumentError(f"{path}:{number}: not JSON: {error.msg}") from error
        yield _entry(f"{path}:{number}", data, _plain)


def _entry(where: str, data: object, read: Callable[[dict[str, Any]], _Read]) -> _Read:
    """One entry through its format's reader; what is wrong with it is said with `where`."""
    if not isinstance(data, dict):
        raise DocumentError(f"{where}: not an object but {type(data).__name__}")
    try:
        return read(data)
    except KeyError as error:
        raise DocumentError(f"{where}: no {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DocumentError(f"{where}: {error}") from error


def _musique(entry: dict[str, Any]) -> Example:
    chunks = tuple(
        _chunk(_titled(str(passage.get("title") or ""), passage["text"]), str(passage.get("title") or ""), place)
        for place, passage in enumerate(entry["ctxs"])
    )
    return Example(_text(entry["question"], "question"), _some(chunks), _texts(entry["answers"]))


def _plain(entry: dict[str, Any]) -> Example:
    chunks = tuple(
        _chunk(chunk, "", place)
        if isinstance(chunk, str)
        else _chunk(chunk["text"], str(chunk.get("source") or ""), place)
        for place, chunk in enumerate(entry["chunks"])
    )
    question = _text(entry["question"], "question")
    return Example(question, _some(chunks), _texts(entry.get("answers", [])), str(entry.get("kind") or ""))


def _squad(path: Path, articles: list[Any], squad_chunks: int, rng: Random) -> list[Example]:
    paragraphs: list[Chunk] = []
    asked: list[tuple[str, dict[str, Any], int]] = []
    for a, article in enumerate(articles):
        for p, paragraph in enumerate(_list(f"{path}: article {a}", article, "paragraphs")):
            where = f"{path}: article {a}, paragraph {p}"
            questions = _list(where, paragraph, "qas")
            place = len(paragraphs)
            context = _entry(where, paragraph, lambda data: _text(data["context"], "context"))
            paragraphs.append(Chunk(context, f"{article.get('title') or 'article'}#{p}"))
            asked += [(f"{where}, question {q}", question, place) for q, question in enumerate(questions)]
    examples = [_entry(where, question, _squad_question) for where, question, _ in asked]
    return [
        Example(example.question, _with_others(paragraphs, place, squad_chunks, rng), example.answers)
        for example, (_, _, place) in zip(examples, asked, strict=True)
    ]


def _squad_question(data: dict[str, Any]) -> Example:
    """A question without its chunks. SQuAD repeats an answer that several people gave."""
    return Example(_text(data["question"], "question"), (), _texts([answer["text"] for answer in data["answers"]]))


def _with_others(paragraphs: Sequence[Chunk], place: int, count: int, rng: Random) -> tuple[Chunk, ...]:
    others = [i for i in rng.sample(range(len(paragraphs)), min(count, len(paragraphs))) if i != place]
    chosen = [place, *others[: max(0, count - 1)]]
    rng.shuffle(chosen)
    return tuple(paragraphs[i] for i in chosen)


def _list(where: str, data: object, key: str) -> list[Any]:
    if not isinstance(data, dict) or not isinstance(data.get(key), list):
        raise DocumentError(f"{where}: no list {key!r}")
    found: list[Any] = data[key]
    return found


def _titled(title: str, text: object) -> object:
    return f"{title}\n{text}" if title and isinstance(text, str) else text


def _chunk(text: object, source: str, place: int) -> Chunk:
    return Chunk(_text(text, f"chunk {place}"), source or f"passage {place}")


def _some(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    if not chunks:
        raise ValueError("there are no chunks")
    return chunks


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} is not a text but {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{what} is empty")
    return value


def _texts(values: object) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"answers are not a list but {type(values).__name__}")
    return tuple(dict.fromkeys(_text(value, "answer") for value in values))
