"""One vLLM server as a process: started, waited for, watched, started again when it dies, ended by its id."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import httpx

from chunkweave.errors import ModelError

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_HEALTH_S = 5.0
_MOST_MISSED = 6
"""Health checks in a row that a server may leave unanswered, before it is taken for hung."""
_TERM_S = 20.0
_LINES = 30
_MOST_PAUSE_S = 60.0


class ProcessState(StrEnum):
    """How a server does."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    ENDED = "ended"


class VllmStartError(ModelError):
    """A vLLM server ended before it answered; the message has what it said last."""


OnState = Callable[[ProcessState], None]


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started: `command` by port, and what its environment has beside ours."""

    command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str]
    start_timeout_s: float


class VllmProcess:
    """A server and its port. Belongs to one event loop.

    It is a session of its own, so that its workers end with it and Ctrl-C at a terminal reaches the front alone.
    """

    def __init__(self, name: str, launch: Launch) -> None:
        self.name = name
        self.state = ProcessState.DOWN
        self.restarts = 0
        self.port = free_port()
        self._launch = launch
        self.on_state: OnState | None = None
        """Called with each state as it begins."""
        self._process: asyncio.subprocess.Process | None = None
        self._said: deque[str] = deque(maxlen=_LINES)
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Of the API server; None while there is none."""
        return None if self._process is None else self._process.pid

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
        self._enter(ProcessState.ENDED)

    async def _start_once(self) -> None:
        self._enter(ProcessState.STARTING)
        command = [sys.executable, "-m", "chunkweave.front.leash", *self._launch.command(self.port)]
        self._said.clear()
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self._launch.environment},
            start_new_session=True,
        )
        reading = asyncio.create_task(self._read(self._process), name=f"log of {self.name}")
        self._tasks = [*(task for task in self._tasks if not task.done()), reading]
        try:
            await self._answers(time.monotonic() + self._launch.start_timeout_s)
        except BaseException:
            await self._end()
            raise
        self._enter(ProcessState.UP)

    async def _answers(self, until_s: float) -> None:
        assert self._process is not None, "it was started"
        async with httpx.AsyncClient(timeout=_HEALTH_S) as client:
            while self._process.returncode is None:
                if await self._healthy(client):
                    return
                if time.monotonic() > until_s:
                    raise VllmStartError(f"{self.name} does not answer after {self._launch.start_timeout_s:g} s")
                await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_POLL_S)  # for its last lines
        said = "\n".join(self._said) or "nothing"
        raise VllmStartError(f"{self.name} ended with {self._process.returncode} before it answered; it said\n{said}")

    async def _watch(self) -> None:
        """Start it again whenever it has ended or hangs, after a pause that grows as long as it does not stay up."""
        pause_s = 1.0
        while not self._ending:
            began = time.monotonic()
            await self._until_it_fails()
            self._enter(ProcessState.DOWN)
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
                    self._enter(ProcessState.DOWN)

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

    def _enter(self, state: ProcessState) -> None:
        if state is not self.state:
            self.state = state
            if self.on_state is not None:
                self.on_state(state)


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
