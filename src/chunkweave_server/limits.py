"""How much one tenant may do at once and in a while, and what it has done."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Self

from chunkweave.metrics import ReuseReport
from chunkweave_server.errors import HttpError
from chunkweave_server.settings import LimitSettings

Clock = Callable[[], float]


class TokenBucket:
    """Holds up to `burst` tokens and gains `per_s` of them a second; a request takes one. Not thread-safe."""

    def __init__(self, per_s: float, burst: int, *, clock: Clock = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._at_s = clock()

    def take(self) -> float:
        """Take a token; returns 0, or the seconds until there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at_s) * self._per_s)
        self._at_s = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_s


class Slot:
    """A tenant's place among its requests at once; give it back, or use it as a context manager."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Give the place back; a second time is harmless."""
        if self._release is not None:
            self._release()
            self._release = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class TenantLimits:
    """Rate and concurrency of every tenant. Belongs to the event loop's thread.

    Tenants come from the operator's keys, so the counts that are kept are as many as these.
    """

    def __init__(self, settings: LimitSettings, *, clock: Clock = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._running: Counter[str] = Counter()

    def count_request(self, tenant: str) -> None:
        """Count one request of a tenant.

        Raises:
            HttpError: 429, there were too many of late.
        """
        per_minute = self.settings.requests_per_minute
        if per_minute is None:
            return
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = TokenBucket(per_minute / 60, self.settings.burst, clock=self._clock)
        if wait_s := bucket.take():
            raise HttpError(
                429,
                f"more than {per_minute:g} requests a minute; try again in {ceil(wait_s)} s",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )

    def occupy(self, tenant: str) -> Slot:
        """A place among the tenant's requests at once.

        Raises:
            HttpError: 429, all are taken.
        """
        if self._running[tenant] >= self.settings.max_concurrent:
            raise HttpError(
                429,
                f"{self.settings.max_concurrent} requests of yours are under way already, and no more may",
                code="too_many_requests_at_once",
                retry_after_s=1,
            )
        self._running[tenant] += 1
        return Slot(lambda: self._leave(tenant))

    def running(self, tenant: str) -> int:
        """How many requests of the tenant are under way."""
        return self._running[tenant]

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]


@dataclass(slots=True)
class TenantCounts:
    """What one tenant's answers reused so far, in tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    prefix_exact_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    answer_tokens: int = 0

    def add(self, report: ReuseReport) -> None:
        """Count one answer."""
        self.requests += 1
        self.answer_tokens += report.new_tokens
        for name in ("prompt", "prefix_exact", "reused", "recomputed", "computed"):
            field = f"{name}_tokens"
            setattr(self, field, getattr(self, field) + getattr(report, field))
