"""Payloads under way: into a tier, with room reserved for them, or out of it."""

from collections.abc import Callable, Mapping
from weakref import ref

from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class Claim:
    """One segment's payload under way, claimed by the thread that moves it. Nobody else may move that segment.

    `nbytes` are reserved for it meanwhile. Whoever fails sets `given_up`, which needs no lock; the store refers to
    claims weakly, so that one whose thread was interrupted between two statements is given up once it is collected.
    `unwanted` is set by the store when the segment is removed while it is being written.
    """

    __slots__ = ("__weakref__", "given_up", "nbytes", "record", "unwanted")

    def __init__(self, record: SegmentRecord, nbytes: int) -> None:
        self.record = record
        self.nbytes = nbytes
        self.given_up = False
        self.unwanted = False


class UnderWay:
    """The claims of one store, by segment. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self._claims: dict[SegmentId, tuple[ref[Claim], int]] = {}

    def __contains__(self, segment: SegmentId) -> bool:
        return segment in self._claims

    def add(self, claim: Claim) -> None:
        """Enter a claim on a segment that nobody else is moving."""
        self._claims[claim.record.id] = (ref(claim), claim.nbytes)

    def remove(self, segment: SegmentId) -> None:
        """The move has ended; unknown ids are ignored."""
        self._claims.pop(segment, None)

    def cancel_where(self, doomed: Callable[[SegmentRecord], bool]) -> None:
        """Whatever is being written under such a record is not to be published."""
        for weak, _ in self._claims.values():
            claim = weak()
            if claim is not None and doomed(claim.record):
                claim.unwanted = True

    def ids(self) -> set[SegmentId]:
        """Segments under way, or left behind by a thread that failed."""
        return set(self._claims)

    def broken(self) -> list[SegmentId]:
        """Segments whose move failed: what the tier has of them is to go."""
        return [segment for segment, (weak, _) in self._claims.items() if _is_broken(weak())]

    def extra_bytes(self, records: Mapping[SegmentId, SegmentRecord]) -> int:
        """Bytes reserved beyond those of the records that are going to be replaced."""
        return sum(
            max(0, nbytes - (records[segment].nbytes if segment in records else 0))
            for segment, (_, nbytes) in self._claims.items()
        )


def _is_broken(claim: Claim | None) -> bool:
    return claim is None or claim.given_up
