"""benchmarks/vllm_ttft.py over an engine that computes nothing: what is sent, and what becomes of its answers."""

import json
import sys
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from chunkweave.errors import UsageError
from chunkweave_server.vllm_backend.process import VllmFlags

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import vllm_ttft

ARGS = SimpleNamespace(chunks="6,15,32", chunk_tokens=512)


def test_prompts_that_are_longer_than_the_context_are_left_out_and_named(capsys):
    assert vllm_ttft.sizes_within(inf, ARGS) == [6, 15, 32]
    assert not capsys.readouterr().out
    assert vllm_ttft.sizes_within(8192, ARGS) == [6, 15]
    assert "8192 tokens: prompts of [32] chunks" in capsys.readouterr().out


def test_a_context_without_room_for_any_is_refused():
    with pytest.raises(UsageError, match="fewer --chunks"):
        vllm_ttft.sizes_within(2048, ARGS)


class Engine:
    """Answers with the tokens 5, 6, 7, ...; those of `epic` differ from the second one on."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict, dict]] = []

    async def generate(self, prompt, sampling, name):
        params = (sampling.extra_args or {}).get("kv_transfer_params", {}).get("chunkweave")
        self.sent.append((prompt, params))
        epic = params is not None and params["method"] == "epic"
        tokens = [5, *(n + epic for n in range(6, 5 + sampling.max_tokens))]
        logprobs = [{5: SimpleNamespace(logprob=-0.5 - 0.25 * epic), 9: SimpleNamespace(logprob=-2.0)}]
        report = {} if params is None else {"chunkweave": {"recompute_fraction": 0.1}}
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)], kv_transfer_params=report)

    def shutdown(self) -> None:
        self.sent.append(({}, None))


@pytest.fixture
def engine(monkeypatch):
    made = Engine()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given)))
    monkeypatch.setattr(vllm_ttft, "_engine", lambda *given: made)
    return made


def test_answers_are_compared_with_full_by_context_and_questions_are_scored(engine, tmp_path, monkeypatch):
    data, out = tmp_path / "data.json", tmp_path / "out.json"
    asked = {"question": "How many steps?", "chunks": ["The Sel Tower has 201 steps.", "Ger has 200."]}
    data.write_text(json.dumps([{**asked, "answers": ["201"]}]))
    options = ["--chunks", "2,3", "--chunk-tokens", "8", "--rounds", "2", "--busy-rounds", "0", "--answers", "4"]
    command = ["vllm_ttft.py", "--model", VllmFlags("reader").source, "--methods", "epic:0.05", "--dataset", str(data)]
    monkeypatch.setattr(sys, "argv", [*command, *options, "--out", str(out)])
    vllm_ttft.main()
    result = json.loads(out.read_text())
    assert result["complete"]
    assert [(row["prompt_tokens"], row["method"]) for row in result["rows"]] == [
        (tokens, method) for tokens in (56, 64) for method in ("full", "prefix caching", "epic:0.05")
    ]
    apart = {(row["same_tokens"], row["first_logprob_apart"]) for row in result["rows"] if row["method"] == "epic:0.05"}
    assert apart == {(0.25, 0.25)}
    assert all(row["same_tokens"] == 1 for row in result["rows"] if row["method"] != "epic:0.05")
    assert [(row["method"], row["questions"], row["f1"]) for row in result["answers"]] == [
        ("full", 1, 0),
        ("epic:0.05", 1, 0),
    ]
    epic = [
        (prompt["prompt_token_ids"], params) for prompt, params in engine.sent if params and "recompute_ratio" in params
    ]
    assert all(params["recompute_ratio"] == 0.05 for _, params in epic)
    ids, params = epic[-1]
    alone = [prompt["prompt_token_ids"] for prompt, params in engine.sent if params and params["method"] == "prefix"]
    start = params["start_tokens"]
    assert [[*ids[:start], *ids[first:stop]] for first, stop in params["chunks"]] == alone[-2:]


def test_what_the_plug_in_refuses_is_an_error(engine, monkeypatch):
    async def refusing(self, prompt, sampling, name):
        yield SimpleNamespace(outputs=[], kv_transfer_params={"chunkweave": {"error": "no such method"}})

    monkeypatch.setattr(Engine, "generate", refusing)
    monkeypatch.setattr(sys, "argv", ["vllm_ttft.py", "--layers", "1", "--shape", "demo", "--methods", "epic"])
    with pytest.raises(RuntimeError, match="no such method"):
        vllm_ttft.main()
