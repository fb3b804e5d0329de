"""Tiers that fail on demand, and the prompts and records that the tests of the hierarchy use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event

from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.eviction import PathRequest
from chunkweave.store.index import RequestUse
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId, SegmentId


@dataclass(frozen=True, slots=True)
class Payload:
    """Says what it is the KV of."""

    record: SegmentRecord

    @property
    def segment(self) -> SegmentId:
        return self.record.id

    @property
    def exact(self) -> bool:
        return self.record.exact

    @property
    def nbytes(self) -> int:
        return self.record.nbytes

    @property
    def header(self) -> "Payload":
        """As a file has one: the record is part of it."""
        return self


class FaultyTier(HostTier[Payload]):
    """Works like memory until told otherwise; `factor` is what its codec makes of a payload's bytes."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.broken = False
        self.late = False
        self.gate: Event | None = None
        self.puts = 0
        self.gets = 0

    def put(self, record: SegmentRecord, payload: Payload) -> None:
        """Broken: nothing stays. Late: it arrives, but the caller has given up by then."""
        if self.gate is not None:
            assert self.gate.wait(10)
        self._answer()
        self.puts += 1
        super().put(record, payload)
        if self.late:
            raise TimeoutError("no answer in time")

    def get(self, segment: SegmentId) -> Payload | None:
        self._answer()
        self.gets += 1
        return super().get(segment)

    def delete(self, segment: SegmentId) -> None:
        self._answer()
        super().delete(segment)

    def nbytes(self, segment: SegmentId) -> int:
        return int(super().nbytes(segment) * self.factor)

    def size_of(self, record: SegmentRecord, payload: Payload) -> int:
        return int(payload.nbytes * self.factor)

    def records(self) -> Iterator[SegmentRecord]:
        self._answer()
        return iter([replace(record, nbytes=self.nbytes(record.id)) for record in super().records()])

    def payloads(self) -> dict[SegmentId, Payload]:
        """What lies here, whatever state the tier is in."""
        return {segment: payload for segment, (_, payload) in self._held.items()}

    def lose(self, segment: SegmentId) -> None:
        """It is gone, and nobody was told."""
        self._held.pop(segment, None)

    def _answer(self) -> None:
        if self.broken:
            raise OSError("the tier is down")


class SharedFaultyTier(FaultyTier):
    """One that other processes fill too."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__(factor)
        self.asked: list[list[SegmentId]] = []

    def find(self, segments: Sequence[SegmentId]) -> list[SegmentRecord]:
        self.asked.append(list(segments))
        return [record for record in self.records() if record.id in segments]


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def tokens(chunk: str) -> tuple[int, ...]:
    """Token ids of a chunk that is named by one letter."""
    return (ord(chunk), 7)


def id_of(path: str) -> SegmentId:
    """Id of the last chunk of `path`, computed after the others."""
    return segment_id(ChunkId(path[-1]), tuple(map(ChunkId, path[:-1])))


def record_of(path: str, *, exact: bool = True, nbytes: int = 10, source: str = "") -> SegmentRecord:
    """Record of the last chunk of `path`, computed after the others."""
    context = tuple(map(ChunkId, path[:-1]))
    return SegmentRecord.of(
        ChunkId(path[-1]), context, tokens(path[-1]), exact=exact, nbytes=nbytes, source=source or path[-1]
    )


def payload_of(record: SegmentRecord) -> Payload:
    """What belongs to a record."""
    return Payload(record)


def prompt_of(path: str) -> Prompt:
    """A prompt with one chunk a letter."""
    parts = [PromptPart(PartKind.CHUNK, tokens(chunk), ChunkId(chunk)) for chunk in path]
    return Prompt((PromptPart(PartKind.START, (1,)), *parts, PromptPart(PartKind.QUESTION, (2, 3))))


def use_of(*paths: str) -> RequestUse:
    """A request that used the segments of these paths, and missed nothing."""
    return RequestUse(PathRequest((), (), 0, 1), (), tuple(map(id_of, paths)), len(paths), 0)


def saved(impact: float, tokens: int = 2) -> float:
    """What a reuse with a CCI (1 - beta') adds to f_r."""
    return 1.0 / max(impact, 1.0 / tokens)


def reuse_of(path: str, impact: float) -> RequestUse:
    """A request that reused one segment with a CCI (1 - beta')."""
    return RequestUse(PathRequest((), (), 0, 1, saved={id_of(path): saved(impact)}), (), (), 0, 0)
