"""The same clients with vLLM: alone with the connector, and behind `chunkweave serve --backend vllm`.

Runs if `CHUNKWEAVE_VLLM_PYTHON` is the Python of an environment with vLLM, as `make test-clients` sets it.
"""

import json
import os
import shutil
from typing import Literal

import pytest
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.chat_tools import TEMPLATE
from tests.clients.chains import passages, reused_shares
from tests.server.processes import ServerProcess
from tests.vllm.test_front_features import blanks
from tests.vllm.test_server import READER, running_server

PYTHON = os.environ.get("CHUNKWEAVE_VLLM_PYTHON", "")
RECOMPUTED = 0.15
CONNECTOR = {
    "kv_connector": "ChunkweaveConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "find_chunks": True,
        "method": f"cacheblend:ratio={RECOMPUTED}",
        "host_budget": "1GiB",
    },
}
FLAGS = (
    *("--max-model-len", "2048", "--enable-prompt-tokens-details"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
pytestmark = pytest.mark.skipif(not PYTHON, reason="CHUNKWEAVE_VLLM_PYTHON is not set: there is no vLLM")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The reader's folder, with a chat template that has a place for tools."""
    folder = tmp_path_factory.mktemp("reader") / "model"
    shutil.copytree(READER, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return str(folder)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory, model):
    with running_server(tmp_path_factory, model, CONNECTOR, *FLAGS, python=PYTHON) as url:
        yield url


@pytest.fixture(scope="module")
def front(vllm, model):
    with ServerProcess("--backend", "vllm", "--model", model, "--upstream", vllm) as front:
        yield f"{front.url}/v1"


class Leader(BaseModel):
    """Who leads what."""

    group: Literal["choir", "tower"]
    leader: Literal["Otto Gunmark", "Paul Tirwright"]


@tool
def read_notes(topic: Literal["choir", "tower"]) -> str:
    """Read the notes about a topic."""
    return f"The {topic} is led by Otto Gunmark."


@pytest.fixture(scope="module")
def llm(front) -> ChatOpenAI:
    return ChatOpenAI(base_url=front, api_key="none", model="reader", temperature=0, max_tokens=96)


def test_the_stuff_chain_over_vllm_alone(vllm, run):
    """vLLM counts what the connector loads, so also the 15 % that are recomputed."""
    chain = run("langchain_chain.py", f"{vllm}/v1", "reader").variables["chain"]
    first, second = reused_shares(chain, passages(4))
    assert first < 0.1
    assert second * (1 - RECOMPUTED) >= 0.8


def test_answers_are_objects(llm):
    found = llm.with_structured_output(Leader).invoke("The Selmond Choir is led by Otto Gunmark. Who leads what?")
    assert isinstance(found, Leader)


def test_tools_are_bound_and_their_results_go_back(llm):
    asked = [("user", "Who leads the choir?")]
    bound = llm.bind_tools([read_notes], tool_choice="any", parallel_tool_calls=False, strict=True)
    called = bound.invoke(asked, logit_bias=dict.fromkeys(blanks(), -100))  # it would write nothing else
    assert called.tool_calls, called
    (call,) = called.tool_calls
    assert call["name"] == "read_notes"
    result = ToolMessage(read_notes.invoke(call["args"]), tool_call_id=call["id"])
    assert llm.bind_tools([read_notes]).invoke([*asked, called, result]).content
