"""benchmarks/vllm_ttft.py over an engine that computes nothing: what is sent, and what becomes of its answers."""

import json
import sys
from types import SimpleNamespace

import pytest
import vllm_ttft

from chunkweave_server.vllm_backend.process import VllmFlags


class Engine:
    """Answers with the tokens 5, 6, 7, ...; those of `epic` differ from the second one on."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict, dict]] = []

    async def generate(self, prompt, sampling, name):
        params = (sampling.extra_args or {}).get("kv_transfer_params", {}).get("chunkweave")
        self.sent.append((prompt, params))
        epic = params is not None and params["method"].startswith("epic")
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


def test_answers_are_compared_with_full_by_context(engine, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    options = ["--chunks", "2,3", "--chunk-tokens", "8", "--rounds", "2", "--answers", "4"]
    command = ["vllm_ttft.py", "--model", VllmFlags("reader").source, "--methods", "epic:0.05"]
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
    assert {params["method"] for _, params in engine.sent if params} == {"epic:ratio=0.05", "prefix"}
