"""`chunkweave vllm-serve --adapter`: vLLM answers with it by default, plain, exact and woven, as our engine does."""

import json

import pytest
from transformers import AutoModelForCausalLM

from chunkweave import Engine
from chunkweave.models.gguf import checkpoint_folder
from tests.integration.adapter_files import write_adapter
from tests.vllm.fronts import PASSAGES, QUESTION, front_process, told

TOKENS = 8


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    weights = AutoModelForCausalLM.from_pretrained(checkpoint_folder("reader"))
    alphas = {"alpha_pattern": {"layers\\.0\\..*": 4}, "use_rslora": True}
    return write_adapter(tmp_path_factory.mktemp("adapters") / "tiny", weights, size=0.1, **alphas)


@pytest.fixture(scope="module")
def front(adapter, tmp_path_factory):
    options = ("--adapter", str(adapter), "--host-budget", "1GiB")
    with front_process(tmp_path_factory.mktemp("front"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def engine(adapter):
    with Engine.load("reader", adapter=adapter, dtype="float32") as engine:
        yield engine


def ask(front, method, documents=PASSAGES, **more):
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "documents": documents,
        "chunkweave": {"method": method, "order": "fixed"},
    }
    reply = front.post("/v1/chat/completions", {**body, **more})
    return reply["choices"][0]["message"]["content"], reply


def own(engine, method, documents=PASSAGES):
    answer = engine.generate(QUESTION, documents, method=method, max_new_tokens=TOKENS)
    return answer.text, answer.report


def test_both_names_are_served(front):
    models = json.loads(front.get("/v1/models"))["data"]
    assert [(model["id"], model["parent"]) for model in models] == [("reader", None), ("reader+tiny", "reader")]


def test_documents_are_answered_with_it_unless_the_base_is_named(front, engine):
    with Engine.load("reader", dtype="float32") as base:
        unadapted, _ = own(base, "full")
    text, reply = ask(front, "full")
    assert text == own(engine, "full")[0] != unadapted
    assert reply["model"] == "reader+tiny"
    assert ask(front, "full", model="reader")[0] == unadapted


def test_woven_answers_are_those_of_our_engine_with_it(front, engine):
    front.post("/v1/cache/warm", {"documents": PASSAGES})
    engine.precompute(PASSAGES)
    for documents in (PASSAGES[::-1], PASSAGES[1:]):
        text, reply = ask(front, "full-reuse", documents)
        expected, report = own(engine, "full-reuse", documents)
        assert reply["chunkweave"]["reused_tokens"] == report.reused_tokens > 0
        assert text == expected
    fresh = told("in May")
    front.post("/v1/cache/warm", {"documents": fresh})
    _, reply = ask(front, "full-reuse", fresh, model="reader")
    assert reply["chunkweave"]["reused_tokens"] == 0, "what was computed with it is not for the model without it"
