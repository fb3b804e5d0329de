"""Chunks that earlier turns of a conversation have sent, for clients that resend all messages (CRAFT §4.3)."""

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock

from chunkweave.errors import PromptTooLongError
from chunkweave.prompt.builder import PromptBuilder, PromptLimit
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.prompt.request import Request
from chunkweave.types import CacheUse, Chunk

Build = Callable[[Request, PromptLimit], Prompt]
"""Builds the prompt of a request."""

_ANSWER_SHARE = 4
"""At most this fraction (1/4) of the context is reserved for an answer; no chunk is left out for a longer one."""
_MOST_TURNS = 16_384
_MAX_IDLE_S = 3600.0
_MOST_SENT_CHARACTERS = 32 << 20
"""Limit on the characters of all chunks in `SentChunks`."""


class SentChunks:
    """The chunks sent with each question, for clients that resend all messages: `ChunkMap` without ids.

    CRAFT §4.3 keeps the chunks in a session's context by session id. Here the key of a turn is its content: the salt,
    the instruction, all earlier questions and answers, and its own question, but not its answer. A turn that was idle
    for an hour is forgotten, and beyond `most_turns`, or too many characters, the longest idle turn of the salt with
    the most text; its chunks are then not in the prompt and are sent again. Thread-safe.
    """

    def __init__(self, *, most_turns: int = _MOST_TURNS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_turns = most_turns
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
        salt = request.cache_salt
        key = _turn_keys(request)[-1]
        with self._lock:
            self._forget(salt, key)
            if chunks:
                self._turns.setdefault(salt, OrderedDict())[key] = self._clock(), tuple(chunks)
                self._characters[salt] += _characters(chunks)
            while len(self) > self._most_turns or self._characters.total() > _MOST_SENT_CHARACTERS:
                most = max(self._turns, key=lambda key: self._characters[key])
                self._forget(most, next(iter(self._turns[most])))

    def _found(self, salt: str, key: bytes) -> tuple[Chunk, ...]:
        turns = self._turns.get(salt)
        if turns is None or key not in turns:
            return ()
        since_s, chunks = turns[key]
        if self._clock() - since_s > _MAX_IDLE_S:
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
    digest = hashlib.blake2b(repr(request.system).encode(), digest_size=16)
    keys = []
    for question, answer in (*request.history, (request.question, "")):
        digest.update(repr(question.strip()).encode())
        keys.append(digest.digest())
        digest.update(repr(answer.strip()).encode())
    return keys


class TurnBuilder:
    """Builds prompts with one model's builder. With `deduplicate` chunks of earlier turns are not sent again."""

    def __init__(self, builder: PromptBuilder, *, deduplicate: bool = False) -> None:
        self._sent = SentChunks() if deduplicate else None
        self._builder = builder

    def build(self, request: Request, build: Build, most_tokens: int) -> tuple[Request, Prompt, tuple[PromptPart, ...]]:
        """The prompt of a request, the request that it was built from, and the chunks that are not sent again.

        With `deduplicate`, chunks sent with earlier questions are placed before these again, where their KV matches,
        and are not sent a second time. If the prompt does not fit, the chunks of the oldest turns are omitted there and
        are new again. The history itself is never cut.

        Raises:
            UsageError, PromptTooLongError: raised by `build`.
        """
        if self._sent is None or request.cache is CacheUse.OFF:
            return request, build(request, PromptLimit(most_tokens)), ()
        held = self._sent.before(request)
        new_chunks = [_chunk(chunk) for chunk in request.chunks]
        room = most_tokens - min(request.sampling.max_new_tokens, most_tokens // _ANSWER_SHARE)
        for cut in range(len(held) + 1):
            remaining = (*((),) * cut, *held[cut:])
            sent = {chunk.text for chunks in remaining for chunk in chunks}
            new = list({chunk.text: chunk for chunk in reversed(new_chunks) if chunk.text not in sent}.values())[::-1]
            with_new_chunks = replace(request, chunks=new, history_chunks=remaining)
            try:
                prompt = build(with_new_chunks, PromptLimit(most_tokens))
            except PromptTooLongError:
                if not any(remaining):
                    raise
                continue
            if len(prompt) <= room or not any(remaining):
                break
        repeated = Counter(chunk.text for chunk in new_chunks) - Counter(chunk.text for chunk in new)
        return with_new_chunks, prompt, self._builder.chunk_parts([*repeated.elements()], cache_salt=request.cache_salt)

    def answered(self, request: Request, chunks: Sequence[Chunk | str]) -> None:
        """Note that a request was answered with these new `chunks`, in this order."""
        if self._sent is not None:
            self._sent.note(request, [_chunk(chunk) for chunk in chunks])


def _chunk(chunk: Chunk | str) -> Chunk:
    return Chunk(chunk) if isinstance(chunk, str) else chunk
