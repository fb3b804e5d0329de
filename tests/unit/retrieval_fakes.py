"""An embedder and a tokenizer for tests of the corpus: no model, and vectors that can be told by hand."""

from collections.abc import Sequence

import numpy as np

from chunkweave.prompt.documents import SplitConfig
from chunkweave.retrieval.corpus import Corpus
from chunkweave.retrieval.documents import CorpusDocument

SUBJECTS = ("harbour", "lighthouse", "storm", "ferry", "choir", "garden")


class SubjectEmbedder:
    """One column a subject that a text names; the last column is for texts that name none."""

    def __init__(self, name: str = "subjects", dimension: int = len(SUBJECTS) + 1) -> None:
        self.name = name
        self.fingerprint = f"{name}-{dimension}"
        self.dimension = dimension
        self.embedded: list[str] = []

    def embed_documents(self, texts: Sequence[str]) -> np.ndarray:
        self.embedded += texts
        return np.array([self._vector(text) for text in texts], dtype=np.float32).reshape(len(texts), self.dimension)

    def embed_query(self, text: str) -> np.ndarray:
        return self._vector(text)

    def _vector(self, text: str) -> np.ndarray:
        counts = [text.lower().count(subject) for subject in SUBJECTS]
        vector = np.zeros(self.dimension, dtype=np.float32)
        vector[: len(counts)] = counts
        vector[-1] = not any(counts)
        return vector / np.linalg.norm(vector)


class LetterTokenizer:
    """A token a character: all that splitting asks of a tokenizer."""

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        return list(map(ord, text))


class CountingTokenizer(LetterTokenizer):
    """Counts the characters that it is given."""

    def __init__(self) -> None:
        self.characters = 0

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        self.characters += len(text)
        return super().encode(text, control_tokens=control_tokens)


SPLIT = SplitConfig(max_tokens=40)


def document(number: int, subject: str = "", text: str = "") -> CorpusDocument:
    subject = subject or SUBJECTS[number % len(SUBJECTS)]
    return CorpusDocument(
        f"d{number}", text or f"Note {number} on the {subject}.", f"Note {number}", {"number": number}
    )


def memory_corpus(embedder: SubjectEmbedder | None = None, **options) -> Corpus:
    return Corpus(embedder or SubjectEmbedder(), split=SPLIT, tokenizer=LetterTokenizer(), **options)


def new_corpus(folder, **options) -> Corpus:
    return Corpus.create(folder, SubjectEmbedder(), split=SPLIT, tokenizer=LetterTokenizer(), **options)


def opened(folder) -> Corpus:
    return Corpus.open(folder, SubjectEmbedder(), tokenizer=LetterTokenizer())
