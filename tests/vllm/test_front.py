"""`chunkweave vllm-serve` with real vLLM servers: answers, reports, routes, and a server that is killed under load."""

import os
import re
import signal

import openai
import pytest

from tests.vllm.fronts import PASSAGES, FrontProcess, ask, front_process, killed_under_load, streamed, told


def test_streamed_answers_are_the_same_and_carry_the_report_also_where_a_stop_text_ends_them(client):
    whole = ask(client, PASSAGES)
    text = whole.choices[0].message.content
    assert len(text) > 3
    for end, stop in ((len(text), []), (2, [text[2:4]])):
        cut, report = streamed(ask(client, PASSAGES, stream=True, stop=stop))
        assert cut == text[:end]
        assert (report["prompt_tokens"], report["replica"]) == (whole.usage.prompt_tokens, "replica-0")
        assert report["prefix_exact_tokens"] + report["reused_tokens"] > 0


def test_with_a_free_order_exact_paths_grow_over_what_comes_back(client):
    """CRAFT's promotion threshold: what two requests have asked for is put in front by the third, and found there."""
    popular, *others = (told(f"on the {day}th of June")[0] for day in range(4, 9))
    reuse = {"method": "prefix", "order": "free"}
    reports = [ask(client, [popular, other], reuse=reuse).model_extra["chunkweave"] for other in others]
    exact = [report["prefix_exact_tokens"] for report in reports]
    assert exact == sorted(exact), exact
    assert exact[1] < exact[3], exact


def test_what_says_nothing_of_documents_is_vllms(client, front):
    plain = client.completions.create(model="reader", prompt="Question:", max_tokens=3, temperature=0)
    assert plain.choices[0].text
    assert "chunkweave" not in plain.model_extra
    assert [model.id for model in client.models.list()] == ["reader"]
    assert front.post("/tokenize", {"model": "reader", "prompt": "a mill"})["count"] > 0
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")


def test_metrics(client, front):
    for order in (PASSAGES, PASSAGES[::-1]):
        ask(client, order)
    text = front.get("/metrics")
    assert 'chunkweave:replica_up{model_name="reader",replica="replica-0"} 1.0' in text
    assert 'kv_source="recomputed",method="cacheblend"' in text


def test_a_server_that_is_killed_under_load_is_told_of_and_started_again(client, front):
    before = restarts(front)
    killed_under_load(front, lambda server: server)
    assert ask(client, PASSAGES).choices[0].message.content
    assert restarts(front) == before + 1


def restarts(front: FrontProcess) -> float:
    (count,) = re.findall(
        r'replica_restarts_total{model_name="reader",replica="replica-0"} (.*)', front.get("/metrics")
    )
    return float(count)


def test_two_servers_and_one_dies(tmp_path):
    with front_process(tmp_path, "--replicas", "2") as front:
        homes = [
            {ask(front.client, [passage] * 2).model_extra["chunkweave"]["replica"] for _ in range(3)}
            for passage in PASSAGES
        ]
        assert all(len(home) == 1 for home in homes), "documents stay where they are"
        assert len(set().union(*homes)) == 2, "both work"
        for _ in range(2):
            ask(front.client, PASSAGES[::-1])
        os.kill(front.servers()[0], signal.SIGKILL)
        answers = [ask(front.client, [passage]) for passage in PASSAGES * 3]
        assert all(one.choices[0].message.content for one in answers)
