"""The plug-in's reports: where they arrive, and what they and this server report of an answer."""

import asyncio
import json
import logging
import re
import shutil
import socket
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from chunkweave.conversation.answer import Durations, Outcome, PartSource, TokenCounts, build_report
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.planning.method_choice import FIELD
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import Prompt
from chunkweave.types import Span
from chunkweave.vllm.report_socket import STORE_TOKENS
from chunkweave_server.vllm_backend.fleet import Found, Placed

logger = logging.getLogger(__name__)


Report = Mapping[str, Any]
"""What the plug-in says of one request (docs/vllm.md, the report)."""

_OUR_ID = re.compile(r"[0-9a-f]{32}")
_MOST_UNREAD = 4096
_BUFFER_BYTES = 8 << 20


class ReportInbox:
    """A socket that vLLM's processes send reports to. Belongs to one event loop.

    A report is found by the id that this server gave its request; vLLM puts its own around that. Reports that nobody
    asks for are dropped, the oldest first.
    """

    def __init__(self, path: Path | None = None) -> None:
        """A socket at `path`; None makes one in a folder of its own."""
        self._path = path
        self._folder: Path | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self._unread: OrderedDict[str, Report] = OrderedDict()
        self._awaited: dict[str, asyncio.Future[Report]] = {}
        self._stores: dict[str, Mapping[str, Any]] = {}
        self.eviction: dict[str, Mapping[str, Any]] = {}
        """By worker, what its store evicts first, as it said last (`weaving.stores.eviction_order`)."""

    @property
    def path(self) -> str:
        """Of the socket; only this user can reach it."""
        assert self._path is not None, "it is open"
        return str(self._path)

    async def open(self) -> None:
        """Listen.

        Raises:
            UsageError: somebody listens at the path, something else is there, or no such folder.
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
        """Listen no more; a second time is harmless."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
            Path(self.path).unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def report(self, request_id: str, timeout_s: float) -> Report | None:
        """The report of a request that has ended; None if none comes in time."""
        found = self._unread.pop(request_id, None)
        if found is not None:
            return found
        future = self._awaited[request_id] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            logger.warning("no report of request %s came", request_id)
            return None
        finally:
            del self._awaited[request_id]

    def store_counts(self) -> Mapping[str, Any] | None:
        """What all workers' stores count, together, as they said last; None if none said anything. From any thread."""
        stores = tuple(self._stores.values())
        return _together(stores) if stores else None

    def take(self, data: bytes) -> None:
        """A datagram came; what is none of ours is logged and gone."""
        try:
            message = json.loads(data)
            if "store" in message:
                source = str(message["source"])
                self._stores[source] = dict(message["store"])
                self.eviction[source] = dict(message.get("eviction") or {})
                return
            found = _OUR_ID.search(message["request_id"])
            report = message["report"][FIELD]
        except (ValueError, KeyError, TypeError):
            logger.warning("a report that cannot be read: %r", data[:200])
            return
        if found is None or not isinstance(report, Mapping):
            return
        request_id = found.group()
        if (future := self._awaited.get(request_id)) is not None:
            if not future.done():
                future.set_result(report)
            return
        self._unread[request_id] = report
        if len(self._unread) > _MOST_UNREAD:
            self._unread.popitem(last=False)


def _together(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums, name by name; a tier is available if it is to all."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in counts for name in one):
        values = [one[name] for one in counts if name in one]
        if isinstance(values[0], Mapping):
            found[name] = _together([value for value in values if isinstance(value, Mapping)])
        else:
            found[name] = min(values) if name == "available" else sum(values)
    return found


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens at any more, as a server that was killed leaves it."""
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
"""What our own engine says of a request and nobody outside vLLM knows."""


_NOT_SHOWN = ("recomputed", "kv_sources", "reasons", "contexts", STORE_TOKENS)
"""What the plug-in says of positions and parts, which an answer has chunk by chunk, and of its store."""

_OF_CHUNK = ("source", "kv_source", "tokens", "recomputed_tokens", "rank", "reasons", "contexts")


def tokens_by_source(report: Report | None, prompt_tokens: int, local_tokens: int) -> tuple[int, int, int, int]:
    """Tokens of a prompt that are exact prefixes, reused, recomputed and computed; they sum to it.

    Without a report, or in one of an error, what vLLM found in its own prefix cache (`local_tokens`) is exact, since
    requests that weave are hashed apart.
    """
    if not _counted(report):
        return local_tokens, 0, 0, prompt_tokens - local_tokens
    names = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    prefix_exact, reused, recomputed, computed = (int(report[name]) for name in names)
    return prefix_exact, reused, recomputed, computed


def _counted(report: Report | None) -> TypeGuard[Report]:
    """Whether the plug-in says what became of the prompt's tokens."""
    return report is not None and "reused_tokens" in report


def cached_tokens(report: ReuseReport, reported: Report | None) -> int:
    """Tokens of a prompt that were not computed for it: what was computed again is not cached."""
    local = int(reported.get("local_tokens", 0)) if reported is not None else 0
    return max(report.prefix_exact_tokens + report.reused_tokens, local)


def what_was_found(placed: Placed, report: ReuseReport, reported: Report | None) -> Found:
    """What an answer tells of its replica's store.

    A part counts by its first token: vLLM takes whole blocks, and computes what is left of a part behind the last one.
    Without a report vLLM's own count is known: what it did not compute, which of a woven prompt may be anywhere.
    """
    cached = report.prefix_exact_tokens
    if reported is None and placed.prepared.weaves and cached:
        return Found([None] * len(placed.prompt.parts), cached)
    said = reported if _counted(reported) else _of_vllm(placed.prompt, cached)
    spans = said.get("kv_sources") or {}
    sources = [_source_of(Span(span.start, span.start + 1), spans) for span in placed.prompt.spans()]
    room = (reported or {}).get(STORE_TOKENS)
    return Found(
        [KVSource(source) if source else None for source in sources],
        cached_tokens(report, reported) + report.recomputed_tokens,
        None if room is None else int(room),
    )


def reuse_report(
    placed: Placed, reported: Report | None, usage: Mapping[str, Any], durations: Durations, new_tokens: int
) -> ReuseReport:
    """The project's own report, of what the plug-in `reported` (None: nothing), of vLLM's `usage`, and of the clock."""
    choice, said = placed.prepared.choice, reported if _counted(reported) else {}
    details = usage.get("prompt_tokens_details") or {}
    local_tokens = int(details.get("cached_tokens") or 0)
    counts = TokenCounts(*tokens_by_source(reported, len(placed.prompt), local_tokens))
    if not said:
        said = _of_vllm(placed.prompt, counts.prefix_exact)
    spans = said.get("kv_sources") or {}
    reasons = {start: dict(one) for start, one in said.get("reasons") or ()}
    contexts = {start: int(count) for start, count in said.get("contexts") or ()}
    sources = [
        PartSource(_source_of(span, spans), reasons=reasons.get(span.start, {}), contexts=contexts.get(span.start, 0))
        for span in placed.prompt.spans()
    ]
    recomputed = sorted(said.get("recomputed") or ())
    checked, stopped = tuple(said.get("check_layers") or ()), said.get("stopped_at_layer")
    outcome = Outcome(choice.method, counts, sources, recomputed, checked, stopped)
    report = build_report(placed.arranged, choice, placed.prepared.content, outcome, durations, new_tokens)
    return replace(
        report,
        recompute_fraction=float(said.get("recompute_fraction") or 0.0),
        weave_s=max(0.0, durations.ttft_s - durations.queue_s),
        parameters=said.get("parameters") or report.parameters,
        engine_cached_tokens=int(said.get("engine_cached_tokens") or 0),
        hits={str(tier): int(tokens) for tier, tokens in (said.get("hits") or {}).items()},
    )


def _of_vllm(prompt: Prompt, cached: int) -> Report:
    """What the plug-in would say of a prompt that it had nothing to do with: vLLM found its first `cached` tokens."""
    spans = {str(KVSource.EXACT): [(0, cached)], str(KVSource.COMPUTED): [(cached, len(prompt))]}
    stored = [span for part, span in zip(prompt.parts, prompt.spans(), strict=True) if part.id is not None]
    found = sum(len(span.within(0, cached)) for span in stored)
    return {"kv_sources": spans, "engine_cached_tokens": cached, "hits": {"vllm": found} if found else {}}


def _source_of(part: Span, sources: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """The source of a part's last token: vLLM's blocks may end within it."""
    found = (source for source, spans in sources.items() for start, stop in spans if start < part.stop <= stop)
    return str(next(found, ""))


def shown_report(placed: Placed, report: ReuseReport, reported: Report | None) -> dict[str, Any]:
    """The report in an answer: what the plug-in says but for lists of positions, and what the server knows."""
    ours = {name: value for name, value in report.as_dict().items() if name not in _UNKNOWN}
    also = {name: value for name, value in (reported or {}).items() if name not in ours and name not in _NOT_SHOWN}
    chunks = [{name: getattr(chunk, name) for name in _OF_CHUNK} for chunk in report.chunks if chunk.rank is not None]
    return {**ours, **also, "chunks": chunks, "replica": placed.replica.name}
