"""The servers of an attack, as processes, and what a tenant can see of their answers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import httpx

from tests.server.processes import ROOT

TENANTS = ("acme", "bolt", "crow")
VICTIM = "acme"
KEYS = {name: f"{name}-key-that-is-long-enough" for name in (*TENANTS, "ops")}
ADMIN = "ops"
_TIMEOUT_S = 120.0
_URL = re.compile(r"on (http://127\.0\.0\.1:\d+)")
_TIMES = ("_s", "created", "id", "saved_share")
"""How names end that say when, how long, or which of many equal requests."""


@dataclass(frozen=True)
class Reply:
    """An answer: its status and body. Of a stream the body is that of the same answer unstreamed."""

    status: int
    body: dict[str, Any]
    retry_after: str | None = None

    @property
    def text(self) -> str:
        choice = self.body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    @property
    def finish_reason(self) -> str:
        return self.body["choices"][0]["finish_reason"]

    @property
    def report(self) -> dict[str, Any]:
        return self.body["chunkweave"]

    def observable(self) -> tuple[int, Any]:
        """All that its client learns, but for when it came and how long it took."""
        return self.status, _without_times(self.body)

    def counts(self) -> tuple[int, Any, Any]:
        """What a client learns whatever the texts say: numbers, and where KV came from."""
        if self.status != 200 or "choices" not in self.body:
            return self.status, None, None
        sources = [tuple(map(one.get, ("kv_source", "tier", "tokens"))) for one in self.report.get("chunks", ())]
        return self.status, self.body["usage"], sources


def _without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        shown = {name: _without_times(one) for name, one in value.items() if name == "variant" or not _timed(name)}
        return {name: one for name, one in shown.items() if name not in ("pipelining",)}
    if isinstance(value, list):
        return [_without_times(one) for one in value]
    return value


def _timed(name: str) -> bool:
    return name.endswith(_TIMES[0]) or name in _TIMES


class Starter(Protocol):
    """Starts servers that end with it."""

    def start(self, *, arguments: list[str], environment: dict[str, str], log: str, control: str, root: str) -> int:
        """The process id of a new server; `control` says what happens to its files below `root`."""


class Forks:
    """The process that servers are forked from; they end with it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        environment = {name: value for name, value in environment.items() if not name.startswith("CHUNKWEAVE_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.adversary.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def start(self, **asked: Any) -> int:
        """The process id of a new server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()


class Server:
    """One server process that can be killed and started again, on a disk that can be made to fail."""

    start_s = 120.0

    def __init__(self, forks: Starter, folder: Path, arguments: Sequence[str]) -> None:
        self._forks = forks
        self._folder = folder
        self._control = folder / "fault"
        self._log = folder / "log"
        self.disk = folder / "disk"
        self.disk.mkdir(parents=True)
        self._arguments = [*arguments, "--port", "0"]
        keys = [f"{name}{':admin' if name == ADMIN else ''}={key}" for name, key in KEYS.items()]
        self._environment = {"CHUNKWEAVE_API_KEYS": ",".join(keys)}
        self._pid = 0
        self._client: httpx.Client | None = None
        self._skipped_writes = 0
        self.most_rss_bytes = self.most_descriptors = 0
        self.slowest_s = 0.0

    def give(self, *arguments: str) -> None:
        """More of its command line, before it is started."""
        self._arguments += arguments

    def launch(self) -> None:
        """Start it; `wait` for it."""
        self._log.write_text("")
        self._skipped_writes = 0
        self._pid = self._forks.start(
            arguments=self._arguments,
            environment=self._environment,
            log=str(self._log),
            control=str(self._control),
            root=str(self.disk),
        )

    def wait(self) -> None:
        ends = time.monotonic() + self.start_s
        while not self._ready():
            assert self._alive(), self.log
            assert time.monotonic() < ends, self.log
            time.sleep(0.02)

    def _ready(self) -> bool:
        if (found := _URL.search(self.log)) is None:
            return False
        if self._client is None:
            self._client = httpx.Client(base_url=found[1], timeout=_TIMEOUT_S)
        try:
            return self._client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """As kill -9 does."""
        self.client.close()
        self._client = None
        os.kill(self._pid, signal.SIGKILL)
        while self._alive():
            time.sleep(0.005)

    def _alive(self) -> bool:
        return Path(f"/proc/{self._pid}").exists()

    @property
    def client(self) -> httpx.Client:
        assert self._client is not None, "it runs"
        return self._client

    def fault(self, kind: str) -> None:
        """What happens to its files from now on; nothing for an empty kind."""
        self._control.write_text(kind)

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def send(self, method: str, path: str, tenant: str, body: Any = None) -> Reply:
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {**self.headers(tenant), **({"content-type": "application/json"} if isinstance(body, bytes) else {})}
        begun_s = time.monotonic()
        reply = self.client.request(method, path, headers=headers, **given)
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
        return Reply(reply.status_code, _parsed(reply.content), reply.headers.get("retry-after"))

    def stream(self, path: str, tenant: str, body: dict[str, Any], *, leave_after: int | None = None) -> Reply | None:
        """A streamed answer put together; None if it is left after so many events."""
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self.client.stream("POST", path, json=whole, headers=self.headers(tenant)) as reply:
            if reply.status_code != 200:
                return Reply(reply.status_code, _parsed(reply.read()), reply.headers.get("retry-after"))
            events: list[dict[str, Any]] = []
            for line in reply.iter_lines():
                if line and line != "data: [DONE]":
                    events.append(json.loads(line.removeprefix("data: ")))
                if leave_after is not None and len(events) >= leave_after:
                    return None
        if "error" in events[-1]:
            return Reply(200, events[-1])
        content = "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])
        finish = [one["choices"][0]["finish_reason"] for one in events if one["choices"]][-1]
        choice = {"index": 0, "message": {"content": content}, "finish_reason": finish}
        return Reply(200, {"choices": [choice], "usage": events[-1]["usage"], "chunkweave": events[-1]["chunkweave"]})

    def headers(self, tenant: str) -> dict[str, str]:
        """Its key; none for no tenant."""
        return {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}

    @property
    def processes(self) -> Sequence[int]:
        """All that it consists of."""
        return [self._pid]

    def measure(self) -> None:
        """Note memory and descriptors of its processes."""
        found = [_rss_and_descriptors(Path(f"/proc/{pid}")) for pid in self.processes]
        self.most_rss_bytes = max(self.most_rss_bytes, sum(rss_bytes for rss_bytes, _ in found))
        self.most_descriptors = max(self.most_descriptors, sum(descriptors for _, descriptors in found))

    def settle(self, *, written: bool = True, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until nothing is under way, or waits to be `written`; returns what an admin sees."""
        ends = time.monotonic() + timeout_s
        while True:
            seen = self.send("GET", "/v1/cache", ADMIN).body
            if _idle(seen) and (not written or _unwritten(seen) <= self._skipped_writes):
                return seen
            assert time.monotonic() < ends, f"never idle: {seen}"
            time.sleep(0.01)

    def settle_writes(self) -> None:
        """Wait until no more is written. What a paused level skipped counts as queued, and is never written."""
        before = -1
        while (now := _unwritten(self.settle(written=False))) != before:
            before = now
            time.sleep(0.2)
        self._skipped_writes = now


def _rss_and_descriptors(folder: Path) -> tuple[int, int]:
    """Of a process; nothing of one that ends meanwhile."""
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024, len(list((folder / "fd").iterdir()))
    except (OSError, KeyError):
        return 0, 0


def _idle(seen: Mapping[str, Any]) -> bool:
    if "replicas" in seen:
        return all(not one["running"] and not one["waiting"] for one in seen["replicas"])
    return not seen["engine"]["running"] and not seen["engine"]["waiting"]


def _unwritten(seen: Mapping[str, Any]) -> int:
    store = seen.get("store")
    if store is None:
        return 0
    return int(store["writes_queued"] - store["writes_done"] - store["writes_rejected"] - store["writes_failed"])


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        return {"unparsed": content.decode(errors="replace")}
    return body if isinstance(body, dict) else {"list": body}
