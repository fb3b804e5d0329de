"""Sends reports out of vLLM: datagrams to a socket bound by the process that started vLLM.

vLLM includes a connector's report only in answers that are not streamed and did not end with a stop string. The socket
gets all reports, just before the end of the answer, or right after it if the client closed it; workers also send their
stores' counts at intervals. The socket belongs to the user who started both processes.
"""

import errno
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("vllm.chunkweave")

VARIABLE = "CHUNKWEAVE_REPORT_SOCKET"
"""Environment variable with the path of a Unix datagram socket; if unset, nothing is sent."""

REPLICA = "CHUNKWEAVE_REPLICA"
"""Environment variable with the name under which this server's counts are kept, apart from other servers'."""

_SERVER = "vllm"
"""The name if that is unset."""

_COUNTS_S = 10.0
"""Prometheus commonly scrapes every 15 s."""

_TOO_LONG = (errno.EMSGSIZE, errno.ENOBUFS)


class ReportSender:
    """Sends each report once, without waiting; a report that cannot be sent is logged and dropped."""

    def __init__(self, path: str | None = None) -> None:
        """Send to the socket at `path` (None: the environment's)."""
        self._path = os.environ.get(VARIABLE) if path is None else path
        self._socket: socket.socket | None = None

    def send(self, request_id: str, report: Mapping[str, Any] | None) -> None:
        """Send the report of a request; None (a request without chunks) sends nothing."""
        if not self._path or report is None:
            return
        try:
            try:
                self._send(request_id, report)
            except OSError as error:
                if error.errno not in _TOO_LONG:
                    raise
                self._send(request_id, _without_lists(report))
        except OSError as error:
            logger.debug("the report of %s was not sent: %s", request_id, error)

    def send_counts(self, source: str, counts: Mapping[str, Any]) -> None:
        """Send a store's counters and its next evictions; `source` names the worker."""
        if not self._path:
            return
        try:
            self._send_message({"source": source, **counts})
        except OSError as error:
            logger.debug("store counts were not sent: %s", error)

    def send_off(self, reason: str) -> None:
        """Send why this server weaves nothing."""
        self.send_counts(os.environ.get(REPLICA, _SERVER), {"off": reason})

    def close(self) -> None:
        """Send nothing more."""
        self._path = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, request_id: str, report: Mapping[str, Any]) -> None:
        self._send_message({"request_id": request_id, "report": report})

    def _send_message(self, message: Mapping[str, Any]) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        self._socket.sendto(json.dumps(message, separators=(",", ":")).encode(), str(self._path))


class CountsSender:
    """Sends a worker's `counts` (with its store's as `store`) at the start, every few seconds, and at the end.

    It uses its own thread. Without a report socket it reads nothing and starts no thread.
    """

    def __init__(self, rank: int, counts: Callable[[], Mapping[str, Any]], every_s: float = _COUNTS_S) -> None:
        self._source = f"{os.environ.get(REPLICA, _SERVER)}/{rank}"
        self._counts = counts
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if os.environ.get(VARIABLE):
            self._thread = threading.Thread(target=self._run, name="store counts", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Send once more and stop; call it before the store is closed."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        sender = ReportSender()
        while True:
            ended = self._ended.is_set()
            sender.send_counts(self._source, self._counts())
            if ended:
                break
            self._ended.wait(self._every_s)
        sender.close()


def _without_lists(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report without lists of positions, which make it long."""
    return {
        name: {key: value for key, value in fields.items() if not isinstance(value, list)}
        for name, fields in report.items()
        if isinstance(fields, Mapping)
    }
