"""What keeps a segment from being evicted: the leases of requests, and claims of threads that move its payload."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self
from weakref import ref

from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class Lease:
    """Pins segments until it is released; a context manager that releases on leaving.

    Leases are made by `SegmentStore.lease`. The store refers to them weakly: one that is dropped without
    a release (an abandoned stream, an interrupt at the wrong moment) pins nothing once it is collected.

    Releasing takes no lock and touches nothing of the store's, since it may run inside a finalizer, in the
    middle of one of the store's own changes. For the same reason pins are not counted in the store:
    a segment is pinned while some live lease names it.
    """

    __slots__ = ("__weakref__", "_ids", "_released")

    def __init__(self, ids: Iterable[SegmentId]) -> None:
        self._ids = tuple(ids)
        self._released = False

    @property
    def ids(self) -> tuple[SegmentId, ...]:
        """Segments pinned by this lease, in the order asked for; empty after the release."""
        return () if self._released else self._ids

    def release(self) -> None:
        """Unpin everything. A second release is harmless."""
        self._released = True

    def forget(self, segment: SegmentId) -> None:
        """For the store alone: the segment is gone, and one stored later under its id is not pinned by this."""
        self._ids = tuple(other for other in self._ids if other != segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class TieredLease(Lease):
    """One lease a level; releases them all, on leaving a `with` block too. Abandoned, it pins nothing."""

    __slots__ = ("_leases",)

    def __init__(self, ids: Iterable[SegmentId], leases: Sequence[Lease]) -> None:
        super().__init__(ids)
        self._leases = tuple(leases)

    @property
    def ids(self) -> tuple[SegmentId, ...]:
        """Segments pinned on some level, in the order asked for; empty after the release."""
        pinned = {segment for lease in self._leases for segment in lease.ids}
        return tuple(segment for segment in self._ids if segment in pinned)

    def release(self) -> None:
        """Unpin everything. A second release is harmless."""
        for lease in self._leases:
            lease.release()


class Pins:
    """The leases of one store, referred to weakly. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self._leases: list[ref[Lease]] = []

    def lease(self, ids: Iterable[SegmentId]) -> Lease:
        """A new lease on `ids`; it pins them until it is released or collected."""
        lease = Lease(ids)
        self._leases = [ref(other) for other in (*self._live(), lease)]
        return lease

    def ids(self) -> set[SegmentId]:
        """Segments that some live lease names."""
        return {segment for lease in self._live() for segment in lease.ids}

    def forget(self, segment: SegmentId) -> None:
        """The segment is gone: leases on it do not pin one stored later under its id."""
        for lease in self._live():
            lease.forget(segment)

    def _live(self) -> list[Lease]:
        # Not a WeakSet: an object collected by another thread may change that while it is iterated over.
        return [lease for lease in (weak() for weak in self._leases) if lease is not None and lease.ids]


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


class Claims:
    """The claims of one store, by segment. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self._claims: dict[SegmentId, tuple[ref[Claim], int, SegmentRecord]] = {}

    def __contains__(self, segment: SegmentId) -> bool:
        return segment in self._claims

    def add(self, claim: Claim) -> None:
        """Enter a claim on a segment that has none."""
        self._claims[claim.record.id] = (ref(claim), claim.nbytes, claim.record)

    def remove(self, segment: SegmentId) -> None:
        """The move has ended; unknown ids are ignored."""
        self._claims.pop(segment, None)

    def cancel_where(self, doomed: Callable[[SegmentRecord], bool]) -> None:
        """Whatever is being written under such a record is not to be published."""
        for weak, _, _ in self._claims.values():
            claim = weak()
            if claim is not None and doomed(claim.record):
                claim.unwanted = True

    def ids(self) -> set[SegmentId]:
        """Segments under way, or left behind by a thread that failed."""
        return set(self._claims)

    def broken(self) -> list[SegmentRecord]:
        """Segments whose move failed: what the tier has of them is to go."""
        claims = ((record, weak()) for weak, _, record in self._claims.values())
        return [record for record, claim in claims if claim is None or claim.given_up]

    def extra_bytes(self, records: Mapping[SegmentId, SegmentRecord]) -> int:
        """Bytes reserved beyond those of the records that are going to be replaced."""
        return sum(
            max(0, nbytes - (records[segment].nbytes if segment in records else 0))
            for segment, (_, nbytes, _) in self._claims.items()
        )
