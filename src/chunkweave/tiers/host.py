"""The host tier: segments in the memory of this process."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class MeasuredPayload(Protocol):
    """A payload that reports its size."""

    @property
    def nbytes(self) -> int:
        """Bytes occupied."""


MeasuredT = TypeVar("MeasuredT", bound=MeasuredPayload)


class HostTier(Generic[MeasuredT]):
    """Keeps payloads in a dict; implements `chunkweave.store.tier.Tier`.

    Payloads are immutable and returned without a copy: a deleted payload stays alive while a request holds it. The
    store enforces the budget. Thread-safe.
    """

    def __init__(self, moved: Callable[[MeasuredT], MeasuredT] | None = None) -> None:
        """An empty tier; `moved` copies a payload into this tier's memory (None: it is already there)."""
        self._moved = moved
        self._held: dict[SegmentId, tuple[SegmentRecord, MeasuredT]] = {}

    def put(self, record: SegmentRecord, payload: MeasuredT) -> None:
        """Store `payload`, replacing one with the same id."""
        stored = payload if self._moved is None else self._moved(payload)
        self._held[record.id] = (replace(record, nbytes=stored.nbytes), stored)

    def get(self, segment: SegmentId) -> MeasuredT | None:
        """The payload itself, or None if it is not stored."""
        held = self._held.get(segment)
        return None if held is None else held[1]

    def delete(self, segment: SegmentId) -> None:
        """Delete a payload; unknown ids are ignored."""
        self._held.pop(segment, None)

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes of a stored payload, 0 if it is not stored."""
        held = self._held.get(segment)
        return 0 if held is None else held[0].nbytes

    def size_of(self, record: SegmentRecord, payload: MeasuredT) -> int:  # noqa: ARG002  (the protocol has it)
        """Bytes that a payload would take."""
        return payload.nbytes

    def records(self) -> Iterator[SegmentRecord]:
        """A snapshot of all records, in no order; the tier may change during iteration."""
        return iter([record for record, _ in tuple(self._held.values())])
