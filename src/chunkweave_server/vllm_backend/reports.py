"""The plug-in's reports: the socket that receives them, and the reuse report made from them."""

import asyncio
import json
import logging
import re
import shutil
import socket
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chunkweave.conversation.answer import Durations, PrefillReport, build_report
from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.planning.method_choice import FIELD

logger = logging.getLogger(__name__)


Report = Mapping[str, Any]
"""The plug-in's report of one request (docs/vllm.md, the report)."""

_OUR_ID = re.compile(r"[0-9a-f]{32}")
_MOST_UNREAD = 4096
_BUFFER_BYTES = 8 << 20


class ReportInbox:
    """A socket for reports from vLLM's processes. Used in one event loop only.

    Reports are matched by this server's request id, which vLLM's id contains. If too many reports are unread, the
    oldest are dropped.
    """

    def __init__(self, path: Path | None = None) -> None:
        """A socket at `path`; None: in a new temporary folder."""
        self._path = path
        self._folder: Path | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self._unread: OrderedDict[str, Report] = OrderedDict()
        self._awaited: dict[str, asyncio.Future[Report]] = {}
        self._stores: dict[str, Mapping[str, Any]] = {}
        self.eviction: dict[str, Mapping[str, Any]] = {}
        """By worker, the last reported order of eviction in its store (`weaving.stores.eviction_order`)."""
        self.off: dict[str, str] = {}
        """By vLLM server, why it weaves nothing; servers that weave are not listed."""

    @property
    def path(self) -> str:
        """Path of the socket; only this user can access it."""
        assert self._path is not None, "it is open"
        return str(self._path)

    async def open(self) -> None:
        """Bind the socket.

        Raises:
            UsageError: the path is in use, or its folder does not exist.
        """
        if self._path is None:
            self._folder = Path(tempfile.mkdtemp(prefix="chunkweave-"))
            self._path = self._folder / "reports"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        sock.setblocking(False)
        try:
            _remove_stale(self._path)
            sock.bind(self.path)
        except OSError as error:
            sock.close()
            raise UsageError(f"reports cannot be received at {self.path}: {error}") from error
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: _Receiver(self), sock=sock)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
            Path(self.path).unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def report(self, request_id: str, timeout_s: float) -> Report | None:
        """The report of an ended request; None if it does not arrive in time."""
        unread = self._unread.pop(request_id, None)
        if unread is not None:
            return unread
        future = self._awaited[request_id] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            logger.warning("no report of request %s arrived", request_id)
            return None
        finally:
            del self._awaited[request_id]

    def store_counts(self) -> Mapping[str, Any] | None:
        """Sums of the last reported counts of all workers' stores; None without reports. Thread-safe."""
        stores = tuple(self._stores.values())
        return _together(stores) if stores else None

    def take(self, data: bytes) -> None:
        """Handle a datagram. Unreadable ones are logged and dropped."""
        try:
            message = json.loads(data)
            if "off" in message:
                self.off[str(message["source"])] = str(message["off"])
                return
            if "store" in message:
                source = str(message["source"])
                self.off.pop(source.rpartition("/")[0], None)  # it was restarted
                self._stores[source] = dict(message["store"])
                self.eviction[source] = dict(message.get("eviction") or {})
                return
            match = _OUR_ID.search(message["request_id"])
            report = message["report"][FIELD]
        except (ValueError, KeyError, TypeError):
            logger.warning("unreadable report: %r", data[:200])
            return
        if match is None or not isinstance(report, Mapping):
            return
        request_id = match.group()
        if (future := self._awaited.get(request_id)) is not None:
            if not future.done():
                future.set_result(report)
            return
        self._unread[request_id] = report
        if len(self._unread) > _MOST_UNREAD:
            self._unread.popitem(last=False)


def _together(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums by name; a tier is available if it is available in all."""
    sums: dict[str, Any] = {}
    for name in dict.fromkeys(name for count_of in counts for name in count_of):
        values = [count_of[name] for count_of in counts if name in count_of]
        if isinstance(values[0], Mapping):
            sums[name] = _together([value for value in values if isinstance(value, Mapping)])
        else:
            sums[name] = min(values) if name == "available" else sum(values)
    return sums


def _remove_stale(path: Path) -> None:
    """Remove a socket without a listener, left by a killed server."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, inbox: ReportInbox) -> None:
        self._inbox = inbox

    def datagram_received(self, data: bytes, _addr: Any) -> None:
        self._inbox.take(data)


_UNKNOWN = ("lookup_s", "load_s", "weave_s", "prefill_flops", "full_prefill_flops", "flops_limit", "chunks")
"""Fields of our own engine's report that are unknown outside vLLM."""


_OF_CHUNK = ("source", "kv_source", "tokens", "recomputed_tokens", "rank", "reasons", "contexts")


def prefill_report(prepared: PreparedRequest, reported: Report | None, usage: Mapping[str, Any]) -> PrefillReport:
    """The plug-in's report of a prompt; without one, or with one of an error, what vLLM's `usage` says of it."""
    if reported is not None and "reused_tokens" in reported:
        return PrefillReport.from_dict(reported)
    details = usage.get("prompt_tokens_details") or {}
    local_tokens = int(details.get("cached_tokens") or 0)
    return PrefillReport.of_vllm(prepared.prompt, local_tokens, prepared.choice.parameters)


def reuse_report(
    prepared: PreparedRequest, prefill: PrefillReport, durations: Durations, new_tokens: int
) -> ReuseReport:
    """The reuse report of an answer, with measured times."""
    return build_report(
        prepared.arranged,
        prepared.choice,
        prepared.not_sent,
        prefill,
        durations,
        method=prepared.method,
        new_tokens=new_tokens,
        weave_s=max(0.0, durations.ttft_s - durations.queue_s),
    )


def shown_report(report: ReuseReport, prefill: PrefillReport, reported: Report | None) -> dict[str, Any]:
    """The report in an answer: fields of the server's report, without lists of positions, and the plug-in's error."""
    shown = {name: value for name, value in report.as_dict().items() if name not in _UNKNOWN}
    error = {"error": reported["error"]} if reported is not None and "error" in reported else {}
    chunks = [{name: getattr(chunk, name) for name in _OF_CHUNK} for chunk in report.chunks if chunk.rank is not None]
    return {**shown, "local_tokens": prefill.local_tokens, **error, "chunks": chunks}
