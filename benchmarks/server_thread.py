"""A server in a thread of this process, on a free port of loopback: for tests and measurements."""

import threading

from chunkweave_server.app import Server, listening_socket
from chunkweave_server.service import Service
from chunkweave_server.settings import ListenSettings


class ServerThread:
    """A server in a thread of this process, on a free port of loopback: for tests and measurements."""

    def __init__(self, service: Service) -> None:
        self._server = Server(service)
        self._socket = listening_socket(ListenSettings(port=0))
        host, port = self._socket.getsockname()
        self._url = f"http://{host}:{port}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._url

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.should_exit = True
        self._thread.join()
