"""Reports on their way out of vLLM: datagrams to a socket that the process which started vLLM has bound.

vLLM carries a connector's report only in answers that are not streamed and that no stop string ended. Over the socket
all reports come, just before the end of the answer, or right after it where the client's side ended it. It belongs to
the user who started both processes.
"""

import errno
import json
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("vllm.chunkweave")

VARIABLE = "CHUNKWEAVE_REPORT_SOCKET"
"""Environment variable with the path of a Unix datagram socket; unset, nothing is sent."""

_TOO_LONG = (errno.EMSGSIZE, errno.ENOBUFS)


class ReportSender:
    """Sends each report once, never waits, and never fails: a report that cannot be sent is logged and dropped."""

    def __init__(self, path: str | None = None) -> None:
        """To the socket at `path` (None: what the environment names)."""
        self._path = os.environ.get(VARIABLE) if path is None else path
        self._socket: socket.socket | None = None

    def send(self, request_id: str, report: Mapping[str, Any] | None) -> None:
        """Send the report of a request; None (a request without chunks) is nothing to send."""
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

    def close(self) -> None:
        """Send nothing more."""
        self._path = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, request_id: str, report: Mapping[str, Any]) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        message = {"request_id": request_id, "report": report}
        self._socket.sendto(json.dumps(message, separators=(",", ":")).encode(), str(self._path))


def _without_lists(report: Mapping[str, Any]) -> dict[str, Any]:
    """Without lists of positions, which is what makes a report long."""
    return {
        name: {key: value for key, value in fields.items() if not isinstance(value, list)}
        for name, fields in report.items()
        if isinstance(fields, Mapping)
    }
