"""The conversations that are going on: a bounded number, each tenant's apart, idle ones forgotten."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from chunkweave.chunking.prompt import PromptPart
from chunkweave.config import ConversationConfig
from chunkweave.errors import ConversationBusyError, QueueFullError, UsageError
from chunkweave.types import SegmentId

Key = tuple[str, str]
"""(cache salt, conversation id): ids of different tenants never meet."""

OnSegments = Callable[[Collection[SegmentId]], None]


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """A part that a conversation's context holds, and the segment with the KV that its answers were decoded over.

    It is the conversation's `own` if other requests can hardly use it: a turn, or a chunk that was computed after one
    or woven for this conversation.
    """

    part: PromptPart
    segment: SegmentId
    own: bool


@dataclass(frozen=True, slots=True)
class PastTurn:
    """The chunks that were new in a turn, and as the last part its question with the answer."""

    parts: tuple[HistoryPart, ...]

    @property
    def chunks(self) -> tuple[PromptPart, ...]:
        """The chunks that were sent with it."""
        return tuple(one.part for one in self.parts[:-1])

    @property
    def tokens(self) -> int:
        """Tokens of all its parts."""
        return sum(len(one.part) for one in self.parts)


@dataclass(frozen=True, slots=True)
class ConversationState:
    """A conversation as it is between two turns. `system` is its instruction, None the template's own."""

    turns: tuple[PastTurn, ...] = ()
    system: str | None = None
    turn_count: int = 0
    """Turns so far, with those that were cut off."""


@dataclass(slots=True)
class _Entry:
    state: ConversationState
    used_s: float
    busy: bool = False


class Conversations:
    """The conversations of one engine: `ChunkMap` of CRAFT §4.3, with the turns that hold its chunks.

    A turn begins with `begin` and ends with `commit` or `abandon`; in between no other turn of it may begin.
    Conversations live in this process alone; a restarted one finds segments in its store, not conversations. `kept` is
    called with segments that only conversations can use when they join one, `released` when no conversation has them
    any more: it was cut, expired or closed. Thread-safe; both are called without the lock held.
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
        self._entries: dict[Key, _Entry] = {}  # the one idle for longest first
        self._holders: Counter[SegmentId] = Counter()
        self._freed: set[SegmentId] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def state(self, key: Key) -> ConversationState | None:
        """A conversation as of its last finished turn; None if there is none of that key."""
        with self._changing():
            self._expire()
            entry = self._entries.get(key)
            return None if entry is None else entry.state

    def open(self, key: Key, system: str | None = None) -> None:
        """Begin a conversation that has no turn yet, with an instruction of its own.

        Raises:
            UsageError: there is one of that key.
            QueueFullError: there are as many as may be, and all are being answered.
        """
        with self._changing():
            self._expire()
            if key in self._entries:
                raise UsageError(f"there is a conversation {key[1]!r} already: go on with it, or close it")
            self._enter(key, ConversationState(system=system))

    def begin(self, key: Key) -> ConversationState:
        """Begin a turn, of a new conversation if there is none of that key.

        Raises:
            ConversationBusyError: its last turn has not ended.
            QueueFullError: there are as many as may be, and all are being answered.
        """
        with self._changing():
            self._expire()
            entry = self._entries.get(key) or self._enter(key, ConversationState())
            if entry.busy:
                raise ConversationBusyError(
                    f"the conversation {key[1]!r} is still being answered: wait for that answer, or abort it"
                )
            entry.busy = True
            return entry.state

    def commit(self, key: Key, before: ConversationState, after: ConversationState) -> None:
        """End a turn that began with `before`: the conversation is as `after` says, unless it was closed meanwhile."""
        with self._changing():
            if self._rest(key, before):
                self._entries[key].state = after
                self._holders.update(_own(after.turns))
                self._let_go(_own(before.turns))
        if (held := _own(after.turns) - _own(before.turns)) and self.state(key) is after:
            self._kept(held)

    def abandon(self, key: Key, before: ConversationState) -> None:
        """End a turn without an answer: the conversation is as it was `before`. A second time is harmless."""
        with self._lock:
            self._rest(key, before)

    def close(self, key: Key) -> bool:
        """Forget a conversation, whatever it is doing; False if it is not known."""
        with self._changing():
            if key not in self._entries:
                return False
            self._drop(key)
            return True

    def expire(self) -> int:
        """Forget those that were idle for too long; returns how many. It happens with every turn that begins, too."""
        with self._changing():
            return self._expire()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; afterwards, without it, release the segments that no conversation holds any more."""
        try:
            with self._lock:
                yield
        finally:
            with self._lock:
                free = {segment for segment in self._freed if segment not in self._holders}
                self._freed.clear()
            if free:
                self._released(free)

    def _enter(self, key: Key, state: ConversationState) -> _Entry:
        if len(self._entries) >= self.config.max_conversations:
            idle = next((other for other, entry in self._entries.items() if not entry.busy), None)
            if idle is None:
                raise QueueFullError(f"{len(self._entries)} conversations are being answered, and no more may be")
            self._drop(idle)
        entry = self._entries[key] = _Entry(state, self._clock())
        return entry

    def _rest(self, key: Key, before: ConversationState) -> bool:
        """Whether the turn that began with `before` is still going on; from now on it is not."""
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
            self._drop(key)
        return len(expired)

    def _drop(self, key: Key) -> None:
        self._let_go(_own(self._entries.pop(key).state.turns))

    def _let_go(self, segments: Collection[SegmentId]) -> None:
        self._holders.subtract(segments)
        for segment in segments:
            if self._holders[segment] <= 0:
                del self._holders[segment]
                self._freed.add(segment)


def _own(turns: Sequence[PastTurn]) -> frozenset[SegmentId]:
    return frozenset(one.segment for turn in turns for one in turn.parts if one.own)
