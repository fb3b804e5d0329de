"""Builds a `Prompt` from instruction, chunks and question; each part is tokenized separately."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from chunkweave.errors import PromptTooLongError, UsageError
from chunkweave.prompt.find_chunks import ChunkFinder
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id, neutral_id
from chunkweave.prompt.rendering import Rendered
from chunkweave.prompt.template import PromptTemplate
from chunkweave.prompt.tokenizer import TextTokenizer, TokenCache
from chunkweave.types import Chunk, ChunkId

_USUAL_CHARACTERS = 8
"""Characters per token above which a text's length is first estimated from slices. Ordinary text has 2 to 6."""

_SLICE_CHARACTERS = 1 << 16
_CUT_TOKENS = 256
"""Most additional tokens that cutting a slice out of a text can cause. A cut usually changes only a few."""


class PromptLimit:
    """Stops tokenizing a prompt that is far too long, so that it costs no more than the longest that fits.

    A prompt of at most `most_tokens` is never refused here. One that is only somewhat longer is tokenized wholly, so
    that the caller can report its length. For one prompt and one thread.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._tokens = 0
        self._counted: set[ChunkId] = set()

    def check(self, tokenizer: TextTokenizer, text: str, what: str) -> None:
        """Refuse `text`, which is the next part, before it is tokenized as a whole.

        Raises:
            PromptTooLongError: the earlier parts have more than twice the tokens that fit, or `text` has more than fit.
        """
        if self._tokens > 2 * self.most_tokens:
            raise self._error(f"the parts of the prompt before {what} have {self._tokens} tokens")
        if not self.doubts(text):
            return
        tokens = 0
        for start in range(0, len(text), _SLICE_CHARACTERS):
            slice_tokens = len(tokenizer.encode(text[start : start + _SLICE_CHARACTERS]))
            tokens += max(0, slice_tokens - _CUT_TOKENS)
            if tokens > self.most_tokens:
                raise self._error(f"{what} has {len(text)} characters, and its beginning alone has {tokens} tokens")

    def doubts(self, text: str) -> bool:
        """Whether `text` is so long that `check` must tokenize slices of it."""
        return len(text) > self._usual_characters

    def check_characters(self, count: int, what: str) -> None:
        """Refuse texts that a template must render before they can be tokenized.

        Raises:
            PromptTooLongError: they have more characters than ordinary text that fits.
        """
        if count > self._usual_characters:
            raise self._error(f"{what} have {count} characters")

    @property
    def _usual_characters(self) -> int:
        return max(_SLICE_CHARACTERS, _USUAL_CHARACTERS * self.most_tokens)

    def count(self, part: PromptPart) -> None:
        """Count a tokenized part. A repeated chunk counts once, since conversations do not resend it."""
        if part.kind is PartKind.TURN or part.id not in self._counted:
            self._tokens += len(part)
            if part.id is not None:
                self._counted.add(part.id)

    def _error(self, why: str) -> PromptTooLongError:
        return PromptTooLongError(
            f"{why}, but at most {self.most_tokens} fit into the context; send fewer or smaller chunks"
        )


class PromptBuilder:
    """Builds prompts for one model: its tokenizer, template and fingerprint.

    A chunk's token ids depend only on its text and the template, so they are the same at every position. They are
    cached, up to `cache_tokens`, separately for each cache salt: the time to build a prompt does not reveal other
    tenants' chunks.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: PromptTemplate,
        fingerprint: str,
        *,
        cache_tokens: int = 500_000,
        cache: TokenCache | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._fingerprint = fingerprint
        self._cache = TokenCache(cache_tokens) if cache is None else cache
        start = tokenizer.start_ids
        ordinary = template.ordinary
        head = self._rendered_ids(Rendered(template.head, ordinary.head))
        self._start = (PromptPart(PartKind.START, start),) if start else ()
        self._head_ids = head[len(start) :] if start and head[: len(start)] == start else head
        self._lead_ids = self._rendered_ids(Rendered(template.lead, ordinary.lead))
        self._tail_ids = self._rendered_ids(Rendered(template.tail, ordinary.tail))

    def alike(self, template: PromptTemplate, fingerprint: str) -> "PromptBuilder":
        """A builder for other weights and another template of the same tokenizer; both share cached token ids.

        Raises:
            UsageError: the template formats chunks differently.
        """
        if template.chunk_format != self._template.chunk_format:
            raise UsageError("both templates must format chunks alike")
        return PromptBuilder(self.tokenizer, template, fingerprint, cache=self._cache)

    def build(
        self,
        question: str | None,
        chunks: Sequence[Chunk | str] = (),
        *,
        system: str | None = None,
        history: Sequence[tuple[str, str | Rendered]] = (),
        history_chunks: Sequence[Sequence[Chunk | str]] = (),
        exchange: Rendered | None = None,
        continued: str = "",
        cache_salt: str = "",
        limit: PromptLimit | None = None,
    ) -> Prompt:
        """Build START, SYSTEM, a TURN for each of `history`, the chunks in the order given, and QUESTION.

        Parts without tokens are omitted. `history` are earlier questions, each with its answer or with all rendered
        text up to the next question; the `history_chunks` of each are placed before it. An `exchange` is the text
        between the question and its answer, in place of the template's tail; `continued` is the beginning of the
        answer, with which the prompt ends. `system=None` means the template's instruction, `system=""` none.
        `question=None` makes a prompt to precompute. Without chunks it is plain generation. A `limit` refuses texts
        that are far too long before they are wholly tokenized.

        Raises:
            UsageError: a question or a chunk is empty, all parts are empty, `history` and `history_chunks` differ in
                length, or there is a `history` and the model's chat template does not support a second turn.
            PromptTooLongError: raised by the `limit`.
        """
        if history_chunks and len(history_chunks) != len(history):
            raise UsageError(f"there are {len(history)} earlier questions, but chunks for {len(history_chunks)}")
        turns = (
            (
                *self.chunk_parts(chunks_before, cache_salt=cache_salt, limit=limit),
                *self._past_turn(*turn, cache_salt, limit),
            )
            for turn, chunks_before in zip(history, history_chunks or [()] * len(history), strict=True)
        )
        parts = [
            *self.opening(system=system, cache_salt=cache_salt, limit=limit),
            *(part for turn in turns for part in turn),
            *self.chunk_parts(chunks, cache_salt=cache_salt, limit=limit),
        ]
        if question is not None:
            parts.append(self.question_part(question, exchange=exchange, continued=continued, limit=limit))
        if all(part.kind is PartKind.START for part in parts):
            raise UsageError("the prompt is empty: give an instruction, a chunk or a question")
        return Prompt(tuple(parts))

    def plain(
        self,
        text: Rendered,
        finder: ChunkFinder,
        *,
        continued: str = "",
        cache_salt: str = "",
        limit: PromptLimit | None = None,
    ) -> Prompt:
        """The prompt with the tokens of `text` as it is, in parts that `finder` finds, and the answer's beginning.

        Raises:
            UsageError: it has no tokens.
            PromptTooLongError: raised by the `limit`.
        """
        if limit is not None:
            limit.check(self.tokenizer, text.text + continued, "the prompt")
        token_ids = (*self._rendered_ids(text), *(self.answer_ids(continued) if continued else ()))
        return self.recut(token_ids, finder, cache_salt=cache_salt)

    def plain_text(
        self, text: str, finder: ChunkFinder, *, cache_salt: str = "", limit: PromptLimit | None = None
    ) -> Prompt:
        """`plain` for a text without control tokens, behind BOS. Raises the errors of `plain`."""
        token_ids = (*self.tokenizer.start_ids, *self._encode(text, "the prompt", limit))
        return self.recut(token_ids, finder, cache_salt=cache_salt)

    def recut(self, token_ids: Sequence[int], finder: ChunkFinder, *, cache_salt: str = "") -> Prompt:
        """The prompt with these tokens, in parts that `finder` finds; see `ChunkFinder.prompt`.

        Raises:
            UsageError: there are no tokens.
        """
        if not token_ids:
            raise UsageError("the prompt is empty")
        return finder.prompt(token_ids, self.tokenizer.start_ids, fingerprint=self._fingerprint, salt=cache_salt)

    def add_to(self, finder: ChunkFinder, prompt: Prompt, *, cache_salt: str = "") -> None:
        """Let `finder` find the parts of a prompt in later ones."""
        finder.add(prompt, self.tokenizer.start_ids, fingerprint=self._fingerprint, salt=cache_salt)

    def chunk_part(
        self,
        chunk: Chunk | str,
        *,
        cache_salt: str = "",
        number: int | None = None,
        limit: PromptLimit | None = None,
    ) -> PromptPart:
        """The part for one chunk, the same in every prompt; `number` identifies it in errors.

        Raises:
            UsageError: the chunk is empty.
            PromptTooLongError: raised by the `limit`.
        """
        if isinstance(chunk, str):
            chunk = Chunk(chunk)
        which = "the chunk" if number is None else f"chunk {number}"
        which = f"{which} ({chunk.source})" if chunk.source else which
        token_ids = self._chunk_ids(chunk.text, cache_salt, which, limit) if chunk.text.strip() else ()
        if not token_ids:
            raise UsageError(f"{which} is empty")
        return _counted(self._stored(PartKind.CHUNK, token_ids, cache_salt, chunk.source), limit)

    def neutral_parts(
        self, passages: Sequence[str], most_tokens: int, *, cache_salt: str = ""
    ) -> tuple[PromptPart, ...]:
        """Parts for the first neutral `passages`, with at most `most_tokens` tokens in all. Their ids are
        `neutral_id`s.

        Raises:
            UsageError: a passage is empty.
        """
        parts: list[PromptPart] = []
        for text in passages:
            part = self.chunk_part(Chunk(text, "neutral"), cache_salt=cache_salt)
            most_tokens -= len(part)
            if most_tokens < 0 or part.id is None:
                break
            parts.append(replace(part, id=neutral_id(part.id)))
        return tuple(parts)

    def preamble(
        self,
        passages: Sequence[str],
        neutral_tokens: int,
        *,
        opening: Sequence[PromptPart] | None = None,
        cache_salt: str = "",
        room: int | None = None,
    ) -> tuple[PromptPart, ...]:
        """The preamble that chunks are computed behind ahead of requests: an opening and the first neutral `passages`.

        `opening=None` means the opening with the template's instruction. The preamble is START alone if
        `neutral_tokens` is 0 or the opening exceeds `room` tokens; it has fewer passages if `room` is short.
        """
        opening = self.opening(cache_salt=cache_salt) if opening is None else opening
        room_left = None if room is None else room - sum(map(len, opening))
        if not neutral_tokens or (room_left is not None and room_left < 0):
            return self._start
        most = neutral_tokens if room_left is None else min(neutral_tokens, room_left)
        return (*opening, *self.neutral_parts(passages, most, cache_salt=cache_salt))

    def opening(
        self, *, system: str | None = None, cache_salt: str = "", limit: PromptLimit | None = None
    ) -> tuple[PromptPart, ...]:
        """The parts that start every prompt: START and SYSTEM, without empty ones.

        Raises:
            PromptTooLongError: raised by the `limit`.
        """
        instruction = self._template.instruction if system is None else system
        text_ids = self._encode(self._template.instruction_text(instruction), "the instruction", limit)
        token_ids = (*self._head_ids, *text_ids, *self._lead_ids)
        if not token_ids:
            return self._start
        return (
            *self._start,
            _counted(self._stored(PartKind.SYSTEM, token_ids, cache_salt, str(PartKind.SYSTEM)), limit),
        )

    def chunk_parts(
        self, chunks: Sequence[Chunk | str], *, cache_salt: str = "", limit: PromptLimit | None = None
    ) -> tuple[PromptPart, ...]:
        """The parts for chunks, in the order given, the same in every prompt.

        Raises:
            UsageError: a chunk is empty; the message names it.
            PromptTooLongError: raised by the `limit`.
        """
        return tuple(
            self.chunk_part(chunk, cache_salt=cache_salt, number=n, limit=limit) for n, chunk in enumerate(chunks)
        )

    def question_part(
        self,
        question: str,
        *,
        exchange: Rendered | None = None,
        continued: str = "",
        limit: PromptLimit | None = None,
    ) -> PromptPart:
        """The part for the question, followed by the template's tail or, if given, an `exchange`, and by `continued`.

        Raises:
            UsageError: the question is empty.
            PromptTooLongError: raised by the `limit`.
        """
        part = self._question(question, "the question", limit, exchange)
        if continued:
            if limit is not None:
                limit.check(self.tokenizer, continued, "the beginning of the answer")
            part = replace(part, token_ids=(*part.token_ids, *self.answer_ids(continued)))
        return _counted(part, limit)

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """Token ids of an answer as the model would generate it, without the token that ends it."""
        return tuple(self.tokenizer.encode(answer if self._tail_ids else f" {answer}"))

    @cached_property
    def turn_break_ids(self) -> tuple[int, ...]:
        """Token ids between an answer and the next turn.

        Raises:
            UsageError: the model's chat template does not support a second turn.
        """
        text = self._template.turn_break
        if text is None:
            return self.tokenizer.end_ids
        if not text:
            raise UsageError("the model's chat template does not support a second turn: no conversations are possible")
        return self._rendered_ids(Rendered(text, self._template.ordinary.turn_break))

    def turn_parts(
        self, question: PromptPart, answer_ids: Sequence[int], *, cache_salt: str = ""
    ) -> tuple[PromptPart, PromptPart]:
        """A past turn: the question and its answer without the last token, and that token with those that end a turn.

        The KV of the first part is known when the answer ends: the last token that is generated is not computed.

        Raises:
            UsageError: the model's chat template does not support a second turn.
        """
        token_ids = (*question.token_ids, *answer_ids)
        turn = self._stored(PartKind.TURN, token_ids[:-1], cache_salt, str(PartKind.TURN))
        end = self._stored(PartKind.TURN, (token_ids[-1], *self.turn_break_ids), cache_salt, "end of turn")
        return turn, replace(end, in_place=True)

    def answered_turn(
        self,
        prompt: Prompt,
        answer: str,
        answer_ids: Sequence[int],
        *,
        finder: ChunkFinder | None = None,
        cache_salt: str = "",
    ) -> PromptPart | None:
        """The part of a later prompt that has a prompt's question and its answer.

        With a `finder` the later prompt may differ from it at any place; else it is as a later prompt will have it that
        sends the answer's text again. None if there is no question, or the model's chat template does not support a
        second turn.
        """
        question = prompt.parts[-1]
        if question.kind is not PartKind.QUESTION:
            return None
        if finder is not None:
            start = self.tokenizer.start_ids
            return finder.answered(prompt, answer_ids, start, fingerprint=self._fingerprint, salt=cache_salt)
        if self._template.turn_break == "" or not answer.strip():
            return None
        return self.turn_parts(question, self.answer_ids(answer.strip()), cache_salt=cache_salt)[0]

    def _past_turn(
        self, question: str, answer: str | Rendered, cache_salt: str, limit: PromptLimit | None
    ) -> tuple[PromptPart, ...]:
        """A turn given as text; the generated answer may have had other token ids."""
        if not isinstance(answer, str):
            turn = self._question(question, "an earlier question", limit, answer)
            return (_counted(self._stored(PartKind.TURN, turn.token_ids, cache_salt, str(PartKind.TURN)), limit),)
        question_part = self._question(question, "an earlier question", limit)
        if limit is not None:
            limit.check(self.tokenizer, answer, "an earlier answer")
        parts = self.turn_parts(question_part, self.answer_ids(answer.strip()), cache_salt=cache_salt)
        return tuple(_counted(part, limit) for part in parts)

    def _question(
        self, question: str, which: str, limit: PromptLimit | None, behind: Rendered | None = None
    ) -> PromptPart:
        if not question.strip():
            raise UsageError(f"{which} is empty")
        text_ids = self._encode(self._template.question_text(question), which, limit)
        if behind is None:
            return PromptPart(PartKind.QUESTION, (*text_ids, *self._tail_ids))
        if limit is not None:
            limit.check(self.tokenizer, behind.text, f"what follows {which}")
        return PromptPart(PartKind.QUESTION, (*text_ids, *self._rendered_ids(behind)))

    def _stored(self, kind: PartKind, token_ids: tuple[int, ...], cache_salt: str, source: str = "") -> PromptPart:
        return PromptPart(kind, token_ids, chunk_id(self._fingerprint, cache_salt, token_ids), source)

    def _chunk_ids(self, text: str, cache_salt: str, which: str, limit: PromptLimit | None) -> tuple[int, ...]:
        token_ids = self._cache.get(text, cache_salt)
        if token_ids is None:
            token_ids = tuple(self._encode(self._template.chunk_text(text), which, limit))
            self._cache.put(text, token_ids, cache_salt)
        return token_ids

    def _rendered_ids(self, rendered: Rendered) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(rendered.text, control_tokens=True, ordinary=rendered.ordinary))

    def _encode(self, text: str, what: str, limit: PromptLimit | None) -> list[int]:
        if limit is not None:
            limit.check(self.tokenizer, text, what)
        return self.tokenizer.encode(text)


def _counted(part: PromptPart, limit: PromptLimit | None) -> PromptPart:
    if limit is not None:
        limit.count(part)
    return part
