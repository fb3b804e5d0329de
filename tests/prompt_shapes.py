"""Prompt shapes as clients send them, drawn: how documents are written, where the question is, and in which role."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from chunkweave.prompt.parts import neutral_passages

PLACES = ("first", "middle", "last")
ROLES = ("user", "system", "both")
_SEPARATORS = ("\n", "\n\n", "\n---\n", "\n\n###\n\n", " ", "\n\n\n", "\n* * *\n")
_LABELS = ("", "[{}] ", "Document {}:\n", "### Source {}\n", "{}. ", "Passage {}: ", "[Document(page_content='", "- ")
_TAGS = (
    None,
    None,
    ("<document>", "</document>"),
    ('<source id="{}">', "</source>"),
    ("<doc>\n", "\n</doc>"),
    ('"""', '"""'),
)
_PROSE = ("Use the following pieces of context.", "Answer from these notes.", "Context information is below.", "")
_QUESTIONS = ("Question: {}", "{}", "Query: {}\nAnswer:", "User asks: {}", "# {}")
_SYLLABLES = {
    "french": ["le", "la", "une", "ville", "pont", "mer", "qui", "est", "dans", "été", "où", "garde", "clef"],
    "german": ["der", "Turm", "über", "Straße", "und", "Schloss", "Fähre", "wird", "heute", "Glocke", "früh"],
    "greek": ["το", "καράβι", "πόλη", "γέφυρα", "και", "στη", "θάλασσα", "παλιά", "είναι"],
}


@dataclass(frozen=True)
class Shape:
    """One way of writing a prompt."""

    separator: str
    label: str
    tags: tuple[str, str] | None
    indent: str
    as_json: bool
    prose: str
    question: str
    place: str
    role: str

    def messages(self, documents: Sequence[str], question: str) -> list[dict[str, Any]]:
        """The messages of a request over `documents` in this order."""
        asked = self.question.format(question)
        if self.as_json:
            listed = json.dumps([{"id": n, "text": text} for n, text in enumerate(documents)], ensure_ascii=False)
            written = [listed]
        else:
            written = [self._written(n, text) for n, text in enumerate(documents, start=1)]
        if self.role == "both":
            system = "\n".join((self.prose or "Answer briefly.", self.separator.join(written)))
            return [{"role": "system", "content": system}, {"role": "user", "content": asked}]
        middle = len(written) // 2 if self.place == "middle" and not self.as_json else len(written)
        at = 0 if self.place == "first" else middle
        body = self.separator.join([*written[:at], asked, *written[at:]])
        text = f"{self.prose}\n\n{body}" if self.prose else body
        if self.role == "system":
            return [{"role": "system", "content": text}, {"role": "user", "content": "Answer in one sentence."}]
        return [{"role": "user", "content": text}]

    def _written(self, number: int, text: str) -> str:
        before, after = self.tags or ("", "")
        return self.indent + self.label.format(number) + before.format(number) + text + after


def drawn_shape(rng: Random) -> Shape:
    """A shape of which every property is drawn."""
    return Shape(
        rng.choice(_SEPARATORS),
        rng.choice(_LABELS),
        rng.choice(_TAGS),
        rng.choice(("", "", "  ", "\t")),
        rng.random() < 0.15,
        rng.choice(_PROSE),
        rng.choice(_QUESTIONS),
        rng.choice(PLACES),
        rng.choice(ROLES),
    )


def drawn_documents(rng: Random, count: int, tokens_of: Any, *, least: int = 60, most: int = 600) -> list[str]:
    """Different documents of `least` to `most` tokens, as `tokens_of` counts them, most of them in English."""
    passages = [sentence for text in neutral_passages() for sentence in text.split(". ")]
    documents = []
    for _ in range(count):
        language = rng.choice(["english", "english", "english", *_SYLLABLES])
        wanted = rng.randint(least, most)
        text = ""
        tokens = 0
        while tokens < wanted:
            if language == "english":
                words = rng.choice(passages).split()
                rng.shuffle(words)
            else:
                words = rng.choices(_SYLLABLES[language], k=rng.randint(6, 14))
            sentence = f"{' '.join(words).strip('.').capitalize()}. "
            tokens += tokens_of(sentence)
            text += sentence
        documents.append(text.strip())
    return documents


def rotations(documents: Sequence[str], requests: int) -> list[list[str]]:
    """The documents in the order of each of several requests: rotated by one each time."""
    return [[*documents[turn % len(documents) :], *documents[: turn % len(documents)]] for turn in range(requests)]
