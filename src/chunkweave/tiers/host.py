"""Segments in the memory of this process."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class MeasuredPayload(Protocol):
    """Anything that knows how many bytes it occupies."""

    @property
    def nbytes(self) -> int:
        """Bytes occupied."""


MeasuredT = TypeVar("MeasuredT", bound=MeasuredPayload)


class HostTier(Generic[MeasuredT]):
    """Keeps payloads in a dict; implements `chunkweave.store.tier.Tier`.

    Payloads are immutable and handed out as they are, without a copy: one that was deleted here lives on
    while a request still holds it. The budget is the store's. Safe to use from several threads.
    """

    def __init__(self, moved: Callable[[MeasuredT], MeasuredT] | None = None) -> None:
        """An empty tier; `moved` brings a payload into this tier's memory (None: it is there already)."""
        self._moved = moved
        self._held: dict[SegmentId, tuple[SegmentRecord, MeasuredT]] = {}

    def put(self, record: SegmentRecord, payload: MeasuredT) -> None:
        """Keep `payload`, replacing one of the same id."""
        kept = payload if self._moved is None else self._moved(payload)
        self._held[record.id] = (replace(record, nbytes=kept.nbytes), kept)

    def get(self, segment: SegmentId) -> MeasuredT | None:
        """The payload itself, or None if it is not here."""
        held = self._held.get(segment)
        return None if held is None else held[1]

    def delete(self, segment: SegmentId) -> None:
        """Forget it; unknown ids are ignored."""
        self._held.pop(segment, None)

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes held for this id, 0 if it is not here."""
        held = self._held.get(segment)
        return 0 if held is None else held[0].nbytes

    def size_of(self, record: SegmentRecord, payload: MeasuredT) -> int:  # noqa: ARG002  (the protocol has it)
        """Bytes that the payload would take here."""
        return payload.nbytes

    def records(self) -> Iterator[SegmentRecord]:
        """Everything held, in no order; a snapshot, so the tier may change meanwhile."""
        return iter([record for record, _ in tuple(self._held.values())])
