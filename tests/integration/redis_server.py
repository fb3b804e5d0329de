"""A Redis-protocol server on loopback for one test, and a proxy in front of it that misbehaves."""

import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

PASSWORD = "correct-horse"


def server_program() -> str:
    """The installed server, or skip the test."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    return program


class Server:
    """A server process with a password, no persistence unless asked for, and a fixed port over restarts."""

    def __init__(self, folder: Path, *, lines: tuple[str, ...] = (), tls: bool = False) -> None:
        self._program = server_program()
        self.port = free_port()
        self._folder = folder
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        listen = (f"tls-port {self.port}", "port 0") if tls else (f"port {self.port}",)
        config = (*listen, "bind 127.0.0.1", f"requirepass {PASSWORD}", 'save ""', f"dir {folder}", *lines)
        self._config = folder / "server.conf"
        self._config.write_text("\n".join(config) + "\n")
        self._config.chmod(0o600)

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([self._program, str(self._config)], stdout=log, stderr=log)
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            if self._process.poll() is not None:
                raise AssertionError((self._folder / "server.log").read_text())
            if self._answers():
                return
            time.sleep(0.01)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        """As kill -9 does; nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It hangs: connections are accepted by the kernel, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as plain:
                if not self._tls:
                    plain.sendall(b"PING\r\n")
                    return plain.recv(1) == b"-"  # NOAUTH; while it loads its data that is LOADING, also an answer
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                with context.wrap_socket(plain) as secured:
                    secured.sendall(b"PING\r\n")
                    return secured.recv(1) == b"-"
        except OSError:
            return False


class Proxy:
    """Forwards loopback connections to a port; what it does to replies can be changed while it runs."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.byte_delay_s = 0.0
        """Replies trickle: so long after every byte."""
        self.reply_delay_s = 0.0
        """Before each piece of a reply."""
        self.cut_after_bytes: int | None = None
        """The connection is cut after so many bytes of replies (from when this is set)."""
        self.connections = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def close(self) -> None:
        self.byte_delay_s = self.reply_delay_s = 0.0
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join(timeout=5)

    def drop(self) -> None:
        """Cut all connections that are there now."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            _end(one)

    def _run(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port), timeout=2)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._sockets += [client, server]
            self._run(self._forward, client, server, False)
            self._run(self._forward, server, client, True)

    def _forward(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        try:
            while data := source.recv(4096):
                if replies and not self._reply(sink, data):
                    break
                if not replies:
                    sink.sendall(data)
        except OSError:
            pass
        _end(source)
        _end(sink)

    def _reply(self, sink: socket.socket, data: bytes) -> bool:
        time.sleep(self.reply_delay_s)
        if self.cut_after_bytes is not None:
            sink.sendall(data[: self.cut_after_bytes])
            self.cut_after_bytes -= min(len(data), self.cut_after_bytes)
            return self.cut_after_bytes > 0
        if not self.byte_delay_s:
            sink.sendall(data)
            return True
        for i in range(len(data)):
            if not self.byte_delay_s:
                sink.sendall(data[i:])
                break
            sink.sendall(data[i : i + 1])
            time.sleep(self.byte_delay_s)
        return True


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key, as PEM files."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *(program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
