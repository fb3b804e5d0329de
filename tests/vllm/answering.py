"""A vLLM engine in a process of its own that can be killed: one request a line, in JSON.

python -m tests.vllm.answering '{"folder": ..., "options": {...}}'
"""

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tests.vllm.environment import ENVIRONMENT, ROOT
from tests.vllm.serving import Ask

START_S = 600
ANSWER_S = 300
_MARK = "ANSWER "


class Process:
    """An engine in another process, engine core and all, with a connector of its own."""

    def __init__(self, folder: Path, log: Path, *, extra: dict[str, Any], **options: Any) -> None:
        """Started, but not waited for: two may start at the same time."""
        arguments = json.dumps({"folder": str(folder), "extra": extra, "options": options})
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment |= options.get("environment", {})
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])  # as in this process
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.answering", arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=environment,
                cwd=ROOT,
            )
        self._read = b""

    def __enter__(self) -> Self:
        self.wait()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def wait(self) -> None:
        """Until it answers."""
        assert self._next(START_S) == "ready"

    def answer(self, *asks: Ask, salt: str | None = None) -> list[dict[str, Any]]:
        """All at once: `tokens`, `log_probs` of the first one, and the `report` of each."""
        self.send(*asks, salt=salt)
        return self.receive()

    def send(self, *asks: Ask, salt: str | None = None) -> None:
        """Ask, and do not wait."""
        line = [asdict(ask) for ask in asks]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"asks": line, "salt": salt}).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self) -> list[dict[str, Any]]:
        """What came of the asks that were sent first."""
        return self._next(ANSWER_S)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the probe in every worker."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": method, "args": args}).encode() + b"\n")
        self._process.stdin.flush()
        return self._next(ANSWER_S)

    def kill(self) -> None:
        """As kill -9 does: nothing is flushed."""
        self._process.kill()
        self._process.wait(30)

    def close(self) -> None:
        """End it as vLLM ends, and wait for it."""
        if self._process.poll() is None:
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()

    def _next(self, limit_s: float) -> Any:
        ends_s = time.monotonic() + limit_s
        out = self._process.stdout
        assert out is not None
        while True:
            line, found, rest = self._read.partition(b"\n")
            if found:
                self._read = rest
                text = line.decode(errors="replace")
                if text.startswith(_MARK):
                    return json.loads(text.removeprefix(_MARK))
                continue
            ready, _, _ = select.select([out], [], [], max(0.0, ends_s - time.monotonic()))
            assert ready, f"no answer within {limit_s} s: {self.log.read_text()[-4000:]}"
            more = os.read(out.fileno(), 1 << 20)
            assert more, f"the engine has ended: {self.log.read_text()[-4000:]}"
            self._read += more


def main() -> None:
    from vllm.inputs import TokensPrompt

    from tests.vllm.serving import got, sampling, serving

    arguments = json.loads(sys.argv[1])
    with serving(Path(arguments["folder"]), extra=arguments["extra"], **arguments["options"]) as served:
        tell("ready")
        for line in sys.stdin:
            request = json.loads(line)
            if "call" in request:
                tell(served.worker(request["call"], *request["args"]))
                continue
            asks = [Ask(**ask) for ask in request["asks"]]
            salt = {} if request["salt"] is None else {"cache_salt": request["salt"]}
            prompts = [TokensPrompt(prompt_token_ids=list(ask.ids), **salt) for ask in asks]
            outputs = served.llm.generate(prompts, [sampling(ask) for ask in asks], use_tqdm=False)
            answers = [got(output) for output in outputs]
            tell([{"tokens": a.tokens, "log_probs": a.log_probs[0].tolist(), "report": a.report} for a in answers])


def tell(what: Any) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps(what)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
