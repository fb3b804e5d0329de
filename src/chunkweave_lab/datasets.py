"""Questions with their passages: data sets from files, the bundled one, and prompts of a given size out of them."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from chunkweave.errors import DocumentError, UsageError
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.documents import read_documents
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.retrieval.embedders import HashedNgramEmbedder
from chunkweave.retrieval.indexes import FlatIndex
from chunkweave.types import Chunk
from chunkweave_lab.dataset_formats import PASSAGES, Example, Reader, musique, own_format, reader_of, text_of, texts_of

_Read = TypeVar("_Read")

SQUAD_CHUNKS = PASSAGES
"""Passages given to a SQuAD question: its own paragraph and others."""


def load_dataset(path: Path, *, squad_chunks: int = SQUAD_CHUNKS, seed: int = 0) -> list[Example]:
    """Read a data set, JSON or JSON lines; the format is found by looking at each entry's fields.

    - SQuAD 1.1 JSON: `{data: [{title, paragraphs: [{context, qas}]}]}`; a question's chunks are its paragraph and
      `squad_chunks - 1` others, drawn and shuffled with `seed`.
    - Lists or lines of entries as `chunkweave_lab.dataset_formats` describes them: MuSiQue, HotpotQA, 2WikiMQA,
      Natural Questions and TriviaQA with passages, SAMSum, Multi-News, LongBench, MTRAG; or our own `{question, chunks,
      answers}`.

    Raises:
        DocumentError: the file cannot be read, is in none of these formats, or holds no question; the message names
            the file, the line or entry, and the reason.
    """
    text = read_text(path, "data set")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        examples = list(_jsonl(path, text))
    else:
        examples = _json(path, text, squad_chunks, seed)
    if not examples:
        raise DocumentError(f"{path} holds no question")
    return examples


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


def json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The values of JSON lines, each with its place for error messages: `FILE:LINE`. Blank lines are left out.

    Raises:
        DocumentError: a line is not JSON.
    """
    # Not splitlines(): JSON strings may hold line separators such as U+2028 as they are.
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
        DocumentError: it is no object, or the reader refuses it; the message begins with `where`.
    """
    if not isinstance(data, dict):
        raise DocumentError(f"{where}: not an object but {type(data).__name__}")
    try:
        return read(data)
    except KeyError as error:
        raise DocumentError(f"{where}: no {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DocumentError(f"{where}: {error}") from error


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
    """A question without its chunks. SQuAD repeats an answer that several people gave."""
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


@dataclass(frozen=True, slots=True)
class BundledQuestion:
    """A question over the bundled documents, the answers that count as right, the documents that hold them."""

    text: str
    answers: tuple[str, ...]
    sources: tuple[str, ...]


HARBOUR, VALLEY = "documents", "valley"
"""Folders of bundled documents: long ones whose questions take two, and short ones for the demo's small model."""


def bundled_documents(which: str = HARBOUR) -> tuple[list[tuple[str, str]], list[BundledQuestion]]:
    """(name, text) of every bundled document of a folder, and the questions about them."""
    with as_file(files("chunkweave") / "assets" / which) as folder:
        documents = [(document.name, document.text) for document in read_documents([folder])]
        entries = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    questions = [
        BundledQuestion(entry["question"], tuple(entry["answers"]), tuple(entry["sources"])) for entry in entries
    ]
    return documents, questions


def bundled_examples(count: int, *, seed: int = 0, which: str = HARBOUR) -> list[Example]:
    """A folder's questions in turn, each over all its documents in an order of its own, until there are `count`."""
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
"""Words of a sentence that is asked for: enough that its beginning tells which one is meant."""


def document_examples(
    chunks: Sequence[Chunk], *, chunks_each: int, count: int, seed: int, questions: Sequence[str] = ()
) -> list[Example]:
    """Questions over one's own documents, each with the chunks that are nearest to it, shuffled with `seed`.

    Without `questions`, `count` sentences are drawn: the beginning of one is given, and how it goes on is the answer
    that counts as right; its chunk is among those given. Nearest is by the bundled embedder (hashed n-grams).

    Raises:
        UsageError: there are too few chunks, or too few sentences of 10 to 40 words.
    """
    if len(chunks) < chunks_each:
        raise UsageError(f"the documents make {len(chunks)} chunks, but {chunks_each} a prompt are asked for")
    rng = Random(seed)
    asked: list[tuple[str, str, int | None]] = [(question, "", None) for question in questions]
    asked += [] if questions else _sentences(chunks, count, rng)
    embedder = HashedNgramEmbedder()
    index = FlatIndex(embedder.dimension)
    index.add(embedder.embed_documents([chunk.text for chunk in chunks]))
    examples = []
    for question, answer, own in asked:
        near = [int(row) for row in index.search(embedder.embed_query(question), chunks_each).rows]
        if own is not None and own not in near:
            near[-1] = own
        rng.shuffle(near)
        answers = (answer,) if answer else ()
        examples.append(Example(question, tuple(chunks[row] for row in near), answers))
    return examples


def sentence_questions(text: str) -> Iterator[tuple[str, str]]:
    """For each sentence of 10 to 40 words a question that gives its first half, and the second half."""
    for sentence in _SENTENCE_END.split(text):
        words = sentence.split()
        if len(words) in _SENTENCE_WORDS:
            half = len(words) // 2
            beginning = " ".join(words[:half])
            yield f'How does this sentence of the passages go on: "{beginning} ..."', " ".join(words[half:])


def _sentences(chunks: Sequence[Chunk], count: int, rng: Random) -> Iterator[tuple[str, str, int]]:
    """`count` questions for sentences, the rest of each sentence, and the place of its chunk."""
    whole = [(*asked, place) for place, chunk in enumerate(chunks) for asked in sentence_questions(chunk.text)]
    if len(whole) < count:
        raise UsageError(
            f"the documents have {len(whole)} sentences of 10 to 40 words, but {count} are to be asked for; give more "
            "documents, fewer questions, or questions of your own"
        )
    yield from rng.sample(whole, count)


class PromptMaker:
    """Builds the prompts of a benchmark over one data set.

    A passage becomes the same chunk in every question that has it: its tokens, then those of the passages that
    follow it in the data set while it is short, cut at `chunk_tokens`. `chunk_tokens=0` leaves passages as they are.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        builder: PromptBuilder,
        fingerprint: str,
        *,
        chunks: int,
        chunk_tokens: int,
        instruction: str | None = None,
    ) -> None:
        """Take over a data set; `instruction=None` is the template's own.

        Raises:
            UsageError: `chunks` or `chunk_tokens` is negative, or the data set has fewer distinct passages than
                `chunks`.
        """
        if chunks < 1 or chunk_tokens < 0:
            raise UsageError(f"chunks must be at least 1 and chunk_tokens not negative: {chunks}, {chunk_tokens}")
        self._builder = builder
        self._fingerprint = fingerprint
        self._chunks = chunks
        self._chunk_tokens = chunk_tokens
        self._instruction = instruction
        self._passages = list({chunk.text: chunk for example in examples for chunk in example.chunks}.values())
        self._places = {chunk.text: place for place, chunk in enumerate(self._passages)}
        if len(self._passages) < chunks:
            raise UsageError(f"the data set has {len(self._passages)} passages, but {chunks} chunks are asked for")

    def prompt(self, example: Example) -> Prompt:
        """START, SYSTEM, the configured number of chunks, QUESTION.

        The example's own passages come first; where it has too few, those that follow in the data set.

        Raises:
            UsageError: the data set's text is shorter than one chunk.
        """
        parts = list(self._builder.build(example.question, system=self._instruction).parts)
        question = parts.pop()
        return Prompt((*parts, *(self._chunk_part(chunk) for chunk in self._chosen(example)), question))

    def _chosen(self, example: Example) -> list[Chunk]:
        own = {chunk.text: chunk for chunk in example.chunks}
        others = (chunk for chunk in self._from(example.chunks[-1]) if chunk.text not in own)
        return list(islice(chain(own.values(), others), self._chunks))

    def _chunk_part(self, chunk: Chunk) -> PromptPart:
        if not self._chunk_tokens:
            return self._builder.chunk_part(chunk)
        token_ids: list[int] = []
        for passage in self._from(chunk):
            token_ids += self._builder.chunk_part(passage).token_ids
            if len(token_ids) >= self._chunk_tokens:
                cut = tuple(token_ids[: self._chunk_tokens])
                return PromptPart(PartKind.CHUNK, cut, chunk_id(self._fingerprint, "", cut), chunk.source)
        raise UsageError(f"the data set has {len(token_ids)} tokens of text, less than a chunk of {self._chunk_tokens}")

    def _from(self, chunk: Chunk) -> list[Chunk]:
        """All passages once, beginning with `chunk`, around the end of the data set."""
        place = self._places[chunk.text]
        return self._passages[place:] + self._passages[:place]


def alone_prompts(prompt: Prompt, *, behind_instruction: bool = False) -> list[Prompt]:
    """For each stored part of `prompt` the prompt that computes it alone: after START, with nothing before it.

    With `behind_instruction` a chunk comes after START and SYSTEM.
    """
    start = tuple(part for part in prompt.parts if part.kind is PartKind.START)
    stored = {part.id: part for part in prompt.parts if part.id is not None}
    system = [part for part in stored.values() if part.kind is PartKind.SYSTEM] if behind_instruction else []
    return [Prompt((*start, *(() if part in system else system), part)) for part in stored.values()]
