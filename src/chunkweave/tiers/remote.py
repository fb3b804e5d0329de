"""The remote tier: segments on another machine, which may be slow, unreachable, restarted, full or corrupt."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock

from chunkweave.errors import UsageError
from chunkweave.kv.segment import Codec, RawCodec, SegmentLost, SegmentSource
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.blobs import BlobKey, BlobRefused, BlobStore, open_blobs
from chunkweave.tiers.remote_calls import CircuitBreaker, RemoteCalls, RemoteGarbage
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


@dataclass(eq=False, slots=True)
class RunningPut:
    """One put, held by its caller and by each thread that writes for it."""

    key: BlobKey
    holders: int = 1
    deleted: bool = False
    """Whether the key was deleted since: the put writes nothing more, and removes what it wrote."""


class RunningPuts:
    """Puts that may still write. Thread-safe.

    An abandoned put keeps running in its thread and may arrive after a deletion of its key.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._puts: set[RunningPut] = set()

    def begin(self, key: BlobKey) -> RunningPut:
        """Register a put of `key`, held by the caller."""
        put = RunningPut(key)
        with self._lock:
            self._puts.add(put)
        return put

    def hold(self, put: RunningPut) -> bool:
        """Hold a put for one write; False if it must not write: it is over, or its key was deleted."""
        with self._lock:
            if put.holders == 0 or put.deleted:
                return False
            put.holders += 1
            return True

    def release(self, put: RunningPut) -> None:
        """End the hold of a caller or a write."""
        with self._lock:
            put.holders -= 1
            if put.holders == 0:
                self._puts.discard(put)

    def mark_deleted(self, key: BlobKey) -> bool:
        """Mark every running put of `key`; whether there is one."""
        with self._lock:
            puts = [put for put in self._puts if put.key == key]
            for put in puts:
                put.deleted = True
        return bool(puts)


_AGREEMENT_DEADLINE_S = 5.0
_HEAD_BYTES = 64 << 10
"""First bytes read for a header: a whole header for up to some thousand tokens, cheaper than a round trip."""


def fetch_header(blobs: BlobStore, key: BlobKey) -> SegmentHeader | None:
    """The validated header of the segment under `key`, or None. Two calls, three if it is very long.

    Raises the `SegmentRefused` of `parse_header`, and `OSError` if the store does not answer.
    """
    total_bytes = blobs.size(key)
    head = blobs.get(key, _HEAD_BYTES)
    if total_bytes is None or head is None:
        return None
    needed = header_size(head, total_bytes)
    return parse_header(head if needed <= len(head) else blobs.get(key, needed) or b"", total_bytes)


def agreed_text(url: str, name: str, proposed: Callable[[], str], allowed: Collection[str]) -> str:
    """A short text on which all processes with the remote at `url` agree: the stored one, else `proposed`, then stored.

    A stored text that is not `allowed` is replaced. A remote that does not answer decides nothing.

    Raises:
        UsageError: as for `open_blobs`.
    """
    blobs = open_blobs(url)
    key = BlobKey(name, SegmentId("0" * 32))
    breaker = CircuitBreaker(f"remote store {blobs.name}")
    calls = RemoteCalls(deadline_s=_AGREEMENT_DEADLINE_S, breaker=breaker, cut=blobs.close)

    def stored() -> str | None:
        data = calls.call(lambda: blobs.get(key, 64))
        text = (data or b"").decode(errors="replace")
        return text if text in allowed else None

    text: str | None = None
    try:
        if (agreed := stored()) is not None:
            return agreed
        text = proposed()
        data = text.encode()
        calls.call(lambda: blobs.put(key, data))
        return stored() or text  # of two that write at the same time, the later one counts
    except OSError as error:
        logger.warning("%s does not say %s: %s", blobs.name, name, error)
        return text or proposed()
    finally:
        blobs.close()


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
        ttl_s: float | None = None,
        max_bytes: int = 512 << 20,
        max_listed: int = 1_000_000,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create the tier without calling the remote, which may be down.

        Args:
            blobs: stores the bytes.
            fingerprint: of the model; part of every key, so that models share a remote but no segments.
            codec: for new segments; stored ones are read by the codec that they name. Raw if None.
            deadline_s: longest time that one call waits for the remote, including retries.
            breaker: the circuit breaker; one with defaults if None. While it is open, a miss does not mean that the
                remote lacks the segment.
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
        self._calls = RemoteCalls(deadline_s=deadline_s, breaker=self.breaker, cut=self.close)
        self._ttl_s, self._max_bytes, self._max_listed, self._now = ttl_s, max_bytes, max_listed, now
        self._puts = RunningPuts()
        self._lock = Lock()
        self._stats = RemoteStats()
        self._gave_garbage = False  # one warning until the next valid segment

    @property
    def stats(self) -> RemoteStats:
        """A snapshot of the counters."""
        return self._stats

    def put(self, record: SegmentRecord, payload: SegmentSource) -> None:
        """Send a segment, replacing one with the same id.

        Raises:
            OSError: the remote did not store it, or not in time. It may still arrive, whole, unless it is deleted
                first.
            ValueError: record and payload are inconsistent.
            SegmentLost: the payload could not be read.
        """
        key = BlobKey(self.fingerprint, record.id)
        try:
            data = encode_segment(
                record, payload, codec=self._codec, fingerprint=self.fingerprint, created_s=self._now()
            )
            if len(data) > self._max_bytes:
                raise BlobRefused(f"segment {record.id} has {len(data)} bytes, the limit is {self._max_bytes}")
            self._send(key, data)
        except OSError:
            self._count(failed_puts=1)
            raise
        self._count(puts=1, bytes_out=len(data))

    def get(self, segment: SegmentId) -> SegmentSource | None:
        """The segment with all its bytes, or None if it is missing, late or invalid.

        A layer that fails its checksum raises `SegmentLost` when it is read.
        """
        key = self._key(segment)
        if key is None:
            self._count(misses=1)
            return None
        try:
            payload = self._calls.call(lambda: self._fetch(key))
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
        if payload is None:
            self._count(misses=1)
            return None
        self._count(hits=1, bytes_in=payload.header.record.nbytes)
        return payload

    def delete(self, segment: SegmentId) -> None:
        """Delete a segment; unknown ids are ignored. A put that still runs will not bring it back.

        Raises:
            OSError: the remote did not confirm it, or a put of this segment may still arrive. Call it again later.
        """
        key = self._key(segment)
        if key is None:
            return
        may_arrive = self._puts.mark_deleted(key)
        try:
            self._calls.call(lambda: self._blobs.delete(key))
        except OSError as error:
            self._count(failed_deletes=1)
            raise OSError(f"{self._blobs.name} did not confirm the deletion: {error}") from error
        if may_arrive:
            self._count(failed_deletes=1)
            raise OSError(f"a put of segment {segment} may still arrive at {self._blobs.name}")

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes that a segment takes in the remote, 0 if it is not there or the remote does not answer."""
        key = self._key(segment)
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
        keys = [key for segment in segments if (key := self._key(segment)) is not None]
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

        Damaged segments are skipped and counted (`garbage`), other format versions too (`refused`).

        Raises:
            OSError: the remote stops answering, or has more than `max_listed` segments. Those before were listed.
        """
        keys = self._blobs.keys(self.fingerprint)
        seen: set[SegmentId] = set()
        while True:
            try:
                key = self._calls.call(lambda: next(keys, None), retry=False)
                if key is None:
                    return
                if key.segment in seen:
                    continue
                if len(seen) == self._max_listed:
                    raise OSError(f"more than {self._max_listed} are not listed")
                seen.add(key.segment)
                records = self._calls.call(lambda key=key: self._find(key))  # type: ignore[misc]
            except OSError as error:
                raise OSError(f"the list of the remote store ends after {len(seen)} segments: {error}") from error
            yield from records

    def clear(self) -> int:
        """Delete every blob of this fingerprint, also damaged ones and other format versions; returns their number.

        Raises:
            OSError: the remote did not list or confirm all of them. Those before are deleted.
        """
        keys = self._blobs.keys(self.fingerprint)
        deleted: set[SegmentId] = set()  # a key may occur twice
        while (key := self._calls.call(lambda: next(keys, None), retry=False)) is not None:
            self.delete(key.segment)
            deleted.add(key.segment)
        return len(deleted)

    def _fetch(self, key: BlobKey) -> MemorySegment | None:
        data = self._blobs.get(key, self._max_bytes + 1)
        if data is None:
            return None
        if len(data) > self._max_bytes:
            raise RemoteGarbage(f"more than {self._max_bytes} bytes")
        with _failures():
            payload = MemorySegment(data, self._note_lost)
        self._require_own(payload.header, key)
        with self._lock:
            self._gave_garbage = False
        return payload

    def _find(self, key: BlobKey) -> list[SegmentRecord]:
        """The record under `key`, if there is a valid one."""
        try:
            with _failures():
                header = fetch_header(self._blobs, key)
            if header is None:
                return []
            self._require_own(header, key)
        except RemoteGarbage as error:
            self._note_garbage(key.segment, str(error))
            return []
        except BlobRefused as refused:
            logger.debug("segment %s of the remote store is skipped: %s", key.segment, refused)
            self._count(refused=1)
            return []
        return [header.record]

    def _require_own(self, header: SegmentHeader, key: BlobKey) -> None:
        if header.record.id != key.segment or header.fingerprint != key.fingerprint:
            raise RemoteGarbage(f"it contains segment {header.record.id} of model {header.fingerprint}")

    def _send(self, key: BlobKey, data: bytes) -> None:
        put = self._puts.begin(key)
        try:
            self._calls.call(lambda: self._write(put, data))
        finally:
            self._puts.release(put)

    def _write(self, put: RunningPut, data: bytes) -> None:
        if not self._puts.hold(put):
            return
        try:
            self._blobs.put(put.key, data, self._ttl_s)
            if put.deleted:
                self._blobs.delete(put.key)
        finally:
            self._puts.release(put)

    def _key(self, segment: SegmentId) -> BlobKey | None:
        try:
            return BlobKey(self.fingerprint, segment)
        except ValueError:
            return None

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
