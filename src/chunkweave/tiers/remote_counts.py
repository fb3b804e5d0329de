"""What a remote tier counts and logs of its calls."""

import logging
from dataclasses import dataclass, replace
from threading import Lock

from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Counters since the tier was opened.

    `unavailable` are reads that got no answer (breaker open included), `garbage` those that got a wrong one, `refused`
    segments of another format version. `bytes_in` and `bytes_out` are bytes of whole segments.
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


class RemoteCounts:
    """The counters of one remote tier; garbage is warned of once, until something sound comes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stats = RemoteStats()
        self._gave_garbage = False

    @property
    def stats(self) -> RemoteStats:
        """A snapshot."""
        with self._lock:
            return self._stats

    def add(self, **more: int) -> None:
        """Add to counters by name."""
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})

    def unavailable(self, error: OSError) -> None:
        """A read got no answer. The breaker says when that begins and ends, so this is no warning."""
        logger.debug("the remote store did not answer: %s", error)
        self.add(unavailable=1)

    def sound(self) -> None:
        """A segment came as it was put."""
        with self._lock:
            self._gave_garbage = False

    def garbage(self, segment: SegmentId, reason: str) -> None:
        """What came is not what was put."""
        with self._lock:
            level = logging.DEBUG if self._gave_garbage else logging.WARNING
            self._gave_garbage = True
        logger.log(level, "segment %s from the remote store is not used: %s", segment, reason)
        self.add(garbage=1)
