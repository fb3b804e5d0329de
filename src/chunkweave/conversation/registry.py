"""The registry of active conversations: bounded, separate by tenant, idle ones expire."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from chunkweave.config import ConversationConfig
from chunkweave.errors import (
    ConversationBusyError,
    ConversationEndedError,
    ConversationTurnError,
    QueueFullError,
    UsageError,
)
from chunkweave.prompt.parts import PromptPart
from chunkweave.types import SegmentId

Key = tuple[str, str]
"""(cache salt, conversation id): ids of different salts are independent."""

_MOST_FORGOTTEN = 16_384
"""Maximum number of forgotten conversations per tenant whose ids are remembered, as hashes."""

OnSegments = Callable[[Collection[SegmentId]], None]


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """A part of a conversation's history, and the segment with the KV that its answers were decoded over.

    `own` segments are of little use to other requests: turns, and chunks that were computed after one or woven for this
    conversation.
    """

    part: PromptPart
    segment: SegmentId
    own: bool


@dataclass(frozen=True, slots=True)
class PastTurn:
    """The chunks that were new in a turn; the last part is its question with the answer."""

    parts: tuple[HistoryPart, ...]

    @property
    def chunks(self) -> tuple[PromptPart, ...]:
        """The chunks that were sent with the turn."""
        return tuple(one.part for one in self.parts[:-1])

    @property
    def tokens(self) -> int:
        """Tokens of all its parts."""
        return sum(len(one.part) for one in self.parts)


@dataclass(frozen=True, slots=True)
class ConversationState:
    """A conversation between two turns. `system` is its instruction; None means the template's."""

    turns: tuple[PastTurn, ...] = ()
    system: str | None = None
    turn_count: int = 0
    """Number of turns so far, including those that were cut off."""


@dataclass(slots=True)
class _Entry:
    state: ConversationState
    used_s: float
    tenant: str
    busy: bool = False


class Conversations:
    """The conversations of one engine: `ChunkMap` of CRAFT §4.3, with the turns that contain its chunks.

    A turn starts with `begin` and ends with `commit` or `abandon`; until then no other turn of the conversation can
    start. Conversations are kept in this process only; after a restart the store still has their segments. If there are
    too many, the one that is idle longest is forgotten, among tenants above their share. `kept` is called with `own`
    segments when they join a conversation, `released` when no conversation holds them any more (cut, expired or
    closed). Thread-safe; both are called without the lock.
    """

    def __init__(
        self,
        config: ConversationConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        kept: OnSegments = lambda _: None,
        released: OnSegments = lambda _: None,
    ) -> None:
        self.config = config or ConversationConfig()
        self._clock = clock
        self._kept = kept
        self._released = released
        self._lock = Lock()
        self._entries: dict[Key, _Entry] = {}  # longest idle first
        self._forgotten: dict[str, dict[bytes, None]] = {}  # hashes of keys by tenant, oldest first
        self._holders: Counter[SegmentId] = Counter()
        self._freed: set[SegmentId] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def state(self, key: Key) -> ConversationState | None:
        """A conversation after its last finished turn, or None."""
        with self._changing():
            self._expire()
            entry = self._entries.get(key)
            return None if entry is None else entry.state

    def open(self, key: Key, system: str | None = None) -> None:
        """Create a conversation without turns, with its own instruction.

        Raises:
            UsageError: the key is in use.
            QueueFullError: the limit on conversations is reached, and none can be forgotten now.
        """
        with self._changing():
            self._expire()
            if key in self._entries:
                raise UsageError(f"the conversation {key[1]!r} already exists: continue it, or close it")
            self._enter(key, "", ConversationState(system=system))

    def begin(self, key: Key, *, tenant: str = "", turn: int | None = None) -> ConversationState:
        """Start a turn of a `tenant`'s conversation, or of a new one if the key is unknown.

        With a `turn` number (from 1), a new conversation is created only for turn 1. Without a number, a forgotten
        conversation is not created again while its id is remembered (`_MOST_FORGOTTEN` per tenant).

        Raises:
            ConversationBusyError: its last turn has not ended.
            ConversationEndedError: it was forgotten, or it does not exist and `turn` is above 1.
            ConversationTurnError: another turn comes next.
            QueueFullError: the limit on conversations is reached, and none can be forgotten now.
        """
        with self._changing():
            self._expire()
            entry = self._entries.get(key)
            gone = _digest(key) in self._forgotten.get(tenant, ()) if turn is None else turn > 1
            if entry is None and gone:
                raise ConversationEndedError(
                    f"the conversation {key[1]!r} no longer exists: it was idle for too long, was forgotten to make "
                    f"room, or this process was restarted; turn 1 starts it again"
                )
            entry = entry or self._enter(key, tenant, ConversationState())
            if entry.busy:
                raise ConversationBusyError(
                    f"the conversation {key[1]!r} is still being answered: wait for that answer, or abort it"
                )
            if turn not in (None, entry.state.turn_count + 1):
                raise ConversationTurnError(
                    f"the next turn of the conversation {key[1]!r} is turn {entry.state.turn_count + 1}, not {turn}"
                )
            entry.busy = True
            return entry.state

    def commit(self, key: Key, before: ConversationState, after: ConversationState) -> None:
        """End a turn that started from `before`: the state becomes `after`, unless the conversation was closed."""
        with self._changing():
            if self._rest(key, before):
                self._entries[key].state = after
                self._holders.update(_own(after.turns))
                self._let_go(_own(before.turns))
        if (held := _own(after.turns) - _own(before.turns)) and self.state(key) is after:
            self._kept(held)

    def holds(self, segment: SegmentId) -> bool:
        """Whether a segment is a conversation's own, so that it is dropped when no conversation holds it any more."""
        with self._lock:
            return self._holders[segment] > 0

    def abandon(self, key: Key, before: ConversationState) -> None:
        """End a turn without an answer: the state stays `before`. Idempotent."""
        with self._lock:
            self._rest(key, before)

    def close(self, key: Key) -> bool:
        """Forget a conversation, even while it is being answered; False if it is unknown."""
        with self._changing():
            if key not in self._entries:
                return False
            self._drop(key)
            return True

    def expire(self) -> int:
        """Forget conversations that were idle for too long; returns how many. Every `begin` does this too."""
        with self._changing():
            return self._expire()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; afterwards, without it, call `released` for segments that no conversation holds any more."""
        try:
            with self._lock:
                yield
        finally:
            with self._lock:
                free = {segment for segment in self._freed if segment not in self._holders}
                self._freed.clear()
            if free:
                self._released(free)

    def _enter(self, key: Key, tenant: str, state: ConversationState) -> _Entry:
        if len(self._entries) >= self.config.max_conversations:
            self._forget(self._dispensable(tenant))
        self._forgotten.get(tenant, {}).pop(_digest(key), None)
        entry = self._entries[key] = _Entry(state, self._clock(), tenant)
        return entry

    def _dispensable(self, tenant: str) -> Key:
        """The conversation to forget for a new one of `tenant`: the longest idle of tenants above their share."""
        held = Counter(entry.tenant for entry in self._entries.values())
        held[tenant] += 1
        equal = self.config.max_conversations // len(held)
        share = equal if self.config.share is None else min(equal, self.config.share)
        for key, entry in self._entries.items():
            if not entry.busy and held[entry.tenant] > share:
                return key
        raise QueueFullError(f"there are {len(self._entries)} conversations, and none of them can be forgotten now")

    def _forget(self, key: Key) -> None:
        entry = self._entries[key]
        if entry.state.turn_count:
            forgotten = self._forgotten.setdefault(entry.tenant, {})
            forgotten[_digest(key)] = None
            if len(forgotten) > _MOST_FORGOTTEN:
                del forgotten[next(iter(forgotten))]
        self._drop(key)

    def _rest(self, key: Key, before: ConversationState) -> bool:
        """End the turn that started from `before`; False if it had already ended."""
        entry = self._entries.get(key)
        if entry is None or not entry.busy or entry.state is not before:
            return False
        entry.busy, entry.used_s = False, self._clock()
        self._entries[key] = self._entries.pop(key)
        return True

    def _expire(self) -> int:
        if self.config.idle_s is None:
            return 0
        latest = self._clock() - self.config.idle_s
        expired = [key for key, entry in self._entries.items() if not entry.busy and entry.used_s < latest]
        for key in expired:
            self._forget(key)
        return len(expired)

    def _drop(self, key: Key) -> None:
        self._let_go(_own(self._entries.pop(key).state.turns))

    def _let_go(self, segments: Collection[SegmentId]) -> None:
        self._holders.subtract(segments)
        for segment in segments:
            if self._holders[segment] <= 0:
                del self._holders[segment]
                self._freed.add(segment)


def _digest(key: Key) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=16).digest()


def _own(turns: Sequence[PastTurn]) -> frozenset[SegmentId]:
    return frozenset(one.segment for turn in turns for one in turn.parts if one.own)
