"""One vLLM server as a process: its flags, its start, its watch and its end."""

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
    "--kv-transfer-config": "the server sets it; give the connector's keys by --connector KEY=VALUE",
    "--uds": "vLLM listens on loopback, the server on --host and --port",
    "--ssl-keyfile": "put a proxy that speaks TLS before the server",
    "--ssl-certfile": "put a proxy that speaks TLS before the server",
    "--root-path": "put a proxy before the server",
    "--headless": "the server needs vLLM's API server",
    "--grpc": "the server needs vLLM's API server",
    "--model": "give the model first: chunkweave vllm-serve MODEL",
}


_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's `--max-lora-rank` may be."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """What vLLM's servers can parse in answers."""

    tools: bool = False
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """A model and the flags that go to vLLM as they are.

    vLLM serves an `adapter` as a model of its own, under the name that clients ask for; the model without it keeps the
    name that it has without one.

    Raises:
        UsageError: a flag that this server has to set itself, or flags or ranks that an adapter cannot have.
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
            raise UsageError(f"{self.flags[0]!r} is no flag of vLLM: give the model first, then flags")
        if self.adapter is None:
            return
        if self.given("--lora-modules"):
            raise UsageError("give either --adapter or vLLM's --lora-modules")
        if self.adapter.settings.highest_rank > _LORA_RANKS[-1]:
            raise UsageError(f"vLLM takes adapters of rank {_LORA_RANKS[-1]} at most, not as {self.adapter.name}")
        if len(self.flags) - len(self._unnamed) > 2:
            raise UsageError("with --adapter give one --served-model-name: it is that of model and adapter")

    def value(self, *names: str) -> str | None:
        """The value that a flag has, by any of its names, the last one given counting; None if it is not given."""
        found: str | None = None
        for place, flag in enumerate(self.flags):
            name, equals, value = flag.partition("=")
            if name.replace("_", "-") not in names:
                continue
            found = value if equals else self.flags[place + 1] if place + 1 < len(self.flags) else None
        return found

    def given(self, *names: str) -> bool:
        """Whether a flag is given, with a value or without."""
        return any(flag.partition("=")[0].replace("_", "-") in names for flag in self.flags)

    @property
    def source(self) -> str:
        """The folder or hub name that vLLM loads: of `reader` and `smollm2` their folders, of a GGUF file its own.

        That of a GGUF file is made when it is asked for first, which takes a while.
        """
        folder = checkpoint_folder(self.model)
        return self.model if folder == Path(self.model) else str(folder)

    @property
    def name(self) -> str:
        """What clients call the model, with its adapter if it has one; never a path."""
        served = self.value("--served-model-name")
        if served is not None:
            return served
        return adapted_name(self._own_name, None if self.adapter is None else self.adapter.folder)

    @property
    def _own_name(self) -> str:
        return Path(self.model).name if Path(self.model).exists() else self.model

    @property
    def _unnamed(self) -> tuple[str, ...]:
        """The flags without what the model is to be called."""
        kept: list[str] = []
        naming = False
        for flag in self.flags:
            if flag.startswith("-"):
                naming = flag.partition("=")[0].replace("_", "-") == "--served-model-name"
            if not naming:
                kept.append(flag)
        return tuple(kept)

    def _adapting(self) -> list[str]:
        """What has vLLM serve model and adapter under two names."""
        if self.adapter is None:
            return []
        name, path = self.name, str(self.adapter.folder.resolve())
        module = {"name": name, "path": path, "base_model_name": self._own_name}
        flags = ["--served-model-name", self._own_name, "--enable-lora", "--lora-modules", json.dumps(module)]
        if not self.given("--max-lora-rank"):
            rank = next(rank for rank in _LORA_RANKS if rank >= self.adapter.settings.highest_rank)
            flags += ["--max-lora-rank", str(rank)]
        return flags

    @property
    def parsers(self) -> Parsers:
        """What vLLM parses by these flags."""
        tools = self.given("--tool-call-parser") and self.given("--enable-auto-tool-choice")
        return Parsers(tools, self.given("--reasoning-parser"))

    @property
    def ranks(self) -> int:
        """How many engines a server balances between itself, each with blocks and segments of its own."""
        elsewhere = ("--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe")
        if self.given(*elsewhere, "--data-parallel-hybrid-lb", "-dph"):
            return 1
        size = self.value("--data-parallel-size", "-dp") or ""
        return max(1, int(size)) if size.isdecimal() else 1

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is loaded from."""
        return self.value("--tokenizer") or self.source

    def command(self, port: int, connector: Mapping[str, Any]) -> Sequence[str]:
        """The command line of one server on loopback; `connector` is the extra config of the connector.

        `python -m`: the `vllm` command of the CPU wheel fails.
        """
        transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": dict(connector)}
        flags = self.flags if self.adapter is None else (*self._unnamed, *self._adapting())
        command = [sys.executable, "-m", SERVER, "--model", self.source, *flags]
        command += ["--host", "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]
        if self.adapter is None and not self.given("--served-model-name"):
            command += ["--served-model-name", self.name]
        if not self.given("--use-tqdm-on-load", "--no-use-tqdm-on-load"):
            command += ["--no-use-tqdm-on-load"]  # its lines go to a log
        if not self.given("--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"):
            command += ["--enable-prompt-tokens-details"]
        if self.parsers != Parsers() and not self.given("--enable-scale-out", "--no-enable-scale-out"):
            command += ["--enable-scale-out"]  # its endpoint parses woven answers
        return command


_POLL_S = 0.25
_HEALTH_S = 5.0
_MOST_MISSED = 6
"""Health checks in a row that a server may leave unanswered, before it is taken for hung."""
_TERM_S = 20.0
_LINES = 30
_ERROR = re.compile(r"(?:^|\] )(\w+(?:Error|Exception): .+)")
"""The last line of a traceback, alone or behind the place that vLLM logs it with."""
_MOST_PAUSE_S = 60.0


class VllmStartError(ModelError):
    """A vLLM server ended before it answered; the message has what it said last, and its first error."""


class VllmProcess:
    """A server and its port. Belongs to one event loop.

    It is a session of its own, so that its workers end with it and Ctrl-C at a terminal reaches this server alone.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        start_timeout_s: float,
    ) -> None:
        """`command` makes the command line for a port; `environment` is joined to ours."""
        self.name = name
        self.restarts = 0
        self.port = free_port()
        self.on_change: Callable[[bool], None] | None = None
        """Called when it answers, or no longer does."""
        self._up = False
        self._command = command
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._said: deque[str] = deque(maxlen=_LINES)
        self._first_error: str | None = None
        """A worker's comes first; what the server says last is only that a worker failed."""
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, wait until it answers, and watch it from then on.

        Raises:
            VllmStartError: it ended, or took too long.
        """
        await self._start_once()
        self._tasks.append(asyncio.create_task(self._watch(), name=f"watch {self.name}"))

    async def stop(self) -> None:
        """End it with all its workers, gently at first."""
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
        await asyncio.sleep(_POLL_S)  # for its last lines
        said = "\n".join(self._said) or "nothing"
        ended = f"{self.name} ended with {self._process.returncode} before it answered; it said\n{said}"
        if self._first_error is not None and not said.endswith(self._first_error):
            ended += f"\nIts first error was\n{self._first_error}"
        raise VllmStartError(ended)

    async def _watch(self) -> None:
        """Start it again whenever it has ended or hangs, after a pause that grows as long as it does not stay up."""
        pause_s = 1.0
        while not self._ending:
            began = time.monotonic()
            await self._until_it_fails()
            self._set_up(False)
            await self._end()
            if time.monotonic() - began > _MOST_PAUSE_S:
                pause_s = 1.0
            while not self._ending:
                logger.warning("%s is started again in %.0f s", self.name, pause_s)
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
            except ValueError:  # longer than the reader's buffer: a progress bar, not worth keeping
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
            logger.warning("%s does not end: it is killed", self.name)
        _signal_group(process.pid, signal.SIGKILL)  # workers of an API server that is gone
        await process.wait()
        self._process = None

    def _set_up(self, up: bool) -> None:
        if up is not self._up:
            self._up = up
            if self.on_change is not None:
                self.on_change(up)


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _signal_group(leader: int, number: signal.Signals) -> None:
    """To the session that `leader` was made the head of; its id is ours until it has been waited for."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
