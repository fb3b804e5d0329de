"""The OpenAI-compatible server, with the bundled reader: as `docs/vllm.md` says to start and to ask it."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from importlib.resources import files

import pytest
from transformers import AutoTokenizer

from tests.vllm.environment import ENVIRONMENT, ROOT

READER = str(files("chunkweave") / "assets" / "reader")
START_S = 300
CONNECTOR = {
    "kv_connector": "ChunkweaveConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"method": "cacheblend", "recompute_ratio": 0.2, "host_budget": "1GiB"},
}
PASSAGES = [
    "The Gerfern Tower has 230 steps. The tower is in Halvik. It is led by Paul Tirwright.",
    "The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.",
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with running_server(tmp_path_factory, READER, CONNECTOR, "--max-model-len", "1024") as address:
        yield address


@contextmanager
def running_server(tmp_path_factory, model, connector, *flags, python=sys.executable):
    """The URL of a server with the connector that serves a model as `reader`, started by vLLM's `python`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", *flags]
    command += ["--served-model-name", "reader", "--kv-transfer-config", json.dumps(connector)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, cwd=ROOT
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while not answers(address):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def complete(url: str, ids: list[int], params: dict | None) -> dict:
    body = {"model": "reader", "prompt": ids, "max_tokens": 4, "temperature": 0}
    if params is not None:
        body["kv_transfer_params"] = {"chunkweave": params}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def parts():
    tokenizer = AutoTokenizer.from_pretrained(READER)
    return [tokenizer.encode(text, add_special_tokens=False) for text in (*PASSAGES, "Who leads the choir?")]


def test_chunks_are_reused_in_another_order(url, parts):
    first, second, question = parts
    for chunk in (first, second):
        complete(url, [0, *chunk], {"chunks": [[1, 1 + len(chunk)]]})
    ids = [0, *second, *first, *question]
    middle = 1 + len(second)
    answer = complete(url, ids, {"chunks": [[1, middle], [middle, middle + len(first)]]})
    report = answer["kv_transfer_params"]["chunkweave"]
    assert report["method"] == "cacheblend"
    assert report["prefix_exact_tokens"] == len(second)
    assert report["recomputed_tokens"] == -(-len(first) // 5)
    assert report["reused_tokens"] + report["recomputed_tokens"] == len(first)
    assert report["computed_tokens"] == 1 + len(question)
    assert answer["choices"][0]["text"]


def test_a_wrong_field_is_reported(url, parts):
    answer = complete(url, [0, *parts[0]], {"chunks": [[1, 9999]]})
    assert "the last chunk ends at 9999" in answer["kv_transfer_params"]["chunkweave"]["error"]
    assert answer["choices"][0]["text"]


def test_without_the_field_nothing_is_reported(url, parts):
    assert not complete(url, [0, *parts[0]], None).get("kv_transfer_params")
