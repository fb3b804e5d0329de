"""`vllm serve` with the connector and the bundled reader, started and asked as `docs/vllm.md` says.

Requests name their chunks, or are plain: passages of these are found, and reused where they move.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.resources import files
from random import Random

import httpx
import pytest
from transformers import AutoTokenizer

from chunkweave.prompt.parts import neutral_passages
from chunkweave_server.vllm_backend.process import free_port
from tests.prompt_shapes import drawn_documents, drawn_shape, rotations
from tests.vllm.environment import ENVIRONMENT, ROOT

READER = str(files("chunkweave") / "assets" / "reader")
START_S = 300
PASSAGES = neutral_passages()
CHOIRS = [
    "The Gerfern Tower has 230 steps. The tower is in Halvik. It is led by Paul Tirwright.",
    "The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.",
]
EXTRA = {"find_chunks": True, "method": "cacheblend:ratio=0.1", "host_budget": "1GiB"}
CONNECTOR = {"kv_connector": "ChunkweaveConnector", "kv_role": "kv_both", "kv_connector_extra_config": EXTRA}
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The reader with a chat template."""
    folder = tmp_path_factory.mktemp("reader") / "model"
    shutil.copytree(READER, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    with running_server(tmp_path_factory, str(folder), CONNECTOR, "--max-model-len", "2048") as address:
        yield address


@contextmanager
def running_server(tmp_path_factory, model, connector, *flags, python=sys.executable):
    """The URL of a server with the connector that serves a model as `reader`, started by vLLM's `python`."""
    port = free_port()
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
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def ask(url, path, **body):
    """The report of an answer."""
    whole = {"model": "reader", "max_tokens": 4, "temperature": 0, **body}
    reply = httpx.post(f"{url}{path}", json=whole, timeout=120).raise_for_status().json()
    return (reply.get("kv_transfer_params") or {}).get("chunkweave")


def complete(url, prompt, **more):
    return ask(url, "/v1/completions", prompt=prompt, **more)


def chat(url, messages):
    return ask(url, "/v1/chat/completions", messages=messages)


def rag(passages, question="Who paid for the bridge?"):
    return "\n\n".join(("Use the context to answer.", *passages, f"Question: {question}"))


def taken(report):
    kept = report["prefix_exact_tokens"] + report["reused_tokens"] + report["recomputed_tokens"]
    return kept / (kept + report["computed_tokens"])


def test_chunks_that_are_named_are_reused_in_another_order(url):
    tokenizer = AutoTokenizer.from_pretrained(READER)
    texts = (*CHOIRS, "Who leads the choir?")
    first, second, question = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    for chunk in (first, second):
        complete(url, [0, *chunk], kv_transfer_params={"chunkweave": {"chunks": [[1, 1 + len(chunk)]]}})
    middle = 1 + len(second)
    chunks = {"chunks": [[1, middle], [middle, middle + len(first)]]}
    report = complete(url, [0, *second, *first, *question], kv_transfer_params={"chunkweave": chunks})
    assert report["method"] == "cacheblend"
    assert report["prefix_exact_tokens"] == len(second)
    assert report["recomputed_tokens"] == -(-len(first) // 10)
    assert report["reused_tokens"] + report["recomputed_tokens"] == len(first)
    assert report["computed_tokens"] == 1 + len(question)


def test_passages_of_a_plain_completion_are_reused_in_another_order(url):
    first = complete(url, rag(PASSAGES[:5]))
    assert taken(first) == 0
    again = complete(url, rag(PASSAGES[4::-1]))
    assert again["reused_tokens"] > 0
    assert taken(again) > 0.8


@pytest.mark.parametrize("number", range(6))
def test_documents_in_drawn_shapes_are_reused_from_the_second_request_on(url, number):
    rng = Random(number)
    tokenizer = AutoTokenizer.from_pretrained(READER)
    shape = drawn_shape(rng)
    documents = drawn_documents(rng, 4, lambda text: len(tokenizer.encode(text)), most=150)
    written = sum(len(tokenizer.encode(document)) for document in documents)
    for turn, order in enumerate(rotations(documents, 4)):
        report = chat(url, shape.messages(order, f"Who said so on day {turn}, and why?"))
        exact = report["prefix_exact_tokens"]
        assert (
            not turn or shape.as_json or exact + report["reused_tokens"] + report["recomputed_tokens"] >= 0.7 * written
        )


def test_a_text_is_removed_from_prompts_that_never_named_it(url):
    tokenizer = AutoTokenizer.from_pretrained(READER)
    for salt in ("quill", "reed"):
        complete(url, rag(PASSAGES[10:13]), cache_salt=salt)
    command = {"forget": {"chunks": [tokenizer.encode(PASSAGES[11], add_special_tokens=False)]}}
    removed = complete(url, "Remove it.", cache_salt="quill", kv_transfer_params={"chunkweave": command})
    assert removed["removed"] > 0
    moved = {salt: complete(url, rag(PASSAGES[12:9:-1]), cache_salt=salt) for salt in ("quill", "reed")}
    assert taken(moved["quill"]) == 0
    assert taken(moved["reed"]) > 0.7


def test_tenants_with_the_same_text_share_nothing(url):
    reports = [complete(url, rag(PASSAGES[:5]), cache_salt=salt) for salt in ("acme", "bolt")]
    assert [taken(report) for report in reports] == [0, 0]


def test_a_request_may_switch_it_off_or_name_its_own_chunks(url):
    off = complete(url, rag(PASSAGES[:5]), kv_transfer_params={"chunkweave": {"find_chunks": False}})
    assert off is None
    exact = complete(
        url, rag(PASSAGES[2::-1]), kv_transfer_params={"chunkweave": {"find_chunks": True, "method": "prefix"}}
    )
    assert (exact["method"], exact["reused_tokens"]) == ("prefix", 0)
    both = {"chunkweave": {"find_chunks": True, "chunks": [[1, 9]]}}
    assert "give either chunks or find_chunks" in complete(url, rag(PASSAGES[:5]), kv_transfer_params=both)["error"]
