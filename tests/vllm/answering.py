"""A vLLM engine in a process of its own that can be killed."""

import os
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm.serving import IN_PROCESS, Ask, serving

START_S = 600
ANSWER_S = 300


class Process:
    """An engine in another process, engine core and all, with a connector of its own."""

    def __init__(self, folder: Path, log: Path, *, extra: dict[str, Any], **options: Any) -> None:
        """Started, but not waited for: two may start at the same time."""
        context = get_context("spawn")
        self.log = log
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, folder, log), kwargs={"extra": extra, **options})
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Until it answers."""
        assert self._next(START_S) == "ready"

    def answer(self, *asks: Ask, salt: str | None = None) -> list[dict[str, Any]]:
        """All at once: `tokens`, `log_probs` of the first one, and the `report` of each."""
        self.send(*asks, salt=salt)
        return self.receive()

    def send(self, *asks: Ask, salt: str | None = None) -> None:
        """Ask, and do not wait."""
        self._pipe.send(("answer", *(replace(ask, salt=salt) for ask in asks)))

    def receive(self) -> list[dict[str, Any]]:
        """What came of the asks that were sent first."""
        return self._next(ANSWER_S)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the probe in every worker."""
        self._pipe.send(("call", method, *args))
        return self._next(ANSWER_S)

    def kill(self) -> None:
        """As kill -9 does: nothing is flushed."""
        self._process.kill()
        self._process.join(30)

    def close(self) -> None:
        """End it as vLLM ends, and wait for it."""
        self._pipe.close()
        self._process.join(60)
        self.kill()

    def _next(self, limit_s: float) -> Any:
        assert self._pipe.poll(limit_s), f"no answer within {limit_s} s: {self.log.read_text()[-4000:]}"
        try:
            return self._pipe.recv()
        except EOFError:
            raise AssertionError(f"the engine has ended: {self.log.read_text()[-4000:]}") from None


def serve(pipe: Connection, folder: Path, log: Path, *, environment: dict[str, str] | None = None, **options: Any):
    """Answer what comes through the pipe until it is closed."""
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    environment = {**IN_PROCESS["environment"], **(environment or {})}
    with serving(folder, environment=environment, **options) as served:
        pipe.send("ready")
        while True:
            try:
                kind, *given = pipe.recv()
            except EOFError:
                return
            if kind == "call":
                pipe.send(served.worker(*given))
                continue
            answers = served.answer(*given)
            pipe.send([{"tokens": a.tokens, "log_probs": a.log_probs[0].tolist(), "report": a.report} for a in answers])
