"""`chunkweave vllm-serve` as a process, with the bundled reader."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tests.vllm.environment import ENVIRONMENT, ROOT

START_S = 400
START = "import sys; sys.argv[0] = 'chunkweave'; from chunkweave.cli.app import main; main()"
FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--block-size", "32")

PASSAGES = [
    "The Gerfern Tower has 230 steps. The tower is in Halvik. It is led by Paul Tirwright.",
    "The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.",
    "The Ostby Mill stands by the river Lune. It was built in 1812 by Karin Halvorsen.",
]
QUESTION = "Who leads the Selmond Choir?"
WEAVE = {"method": "cacheblend", "recompute_ratio": 0.2, "order": "fixed"}
CLEAN = {"answered", "502 server_error", "503 server_error", "replica_lost"}
"""What may become of a request while a server is gone."""


@dataclass(frozen=True)
class FrontProcess:
    """A front that answers at `url`, and what it and its servers say in `log`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return json.load(reply)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as reply:
            return reply.read().decode()

    def ready(self) -> bool:
        try:
            return json.loads(self.get("/ready"))["ready"]
        except (urllib.error.URLError, OSError):
            return False

    def wait_until_ready(self) -> None:
        until = time.monotonic() + START_S
        while not self.ready():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < until, self.log.read_text()[-4000:]
            time.sleep(0.3)

    def restart_server(self) -> None:
        """Kill its first vLLM server, and wait until the front has started another one."""
        os.kill(self.servers()[0], signal.SIGKILL)
        until = time.monotonic() + 60
        while self.ready():
            assert time.monotonic() < until
            time.sleep(0.05)
        self.wait_until_ready()

    def servers(self) -> list[int]:
        """Process ids of vLLM's API servers, which are the front's children."""
        return children(self.process.pid)


@contextmanager
def front_process(
    folder: Path, port: int, *options: str, model: str = "reader", spawns: bool = False
) -> Iterator[FrontProcess]:
    """A front with its servers; ended, gently, with the block. If it `spawns`, vLLM's processes start as users' do."""
    command = [sys.executable, "-c", START, "vllm-serve", model, "--port", str(port), "--graceful", "5"]
    command += [*options, *FLAGS]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    log = folder / "front.log"
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "CHUNKWEAVE_TESTS_SPAWN": str(int(spawns))}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    front = FrontProcess(f"http://127.0.0.1:{port}", process, log)
    try:
        front.wait_until_ready()
        yield front
    finally:
        below = [pid for child in front.servers() for pid in (child, *children(child))]
        process.send_signal(signal.SIGTERM)
        process.wait(90)
        assert not any(alive(pid) for pid in below), "servers outlive their front"


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(one) for one in text.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ask(client, documents, question=QUESTION, *, stream=False, reuse=WEAVE, **more):
    return client.chat.completions.create(
        model="reader",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=8,
        stream=stream,
        extra_body={"documents": documents, "chunkweave": reuse, **more},
    )


def streamed(events):
    events = list(events)
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    return text, events[-1].model_extra["chunkweave"]


@contextmanager
def load(client: openai.OpenAI) -> Iterator[list[str]]:
    """Three clients that ask again and again, and what becomes of their requests, in order."""
    outcomes: list[str] = []
    going = threading.Event()
    going.set()

    def on_and_on() -> None:
        while going.is_set():
            try:
                streamed(ask(client, PASSAGES, stream=True))
                outcomes.append("answered")
            except openai.APIStatusError as error:
                outcomes.append(f"{error.status_code} {error.body['type']}")
            except openai.APIError as error:  # an error in a stream that had begun
                outcomes.append(str(error.code))
            time.sleep(0.05)

    threads = [threading.Thread(target=on_and_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        going.clear()
        for thread in threads:
            thread.join()
