"""Reports on their way out of vLLM: datagrams to a socket that whoever started vLLM has bound.

vLLM carries a connector's report in answers that are not streamed, and that end by themselves. Streamed ones have no
field for it, and of those that a stop string ended vLLM has none. This way all of them come, just before the answer's
end, or right behind it where the client's side ended it.

The socket belongs to the user who started both; nothing reads what the other side does not send to it.
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

_UNSENDABLE = (errno.EMSGSIZE, errno.ENOBUFS)


class ReportSender:
    """Sends each report once, never waits, and never fails: a report that cannot be sent is logged and gone."""

    def __init__(self, path: str | None = None) -> None:
        """To the socket at `path` (None: what the environment names)."""
        self._path = os.environ.get(VARIABLE) if path is None else path
        self._socket: socket.socket | None = None

    def send(self, request_id: str, report: Mapping[str, Any] | None) -> None:
        """Send what the answer to a request is to carry; None (a request without chunks) is nothing to send."""
        if not self._path or report is None:
            return
        try:
            self._send({"request_id": request_id, "report": report})
        except OSError as error:
            if error.errno in _UNSENDABLE:
                self._send_short(request_id, report)
            else:
                logger.debug("the report of %s was not sent: %s", request_id, error)

    def close(self) -> None:
        """Send nothing more."""
        self._path = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send_short(self, request_id: str, report: Mapping[str, Any]) -> None:
        """Without lists of positions, which is what makes a report long."""
        short = {
            name: {key: value for key, value in told.items() if not isinstance(value, list)}
            for name, told in report.items()
            if isinstance(told, Mapping)
        }
        try:
            self._send({"request_id": request_id, "report": short})
        except OSError as error:
            logger.debug("the report of %s was not sent: %s", request_id, error)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        self._socket.sendto(json.dumps(message, separators=(",", ":")).encode(), str(self._path))
