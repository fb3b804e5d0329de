"""What of a conversation goes into its next prompt: which turns stay, which chunks are new (CRAFT §4.3)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chunkweave.chunking.prompt import PromptPart
from chunkweave.types import ChunkId, SegmentId


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """A part that a conversation's context holds, and the segment with the KV that its answers were decoded over.

    It is the conversation's `own` if hardly anybody else can use it: a turn, or what was computed behind one or woven
    for this conversation.
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
class NextTurn:
    """What the next prompt holds between instruction and question.

    `kept` are the turns that stay, of which `cut` older ones were cut off; `new` are the chunks to send, `not_sent`
    those that are there already, or were given twice.
    """

    kept: tuple[PastTurn, ...]
    cut: int
    new: tuple[PromptPart, ...]
    not_sent: tuple[PromptPart, ...]

    @property
    def history(self) -> tuple[HistoryPart, ...]:
        """All parts of the turns that stay."""
        return tuple(part for turn in self.kept for part in turn.parts)

    @property
    def history_tokens(self) -> int:
        """Tokens of the turns that stay."""
        return sum(turn.tokens for turn in self.kept)

    @property
    def tokens(self) -> int:
        """Tokens of the turns that stay and of the new chunks."""
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

    All turns if they fit. Else the oldest are cut off: of the rest as many stay as fit and have at most `keep_tokens`.
    A chunk whose turn was cut off is new again. If nothing can stay and the new chunks alone do not fit, the result is
    larger than `room`. Without `deduplicate` all chunks are sent, as they are given.
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
