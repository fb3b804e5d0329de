"""Data sets in published formats."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from chunkweave.calibration.questions import (
    Example,
    chunk_of,
    json_lines,
    own_format,
    read_entry,
    read_text,
    some,
    text_of,
    texts_of,
)
from chunkweave.errors import DocumentError
from chunkweave.types import Chunk

PASSAGES = 10
"""Passages per question if the data set has more or no fixed number: as in MuSiQue's prepared sets."""

SUMMARIZE = "Write a summary of all the passages."
SUMMARIZE_DIALOGUE = "Summarize the dialogue in a sentence or two."


Entry = Mapping[str, Any]
Reader = Callable[[Entry], Example]


def read_dataset(name: Path, *, count: int, chunks: int, seed: int) -> list[Example]:  # noqa: ARG001 - read as a whole
    """The questions of a data set named on the command line; SQuAD questions have `chunks` passages.

    Raises:
        DocumentError: the file cannot be read, or has no question in a known format.
    """
    return load_dataset(name, squad_chunks=chunks, seed=seed)


def load_dataset(path: Path, *, squad_chunks: int = PASSAGES, seed: int = 0) -> list[Example]:
    """Read a data set, JSON or JSON lines; the format is detected by each entry's fields.

    - SQuAD 1.1 JSON: `{data: [{title, paragraphs: [{context, qas}]}]}`; a question's chunks are its paragraph and
      `squad_chunks - 1` others, drawn and shuffled with `seed`.
    - Lists or lines of entries in a format of `_READERS`: MuSiQue, HotpotQA, 2WikiMQA,
      Natural Questions and TriviaQA with passages, SAMSum, Multi-News, LongBench, MTRAG; or our own `{question, chunks,
      answers}`.

    Raises:
        DocumentError: the file cannot be read, is in none of these formats, or has no question; the message names the
            file, the line or entry, and the reason.
    """
    text = read_text(path, "data set")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        examples = list(_jsonl(path, text))
    else:
        examples = _json(path, text, squad_chunks, seed)
    if not examples:
        raise DocumentError(f"{path} has no question")
    return examples


def _json(path: Path, text: str, squad_chunks: int, seed: int) -> list[Example]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return list(_jsonl(path, text))
        raise DocumentError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if isinstance(data, list):
        return [_example(f"{path}: entry {i}", entry, musique) for i, entry in enumerate(data)]
    if isinstance(data, dict) and isinstance(data.get("data"), list):
        return _squad(path, data["data"], squad_chunks, Random(seed))
    if isinstance(data, dict) and "question" in data:
        return list(_jsonl(path, json.dumps(data)))
    raise DocumentError(f"{path} is neither a list (as MuSiQue's), SQuAD 1.1 JSON (with 'data') nor JSONL")


def _jsonl(path: Path, text: str) -> Iterator[Example]:
    return (_example(where, data, own_format) for where, data in json_lines(path, text))


def _example(where: str, data: object, otherwise: Reader) -> Example:
    return read_entry(where, data, lambda entry: reader_of(entry, otherwise)(entry))


def _squad(path: Path, articles: list[Any], squad_chunks: int, rng: Random) -> list[Example]:
    paragraphs: list[Chunk] = []
    entries: list[tuple[str, dict[str, Any], int]] = []
    for a, article in enumerate(articles):
        for p, paragraph in enumerate(_list(f"{path}: article {a}", article, "paragraphs")):
            where = f"{path}: article {a}, paragraph {p}"
            questions = _list(where, paragraph, "qas")
            place = len(paragraphs)
            context = read_entry(where, paragraph, lambda data: text_of(data["context"], "context"))
            paragraphs.append(Chunk(context, f"{article.get('title') or 'article'}#{p}"))
            entries += [(f"{where}, question {q}", question, place) for q, question in enumerate(questions)]
    examples = [read_entry(where, question, _squad_question) for where, question, _ in entries]
    return [
        Example(example.question, _with_others(paragraphs, place, squad_chunks, rng), example.answers)
        for example, (_, _, place) in zip(examples, entries, strict=True)
    ]


def _squad_question(data: dict[str, Any]) -> Example:
    """A question without its chunks. SQuAD repeats answers that several annotators gave."""
    return Example(text_of(data["question"], "question"), (), texts_of([answer["text"] for answer in data["answers"]]))


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


def reader_of(entry: Entry, otherwise: Reader) -> Reader:
    """The reader for an entry's format, by its fields; `otherwise` if the format is unknown."""
    return next((read for fields, read in _READERS if fields <= entry.keys()), otherwise)


def musique(entry: Entry) -> Example:
    """`{question, answers, ctxs: [{title, text}]}`, as CacheBlend's authors prepared MuSiQue, 2WikiMQA and SAMSum."""
    return Example(text_of(entry["question"], "question"), _passages(entry["ctxs"]), texts_of(entry["answers"]))


def multi_hop(entry: Entry) -> Example:
    """HotpotQA and 2WikiMQA: `{question, answer, type, context: [[title, [sentence]]], supporting_facts}`.

    As Hugging Face has them, `context` is `{title: [...], sentences: [[...]]}`.
    """
    context = entry["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
    passages = [{"title": title, "text": " ".join(map(str.strip, sentences))} for title, sentences in pairs]
    answers = (text_of(entry["answer"], "answer"),)
    return Example(text_of(entry["question"], "question"), _passages(passages), answers, str(entry.get("type") or ""))


def retrieved(entry: Entry) -> Example:
    """Natural Questions and TriviaQA with passages of Wikipedia, as dense passage retrieval was trained with.

    `{question, answers, positive_ctxs, hard_negative_ctxs, negative_ctxs}`: one answering passage among others that do
    not answer, hard ones first, in an order that depends only on the question.
    """
    question = text_of(entry["question"], "question")
    right, wrong = entry["positive_ctxs"], [*entry.get("hard_negative_ctxs", ()), *entry.get("negative_ctxs", ())]
    passages = [*right[:1], *wrong][:PASSAGES]
    Random(question).shuffle(passages)
    return Example(question, _passages(passages), texts_of(entry["answers"]))


def dialogue(entry: Entry) -> Example:
    """SAMSum: `{id, dialogue, summary}`."""
    return Example(SUMMARIZE_DIALOGUE, (chunk_of(entry["dialogue"], str(entry.get("id") or ""), 0),), _one(entry))


def articles(entry: Entry) -> Example:
    """Multi-News: `{document, summary}`, the articles separated by `|||||`."""
    texts = [text.strip() for text in text_of(entry["document"], "document").split("|||||")]
    return Example(SUMMARIZE, some(_numbered(filter(None, texts))), _one(entry))


def long_bench(entry: Entry) -> Example:
    """LongBench: `{input, context, answers, dataset}`; passages of a context begin with `Passage N:`.

    A context without such passages is one chunk. Without an input, a summary is requested.
    """
    texts = [text.strip() for text in _PASSAGE.split(text_of(entry["context"], "context"))]
    question = str(entry["input"]).strip() or SUMMARIZE
    kind = str(entry.get("dataset") or "")
    return Example(question, some(_numbered(filter(None, texts))), texts_of(entry["answers"]), kind)


def conversation(entry: Entry) -> Example:
    """MTRAG's tasks: `{input: [{speaker, text}], contexts: [{document_id, text}], targets: [{text}]}`.

    The question is the last one; earlier turns are omitted.
    """
    asked = [text_of(turn["text"], "question") for turn in entry["input"] if turn["speaker"] == "user"]
    if not asked:
        raise ValueError("there is no question of the user")
    chunks = [
        chunk_of(one["text"], str(one.get("document_id") or ""), place) for place, one in enumerate(entry["contexts"])
    ]
    return Example(asked[-1], some(tuple(chunks)), texts_of([one["text"] for one in entry["targets"]]))


_PASSAGE = re.compile(r"(?m)^Passage \d+:\n")

_READERS: tuple[tuple[set[str], Reader], ...] = (
    ({"ctxs"}, musique),
    ({"positive_ctxs"}, retrieved),
    ({"context", "supporting_facts"}, multi_hop),
    ({"context", "input"}, long_bench),
    ({"contexts", "targets"}, conversation),
    ({"dialogue", "summary"}, dialogue),
    ({"document", "summary"}, articles),
    ({"chunks"}, own_format),
)


def _one(entry: Entry) -> tuple[str, ...]:
    return (text_of(entry["summary"], "summary"),)


def _passages(passages: Iterable[Entry]) -> tuple[Chunk, ...]:
    """Chunks of `{title, text}`: the title is the first line and the source."""
    return some(
        tuple(
            chunk_of(_titled(str(one.get("title") or ""), one["text"]), str(one.get("title") or ""), place)
            for place, one in enumerate(passages)
        )
    )


def _numbered(texts: Iterable[str]) -> tuple[Chunk, ...]:
    return tuple(chunk_of(text, "", place) for place, text in enumerate(texts))


def _titled(title: str, text: object) -> object:
    return f"{title}\n{text}" if title and isinstance(text, str) else text
