"""Three tenants, random requests and faults, before vLLM itself; `tests/adversary` says what is drawn, and how long."""

import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from tests.adversary.arena import Arena
from tests.adversary.attack import SECONDS, SEED, attack
from tests.adversary.servers import ADMIN, Reply, Server
from tests.adversary.texts import text
from tests.vllm.environment import ENVIRONMENT, ROOT
from tests.vllm.fronts import FLAGS, START, START_S, alive

_ENDED_S = 60.0
_MOST_REPLAYED = 8
_MORE_FLAGS = "CHUNKWEAVE_ADVERSARY_VLLM"
"""Environment variable with more flags of vLLM, such as `--kv-cache-dtype fp8`."""
_FAULTY_DISK = Path(__file__).parent / "faulty_disk"


class Processes:
    """Starts each server as a process of its own; what it starts in turn has the same disk."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *, arguments: list[str], environment: dict[str, str], log: str, control: str, root: str) -> int:
        path = os.pathsep.join((str(_FAULTY_DISK), ENVIRONMENT["PYTHONPATH"]))
        given = {"PYTHONPATH": path, "CHUNKWEAVE_TEST_DISK": f"{control}{os.pathsep}{Path(root).resolve()}"}
        with Path(log).open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", START, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **given, **environment},
            )
        threading.Thread(target=process.wait, daemon=True).start()  # so that none is left as a zombie
        self._started.append(process)
        return process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._started:
            with suppress(psutil.NoSuchProcess):
                below = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                _wait_until_gone([one.pid for one in below])


class Front(Server):
    """A front and its vLLM, whose processes end with it however it ends."""

    start_s = float(START_S)

    @property
    def processes(self) -> Sequence[int]:
        return [self._pid, *(one.pid for one in psutil.Process(self._pid).children(recursive=True))]

    def kill(self) -> None:
        below = self.processes[1:]
        super().kill()
        _wait_until_gone(below)

    def break_vllm(self, draw: random.Random) -> None:
        """As kill -9 does to one of vLLM's processes."""
        with suppress(ProcessLookupError):
            os.kill(draw.choice(self.processes[1:]), signal.SIGKILL)


def _wait_until_gone(processes: Sequence[int]) -> None:
    ends = time.monotonic() + _ENDED_S
    while left := [pid for pid in processes if alive(pid)]:
        assert time.monotonic() < ends, f"vLLM outlives its front: {left}"
        time.sleep(0.05)


@dataclass(frozen=True)
class Asked:
    """What a tenant has asked for, or had warmed or removed, since everything was removed last."""

    path: str
    body: dict[str, Any]


class VllmArena(Arena):
    """Fronts with a vLLM each; KV is in vLLM's own cache, in memory and on disk."""

    backend = "vllm"
    faults = ("full", "readonly", "slow", "upstream")
    starter = Processes
    growth_bytes = 1 << 30
    """Blocks that nobody has touched are no memory yet, and the store's budget is empty."""
    settled_s = 240.0

    def open(self, stack: ExitStack) -> list[Server]:
        self._draw = random.Random(SEED)
        self._asked: dict[str, list[Asked]] = {}
        flags = [
            "vllm-serve",
            "reader",
            "--set",
            "speculate=false",
            "--set",
            "log_level=ERROR",
            "--host-budget",
            "128MiB",
        ]
        flags += [*FLAGS, "--num-gpu-blocks-override", "512", *shlex.split(os.environ.get(_MORE_FLAGS, ""))]
        for name in ("attacked", "swapped"):
            disk = self.folder / name / "disk"
            kept = ["--cache-dir", str(disk / "cache"), "--disk-budget", "256MiB", "--data-dir", str(disk / "data")]
            self.twins.append(Front(self.forks, self.folder / name, [*flags, *kept]))
        self.lone = Front(self.forks, self.folder / "lone", flags)
        return [*self.twins, self.lone]

    def emptied(self, server: Server) -> bool:
        self._asked.clear()
        if server.send("GET", "/ready", ADMIN).status != 200:
            return False
        if server.send("POST", "/v1/cache/warm", ADMIN, {"documents": [text(0)]}).status != 200:
            return False
        return server.send("POST", "/v1/cache/clear", ADMIN, {"everything": True}).status == 200

    def begin_fault(self, kind: str) -> None:
        super().begin_fault("" if kind == "upstream" else kind)
        self.fault = kind
        if kind == "upstream":
            for twin in self.twins:
                twin.break_vllm(self._draw)

    def check_answer(self, tenant: str, numbers: list[int], question: int, method: str, reply: Reply) -> None:
        super().check_answer(tenant, numbers, question, method, reply)
        if method not in ("full", "prefix") and self.in_step:
            self.replay(tenant, self.body(tenant, numbers, question, method), reply)
        self.answered(tenant, numbers, question, method)

    def replay(self, tenant: str, body: dict[str, Any], reply: Reply) -> None:
        """Have the lone server do all that this tenant had done: it answers the same, with as many tokens reused."""
        before = self._asked.get(tenant, [])
        if len(before) > _MOST_REPLAYED:
            self.counts["woven answers with too much before them"] += 1
            return
        salted = {"cache_salt": uuid.uuid4().hex}
        for one in before:
            assert self.lone.send("POST", one.path, tenant, {**one.body, **salted}).status == 200
        again = self.lone.send("POST", "/v1/chat/completions", tenant, {**body, **salted})
        self.counts["woven answers replayed"] += 1
        for name in ("reused_tokens", "recomputed_tokens"):  # of the others vLLM's own cache may have more, or less
            assert again.report[name] == reply.report[name], self.told(f"{name}: {again.report} {reply.report}")
        texts = [(one.text, one.finish_reason) for one in (again, reply)]
        assert texts[0] == texts[1], self.told(f"replayed {texts}")

    def warmed(self, tenant: str, numbers: list[int]) -> None:
        self._note(tenant, "/v1/cache/warm", {"documents": [text(number) for number in numbers]})

    def forgotten(self, tenant: str, numbers: list[int]) -> None:
        self._note(tenant, "/v1/cache/clear", {"documents": [text(number) for number in numbers]})

    def answered(self, tenant: str, numbers: list[int], question: int, method: str) -> None:
        self._note(tenant, "/v1/chat/completions", self.body(tenant, numbers, question, method))

    def _note(self, tenant: str, path: str, body: dict[str, Any]) -> None:
        self._asked.setdefault(tenant, []).append(Asked(path, body))


def test_nobody_notices_the_others(tmp_path: Path) -> None:
    with VllmArena(tmp_path, SECONDS) as arena:
        attack(arena)
