"""`draft_tokens` (prompt lookup decoding) over HTTP: the same answers in fewer steps, in every form of answer."""

import json
from typing import Any

import pytest

from tests.server.conftest import Client, Serve, events_of

SONG = "The ferry leaves at nine and again at noon. The ferry leaves at nine and again at noon. "
ASKED: dict[str, Any] = {"documents": [SONG], "max_tokens": 24, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}}, "required": ["a"]}
FORMS: dict[str, dict[str, Any]] = {
    "text": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "several": {"n": 3, "temperature": 0.7, "seed": 5},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "stop": {"stop": ["e"]},
}

pytestmark = pytest.mark.backend("engine")


@pytest.fixture
def both(serve: Serve) -> tuple[Client, Client]:
    """A server with drafts, and one without."""
    return serve(draft_tokens=6, dtype="float32"), serve(dtype="float32")


def choices(client: Client, **more: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    reply = client.ask(**{**ASKED, **more})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return body["choices"], body["chunkweave"]


def rounded(value: Any) -> Any:
    return json.loads(json.dumps(value), parse_float=lambda number: round(float(number), 3))


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_without_drafts(both: tuple[Client, Client], form: str):
    (drafted, report), (plain, plain_report) = (choices(client, **FORMS[form]) for client in both)
    assert rounded(drafted) == rounded(plain)
    assert report["new_tokens"] == plain_report["new_tokens"]
    assert plain_report["draft_tokens"] == plain_report["accepted_tokens"] == 0
    assert report["draft_tokens"] >= report["accepted_tokens"] >= 0


def test_an_answer_that_repeats_the_prompt_takes_fewer_steps(both: tuple[Client, Client]):
    """A toy repeats itself soon. The report counts accepted tokens, and so does /metrics."""
    client, plain = both
    accepted = [choices(client, max_tokens=64, documents=[f"{SONG} {n}"])[1]["accepted_tokens"] for n in range(4)]
    assert sum(accepted) > 0
    shown = client.get("/metrics").text
    assert f'engine_accepted_tokens_total{{model_name="toy"}} {float(sum(accepted))}' in shown
    assert 'engine_draft_tokens_total{model_name="toy"} 0.0' in plain.get("/metrics").text


def test_streams_have_the_same_text(both: tuple[Client, Client]):
    said = []
    for client in both:
        found = events_of(client.ask(**ASKED, stream=True))
        said.append("".join(one["choices"][0]["delta"].get("content") or "" for one in found if one["choices"]))
    assert said[0] == said[1]


def test_a_negative_number_is_refused(serve: Serve):
    with pytest.raises(Exception, match="draft_tokens"):
        serve(draft_tokens=-1)
