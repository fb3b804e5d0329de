"""Where the plug-in's reports arrive."""

import asyncio
import json
import logging
import re
import shutil
import socket
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.planning.method_choice import FIELD

logger = logging.getLogger(__name__)

Report = Mapping[str, Any]
"""What the plug-in says of one request (docs/vllm.md, the report)."""

_OUR_ID = re.compile(r"[0-9a-f]{32}")
_MOST_UNREAD = 4096
_BUFFER_BYTES = 8 << 20


class ReportInbox:
    """A socket that vLLM's processes send reports to. Belongs to one event loop.

    A report is found by the id that the front gave its request; vLLM puts its own around that. Reports that nobody
    asks for are dropped, the oldest first.
    """

    def __init__(self, path: Path | None = None) -> None:
        """A socket at `path`; None makes one in a folder of its own."""
        self._path = path
        self._folder: Path | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self._unread: OrderedDict[str, Report] = OrderedDict()
        self._awaited: dict[str, asyncio.Future[Report]] = {}

    @property
    def path(self) -> str:
        """Of the socket; only this user can reach it."""
        assert self._path is not None, "it is open"
        return str(self._path)

    async def open(self) -> None:
        """Listen.

        Raises:
            UsageError: there is something at the path, or no such folder.
        """
        if self._path is None:
            self._folder = Path(tempfile.mkdtemp(prefix="chunkweave-"))
            self._path = self._folder / "reports"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        sock.setblocking(False)
        try:
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

    def take(self, data: bytes) -> None:
        """A datagram came; what is none of ours is logged and gone."""
        try:
            message = json.loads(data)
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


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, inbox: ReportInbox) -> None:
        self._inbox = inbox

    def datagram_received(self, data: bytes, _addr: Any) -> None:
        self._inbox.take(data)
