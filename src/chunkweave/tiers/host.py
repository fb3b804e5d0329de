"""Segments in the memory of this process."""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

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
    while a request still holds it. The budget is the store's, and so is the lock around several calls.
    """

    def __init__(self) -> None:
        self._payloads: dict[SegmentId, MeasuredT] = {}

    def put(self, segment: SegmentId, payload: MeasuredT) -> None:
        """Keep `payload`, replacing one of the same id."""
        self._payloads[segment] = payload

    def get(self, segment: SegmentId) -> MeasuredT | None:
        """The payload itself, or None if it is not here."""
        return self._payloads.get(segment)

    def delete(self, segment: SegmentId) -> None:
        """Forget it; unknown ids are ignored."""
        self._payloads.pop(segment, None)

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes held for this id, 0 if it is not here."""
        payload = self._payloads.get(segment)
        return 0 if payload is None else payload.nbytes

    def ids(self) -> Iterator[SegmentId]:
        """All ids held, in no order; a snapshot, so the tier may change meanwhile."""
        return iter(tuple(self._payloads))
