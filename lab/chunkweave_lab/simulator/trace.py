"""Traces: arrival time and sequence of chunks of each request."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from chunkweave.calibration.questions import json_lines, read_entry, read_text
from chunkweave.errors import DocumentError
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, Context, SegmentId


@dataclass(frozen=True, slots=True)
class Part:
    """A stored part of a prompt: its name and its tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace file: its parts in prompt order, and the tokens of its question.

    With `has_system` the first part is the system part, which does not count in the hit rate of documents. Requests
    with the same `conversation` are its turns; an empty one means an independent request.
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
    """A request for the tree: one record per part, in the context of the parts before it."""

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
        """Whether all documents have the same size."""
        return len({record.nbytes for request in self.requests for record in request.documents}) <= 1

    @property
    def working_set_bytes(self) -> int:
        """Bytes of all distinct nodes of the trace."""
        return sum({record.id: record.nbytes for request in self.requests for record in request.path}.values())


class PathRecords:
    """Records of parts in contexts, one object per node, sized for a model with `bytes_per_token`."""

    def __init__(self, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._nodes: dict[tuple[SegmentId | None, str], SegmentRecord] = {}
        self._ids: dict[int, tuple[int, ...]] = {}

    def path(self, parts: Iterable[Part]) -> tuple[SegmentRecord, ...]:
        """The records of consecutive `parts`."""
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
    """The name of a part as an id, which is ASCII only."""
    return ChunkId(part.name.encode("unicode_escape").decode("ascii"))


def build_trace(name: str, arrivals: Iterable[Arrival], bytes_per_token: int) -> Trace:
    """Records for every part in every context, one object per node, with `bytes_per_token` of KV.

    A node's size is that of its first arrival. Requests are sorted by time; the sort is stable.
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
    """The same requests in the same order, with other arrival times."""
    return [replace(one, arrival_s=time_s) for one, time_s in zip(arrivals, times, strict=True)]


MOONCAKE_BLOCK_TOKENS = 512


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace; the format is detected by the first line.

    - Mooncake: `{"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [..]}`. A hash id names a block of
      512 tokens after all earlier blocks, so each is a part; a last, shorter block counts as a whole one, since KV
      memory is allocated in blocks.
    - Our own: `{"arrival_s": 0.5, "system": {"id": "s", "tokens": 90}, "chunks": [{"id": "a", "tokens": 512}, ..],
      "question_tokens": 30, "conversation_id": "c"}`; only time and chunks are required.

    Raises:
        DocumentError: the file cannot be read or a line is not a request; the message has file, line and reason.
    """
    read: Callable[[dict[str, Any]], Arrival] | None = None
    arrivals = []
    for where, entry in json_lines(path, read_text(path, "trace")):
        if read is None:
            read = _mooncake if isinstance(entry, dict) and "hash_ids" in entry else _own
        arrivals.append(read_entry(where, entry, read))
    if not arrivals:
        raise DocumentError(f"{path} has no request")
    return arrivals


def _mooncake(entry: dict[str, Any]) -> Arrival:
    blocks = _list(entry, "hash_ids")
    return Arrival(
        _number(entry, "timestamp") / 1000.0, tuple(Part(str(block), MOONCAKE_BLOCK_TOKENS) for block in blocks)
    )


def _own(entry: dict[str, Any]) -> Arrival:
    parts = [_part(chunk, f"chunk {place}") for place, chunk in enumerate(_list(entry, "chunks"))]
    system = entry.get("system")
    if system is not None:
        parts.insert(0, _part(system, "system"))
    question_tokens = _whole(entry, "question_tokens") if "question_tokens" in entry else 0
    conversation = str(entry.get("conversation_id") or "")
    return Arrival(_number(entry, "arrival_s"), tuple(parts), question_tokens, system is not None, conversation)


def _part(entry: object, what: str) -> Part:
    if not isinstance(entry, dict):
        raise TypeError(f"{what} is not an object but {type(entry).__name__}")
    tokens = _whole(entry, "tokens")
    if tokens == 0:
        raise ValueError(f"{what} has no tokens")
    return Part(str(entry["id"]), tokens)


def _list(entry: dict[str, Any], key: str) -> list[Any]:
    value = entry[key]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key!r} is not a non-empty list")
    return value


def _number(entry: dict[str, Any], key: str) -> float:
    value = entry[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{key!r} is not a number of at least 0: {value!r}")
    return float(value)


def _whole(entry: dict[str, Any], key: str) -> int:
    value = _number(entry, key)
    if value != int(value):
        raise ValueError(f"{key!r} is not a whole number: {value!r}")
    return int(value)
