"""`chunkweave vllm-serve` with real vLLM servers: answers, reports, routes, and a server that is killed under load."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import permutations

import openai
import pytest

from chunkweave_server.vllm_backend.process import free_port
from tests.vllm.fronts import CLEAN, PASSAGES, WEAVE, alive, ask, children, front_process, load, streamed


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    options = ("--shadow-every", "2", "--connector", "host_budget=1GiB", "--promotion-threshold", "2")
    with front_process(tmp_path_factory.mktemp("front"), free_port(), *options) as running:
        yield running


@pytest.fixture(scope="module")
def client(front):
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


def test_documents_are_woven_and_counted(client):
    for passage in PASSAGES:
        ask(client, [passage])
    told = ask(client, PASSAGES[::-1])
    report = told.model_extra["chunkweave"]
    assert report["method"] == "cacheblend"
    assert report["recomputed_tokens"] > 0
    cached = report["prefix_exact_tokens"] + report["reused_tokens"]
    assert told.usage.prompt_tokens_details.cached_tokens == cached > 0
    sources = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(report[name] for name in sources) == told.usage.prompt_tokens
    assert report["recomputed_tokens"] == sum(chunk["recomputed_tokens"] for chunk in report["chunks"])
    assert {chunk["kv_source"] for chunk in report["chunks"]} <= {"reused", "prefix-exact"}


def test_streamed_answers_are_the_same_and_carry_the_report(client):
    whole = ask(client, PASSAGES[1:])
    text, report = streamed(ask(client, PASSAGES[1:], stream=True))
    assert text == whole.choices[0].message.content
    assert report["prompt_tokens"] == whole.usage.prompt_tokens
    assert report["replica"] == "replica-0"


def test_an_answer_that_a_stop_text_ends_has_its_report(client):
    text = ask(client, PASSAGES).choices[0].message.content
    assert len(text) > 3
    cut, report = streamed(ask(client, PASSAGES, stream=True, stop=[text[2:4]]))
    assert cut == text[:2]
    assert report["prefix_exact_tokens"] + report["reused_tokens"] > 0


def test_what_is_warmed_is_woven_into_the_first_question_about_it(client, front):
    fresh = [f"{passage} So it was told in May." for passage in PASSAGES[:2]]
    assert front.post("/v1/cache/warm", {"documents": fresh}) == {"chunks": 2, "computed": 2}
    told = ask(client, fresh[::-1], reuse={"method": "full-reuse", "order": "fixed"})
    report = told.model_extra["chunkweave"]
    documents = [chunk["tokens"] for chunk in report["chunks"] if chunk["source"].startswith("document")]
    assert report["reused_tokens"] == sum(documents) > 0, report
    assert [chunk["kv_source"] for chunk in report["chunks"]] == ["reused"] * len(fresh)


def test_exact_answers_are_those_of_vllm_without_reuse(client):
    exact = ask(client, PASSAGES, reuse={"method": "prefix", "order": "fixed"})
    again = ask(client, PASSAGES, reuse={"method": "prefix", "order": "fixed"})
    full = ask(client, PASSAGES, reuse={"method": "full", "order": "fixed"}, cache_salt="nobody else's")
    texts = {one.choices[0].message.content for one in (exact, again, full)}
    assert len(texts) == 1
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert full.usage.prompt_tokens_details.cached_tokens == 0


def new_documents(name: str) -> list[str]:
    """Three documents of some hundred tokens that no other test has."""
    lines = [
        f"The {name} {place} has {{}} steps. It was built in {{}} by Karin Halvorsen." for place in ("A", "B", "C")
    ]
    return [" ".join(line.format(number, 1800 + number) for number in range(230, 236)) for line in lines]


def orders_of(documents: list[str]) -> list[list[str]]:
    return [list(one) for one in permutations(documents)]


@contextmanager
def busy(client) -> Iterator[None]:
    """vLLM prefills plain prompts, so that what is sent meanwhile is there at once when it is done."""
    prompts = [[*range(start, start + 900)] for start in (100, 101, 102, 103)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for prompt in prompts:
            pool.submit(client.completions.create, model="reader", prompt=prompt, max_tokens=1)
        time.sleep(0.1)
        yield


def computed(answer) -> int:
    report = answer.model_extra["chunkweave"]
    return report["computed_tokens"] + report["recomputed_tokens"]


@pytest.mark.parametrize("method", ["cacheblend", "query"])
def test_requests_at_once_compute_what_they_compute_one_after_the_other(client, method):
    reuse = {"method": method, "recompute_ratio": 0.1, "order": "fixed"}
    alone = [ask(client, order, reuse=reuse) for order in orders_of(new_documents(f"{method} mill"))]
    with ThreadPoolExecutor(6) as pool, busy(client):
        together = list(
            pool.map(lambda order: ask(client, order, reuse=reuse), orders_of(new_documents(f"{method} inn")))
        )
    assert sum(map(computed, together)) <= 1.1 * sum(map(computed, alone))


def test_if_one_of_several_at_once_gives_up_the_others_are_answered(client):
    reuse = {"method": "prefix", "order": "fixed"}
    documents = new_documents("chapel")
    impatient = client.with_options(timeout=0.2)
    with ThreadPoolExecutor(6) as pool, busy(client):
        gone = pool.submit(ask, impatient, documents, reuse={**WEAVE})
        time.sleep(0.02)
        asked = [pool.submit(ask, client, documents[:count], reuse=reuse) for count in (3, 2, 1, 2, 3)]
        texts = [one.result().choices[0].message.content for one in asked]
    assert isinstance(gone.exception(), openai.APITimeoutError | None)
    full = {"method": "full", "order": "fixed"}
    lone = [ask(client, documents[:count], reuse=full, cache_salt="alone") for count in (3, 2, 1)]
    expected = [one.choices[0].message.content for one in lone]
    assert texts == [expected[0], expected[1], expected[2], expected[1], expected[0]]


def test_with_a_free_order_exact_paths_grow_over_what_comes_back(client):
    """CRAFT's promotion threshold: what two requests have asked for is put in front by the third, and found there."""
    popular, *others = (f"{PASSAGES[0]} So it was told on the {day}th of June." for day in range(4, 9))
    reuse = {"method": "prefix", "order": "free"}
    reports = [ask(client, [popular, other], reuse=reuse).model_extra["chunkweave"] for other in others]
    exact = [report["prefix_exact_tokens"] for report in reports]
    assert exact == sorted(exact), exact
    assert exact[1] < exact[3], exact


def test_what_vllm_alone_can_do_it_does_over_documents(client):
    choices = ["in Halvik", "by the river"]
    told = ask(client, PASSAGES[::-1], structured_outputs={"choice": choices}, max_tokens=64)
    assert told.choices[0].message.content in choices
    assert told.model_extra["chunkweave"]["reused_tokens"] > 0

    two = ask(client, PASSAGES[::-1], n=2, temperature=1.0, top_k=1, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].message.content == two.choices[1].message.content
    assert all(len(choice.logprobs.content[0].top_logprobs) == 2 for choice in two.choices)
    assert two.usage.completion_tokens == 2 * len(two.choices[0].logprobs.content)

    events = list(ask(client, PASSAGES, stream=True, stream_options={"include_usage": True}))
    assert events[-1].usage.completion_tokens > 0
    assert not events[-1].choices


def test_what_says_nothing_of_documents_is_vllms(client, front):
    plain = client.completions.create(model="reader", prompt="Question:", max_tokens=3, temperature=0)
    assert plain.choices[0].text
    assert "chunkweave" not in plain.model_extra
    assert [model.id for model in client.models.list()] == ["reader"]
    assert front.post("/tokenize", {"model": "reader", "prompt": "a mill"})["count"] > 0
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")


def test_metrics_and_shadow_checks(client, front):
    for _ in range(4):
        ask(client, PASSAGES[::-1])
    until = time.monotonic() + 60
    while "chunkweave:shadow_checks_total" not in (text := front.get("/metrics")) or (
        'shadow_checks_total{model_name="reader",result="checked"} 0.0' in text
    ):
        assert time.monotonic() < until, "no check was made"
        time.sleep(0.5)
    assert 'vllm:num_requests_running{replica="replica-0"' in text
    assert 'chunkweave:replica_up{model_name="reader",replica="replica-0"} 1.0' in text
    assert 'kv_source="recomputed",method="cacheblend"' in text


def test_a_server_that_is_killed_under_load_is_told_of_and_started_again(client, front):
    with load(client) as outcomes:
        time.sleep(2)
        (server,) = front.servers()
        workers = children(server)
        os.kill(server, signal.SIGKILL)
        time.sleep(3)
        assert not front.ready()
        front.wait_until_ready()
        time.sleep(2)
    assert set(outcomes) <= CLEAN, set(outcomes)
    assert outcomes[-1] == "answered"
    assert len(set(outcomes)) > 1, "nobody noticed"
    assert not any(alive(pid) for pid in workers), "workers outlive their server"
    assert front.servers() != [server]
    assert ask(client, PASSAGES).choices[0].message.content
    assert 'replica_restarts_total{model_name="reader",replica="replica-0"} 1.0' in front.get("/metrics")


def test_two_servers_and_one_dies(tmp_path):
    with front_process(tmp_path, free_port(), "--replicas", "2") as front:
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        homes = [
            {ask(client, [passage] * 2).model_extra["chunkweave"]["replica"] for _ in range(3)} for passage in PASSAGES
        ]
        assert all(len(home) == 1 for home in homes), "documents stay where they are"
        assert len(set().union(*homes)) == 2, "both work"
        os.kill(front.servers()[0], signal.SIGKILL)
        answers = [ask(client, [passage]) for passage in PASSAGES * 3]
        assert all(one.choices[0].message.content for one in answers)
