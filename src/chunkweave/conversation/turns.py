"""Turns of conversations: a turn's prompt, and the state from which the next turn continues (CRAFT §4.3)."""

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from chunkweave.config import ConversationConfig
from chunkweave.conversation.registry import Conversations, ConversationState, HistoryPart, Key, PastTurn
from chunkweave.errors import PromptTooLongError
from chunkweave.planning.plan import Plan
from chunkweave.prompt.builder import PromptBuilder, PromptLimit
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.prompt.request import Request
from chunkweave.store.records import segment_id
from chunkweave.types import CacheUse, Chunk, ChunkId, SegmentId, Span

Build = Callable[[Request, PromptLimit], Prompt]
"""Builds the prompt of a request without a conversation id."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """The content of the next prompt between instruction and question.

    `kept` are the turns that stay; `cut` older ones were cut off. `new` are the chunks to send, `not_sent` those that
    are already in the prompt or were given twice.
    """

    kept: tuple[PastTurn, ...]
    cut: int
    new: tuple[PromptPart, ...]
    not_sent: tuple[PromptPart, ...]

    @property
    def history(self) -> tuple[HistoryPart, ...]:
        """All parts of the kept turns."""
        return tuple(part for turn in self.kept for part in turn.parts)

    @property
    def history_tokens(self) -> int:
        """Tokens of the kept turns."""
        return sum(turn.tokens for turn in self.kept)

    @property
    def tokens(self) -> int:
        """Tokens of the kept turns and the new chunks."""
        return self.history_tokens + sum(map(len, self.new))


def next_turn(
    turns: Sequence[PastTurn],
    chunks: Sequence[PromptPart],
    *,
    room: int,
    keep_tokens: int,
    deduplicate: bool = True,
) -> NextTurn:
    """The latest turns and new chunks that together have at most `room` tokens.

    All turns are kept if they fit. Else the oldest are cut off, until the rest fits and has at most `keep_tokens`. A
    chunk whose turn was cut off is new again. If no turn can be kept and the new chunks alone do not fit, the result
    exceeds `room`. Without `deduplicate` all chunks are sent as given.
    """
    sent_in: dict[ChunkId | None, int] = {}
    given = list(chunks)
    if deduplicate:
        first: dict[ChunkId | None, PromptPart] = {}
        for chunk in chunks:
            first.setdefault(chunk.id, chunk)
        given = list(first.values())
        sent_in = {chunk.id: number for number, turn in enumerate(turns) for chunk in turn.chunks}
    history_tokens = sum(turn.tokens for turn in turns)
    for cut in range(len(turns) + 1):
        new = [chunk for chunk in given if sent_in.get(chunk.id, -1) < cut]
        fits = history_tokens + sum(map(len, new)) <= room
        if cut == len(turns) or (fits and (not cut or history_tokens <= keep_tokens)):
            break
        history_tokens -= turns[cut].tokens
    return NextTurn(tuple(turns[cut:]), cut, tuple(new), tuple(_others(chunks, new)))


def _others(chunks: Sequence[PromptPart], new: Sequence[PromptPart]) -> Iterator[PromptPart]:
    left = Counter(chunk.id for chunk in new)
    for chunk in chunks:
        if left[chunk.id]:
            left[chunk.id] -= 1
        else:
            yield chunk


_ANSWER_SHARE = 4
"""At most this fraction (1/4) of the context is reserved for an answer; history is not cut for a longer one."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningTurn:
    """A question of a conversation that is being answered.

    `before` is the conversation's state before the turn, `system` its instruction, `content` the history and new chunks
    in the prompt. `closing` are the tokens that end the turn after its answer. `held` returns whether a segment is a
    conversation's own.
    """

    key: Key
    before: ConversationState
    system: str | None
    content: NextTurn
    closing: tuple[int, ...]
    held: Callable[[SegmentId], bool]

    def places(self, prompt: Prompt) -> Mapping[int, SegmentId]:
        """The segments of the history by index of their part in the turn's prompt."""
        first = next(
            (place for place, part in enumerate(prompt.parts) if part.kind not in (PartKind.START, PartKind.SYSTEM)), 0
        )
        return {first + place: one.segment for place, one in enumerate(self.content.history)}


_MOST_SENT_CHARACTERS = 32 << 20
"""Limit on the characters of all chunks in `SentChunks`."""


class SentChunks:
    """The chunks sent with each question, for clients that resend all messages: `ChunkMap` without ids.

    CRAFT §4.3 keeps the chunks in a session's context by session id. Here the key of a turn is its content: the salt,
    the instruction, all earlier questions and answers, and its own question, but not its answer. The limits on the
    number and idle time of conversations apply to turns. Beyond them, the longest idle turn of the salt with the most
    text is forgotten; its chunks are then not in the prompt and are sent again. Thread-safe.
    """

    def __init__(self, config: ConversationConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._lock = Lock()
        self._turns: dict[str, OrderedDict[bytes, tuple[float, tuple[Chunk, ...]]]] = {}
        self._characters: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    def before(self, request: Request) -> tuple[tuple[Chunk, ...], ...]:
        """For each question of a request's history, the chunks that were new with it; empty if unknown."""
        with self._lock:
            return tuple(self._found(request.cache_salt, key) for key in _turn_keys(request)[:-1])

    def note(self, request: Request, chunks: Sequence[Chunk]) -> None:
        """Note that a request was answered with these new chunks, in this order, before its question."""
        salt, key = request.cache_salt, _turn_keys(request)[-1]
        with self._lock:
            self._forget(salt, key)
            if chunks:
                self._turns.setdefault(salt, OrderedDict())[key] = self._clock(), tuple(chunks)
                self._characters[salt] += _characters(chunks)
            while len(self) > self._config.max_conversations or self._characters.total() > _MOST_SENT_CHARACTERS:
                most = max(self._turns, key=lambda one: self._characters[one])
                self._forget(most, next(iter(self._turns[most])))

    def _found(self, salt: str, key: bytes) -> tuple[Chunk, ...]:
        turns, idle_s = self._turns.get(salt), self._config.idle_s
        if turns is None or key not in turns:
            return ()
        since_s, chunks = turns[key]
        if idle_s is not None and self._clock() - since_s > idle_s:
            self._forget(salt, key)
            return ()
        turns[key] = self._clock(), chunks
        turns.move_to_end(key)
        return chunks

    def _forget(self, salt: str, key: bytes) -> None:
        turns = self._turns.get(salt)
        if turns is None or key not in turns:
            return
        self._characters[salt] -= _characters(turns.pop(key)[1])
        if not turns:
            del self._turns[salt], self._characters[salt]


def _characters(chunks: Sequence[Chunk]) -> int:
    return sum(len(chunk.text) + len(chunk.source) for chunk in chunks)


def _turn_keys(request: Request) -> list[bytes]:
    """A hash of the messages up to each question; the request's own question is last."""
    digest, keys = hashlib.blake2b(repr(request.system).encode(), digest_size=16), []
    for question, answer in (*request.history, (request.question, "")):
        digest.update(repr(question.strip()).encode())
        keys.append(digest.digest())
        digest.update(repr(answer.strip()).encode())
    return keys


class TurnBuilder:
    """Starts and ends turns with one model's builder. `conversations` holds the history."""

    def __init__(self, builder: PromptBuilder, conversations: Conversations, max_positions: int) -> None:
        self.conversations = conversations
        self._sent = SentChunks(conversations.config)
        self._builder = builder
        self._max_positions = max_positions

    def without_id(self, request: Request, build: Build, most_tokens: int) -> tuple[Request, Prompt, NextTurn | None]:
        """The prompt of a request without a conversation id, and the request that it was built from.

        With `deduplicate`, chunks sent with earlier questions are placed before these again, where their KV matches,
        and are not sent a second time. If the prompt does not fit, the chunks of the oldest turns are omitted there and
        are new again. The history itself is never cut.

        Raises:
            UsageError, PromptTooLongError: raised by `build`.
        """
        if not self.conversations.config.deduplicate or request.cache is CacheUse.OFF:
            return request, build(request, PromptLimit(most_tokens)), None
        held, given = self._sent.before(request), [_chunk(one) for one in request.chunks]
        room = most_tokens - min(request.sampling.max_new_tokens, most_tokens // _ANSWER_SHARE)
        for cut in range(len(held) + 1):
            kept = (*((),) * cut, *held[cut:])
            sent = {chunk.text for chunks in kept for chunk in chunks}
            new = list({chunk.text: chunk for chunk in reversed(given) if chunk.text not in sent}.values())[::-1]
            asked = replace(request, chunks=new, history_chunks=kept)
            try:
                prompt = build(asked, PromptLimit(most_tokens))
            except PromptTooLongError:
                if not any(kept):
                    raise
                continue
            if len(prompt) <= room or not any(kept):
                break
        others = Counter(chunk.text for chunk in given) - Counter(chunk.text for chunk in new)
        not_sent = self._builder.chunk_parts([*others.elements()], cache_salt=request.cache_salt)
        return asked, prompt, NextTurn((), 0, (), not_sent)

    def answered(self, request: Request, chunks: Sequence[Chunk | str]) -> None:
        """Note that a request without a conversation id was answered with these new `chunks`, in this order."""
        if self.conversations.config.deduplicate:
            self._sent.note(request, [_chunk(one) for one in chunks])

    def begin(self, request: Request, *, most_tokens: int | None = None) -> tuple[RunningTurn, Prompt]:
        """Start the turn of `request`; returns it with its prompt. End it with `end` or `abandon`.

        The oldest turns are cut off if prompt and answer would exceed `most_tokens` or the model's context.

        Raises:
            UsageError: an empty question or chunk, or a chat template that does not support a second turn.
            PromptTooLongError: the new turn alone does not fit.
            ConversationBusyError: the conversation's last question is still being answered.
            ConversationEndedError: it was forgotten.
            ConversationTurnError: the request's `turn` is not the next turn.
            QueueFullError: too many conversations are being answered.
        """
        assert request.conversation_id is not None, "a turn needs a conversation id"
        positions = min(self._max_positions, most_tokens or self._max_positions)
        limit = PromptLimit(positions)
        closing = self._builder.turn_break_ids
        question = self._builder.question_part(request.question, limit=limit)
        chunks = self._builder.chunk_parts(request.chunks, cache_salt=request.cache_salt, limit=limit)
        key = (request.cache_salt, request.conversation_id)
        before = self.conversations.begin(key, tenant=request.tenant, turn=request.turn)
        try:
            system = before.system if request.system is None else request.system
            opening = self._builder.opening(system=system, cache_salt=request.cache_salt, limit=limit)
            context = positions - len(closing)
            config = self.conversations.config
            most = context - 1 if config.max_tokens is None else min(context - 1, config.max_tokens)
            most_with_answer = min(most, context - min(request.sampling.max_new_tokens, context // _ANSWER_SHARE))
            fixed = sum(map(len, opening)) + len(question)
            content = next_turn(
                before.turns,
                chunks,
                room=most_with_answer - fixed,
                keep_tokens=int(config.keep * most_with_answer),
                deduplicate=config.deduplicate,
            )
            if fixed + content.tokens > most:
                raise PromptTooLongError(
                    f"the new turn alone has {fixed + content.tokens} tokens, but a turn of a conversation may have at "
                    f"most {most}; send fewer or smaller chunks"
                )
        except BaseException:
            self.conversations.abandon(key, before)
            raise
        parts = (*opening, *(one.part for one in content.history), *content.new, question)
        return RunningTurn(key, before, system, content, closing, self.conversations.holds), Prompt(parts)

    def said(self, turn: RunningTurn, prompt: Prompt, answer_ids: Sequence[int]) -> PromptPart:
        """The turn as a part of later prompts: its question, the complete answer, and the tokens that end it."""
        return self._builder.turn_part(prompt.parts[-1], answer_ids, cache_salt=turn.key[0])

    def end(
        self, turn: RunningTurn, prompt: Prompt, said: PromptPart, history: Sequence[HistoryPart] | None = None
    ) -> None:
        """Add the turn `said` to the conversation, after `history`; None if the KV is kept outside our store."""
        assert said.id is not None, "a turn has an id"
        own = history is not None
        if history is None:
            history = tuple(
                HistoryPart(part, segment_id(part.id, context), own=False)
                for part, context in zip(prompt.parts, prompt.contexts(), strict=True)
                if part.id is not None and part.kind is not PartKind.SYSTEM
            )
        turns: list[PastTurn] = []
        run: list[HistoryPart] = []
        for one in (*history, HistoryPart(said, segment_id(said.id, prompt.contexts()[-1]), own)):
            run.append(one)
            if one.part.kind is PartKind.TURN:
                turns.append(PastTurn(tuple(run)))
                run = []
        after = ConversationState(tuple(turns), turn.system, turn.before.turn_count + 1)
        self.conversations.commit(turn.key, turn.before, after)

    def abandon(self, turn: RunningTurn) -> None:
        """Discard the turn: the conversation stays in its earlier state. Does nothing after the turn has ended."""
        self.conversations.abandon(turn.key, turn.before)


def _chunk(chunk: Chunk | str) -> Chunk:
    return Chunk(chunk) if isinstance(chunk, str) else chunk


def history_after(prompt: Prompt, plan: Plan, turn: RunningTurn, woven: Collection[Span]) -> tuple[HistoryPart, ...]:
    """Chunks and turns of a prompt with the segments of their prefilled KV. Call it before storing.

    Parts whose spans are in `woven` are kept in their recomputed form. A chunk may have been taken from a
    conversation's own segments: of an earlier turn of this conversation, even a cut one, or of another conversation. It
    then becomes this conversation's own too, so that it is kept.
    """
    history: list[HistoryPart] = []
    behind_turn = False
    for part, context in zip(plan.parts, prompt.contexts(), strict=True):
        if part.part.id is None or part.part.kind is PartKind.SYSTEM:
            continue
        in_context = segment_id(part.part.id, context)
        segment = in_context if part.segment is None or part.span in woven else part.segment
        behind_turn = behind_turn or part.part.kind is PartKind.TURN
        own = part.span in woven or turn.held(segment) or (behind_turn and segment == in_context)
        history.append(HistoryPart(part.part, segment, own))
    return tuple(history)
