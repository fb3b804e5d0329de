"""One vLLM server as a process: its flags, start, supervision and stop."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from chunkweave.config import adapted_name
from chunkweave.errors import ModelError, UsageError
from chunkweave.models.adapters import Adapter
from chunkweave.models.gguf import checkpoint_folder

logger = logging.getLogger(__name__)


CONNECTOR = "ChunkweaveConnector"
SERVER = "vllm.entrypoints.openai.api_server"
_LEASH = "chunkweave_server.vllm_backend.parent_death_signal"

_REFUSED = {
    "--api-key": "give keys to the server: --keys-file or CHUNKWEAVE_API_KEYS",
    "--kv-transfer-config": "the server sets it; its keys are settings here, such as --host-budget",
    "--uds": "vLLM listens on loopback, the server on --host and --port",
    "--ssl-keyfile": "put a TLS proxy in front of the server",
    "--ssl-certfile": "put a TLS proxy in front of the server",
    "--root-path": "put a proxy in front of the server",
    "--headless": "the server needs vLLM's API server",
    "--grpc": "the server needs vLLM's API server",
    "--threads": "set OMP_NUM_THREADS or VLLM_CPU_OMP_THREADS_BIND in its environment",
    "--model": "give the model first: chunkweave vllm-serve MODEL",
}


_ASKED_ALL_THE_TIME = "/health,/metrics"
"""Endpoints that this server polls every few seconds: their access log would fill the log."""

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Allowed values of vLLM's `--max-lora-rank`."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """What vLLM's servers parse in answers."""

    tools: bool = False
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """A model and the flags that are passed to vLLM.

    vLLM serves an `adapter` as a separate model under the name that clients use; the model without the adapter keeps
    its own name.

    Raises:
        UsageError: a flag that only this server may set, or flags or a rank that an adapter cannot have.
    """

    model: str
    flags: tuple[str, ...] = ()
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        for flag in self.flags:
            name = flag.partition("=")[0].replace("_", "-")
            if flag.startswith("-") and name in _REFUSED:
                raise UsageError(f"{name} cannot be given to vLLM here: {_REFUSED[name]}")
        if self.flags and not self.flags[0].startswith("-"):
            raise UsageError(f"{self.flags[0]!r} is not a flag of vLLM: give the model first, then flags")
        if self.adapter is None:
            return
        if self.given("--lora-modules"):
            raise UsageError("give either --adapter or vLLM's --lora-modules")
        if self.adapter.rank > _LORA_RANKS[-1]:
            raise UsageError(
                f"vLLM supports adapters up to rank {_LORA_RANKS[-1]}; {self.adapter.name} has a higher one"
            )
        if len(self.flags) - len(self._unnamed) > 2:
            raise UsageError("with --adapter give one --served-model-name: the name of the model with the adapter")

    def value(self, *names: str) -> str | None:
        """The last value given for a flag, under any of its names; None if the flag is not given."""
        flag_value: str | None = None
        for place, flag in enumerate(self.flags):
            name, equals, value = flag.partition("=")
            if name.replace("_", "-") not in names:
                continue
            flag_value = value if equals else self.flags[place + 1] if place + 1 < len(self.flags) else None
        return flag_value

    def given(self, *names: str) -> bool:
        """Whether a flag is given, with or without a value."""
        return any(flag.partition("=")[0].replace("_", "-") in names for flag in self.flags)

    @property
    def source(self) -> str:
        """The folder or hub name that vLLM loads; `reader`, `smollm2` and GGUF files become folders.

        The folder of a GGUF file is made at the first call, which is slow.
        """
        folder = checkpoint_folder(self.model)
        return self.model if folder == Path(self.model) else str(folder)

    @property
    def name(self) -> str:
        """The name of the model, with its adapter, for clients; never a path."""
        served = self.value("--served-model-name")
        if served is not None:
            return served
        return adapted_name(self._own_name, None if self.adapter is None else self.adapter.folder)

    @property
    def _own_name(self) -> str:
        return Path(self.model).name if Path(self.model).exists() else self.model

    @property
    def _unnamed(self) -> tuple[str, ...]:
        """The flags without `--served-model-name` and its values."""
        remaining: list[str] = []
        naming = False
        for flag in self.flags:
            if flag.startswith("-"):
                naming = flag.partition("=")[0].replace("_", "-") == "--served-model-name"
            if not naming:
                remaining.append(flag)
        return tuple(remaining)

    def _adapting(self) -> list[str]:
        """Flags that make vLLM serve model and adapter under two names."""
        if self.adapter is None:
            return []
        name = self.name
        path = str(self.adapter.folder.resolve())
        module = {"name": name, "path": path, "base_model_name": self._own_name}
        flags = ["--served-model-name", self._own_name, "--enable-lora", "--lora-modules", json.dumps(module)]
        if not self.given("--max-lora-rank"):
            rank = next(rank for rank in _LORA_RANKS if rank >= self.adapter.rank)
            flags += ["--max-lora-rank", str(rank)]
        return flags

    @property
    def parsers(self) -> Parsers:
        """The parsers that these flags switch on."""
        tools = self.given("--tool-call-parser") and self.given("--enable-auto-tool-choice")
        return Parsers(tools, self.given("--reasoning-parser"))

    @property
    def ranks(self) -> int:
        """Number of engines between which one server balances requests; each has its own blocks and segments."""
        elsewhere = ("--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe")
        if self.given(*elsewhere, "--data-parallel-hybrid-lb", "-dph"):
            return 1
        size = self.value("--data-parallel-size", "-dp") or ""
        return max(1, int(size)) if size.isdecimal() else 1

    @property
    def tokenizer(self) -> str:
        """Folder or hub name of the tokenizer."""
        return self.value("--tokenizer") or self.source

    def command(self, port: int, connector: Mapping[str, Any]) -> Sequence[str]:
        """The command line of one server on loopback; `connector` is the connector's extra config.

        Uses `python -m`, because the `vllm` command of the CPU wheel fails.
        """
        transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": dict(connector)}
        flags = self.flags if self.adapter is None else (*self._unnamed, *self._adapting())
        command = [sys.executable, "-m", SERVER, "--model", self.source, *flags]
        command += ["--host", "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]
        if self.adapter is None and not self.given("--served-model-name"):
            command += ["--served-model-name", self.name]
        if not self.given("--use-tqdm-on-load", "--no-use-tqdm-on-load"):
            command += ["--no-use-tqdm-on-load"]  # the output is a log
        if not self.given("--disable-access-log-for-endpoints", "--disable-uvicorn-access-log"):
            command += ["--disable-access-log-for-endpoints", _ASKED_ALL_THE_TIME]
        if not self.given("--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"):
            command += ["--enable-prompt-tokens-details"]
        if self.parsers != Parsers() and not self.given("--enable-scale-out", "--no-enable-scale-out"):
            command += ["--enable-scale-out"]  # for the endpoint that parses woven answers
        return command


_POLL_S = 0.25
_HEALTH_S = 5.0
_MOST_MISSED = 6
"""A server counts as hung after this many consecutive failed health checks."""
_TERM_S = 20.0
_LINES = 30
_ERROR = re.compile(r"(?:^|\] )(\w+(?:Error|Exception): .+)")
"""The last line of a traceback, alone or after vLLM's log prefix."""
_MOST_PAUSE_S = 60.0


class VllmStartError(ModelError):
    """A vLLM server ended before it answered; the message has its last output and its first error."""


class VllmProcess:
    """A vLLM server process on a port. Used in one event loop only.

    It runs in its own session, so that its workers end with it, and Ctrl-C in a terminal is sent only to this server.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        start_timeout_s: float,
    ) -> None:
        """`command` makes the command line for a port; `environment` is added to this process's environment."""
        self.name = name
        self.restarts = 0
        self.port = free_port()
        self.on_change: Callable[[bool], None] | None = None
        """Called with whether it answers, when this changes."""
        self._up = False
        self._command = command
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._said: deque[str] = deque(maxlen=_LINES)
        self._first_error: str | None = None
        """Kept because a worker's error comes first; the last output says only that a worker failed."""
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, wait until it answers, and supervise it from then on.

        Raises:
            VllmStartError: it ended, or took too long.
        """
        await self._start_once()
        self._tasks.append(asyncio.create_task(self._watch(), name=f"watch {self.name}"))

    async def stop(self) -> None:
        """Stop it with all its workers: SIGTERM, then SIGKILL after a timeout."""
        self._ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end()
        self._set_up(False)

    async def _start_once(self) -> None:
        command = [sys.executable, "-m", _LEASH, *self._command(self.port)]
        self._said.clear()
        self._first_error = None
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )
        reading = asyncio.create_task(self._read(self._process), name=f"log of {self.name}")
        self._tasks = [*(task for task in self._tasks if not task.done()), reading]
        try:
            await self._answers(time.monotonic() + self._start_timeout_s)
        except BaseException:
            await self._end()
            raise
        self._set_up(True)

    async def _answers(self, until_s: float) -> None:
        assert self._process is not None, "it was started"
        async with httpx.AsyncClient(timeout=_HEALTH_S) as client:
            while self._process.returncode is None:
                if await self._healthy(client):
                    return
                if time.monotonic() > until_s:
                    raise VllmStartError(f"{self.name} does not answer after {self._start_timeout_s:g} s")
                await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_POLL_S)  # wait for its last lines
        log_lines = "\n".join(self._said) or "nothing"
        ended = f"{self.name} ended with {self._process.returncode} before it answered; its last output:\n{log_lines}"
        if self._first_error is not None and not log_lines.endswith(self._first_error):
            ended += f"\nIts first error:\n{self._first_error}"
        raise VllmStartError(ended)

    async def _watch(self) -> None:
        """Restart it whenever it ends or hangs. The pause before a restart grows while it does not stay up."""
        pause_s = 1.0
        while not self._ending:
            began = time.monotonic()
            await self._until_it_fails()
            self._set_up(False)
            await self._end()
            if time.monotonic() - began > _MOST_PAUSE_S:
                pause_s = 1.0
            while not self._ending:
                logger.warning("%s will be restarted in %.0f s", self.name, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(_MOST_PAUSE_S, 2 * pause_s)
                try:
                    self.restarts += 1
                    await self._start_once()
                    break
                except VllmStartError as error:
                    logger.error("%s", error)
                    self._set_up(False)

    async def _until_it_fails(self) -> None:
        assert self._process is not None, "it was started"
        missed = 0
        async with httpx.AsyncClient(timeout=_HEALTH_S) as client:
            while missed < _MOST_MISSED:
                with suppress(TimeoutError):
                    code = await asyncio.wait_for(self._process.wait(), _HEALTH_S)
                    logger.error("%s ended with %s", self.name, code)
                    return
                missed = 0 if await self._healthy(client) else missed + 1
        logger.error("%s has not answered %d health checks", self.name, missed)

    async def _healthy(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get(f"{self.url}/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "it is a pipe"
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than the reader's buffer: a progress bar, skipped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._said.append(text)
            if self._first_error is None and (error := _ERROR.search(text)):
                self._first_error = error[1]
            sys.stderr.write(f"{self.name} | {text}\n")

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _TERM_S)
        except TimeoutError:
            logger.warning("%s did not stop and is killed", self.name)
        _signal_group(process.pid, signal.SIGKILL)  # workers that outlived the API server
        await process.wait()
        self._process = None

    def _set_up(self, up: bool) -> None:
        if up is not self._up:
            self._up = up
            if self.on_change is not None:
                self.on_change(up)


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _signal_group(leader: int, number: signal.Signals) -> None:
    """Signal the process group of `leader`. Its id is not reused until the leader has been waited for."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
