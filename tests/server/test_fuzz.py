"""Every endpoint against requests drawn from the schema, and against requests that break it: no 5xx, no hang.

The bundled reader behind the engine backend, with corpora and KV on disk; the vLLM backend before a server that looks
like vLLM. `CHUNKWEAVE_FUZZ_EXAMPLES` requests an endpoint, half of them against the schema.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from chunkweave_server.app import create_app
from chunkweave_server.engine_backend import EngineBackend
from chunkweave_server.service import Service
from chunkweave_server.tenants import KeyRing
from tests.server.conftest import audit, listening, settings_of, toy_service, vllm_service
from tests.server.fake_vllm import FakeVllm
from tests.server.test_refusals import INSIDE

EXAMPLES = int(os.environ.get("CHUNKWEAVE_FUZZ_EXAMPLES", "6"))
SCHEMA = schemathesis.openapi.from_dict(create_app(toy_service()).openapi())
OPERATIONS = {f"{one.method.upper()} {one.path}": one for one in (found.ok() for found in SCHEMA.get_all_operations())}
FIELDS = sorted({name for one in SCHEMA.raw_schema["components"]["schemas"].values() for name in one["properties"]})
TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)  # halves of surrogate pairs too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | TEXTS, inner, max_size=4),
)
LIMITS = {"max_answer_tokens": 8, "default_answer_tokens": 2, "max_corpora": 1_000_000}


@pytest.fixture(scope="module", params=["engine", "vllm"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fuzz")
    with ExitStack() as stack:
        if request.param == "engine":
            places = {"cache_dir": str(folder / "cache"), "data_dir": str(folder / "data")}
            settings = settings_of(model="reader", shape=None, served_model_name="reader", **places, **LIMITS)
            service = Service(settings, EngineBackend(settings), KeyRing())
        else:
            fake = stack.enter_context(FakeVllm(str(folder / "reports")))
            service = vllm_service(fake, data_dir=str(folder / "data"), **LIMITS)
        server = stack.enter_context(listening(service))
        httpx.post(f"{server.url}/v1/corpora", json={"name": "notes"})
        httpx.post(f"{server.url}/v1/corpora/notes/documents", json={"documents": ["one", "two"]})
        yield server.url
        audit(service)


def check(response: httpx.Response | schemathesis.Response) -> None:
    """No fault of the server's; what is refused is refused in one form, and "later" says when."""
    assert response.status_code < 500 or response.status_code in (501, 503), response.text
    if response.status_code == 503:
        assert "retry-after" in response.headers
    if response.status_code >= 400 and "json" in str(response.headers.get("content-type")):
        error = response.json()["error"]
        assert {"message", "code"} <= set(error)
        assert INSIDE.search(error["message"]) is None, error


def test_there_is_an_operation_for_every_endpoint():
    assert len(OPERATIONS) == 23
    assert {"POST /v1/chat/completions", "DELETE /v1/corpora/{name}/documents/{document}"} <= set(OPERATIONS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_no_request_breaks_the_server(url: str, operation: str, mode: GenerationMode):
    cases = OPERATIONS[operation].as_strategy(generation_mode=mode)

    @settings(
        max_examples=(EXAMPLES + 1) // 2,
        deadline=timedelta(seconds=60),
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def run(case: schemathesis.Case) -> None:
        check(case.call(base_url=url, timeout=60))

    try:
        run()
    except Unsatisfiable:
        pytest.skip("this operation takes nothing that could be wrong")


def test_no_bytes_break_the_server(url: str):
    headers = {"content-type": "application/json"}

    @settings(max_examples=EXAMPLES * 10, deadline=None, derandomize=True, database=None)
    @given(
        st.sampled_from(sorted({one.path for one in OPERATIONS.values()})),
        st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
        st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()),
    )
    def run(path: str, method: str, body: bytes) -> None:
        path = path.format(name="notes", document="x", key="x")
        if (method, path) != ("DELETE", "/v1/corpora/notes"):
            check(client.request(method, path, content=body))

    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        run()


def test_the_server_still_answers(url: str):
    body = {"prompt": "When?", "documents": ["The ferry leaves at nine."]}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
