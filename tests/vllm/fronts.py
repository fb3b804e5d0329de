"""`chunkweave vllm-serve` as a process, with the bundled reader."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import openai
from transformers import AutoConfig

from chunkweave.models.fingerprint import fingerprint_folder
from chunkweave.planning.cost import CostModel, cost_model_path
from chunkweave_server.vllm_backend.process import free_port
from tests.server.conftest import wait_until
from tests.vllm.environment import ENVIRONMENT, ROOT

START_S = 400
START = "import sys; sys.argv[0] = 'chunkweave'; from chunkweave.cli.app import main; {}; main()"
FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--block-size", "32")

PASSAGES = [
    "The Gerfern Tower has 230 steps. The tower is in Halvik. It is led by Paul Tirwright.",
    "The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.",
    "The Ostby Mill stands by the river Lune. It was built in 1812 by Karin Halvorsen.",
]
QUESTION = "Who leads the Selmond Choir?"
WEAVE = {"method": "cacheblend:ratio=0.2", "order": "fixed"}
CLEAN = {"answered", "502 server_error", "503 server_error", "replica_lost"}
"""What may become of a request while a server is gone."""


@dataclass(frozen=True)
class FrontProcess:
    """A front that answers at `url`, and what it and its servers say in `log`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120) -> dict[str, Any]:
        reply: dict[str, Any] = httpx.post(f"{self.url}{path}", json=body, timeout=timeout_s).raise_for_status().json()
        return reply

    def get(self, path: str) -> str:
        return httpx.get(f"{self.url}{path}", timeout=60).raise_for_status().text

    def ready(self) -> bool:
        try:
            return bool(json.loads(self.get("/ready"))["ready"])
        except httpx.HTTPError:
            return False

    def wait_until_ready(self) -> None:
        until = time.monotonic() + START_S
        while not self.ready():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < until, self.log.read_text()[-4000:]
            time.sleep(0.3)

    @property
    def client(self) -> openai.OpenAI:
        """OpenAI's client, which asks once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def clear(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/cache/clear", json=body, timeout=90)

    def kill_server(self) -> None:
        """Kill its first vLLM server, and wait until the front has noticed."""
        os.kill(self.servers()[0], signal.SIGKILL)
        wait_until(lambda: not self.ready(), 60)

    def restart_server(self) -> None:
        """Kill its first vLLM server, and wait until the front has started another one."""
        self.kill_server()
        self.wait_until_ready()

    def servers(self) -> list[int]:
        """Process ids of vLLM's API servers, which are the front's children."""
        return children(self.process.pid)


TWO_SMALL_CONTEXTS = (
    "from chunkweave.prompt.contexts import ContextRule; from chunkweave_server.vllm_backend import backend; "
    "backend.rule_of = lambda capture: ContextRule(2, 40)"
)
"""What a front runs first whose means are over two contexts of 40 tokens."""


@contextmanager
def front_process(folder: Path, *options: str, spawns: bool = False, first: str = "pass") -> Iterator[FrontProcess]:
    """A front with its servers; ended, gently, with the block. If it `spawns`, vLLM's processes start as users' do.

    The front runs the statement `first` before its command.
    """
    port = free_port()
    command = [sys.executable, "-c", START.format(first), "vllm-serve", "reader", "--port", str(port)]
    command += ["--set", "graceful=5"]
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


def told(about: str, passages: Sequence[str] = PASSAGES) -> list[str]:
    """The passages with another ending, so that no other test has sent them."""
    return [f"{passage} So it was told {about}." for passage in passages]


def save_costs(cache_dir: Path, **bytes_per_s: float) -> None:
    """A cost model of the reader: 10 ms a token, which has 1000 bytes, and the rates at which tiers are read."""
    reader = files("chunkweave") / "assets" / "reader"
    fingerprint = fingerprint_folder(reader, AutoConfig.from_pretrained(reader, local_files_only=True), "float32")
    path = cost_model_path(cache_dir, fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    CostModel((0,), (1,), ((0.01,),), 1000, bytes_per_s, fingerprint).save(path)


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


def killed_under_load(front: FrontProcess, worker: Callable[[int], int]) -> None:
    """Kill a process of the server, `worker` of its id, while clients ask: it is told of, and started again."""
    (server,) = front.servers()
    below = [pid for child in children(server) for pid in (child, *children(child))]
    with load(front.client) as outcomes:
        time.sleep(2)
        os.kill(worker(server), signal.SIGKILL)
        wait_until(lambda: not front.ready(), 60)
        front.wait_until_ready()
        time.sleep(2)
    assert set(outcomes) <= CLEAN, set(outcomes)
    assert outcomes[-1] == "answered"
    assert len(set(outcomes)) > 1, "no client noticed"
    assert not any(alive(pid) for pid in below), "workers outlive their server"
    assert front.servers() != [server]


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
