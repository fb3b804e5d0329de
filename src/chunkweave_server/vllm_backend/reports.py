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
from typing import Any, TypeGuard

from chunkweave.conversation.answer import Durations, PartSource, build_report
from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.planning.method_choice import FIELD
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import Prompt
from chunkweave.types import Span

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


_NOT_SHOWN = ("recomputed", "kv_sources", "reasons", "contexts")
"""Fields of the plug-in's report that answers leave out: positions, and parts (answers list chunks)."""

_OF_CHUNK = ("source", "kv_source", "tokens", "recomputed_tokens", "rank", "reasons", "contexts")


def tokens_by_source(report: Report | None, prompt_tokens: int, local_tokens: int) -> tuple[int, int, int, int]:
    """Prefix-exact, reused, recomputed and computed tokens of a prompt; they sum to `prompt_tokens`.

    Without a report, or with one of an error, tokens from vLLM's own prefix cache (`local_tokens`) count as exact:
    woven requests have other hashes there.
    """
    if not _counted(report):
        return local_tokens, 0, 0, prompt_tokens - local_tokens
    names = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    prefix_exact, reused, recomputed, computed = (int(report[name]) for name in names)
    return prefix_exact, reused, recomputed, computed


def _counted(report: Report | None) -> TypeGuard[Report]:
    """Whether a report has the counts of the prompt's tokens."""
    return report is not None and "reused_tokens" in report


def cached_tokens(report: ReuseReport, reported: Report | None) -> int:
    """Tokens of a prompt that were not computed for it; recomputed tokens do not count as cached."""
    local = int(reported.get("local_tokens", 0)) if reported is not None else 0
    return max(report.prefix_exact_tokens + report.reused_tokens, local)


def reuse_report(
    prepared: PreparedRequest, reported: Report | None, usage: Mapping[str, Any], durations: Durations, new_tokens: int
) -> ReuseReport:
    """The reuse report of an answer, from the plug-in's report (None: none), vLLM's `usage`, and measured times."""
    choice = prepared.choice
    fields = reported if _counted(reported) else {}
    details = usage.get("prompt_tokens_details") or {}
    local_tokens = int(details.get("cached_tokens") or 0)
    exact, reused, recomputed, computed = tokens_by_source(reported, len(prepared.prompt), local_tokens)
    if not fields:
        fields = _of_vllm(prepared.prompt, exact)
    spans = fields.get("kv_sources") or {}
    reasons = {start: dict(reasons_of_part) for start, reasons_of_part in fields.get("reasons") or ()}
    contexts = {start: int(count) for start, count in fields.get("contexts") or ()}
    sources = [
        PartSource(_source_of(span, spans), reasons=reasons.get(span.start, {}), contexts=contexts.get(span.start, 0))
        for span in prepared.prompt.spans()
    ]
    return build_report(
        prepared.arranged,
        choice,
        prepared.not_sent,
        sources,
        sorted(fields.get("recomputed") or ()),
        durations,
        method=choice.method,
        new_tokens=new_tokens,
        prefix_exact_tokens=exact,
        reused_tokens=reused,
        recomputed_tokens=recomputed,
        computed_tokens=computed,
        check_layers=tuple(fields.get("check_layers") or ()),
        stopped_at_layer=fields.get("stopped_at_layer"),
        recompute_fraction=float(fields.get("recompute_fraction") or 0.0),
        weave_s=max(0.0, durations.ttft_s - durations.queue_s),
        parameters=fields.get("parameters") or choice.parameters,
        engine_cached_tokens=int(fields.get("engine_cached_tokens") or 0),
        hits={str(tier): int(tokens) for tier, tokens in (fields.get("hits") or {}).items()},
    )


def _of_vllm(prompt: Prompt, cached: int) -> Report:
    """The report of a prompt that the plug-in did not handle: vLLM had its first `cached` tokens in its own cache."""
    spans = {str(KVSource.EXACT): [(0, cached)], str(KVSource.COMPUTED): [(cached, len(prompt))]}
    stored = [span for part, span in zip(prompt.parts, prompt.spans(), strict=True) if part.id is not None]
    found_tokens = sum(len(span.within(0, cached)) for span in stored)
    return {"kv_sources": spans, "engine_cached_tokens": cached, "hits": {"vllm": found_tokens} if found_tokens else {}}


def _source_of(part: Span, sources: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """The source of a part's last token: one of vLLM's blocks may end inside the part."""
    matching = (source for source, spans in sources.items() for start, stop in spans if start < part.stop <= stop)
    return str(next(matching, ""))


def shown_report(report: ReuseReport, reported: Report | None) -> dict[str, Any]:
    """The report in an answer: fields of the server's report and of the plug-in's, without lists of positions."""
    ours = {name: value for name, value in report.as_dict().items() if name not in _UNKNOWN}
    also = {name: value for name, value in (reported or {}).items() if name not in ours and name not in _NOT_SHOWN}
    chunks = [{name: getattr(chunk, name) for name in _OF_CHUNK} for chunk in report.chunks if chunk.rank is not None]
    return {**ours, **also, "chunks": chunks}
