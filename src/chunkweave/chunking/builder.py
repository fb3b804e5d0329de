"""Instruction, chunks and question into a `Prompt`, every part tokenized apart."""

from collections.abc import Sequence
from functools import cached_property

from chunkweave.chunking.prompt import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.chunking.template import PromptTemplate
from chunkweave.chunking.tokenizer import TextTokenizer, TokenCache
from chunkweave.errors import UsageError
from chunkweave.types import Chunk


class PromptBuilder:
    """Builds prompts for one model: its tokenizer, its template, its fingerprint.

    A chunk's token ids depend on its text and the template alone, so they are the same wherever it stands.
    Ids of chunks are remembered, up to `cache_tokens`, for each cache salt apart: how long a prompt takes to build
    tells nobody what others asked about.
    """

    def __init__(
        self, tokenizer: TextTokenizer, template: PromptTemplate, fingerprint: str, *, cache_tokens: int = 500_000
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._fingerprint = fingerprint
        self._cache = TokenCache(cache_tokens)
        start = tokenizer.start_ids
        head = tuple(tokenizer.encode(template.head, control_tokens=True))
        self._start = (PromptPart(PartKind.START, start),) if start else ()
        self._head_ids = head[len(start) :] if start and head[: len(start)] == start else head
        self._lead_ids = tuple(tokenizer.encode(template.lead, control_tokens=True))
        self._tail_ids = tuple(tokenizer.encode(template.tail, control_tokens=True))

    def build(
        self,
        question: str | None,
        chunks: Sequence[Chunk | str] = (),
        *,
        system: str | None = None,
        cache_salt: str = "",
    ) -> Prompt:
        """START, SYSTEM, the chunks in the order given, QUESTION; parts without tokens are left out.

        `system=None` means the template's instruction, `system=""` none. `question=None` makes a prompt to
        precompute. No chunks is plain generation.

        Raises:
            UsageError: the question or a chunk is empty, or there is nothing at all.
        """
        parts = [*self.opening(system=system, cache_salt=cache_salt), *self.chunk_parts(chunks, cache_salt=cache_salt)]
        if question is not None:
            parts.append(self.question_part(question))
        if all(part.kind is PartKind.START for part in parts):
            raise UsageError("nothing to build a prompt from: no instruction, no chunk, no question")
        return Prompt(tuple(parts))

    def chunk_part(self, chunk: Chunk | str, *, cache_salt: str = "", number: int | None = None) -> PromptPart:
        """One chunk as it stands in every prompt; `number` names it where it is refused.

        Raises:
            UsageError: the chunk is empty.
        """
        if isinstance(chunk, str):
            chunk = Chunk(chunk)
        token_ids = self._chunk_ids(chunk.text, cache_salt) if chunk.text.strip() else ()
        if not token_ids:
            which = "the chunk" if number is None else f"chunk {number}"
            raise UsageError(f"{which}{f' ({chunk.source})' if chunk.source else ''} is empty")
        return self._stored(PartKind.CHUNK, token_ids, cache_salt, chunk.source)

    def alone(self, chunk: Chunk | str, *, cache_salt: str = "") -> Prompt:
        """START and this chunk only: the prompt that computes its context-free segment.

        Raises:
            UsageError: the chunk is empty.
        """
        return Prompt((*self._start, self.chunk_part(chunk, cache_salt=cache_salt)))

    def opening(self, *, system: str | None = None, cache_salt: str = "") -> tuple[PromptPart, ...]:
        """What every prompt begins with: START and SYSTEM, those that have tokens."""
        instruction = self._template.instruction if system is None else system
        text_ids = self._tokenizer.encode(self._template.instruction_text(instruction))
        token_ids = (*self._head_ids, *text_ids, *self._lead_ids)
        if not token_ids:
            return self._start
        return (*self._start, self._stored(PartKind.SYSTEM, token_ids, cache_salt))

    def chunk_parts(self, chunks: Sequence[Chunk | str], *, cache_salt: str = "") -> tuple[PromptPart, ...]:
        """The chunks in the order given, as they stand in every prompt.

        Raises:
            UsageError: one is empty; the message says which.
        """
        return tuple(self.chunk_part(chunk, cache_salt=cache_salt, number=n) for n, chunk in enumerate(chunks))

    def question_part(self, question: str) -> PromptPart:
        """The question as it stands in every prompt.

        Raises:
            UsageError: it is empty.
        """
        if not question.strip():
            raise UsageError("the question is empty")
        text_ids = self._tokenizer.encode(self._template.question_text(question))
        return PromptPart(PartKind.QUESTION, (*text_ids, *self._tail_ids))

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """An answer as the model would write it behind a prompt, without the token that ends it."""
        return tuple(self._tokenizer.encode(answer if self._tail_ids else f" {answer}"))

    @cached_property
    def turn_break_ids(self) -> tuple[int, ...]:
        """What stands between an answer and the next turn.

        Raises:
            UsageError: the model's chat template takes no second turn.
        """
        text = self._template.turn_break
        if text is None:
            return self._tokenizer.end_ids
        if not text:
            raise UsageError("the model's chat template takes no second turn: it cannot hold a conversation")
        return tuple(self._tokenizer.encode(text, control_tokens=True))

    def turn_part(self, question: PromptPart, answer_ids: Sequence[int], *, cache_salt: str = "") -> PromptPart:
        """A question with the tokens of its answer, as they were generated, and what ends a turn.

        Raises:
            UsageError: the model's chat template takes no second turn.
        """
        token_ids = (*question.token_ids, *answer_ids, *self.turn_break_ids)
        return self._stored(PartKind.TURN, token_ids, cache_salt)

    def _stored(self, kind: PartKind, token_ids: tuple[int, ...], cache_salt: str, source: str = "") -> PromptPart:
        return PromptPart(kind, token_ids, chunk_id(self._fingerprint, cache_salt, token_ids), source)

    def _chunk_ids(self, text: str, cache_salt: str) -> tuple[int, ...]:
        key = f"{len(cache_salt)}:{cache_salt}{text}"  # the length keeps two pairs from spelling one key
        token_ids = self._cache.get(key)
        if token_ids is None:
            token_ids = tuple(self._tokenizer.encode(self._template.chunk_text(text)))
            self._cache.put(key, token_ids)
        return token_ids
