"""The requests that ended last, kept in memory for the page."""

import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chunkweave.metrics import ReuseReport
from chunkweave_server.errors import HttpError

if TYPE_CHECKING:  # the gate logs, and logging keeps these
    from chunkweave_server.auth import Tenant

MOST = 200
MOST_BYTES = 16 << 20
"""Of all reports that are kept, as `_bytes_of` counts them: long prompts leave fewer of them."""

_BYTES_OF_A_CHUNK = 500
_BYTES_OF_A_SPAN = 120
"""About what these objects take in memory."""


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """A request that has ended, without its texts; only its parts' names are kept. Without an answer it has no report.

    `key` names it on the page: a number would tell how many others there were. `ended_s` is a Unix time, `error` says
    what ended it: status and code of a refusal, else the class.
    """

    id: str
    tenant: str
    outcome: str
    report: ReuseReport | None = None
    finish_reason: str = ""
    error: str = ""
    ended_s: float = field(default_factory=time.time)
    key: str = field(default_factory=lambda: secrets.token_hex(8))


class RecentRequests:
    """The last `MOST` requests of all tenants, or as many as `MOST_BYTES` hold. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._kept: deque[RecentRequest] = deque()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """About what the reports take."""
        return self._nbytes

    def add(
        self,
        request_id: str,
        tenant: str,
        outcome: str,
        report: ReuseReport | None = None,
        *,
        finish_reason: str = "",
        error: BaseException | None = None,
    ) -> None:
        """A request has ended."""
        name = _short(error)
        self._kept.append(RecentRequest(request_id, tenant, outcome, report, finish_reason, name))
        self._nbytes += _bytes_of(report)
        while len(self._kept) > MOST or (self._nbytes > MOST_BYTES and len(self._kept) > 1):
            self._nbytes -= _bytes_of(self._kept.popleft().report)

    def seen_by(self, tenant: "Tenant") -> Iterator[RecentRequest]:
        """What a tenant may see, the last first: its own; an admin all."""
        return (one for one in reversed(self._kept) if tenant.admin or one.tenant == tenant.name)

    def find(self, tenant: "Tenant", key: str) -> RecentRequest | None:
        """A request by its key, if the tenant may see it and it is still kept."""
        return next((one for one in self.seen_by(tenant) if one.key == key), None)


def _bytes_of(report: ReuseReport | None) -> int:
    chunks = () if report is None else report.chunks
    return sum(_BYTES_OF_A_CHUNK + sys.getsizeof(one.source) + _BYTES_OF_A_SPAN * len(one.recomputed) for one in chunks)


def _short(error: BaseException | None) -> str:
    """An error without its text, which may quote the request."""
    if isinstance(error, HttpError):
        return f"{error.status_code} {error.code or ''}".strip()
    return "" if error is None else type(error).__name__
