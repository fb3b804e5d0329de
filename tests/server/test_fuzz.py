"""Every endpoint against requests drawn from the schema, and against requests that break it: no 5xx, no hang."""

import os
from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest
import schemathesis
from benchmarks.server_thread import ServerThread
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from chunkweave.server.app import create_app
from chunkweave.server.backend import Stage
from tests.server.conftest import audit, toy_service, wait_until

EXAMPLES = int(os.environ.get("CHUNKWEAVE_FUZZ_EXAMPLES", "5"))
SCHEMA = schemathesis.openapi.from_dict(create_app(toy_service()).openapi())
OPERATIONS = {f"{one.method.upper()} {one.path}": one for one in (found.ok() for found in SCHEMA.get_all_operations())}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    service = toy_service(max_answer_tokens=8, default_answer_tokens=2, max_corpora=1_000_000)
    with ServerThread(service) as server:
        wait_until(lambda: service.stage is Stage.READY)
        httpx.post(f"{server.url}/v1/corpora", json={"name": "notes"})
        httpx.post(f"{server.url}/v1/corpora/notes/documents", json={"documents": ["one", "two"]})
        yield server.url
        audit(service)


def test_there_is_an_operation_for_every_endpoint():
    assert len(OPERATIONS) == 24
    assert {"POST /v1/chat/completions", "DELETE /v1/corpora/{name}/documents/{document}"} <= set(OPERATIONS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_no_request_breaks_the_server(url: str, operation: str, mode: GenerationMode):
    cases = OPERATIONS[operation].as_strategy(generation_mode=mode)

    @settings(
        max_examples=EXAMPLES,
        deadline=timedelta(seconds=60),
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def run(case: schemathesis.Case) -> None:
        response = case.call(base_url=url, timeout=60)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    try:
        run()
    except Unsatisfiable:
        pytest.skip("this operation takes nothing that could be wrong")


@settings(max_examples=EXAMPLES * 10, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(sorted({one.path for one in OPERATIONS.values()})),
    st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
    st.binary(max_size=200),
)
def test_no_bytes_break_the_server(url: str, path: str, method: str, body: bytes):
    path = path.format(name="notes", document="x")
    if (method, path) == ("DELETE", "/v1/corpora/notes"):
        return
    response = httpx.request(
        method, f"{url}{path}", content=body, headers={"content-type": "application/json"}, timeout=60
    )
    assert response.status_code < 500


def test_the_server_still_answers(url: str):
    body = {"prompt": "When?", "documents": ["The ferry leaves at nine."]}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
