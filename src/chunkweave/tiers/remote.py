"""The remote tier: segments on another machine, which may be slow, unreachable, restarted, full or corrupt."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event, Lock
from typing import Self
from weakref import WeakSet

from chunkweave.errors import UsageError
from chunkweave.kv.segment import Codec, RawCodec, SegmentLost, SegmentSource
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.blobs import BlobKey, BlobRefused, BlobStore
from chunkweave.tiers.remote_calls import Backoff, BreakerState, CircuitBreaker, RemoteCalls, RemoteGarbage
from chunkweave.tiers.segment_file import MemorySegment, encode_segment, file_bytes
from chunkweave.tiers.segment_header import FileProblem, SegmentHeader, SegmentRefused, header_size, parse_header
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Counters since the tier was opened.

    `unavailable` counts reads without an answer (including those refused by the open breaker), `garbage` reads with
    invalid bytes, `refused` segments of another format version. `bytes_in` and `bytes_out` are bytes of whole segments.
    """

    hits: int = 0
    misses: int = 0
    unavailable: int = 0
    garbage: int = 0
    refused: int = 0
    puts: int = 0
    failed_puts: int = 0
    failed_deletes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class RunningPut:
    """One put, from its first attempt until the last thread that runs it has ended."""

    key: BlobKey
    deleted: Event = field(default_factory=Event)
    """Set if the key was deleted since: the put must remove what it wrote and write nothing more."""


class Deletions:
    """Tracks deleted keys that may still be in the remote, or be written later. Thread-safe.

    An abandoned put keeps running in its thread and may arrive after a deletion: it is marked, and its thread deletes
    what it wrote. A failed deletion is pending ("owed"): its key reads as a miss here, and the deletion is retried.
    Pending deletions are lost when the process ends; `owed` lists them.
    """

    def __init__(self, *, max_owed: int = 100_000) -> None:
        self._max_owed = max_owed
        self._lock = Lock()
        self._owed: dict[BlobKey, None] = {}
        self._puts: WeakSet[RunningPut] = WeakSet()

    def begin_put(self, key: BlobKey) -> RunningPut:
        """Register a put of `key`; it replaces a pending deletion."""
        put = RunningPut(key)
        with self._lock:
            self._owed.pop(key, None)
            self._puts.add(put)
        return put

    def delete(self, key: BlobKey) -> None:
        """Register a deletion of `key`: pending until `settled`. Marks every running put of `key`."""
        with self._lock:
            for put in self._puts:
                if put.key == key:
                    put.deleted.set()
            self._owed[key] = None
            if len(self._owed) > self._max_owed:
                oldest = next(iter(self._owed))
                del self._owed[oldest]
                logger.error("too many deletions are pending; segment %s may stay in the remote store", oldest.segment)

    def settled(self, key: BlobKey) -> None:
        """Note that the remote has deleted `key`."""
        with self._lock:
            self._owed.pop(key, None)

    def is_owed(self, key: BlobKey) -> bool:
        """Whether the deletion of `key` is pending."""
        with self._lock:
            return key in self._owed

    def owed(self, limit: int | None = None) -> tuple[BlobKey, ...]:
        """Keys whose deletion is pending, oldest first."""
        with self._lock:
            return tuple(self._owed)[:limit]


_OWED_AT_ONCE = 8
_HEAD_BYTES = 64 << 10
"""First bytes read for a header: a whole header for up to some thousand tokens, cheaper than a round trip."""


def fetch_header(blobs: BlobStore, key: BlobKey) -> SegmentHeader | None:
    """The validated header of the segment under `key`, or None. Two calls, three if it is very long.

    Raises the `SegmentRefused` of `parse_header`, and `OSError` if the store does not answer.
    """
    total_bytes, head = blobs.size(key), blobs.get(key, _HEAD_BYTES)
    if total_bytes is None or head is None:
        return None
    needed = header_size(head, total_bytes)
    return parse_header(head if needed <= len(head) else blobs.get(key, needed) or b"", total_bytes)


class RemoteNote:
    """A short text that all processes with a remote agree on. Use it as a context manager."""

    def __init__(self, blobs: BlobStore, name: str, *, deadline_s: float = 5.0) -> None:
        self._blobs, self._key = blobs, BlobKey(name, SegmentId("0" * 32))
        breaker = CircuitBreaker(f"remote store {blobs.name}")
        self._calls = RemoteCalls(deadline_s=deadline_s, breaker=breaker, cut=blobs.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._blobs.close()

    def agree(self, proposed: Callable[[], str], allowed: Collection[str]) -> str:
        """The remote's text if it is `allowed`, else `proposed`, which is written there. It need not answer."""
        text = None
        try:
            found = self._read(allowed)
            if found is None:
                text = proposed()
                data = text.encode()
                self._calls.call(lambda: self._blobs.put(self._key, data))
                found = self._read(allowed) or text  # of two that write at the same time, the later one counts
        except OSError as error:
            logger.warning("%s does not say %s: %s", self._blobs.name, self._key.fingerprint, error)
            return text or proposed()
        return found

    def _read(self, allowed: Collection[str]) -> str | None:
        data = self._calls.call(lambda: self._blobs.get(self._key, 64))
        text = (data or b"").decode(errors="replace")
        return text if text in allowed else None


class RemoteTier:
    """Stores segments in a `BlobStore`; implements `chunkweave.store.tier.Tier[SegmentSource]`.

    A read that exceeds `deadline_s` is a miss. It is counted; the log has one line when the remote stops working and
    one when it works again. The remote is not trusted: sizes are limited, and checksums, fingerprint and id in the
    bytes must match. The bytes are in the disk format. Other processes use the remote at the same time, so its contents
    may change at any time. Thread-safe.
    """

    def __init__(
        self,
        blobs: BlobStore,
        fingerprint: str,
        *,
        codec: Codec | None = None,
        deadline_s: float = 2.0,
        breaker: CircuitBreaker | None = None,
        backoff: Backoff | None = None,
        ttl_s: float | None = None,
        max_bytes: int = 512 << 20,
        max_listed: int = 100_000,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create the tier without calling the remote, which may be down.

        Args:
            blobs: stores the bytes.
            fingerprint: of the model; part of every key, so that models share a remote but no segments.
            codec: for new segments; stored ones are read by the codec that they name. Raw if None.
            deadline_s: longest time that one call waits for the remote, including retries.
            breaker: the circuit breaker; one with defaults if None.
            backoff: pauses between retries; defaults if None.
            ttl_s: seconds after its put at which the remote deletes a segment; None for never.
            max_bytes: larger segments are neither put nor fetched.
            max_listed: maximum number of segments that `records` lists.
            now: seconds since the epoch, for the time of creation in the bytes.

        Raises:
            UsageError: an argument is out of range, or `ttl_s` is given and `blobs` cannot expire keys.
        """
        if ttl_s is not None and (ttl_s <= 0 or not blobs.expires):
            raise UsageError(f"{blobs.name} cannot expire segments after {ttl_s} s")
        if max_bytes <= 0 or max_listed < 0:
            raise UsageError(f"max_bytes ({max_bytes}) must be positive and max_listed ({max_listed}) not negative")
        try:
            BlobKey(fingerprint, SegmentId("0" * 32))
        except ValueError as error:
            raise UsageError(str(error)) from error
        self.fingerprint = fingerprint
        self.breaker = CircuitBreaker(f"remote store {blobs.name}") if breaker is None else breaker
        self._blobs = blobs
        self._codec: Codec = RawCodec() if codec is None else codec
        self._calls = RemoteCalls(deadline_s=deadline_s, breaker=self.breaker, cut=self.close, backoff=backoff)
        self._ttl_s, self._max_bytes, self._max_listed, self._now = ttl_s, max_bytes, max_listed, now
        self._deletions = Deletions()
        self._lock = Lock()
        self._stats = RemoteStats()
        self._gave_garbage = False  # one warning until the next valid segment

    @property
    def stats(self) -> RemoteStats:
        """A snapshot of the counters."""
        return self._stats

    @property
    def available(self) -> bool:
        """False while the breaker is open: a miss then does not mean that the remote lacks the segment."""
        return self.breaker.state is BreakerState.CLOSED

    @property
    def undeleted(self) -> tuple[SegmentId, ...]:
        """Segments whose deletion the remote has not confirmed."""
        return tuple(key.segment for key in self._deletions.owed())

    def put(self, record: SegmentRecord, payload: SegmentSource) -> None:
        """Send a segment, replacing one with the same id.

        Raises:
            OSError: the remote did not store it, or not in time. It may still arrive, whole, unless it is deleted
                first.
            ValueError: record and payload are inconsistent.
            SegmentLost: the payload could not be read.
        """
        key = BlobKey(self.fingerprint, record.id)
        self.settle_deletions(_OWED_AT_ONCE)
        try:
            data = encode_segment(
                record, payload, codec=self._codec, fingerprint=self.fingerprint, created_s=self._now()
            )
            if len(data) > self._max_bytes:
                raise BlobRefused(f"segment {record.id} has {len(data)} bytes, the limit is {self._max_bytes}")
            running = self._deletions.begin_put(key)
            self._calls.call(lambda: self._send(running, data))
        except OSError:
            self._count(failed_puts=1)
            raise
        self._count(puts=1, bytes_out=len(data))

    def get(self, segment: SegmentId) -> SegmentSource | None:
        """The segment with all its bytes, or None if it is missing, late or invalid.

        A layer that fails its checksum raises `SegmentLost` when it is read.
        """
        key = self._readable_key(segment)
        if key is None:
            self._count(misses=1)
            return None
        try:
            found = self._calls.call(lambda: self._fetch(key))
        except RemoteGarbage as error:
            self._note_garbage(segment, str(error))
            return None
        except BlobRefused as refused:
            logger.debug("segment %s of the remote store is skipped: %s", segment, refused)
            self._count(refused=1)
            return None
        except OSError as error:
            self._note_unavailable(error)
            return None
        if found is None or self._deletions.is_owed(key):
            self._count(misses=1)
            return None
        self._count(hits=1, bytes_in=found.header.record.nbytes)
        return found

    def delete(self, segment: SegmentId) -> None:
        """Delete a segment: here at once, in the remote as soon as it can be reached. Unknown ids are ignored.

        A deletion that the remote did not confirm is logged, counted, listed in `undeleted`, and retried with later
        puts and deletions of this process.

        Raises:
            OSError: the remote did not confirm it.
        """
        key = self._key(segment)
        if key is None:
            return
        self._deletions.delete(key)
        if not self._carry_out(key):
            self._count(failed_deletes=1)
            raise OSError(f"{self._blobs.name} did not confirm the deletion")
        self.settle_deletions(_OWED_AT_ONCE)

    def settle_deletions(self, limit: int | None = None) -> int:
        """Retry pending deletions, at most `limit`, until one fails; returns how many are left."""
        for key in self._deletions.owed(limit):
            if not self._carry_out(key):
                break
        return len(self._deletions.owed())

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes that a segment takes in the remote, 0 if it is not there or the remote does not answer."""
        key = self._readable_key(segment)
        if key is None:
            return 0
        try:
            return self._calls.call(lambda: self._blobs.size(key)) or 0
        except OSError as error:
            self._note_unavailable(error)
            return 0

    def find(self, segments: Sequence[SegmentId]) -> list[SegmentRecord]:
        """Records of those of `segments` that are stored: two calls each, one deadline for all.

        Raises:
            OSError: the remote did not answer, or not in time.
        """
        keys = [key for segment in segments if (key := self._readable_key(segment)) is not None]
        return self._calls.call(lambda: [record for key in keys for record in self._find(key)]) if keys else []

    def close(self) -> None:
        """Close the connections: running calls fail, later calls open new connections."""
        try:
            self._blobs.close()
        except OSError as error:
            logger.debug("closing connections: %s", error)

    def size_of(self, record: SegmentRecord, payload: SegmentSource) -> int:
        """Bytes that a payload would take in the remote."""
        return file_bytes(record, payload, self._codec, self.fingerprint)

    def records(self) -> Iterator[SegmentRecord]:
        """Records of this fingerprint in the remote, fetched while iterating: two calls per segment, and the pages.

        Ends early, with a warning, at `max_listed` segments. Damaged segments and other format versions are skipped.

        Raises:
            OSError: the remote stops answering.
        """
        keys = self._blobs.keys(self.fingerprint)
        seen: set[SegmentId] = set()
        while len(seen) < self._max_listed:
            try:
                key = self._calls.call(lambda: next(keys, None), retry=False)
                if key is None:
                    return
                if key.segment in seen or self._deletions.is_owed(key):
                    continue
                seen.add(key.segment)
                header = self._calls.call(lambda key=key: self._fetch_header(key))  # type: ignore[misc]
            except (RemoteGarbage, BlobRefused) as error:
                logger.debug("not listed: %s", error)
                continue
            except OSError as error:
                raise OSError(f"the list of the remote store ends after {len(seen)} segments: {error}") from error
            if header is not None:
                yield header.record
        logger.warning("the remote store holds more than %d segments; the rest is not listed", self._max_listed)

    def _fetch(self, key: BlobKey) -> MemorySegment | None:
        data = self._blobs.get(key, self._max_bytes + 1)
        if data is None:
            return None
        if len(data) > self._max_bytes:
            raise RemoteGarbage(f"more than {self._max_bytes} bytes")
        with _failures():
            found = MemorySegment(data, self._note_lost)
        self._require_own(found.header, key)
        with self._lock:
            self._gave_garbage = False
        return found

    def _fetch_header(self, key: BlobKey) -> SegmentHeader | None:
        with _failures():
            header = fetch_header(self._blobs, key)
        if header is not None:
            self._require_own(header, key)
        return header

    def _find(self, key: BlobKey) -> list[SegmentRecord]:
        try:
            header = self._fetch_header(key)
        except (RemoteGarbage, BlobRefused) as error:
            logger.debug("segment %s of the remote store is skipped: %s", key.segment, error)
            return []
        return [] if header is None else [header.record]

    def _require_own(self, header: SegmentHeader, key: BlobKey) -> None:
        if header.record.id != key.segment or header.fingerprint != key.fingerprint:
            raise RemoteGarbage(f"it contains segment {header.record.id} of model {header.fingerprint}")

    def _send(self, running: RunningPut, data: bytes) -> None:
        if running.deleted.is_set():
            return
        self._blobs.put(running.key, data, self._ttl_s)
        if running.deleted.is_set():
            self._deletions.delete(running.key)
            self._blobs.delete(running.key)
            self._deletions.settled(running.key)

    def _carry_out(self, key: BlobKey) -> bool:
        try:
            self._calls.call(lambda: self._blobs.delete(key))
        except OSError as error:
            if self.breaker.state is BreakerState.CLOSED:
                logger.warning("segment %s may stay in the remote store: %s", key.segment, error)
            return False
        self._deletions.settled(key)
        return True

    def _key(self, segment: SegmentId) -> BlobKey | None:
        try:
            return BlobKey(self.fingerprint, segment)
        except ValueError:
            return None

    def _readable_key(self, segment: SegmentId) -> BlobKey | None:
        key = self._key(segment)
        return None if key is None or self._deletions.is_owed(key) else key

    def _count(self, **more: int) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})

    def _note_unavailable(self, error: OSError) -> None:
        """Not a warning, since the breaker logs when an outage starts and ends."""
        logger.debug("the remote store did not answer: %s", error)
        self._count(unavailable=1)

    def _note_lost(self, lost: SegmentLost) -> None:
        self._note_garbage(SegmentId(lost.segment), str(lost))

    def _note_garbage(self, segment: SegmentId, reason: str) -> None:
        with self._lock:
            level = logging.DEBUG if self._gave_garbage else logging.WARNING
            self._gave_garbage = True
        logger.log(level, "segment %s from the remote store is not used: %s", segment, reason)
        self._count(garbage=1)


@contextmanager
def _failures() -> Iterator[None]:
    """Convert refused segments to failures of the remote, except those of another version."""
    try:
        yield
    except SegmentRefused as refused:
        failure = BlobRefused if refused.problem is FileProblem.OTHER_VERSION else RemoteGarbage
        raise failure(str(refused)) from refused
