"""Paragraphs with questions about them, in SQuAD's format, and pieces of text that a question could ask for."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkweave.types import Chunk

_NAME_OR_NUMBER = re.compile(
    r"(?<=[a-z,;] )(?:[A-Z][\w'-]+(?: [A-Z][\w'-]+)*|\d[\d,.]*\d(?: (?:million|percent|billion))?)"
)
"""A name or a number inside a sentence."""
_AROUND = 9
"""Words on each side of a piece of text that are shown with it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the answer that counts with the character where it begins in the paragraph."""

    question: str
    answer: str
    start: int


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A text, and what is asked about it."""

    chunk: Chunk
    asked: tuple[Asked, ...]


def read_paragraphs(file: Path) -> list[Paragraph]:
    """The paragraphs of a SQuAD file; of the answers that people gave the shortest counts."""
    found = []
    for article in json.loads(file.read_text(encoding="utf-8"))["data"]:
        for place, paragraph in enumerate(article["paragraphs"]):
            asked = []
            for one in paragraph["qas"]:
                answer = min(one["answers"], key=lambda answer: len(answer["text"]))
                asked.append(Asked(one["question"].strip(), answer["text"], answer["answer_start"]))
            found.append(Paragraph(Chunk(paragraph["context"], f"{article['title']}#{place}"), tuple(asked)))
    return found


def squad_of(paragraphs: Iterable[Paragraph]) -> dict[str, Any]:
    """The same in SQuAD's format, an article a paragraph."""
    return {
        "version": "1.1",
        "data": [
            {
                "title": one.chunk.source,
                "paragraphs": [
                    {
                        "context": one.chunk.text,
                        "qas": [
                            {
                                "id": f"{one.chunk.source}?{place}",
                                "question": asked.question,
                                "answers": [{"text": asked.answer, "answer_start": asked.start}],
                            }
                            for place, asked in enumerate(one.asked)
                        ],
                    }
                ],
            }
            for one in paragraphs
        ],
    }


def names_and_numbers(text: str) -> list[tuple[str, int]]:
    """Names and numbers inside the sentences of `text`, and where they begin; each once."""
    found: dict[str, int] = {}
    for one in _NAME_OR_NUMBER.finditer(text):
        found.setdefault(one.group().rstrip(",."), one.start())
    return list(found.items())


def with_a_blank(text: str, answer: str, start: int) -> str:
    """The words around the `answer` that begins at `start`, with a blank in its place."""
    before, after = text[:start].split(), text[start + len(answer) :].split()
    return " ".join((*before[-_AROUND:], "____", *after[:_AROUND]))
