"""A trace: who asked when for which sequence of chunks. All that a simulation knows of requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, Context, SegmentId


@dataclass(frozen=True, slots=True)
class Part:
    """A stored part of a prompt: its name and its tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as a trace file has it: its parts in prompt order, with the tokens of the question behind them.

    With `has_system` the first part is the system part, which is no document and counts in no hit rate of documents.
    Requests of one `conversation` are its turns; one of none stands alone.
    """

    arrival_s: float
    parts: tuple[Part, ...]
    question_tokens: int = 0
    has_system: bool = False
    conversation: str = ""

    @property
    def documents(self) -> tuple[Part, ...]:
        """The parts without the system part."""
        return self.parts[int(self.has_system) :]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as the tree sees it: one record for each part, in the context of the parts before it."""

    arrival_s: float
    path: tuple[SegmentRecord, ...]
    question_tokens: int
    documents_from: int

    @property
    def documents(self) -> tuple[SegmentRecord, ...]:
        """The path without the system part."""
        return self.path[self.documents_from :]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(map(len, self.path)) + self.question_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by time of arrival, with records sized for one model."""

    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def equal_sizes(self) -> bool:
        """Whether all documents take the same room."""
        return len({record.nbytes for request in self.requests for record in request.documents}) <= 1

    @property
    def working_set_bytes(self) -> int:
        """Bytes that every distinct node of the trace takes together."""
        return sum({record.id: record.nbytes for request in self.requests for record in request.path}.values())


class PathRecords:
    """Records of parts in contexts, one object for each node, sized for a model of `bytes_per_token`."""

    def __init__(self, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._nodes: dict[tuple[SegmentId | None, str], SegmentRecord] = {}
        self._ids: dict[int, tuple[int, ...]] = {}

    def path(self, parts: Iterable[Part]) -> tuple[SegmentRecord, ...]:
        """The records of `parts` one behind the other."""
        path: list[SegmentRecord] = []
        context: Context = ()
        for part in parts:
            key = (path[-1].id if path else None, part.name)
            if key not in self._nodes:
                tokens = self._ids.setdefault(part.tokens, tuple([0] * part.tokens))
                nbytes = part.tokens * self._bytes_per_token
                self._nodes[key] = SegmentRecord.of(key_of(part), context, tokens, exact=True, nbytes=nbytes)
            path.append(self._nodes[key])
            context = (*context, self._nodes[key].chunk_id)
        return tuple(path)


def key_of(part: Part) -> ChunkId:
    """The name of a part as an id, which has ASCII alone."""
    return ChunkId(part.name.encode("unicode_escape").decode("ascii"))


def build_trace(name: str, arrivals: Iterable[Arrival], bytes_per_token: int) -> Trace:
    """Records for every part in every context, one object for each node: `bytes_per_token` is the model's KV.

    A node's size is that of its first arrival. Requests are sorted by time; those of equal times keep their order.
    """
    nodes = PathRecords(bytes_per_token)
    requests = [
        TraceRequest(arrival.arrival_s, nodes.path(arrival.parts), arrival.question_tokens, int(arrival.has_system))
        for arrival in sorted(arrivals, key=lambda one: one.arrival_s)
    ]
    return Trace(name, tuple(requests))


def poisson_times(count: int, rate_per_s: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process, in seconds."""
    rng = Random(f"arrivals {seed}")
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += rng.expovariate(rate_per_s)
        times.append(now_s)
    return times


def at_times(arrivals: Sequence[Arrival], times: Sequence[float]) -> list[Arrival]:
    """The same requests at other times, in the same order."""
    return [
        Arrival(time_s, one.parts, one.question_tokens, one.has_system, one.conversation)
        for one, time_s in zip(arrivals, times, strict=True)
    ]
