"""`chunkweave serve` in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
_START = "import sys; sys.argv[0] = 'chunkweave'; from chunkweave.cli.app import main; main()"
_URL = re.compile(r"on (http://127\.0\.0\.1:\d+)")


class ServerProcess:
    """A server on a free port; killed on leaving if it has not ended."""

    def __init__(self, *flags: str, packages: tuple[Path, ...] = ()) -> None:
        path = os.pathsep.join(map(str, (ROOT / "src", *packages)))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _START, "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)
        self.log: list[str] = []
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := _URL.search(line):
                self.url = found[1]

    def __enter__(self) -> "ServerProcess":
        ends = time.monotonic() + 120
        while not self._ready():
            assert self.process.poll() is None, "".join(self.log)
            assert time.monotonic() < ends, "".join(self.log)
            time.sleep(0.05)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _ready(self) -> bool:
        try:
            return bool(self.url) and httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def end(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Send a signal and wait; returns the exit code."""
        self.process.send_signal(how)
        return self.process.wait(timeout_s)
