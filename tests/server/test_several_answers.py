"""`n` answers to one prompt, and log-probabilities, from the engine backend."""

import threading
from typing import Any

import pytest
import torch

from chunkweave.config import SamplingParams
from chunkweave.errors import UsageError
from chunkweave_server.replies import ReplyForm
from tests.server.conftest import Client, Serve, engine_of, events_of, wait_until

FERRY = "The ferry leaves the northern pier at nine and again at noon. "

pytestmark = pytest.mark.backend("engine")


def texts(reply: Any) -> list[str]:
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["message"]["content"] for choice in choices]


def test_answers_share_one_prefill_and_differ(client: Client):
    batching = engine_of(client.service).batching
    body = {"documents": [FERRY], "temperature": 1, "seed": 3, "max_tokens": 8}
    (alone,) = texts(client.ask(**body))
    before = batching.stats.prefilled_tokens
    reply = client.ask(**body, n=4, cache_salt="other")
    several = texts(reply)
    assert len(set(several)) == 4
    assert several[0] == alone, "the first has the request's seed"
    assert several[2] == texts(client.ask(**{**body, "seed": 5}))[0], "and each further one the next"
    usage = reply.json()["usage"]
    assert batching.stats.prefilled_tokens - before >= usage["prompt_tokens"]
    assert usage["completion_tokens"] == 4 * 8
    assert {choice["finish_reason"] for choice in reply.json()["choices"]} == {"length"}
    before = batching.stats.prefilled_tokens
    reply = client.ask(**body, n=4, cache_salt="third")
    assert batching.stats.prefilled_tokens - before == reply.json()["usage"]["prompt_tokens"]


def test_streams_say_which_answer_a_piece_is_of(client: Client):
    body = {"documents": [FERRY], "temperature": 1, "seed": 3, "max_tokens": 8, "n": 3}
    whole = texts(client.ask(**body))
    found = events_of(client.ask(**body, stream=True, stream_options={"include_usage": True}))
    pieces = ["", "", ""]
    reasons = []
    for event in found:
        for choice in event["choices"]:
            pieces[choice["index"]] += choice["delta"].get("content") or ""
            reasons += [choice["index"]] * (choice["finish_reason"] is not None)
    assert pieces == whole
    assert sorted(reasons) == [0, 1, 2]
    assert found[-1]["usage"]["completion_tokens"] == 24
    assert "chunkweave" in found[-1]


def test_without_room_for_all_they_are_prefilled_again(serve: Serve):
    """Two running requests at most, and memory for little more than one prompt: the rest wait, and are the same."""
    body = {"documents": [FERRY * 4], "temperature": 1, "seed": 3, "max_tokens": 8, "n": 4}
    expected = texts(serve().ask(**body))
    assert texts(serve(max_num_seqs=2).ask(**body)) == expected
    client = serve(kv_tokens=256)
    assert client.ask(documents=[FERRY * 4], max_tokens=1).json()["usage"]["prompt_tokens"] > 100
    before = engine_of(client.service).batching.stats.prefilled_tokens
    reply = client.ask(**body, cache_salt="other")
    assert texts(reply) == expected
    again = engine_of(client.service).batching.stats.prefilled_tokens - before
    assert again > reply.json()["usage"]["prompt_tokens"], "none was prefilled again"


def test_a_client_that_leaves_ends_all_answers(client: Client):
    batching = engine_of(client.service).batching
    with client.stream(
        "POST",
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "When?"}], "n": 3, "max_tokens": 400, "stream": True},
    ) as reply:
        next(reply.iter_lines())
    wait_until(lambda: batching.stats.running == 0)
    assert batching.stats.blocks_reserved == 0


def test_one_error_ends_all_answers(client: Client, monkeypatch: pytest.MonkeyPatch):
    """The third token of one of them cannot be chosen, and in its second try neither."""
    from chunkweave.engine.decode import DecodeState

    advance = DecodeState.advance

    def failing(self: Any, logits: torch.Tensor) -> str:
        if self._prepared.request.sampling.seed == 4 and len(self.token_ids) == 2:
            raise RuntimeError("no token")
        return advance(self, logits)

    monkeypatch.setattr(DecodeState, "advance", failing)
    reply = client.ask(temperature=1, seed=3, n=3, max_tokens=8)
    assert reply.status_code == 500
    assert texts(client.ask(temperature=1, seed=7, n=3, max_tokens=8))


def expected_logprobs(client: Client, ids: list[int], new: int) -> torch.Tensor:
    """Transformers' log-probabilities of the tokens behind the prompt, `[new, vocab]`."""
    model = client.engine.loaded.model.model
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -new - 1 : -1]
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_transformers_own(client: Client, stream: bool, temperature: float, monkeypatch):
    from chunkweave.engine.decode import DecodeState

    states: list[DecodeState] = []
    answer = DecodeState.answer

    def seen(self: Any, *arguments: Any) -> Any:
        states.append(self)
        return answer(self, *arguments)

    monkeypatch.setattr(DecodeState, "answer", seen)
    body = {"documents": [FERRY], "max_tokens": 8, "temperature": temperature, "seed": 2, "n": 2, "stream": stream}
    reply = client.ask(**body, logprobs=True, top_logprobs=5)
    assert reply.status_code == 200, reply.text
    found: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for choices in [event["choices"] for event in events_of(reply)] if stream else [reply.json()["choices"]]:
        for choice in choices:
            found[choice["index"]] += (choice.get("logprobs") or {}).get("content", [])
    states.sort(key=lambda one: one._prepared.request.sampling.seed)
    for index, state in enumerate(states):
        ids = [*state.prefilled.prompt.token_ids, *state.token_ids]
        expected = expected_logprobs(client, ids, len(state.token_ids))
        assert len(found[index]) == len(state.token_ids) == 8
        for one, token, row in zip(found[index], state.token_ids, expected, strict=True):
            assert one["logprob"] == pytest.approx(float(row[token]), abs=1e-3)
            top = [other["logprob"] for other in one["top_logprobs"]]
            assert top == sorted(top, reverse=True)
            best = row.topk(5).values.tolist()
            assert all(any(abs(value - other) < 1e-3 for other in best) for value in top)
            assert top[0] == pytest.approx(best[0], abs=1e-3)
        assert "".join(one["token"] for one in found[index]).startswith(state.text)


def test_log_probabilities_of_a_plain_completion(client: Client):
    body = {"prompt": "When does the ferry leave?", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 6
    assert "".join(found["tokens"]) == choice["text"]
    placed = zip(found["text_offset"], found["tokens"], strict=True)
    assert [choice["text"][at:][: len(token)] for at, token in placed] == found["tokens"]
    greedy = zip(found["tokens"], found["top_logprobs"], strict=True)
    assert all(top[token] == max(top.values()) for token, top in greedy)


def test_log_probabilities_are_rendered_beside_other_answers(client: Client, monkeypatch: pytest.MonkeyPatch):
    """Those of 64 answers with 1024 tokens take eight seconds, in which the event loop would serve no other request."""
    whole, threads = ReplyForm.whole, []

    def seen(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return whole(*given)

    monkeypatch.setattr(ReplyForm, "whole", seen)
    reply = client.ask(n=2, logprobs=True, top_logprobs=2)
    assert [len(one["logprobs"]["content"]) for one in reply.json()["choices"]] == [6, 6]
    assert threads[0].startswith("chunkweave-prepare")
    assert [one["logprobs"] for one in client.ask(n=2).json()["choices"]] == [None, None]


def test_sampling_params_refuse_a_negative_number():
    with pytest.raises(UsageError, match="logprobs"):
        SamplingParams(logprobs=-1)
