"""Real processes: a gentle end, a violent one, and what is left after it; and a soak in short."""

import asyncio
import json
import signal
import socket
import sys
from importlib.resources import files
from pathlib import Path
from shutil import copytree

import httpx
import pytest
import torch

from chunkweave.models.loading import random_model
from tests.integration.command_line import invoke
from tests.server.conftest import wait_until
from tests.server.processes import ServerProcess
from tests.toys import toy_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "toy"
    copytree(Path(str(files("chunkweave") / "assets" / "tokenizer")), folder)
    config = toy_config("llama", max_position_embeddings=4096)
    random_model(config, dtype=torch.float32, device="cpu", seed=0).save_pretrained(folder)
    return str(folder)


PASSAGES = [f"Passage {number}: the ferry leaves pier {number} at nine and again at noon. " * 8 for number in range(6)]


def body(number: int, **more) -> dict:
    messages = [{"role": "user", "content": "When does the ferry leave?"}]
    return {"messages": messages, "documents": [PASSAGES[number % 6]], "temperature": 0, "max_tokens": 4, **more}


def last_events(server: ServerProcess, **asked) -> list[dict]:
    """The events of a stream that came after the server was told to end; it has then ended without an error."""
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body(stream=True, **asked), timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        *events, end = [line.removeprefix("data: ") for line in lines if line]
    assert end == "[DONE]"
    assert server.process.wait(60) == 0
    return list(map(json.loads, events))


def test_sigterm_lets_answers_end_and_writes_what_was_computed(tmp_path, checkpoint):
    cache = ["--model", checkpoint, "--cache-dir", str(tmp_path)]
    with ServerProcess(*cache) as server:
        wait_until(lambda: any("s  ready" in line for line in server.log))
        stages = [line for line in server.log if " s  " in line]
        assert [words in "".join(stages) for words in ("loading the model", "opening corpora", "ready")] == [True] * 3
        assert f"ready: {server.url}/v1 for clients, {server.url}/ for a browser" in stages[-1]
        *_, last = last_events(server, number=0, max_tokens=150)
        assert last["choices"][0]["finish_reason"] in ("length", "stop")
    assert list(tmp_path.rglob("*.safetensors"))
    with ServerProcess(*cache, "--set", "graceful=0.2") as server:
        told = httpx.post(f"{server.url}/v1/chat/completions", json=body(0), timeout=60).json()
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert {chunk["tier"] for chunk in told["chunkweave"]["chunks"]} == {"disk"}
        *_, last = last_events(server, number=1, max_tokens=1024)
        assert last["error"]["code"] == "stopping"


def test_what_was_written_before_a_kill_still_serves(tmp_path, checkpoint):
    cache = ["--model", checkpoint, "--cache-dir", str(tmp_path)]

    async def load(server: ServerProcess) -> list[object]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:

            async def ask(number: int) -> object:
                try:
                    response = await client.post("/v1/chat/completions", json=body(number, max_tokens=40))
                    response.json()
                    return response.status_code
                except httpx.HTTPError as error:
                    return type(error)

            first = await asyncio.gather(*(ask(number) for number in range(6)))
            assert first == [200] * 6
            asking = [asyncio.create_task(ask(number)) for number in range(24)]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(wait_until, lambda: any(tmp_path.rglob("*.safetensors")))
            server.end(signal.SIGKILL)
            return list(await asyncio.gather(*asking))

    with ServerProcess(*cache) as server:
        ended = asyncio.run(load(server))
    clean = {200, httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError, httpx.WriteError}
    assert set(ended) <= clean
    assert set(ended) != {200}, "the server was killed too late"
    with ServerProcess(*cache) as server:
        tiers = set()
        for number in range(6):
            told = httpx.post(f"{server.url}/v1/chat/completions", json=body(number), timeout=60).json()
            tiers |= {chunk["tier"] for chunk in told["chunkweave"]["chunks"]}
        assert "disk" in tiers
        assert server.end() == 0


def test_a_missing_model_ends_with_a_line(tmp_path):
    server = ServerProcess("--model", str(tmp_path / "none"))
    try:
        assert server.process.wait(300) == 1
    finally:
        server.__exit__()
    assert "no model folder" in "".join(server.log)
    assert "Traceback" not in "".join(server.log)
    assert "chunkweave serves" not in "".join(server.log), "it serves nothing"


@pytest.mark.parametrize(
    "command", [("serve", "--shape", "demo"), ("vllm-serve", "reader"), ("ask", "--set", "shape=demo", "Why?")]
)
def test_a_cache_directory_that_cannot_be_written_is_refused_at_the_start(command, tmp_path):
    (tmp_path / "file").touch()
    where = tmp_path / "file" / "cache"
    flags = ("--port", 0) if "serve" in command[0] else ()
    refused = invoke(*command, *flags, "--cache-dir", where)
    assert refused.exit_code == 2
    said = f"error: the cache directory {where} cannot be written: Not a directory"
    assert refused.stderr.strip().splitlines() == [said]


def test_a_taken_port_is_refused_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = invoke("serve", "--shape", "demo", "--port", taken.getsockname()[1])
    assert (refused.exit_code, "cannot listen" in refused.output) == (2, True)


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_short_soak_leaves_nothing_behind(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak

    result = soak.run(200, seed=1)
    del sys.modules["soak"]
    assert result["ok"], result
    assert set(result["answers"]) == {"200", "400", "left"}
