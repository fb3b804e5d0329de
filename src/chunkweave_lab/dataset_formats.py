"""What an entry of each data set's published files looks like, and how it becomes a question with its passages."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from chunkweave.types import Chunk

PASSAGES = 10
"""Passages of a question whose data set has more or leaves the number open: as many as MuSiQue's prepared sets have."""

SUMMARIZE = "Write a summary of all the passages."
SUMMARIZE_DIALOGUE = "Summarize the dialogue in a sentence or two."


@dataclass(frozen=True, slots=True)
class Example:
    """A question, the chunks to answer it from, and the answers that count as right.

    `kind` is the data set's own name for what answering takes, empty if it has none.
    """

    question: str
    chunks: tuple[Chunk, ...]
    answers: tuple[str, ...]
    kind: str = ""


Entry = Mapping[str, Any]
Reader = Callable[[Entry], Example]


def reader_of(entry: Entry, otherwise: Reader) -> Reader:
    """The reader of an entry's format, by the fields that it has; `otherwise` if that is none of these."""
    return next((read for fields, read in _READERS if fields <= entry.keys()), otherwise)


def musique(entry: Entry) -> Example:
    """`{question, answers, ctxs: [{title, text}]}`, as CacheBlend's authors prepared MuSiQue, 2WikiMQA and SAMSum."""
    return Example(text_of(entry["question"], "question"), _passages(entry["ctxs"]), texts_of(entry["answers"]))


def own_format(entry: Entry) -> Example:
    """`{question, chunks: [text or {text, source}], answers, kind}`; answers and kind may be left out."""
    chunks = tuple(
        _chunk(chunk, "", place)
        if isinstance(chunk, str)
        else _chunk(chunk["text"], str(chunk.get("source") or ""), place)
        for place, chunk in enumerate(entry["chunks"])
    )
    question = text_of(entry["question"], "question")
    return Example(question, _some(chunks), texts_of(entry.get("answers", [])), str(entry.get("kind") or ""))


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

    `{question, answers, positive_ctxs, hard_negative_ctxs, negative_ctxs}`: a passage that answers among others that
    do not, the hard ones first, in an order that depends on the question alone.
    """
    question = text_of(entry["question"], "question")
    right, wrong = entry["positive_ctxs"], [*entry.get("hard_negative_ctxs", ()), *entry.get("negative_ctxs", ())]
    passages = [*right[:1], *wrong][:PASSAGES]
    Random(question).shuffle(passages)
    return Example(question, _passages(passages), texts_of(entry["answers"]))


def dialogue(entry: Entry) -> Example:
    """SAMSum: `{id, dialogue, summary}`."""
    return Example(SUMMARIZE_DIALOGUE, (_chunk(entry["dialogue"], str(entry.get("id") or ""), 0),), _one(entry))


def articles(entry: Entry) -> Example:
    """Multi-News: `{document, summary}`, the articles separated by `|||||`."""
    texts = [text.strip() for text in text_of(entry["document"], "document").split("|||||")]
    return Example(SUMMARIZE, _some(_numbered(filter(None, texts))), _one(entry))


def long_bench(entry: Entry) -> Example:
    """LongBench: `{input, context, answers, dataset}`, the passages of a context begin with `Passage N:`.

    A context without any is one chunk. Where there is no input, a summary is asked for.
    """
    texts = [text.strip() for text in _PASSAGE.split(text_of(entry["context"], "context"))]
    question = str(entry["input"]).strip() or SUMMARIZE
    kind = str(entry.get("dataset") or "")
    return Example(question, _some(_numbered(filter(None, texts))), texts_of(entry["answers"]), kind)


def conversation(entry: Entry) -> Example:
    """MTRAG's tasks: `{input: [{speaker, text}], contexts: [{document_id, text}], targets: [{text}]}`.

    The question is the last one; what was said before is left out.
    """
    asked = [text_of(turn["text"], "question") for turn in entry["input"] if turn["speaker"] == "user"]
    if not asked:
        raise ValueError("nobody asks")
    chunks = [
        _chunk(one["text"], str(one.get("document_id") or ""), place) for place, one in enumerate(entry["contexts"])
    ]
    return Example(asked[-1], _some(tuple(chunks)), texts_of([one["text"] for one in entry["targets"]]))


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


def text_of(value: object, what: str) -> str:
    """A text that says something.

    Raises:
        TypeError: it is none.
        ValueError: it is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} is not a text but {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{what} is empty")
    return value


def texts_of(values: object) -> tuple[str, ...]:
    """A list of answers, each once. Raises what `text_of` does."""
    if not isinstance(values, list):
        raise TypeError(f"answers are not a list but {type(values).__name__}")
    return tuple(dict.fromkeys(text_of(value, "answer") for value in values))


def _one(entry: Entry) -> tuple[str, ...]:
    return (text_of(entry["summary"], "summary"),)


def _passages(passages: Iterable[Entry]) -> tuple[Chunk, ...]:
    """Chunks of `{title, text}`: a title is the first line and the source."""
    return _some(
        tuple(
            _chunk(_titled(str(one.get("title") or ""), one["text"]), str(one.get("title") or ""), place)
            for place, one in enumerate(passages)
        )
    )


def _numbered(texts: Iterable[str]) -> tuple[Chunk, ...]:
    return tuple(_chunk(text, "", place) for place, text in enumerate(texts))


def _titled(title: str, text: object) -> object:
    return f"{title}\n{text}" if title and isinstance(text, str) else text


def _chunk(text: object, source: str, place: int) -> Chunk:
    return Chunk(text_of(text, f"chunk {place}"), source or f"passage {place}")


def _some(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    if not chunks:
        raise ValueError("there are no chunks")
    return chunks
