"""`chunkweave.cache`: a request that stores nothing (`read`), or does not look either (`off`), over both backends."""

from typing import Any

import pytest

from tests.server.conftest import Client, Serve, engine_of

DOCUMENTS = [
    "The ferry leaves at seven, at noon and at six, and on Sundays at nine. " * 3,
    "The choir sings on Sundays behind the old wall of the upper garden. " * 3,
]
OTHERS = ["The tower has two hundred and thirty steps and a copper roof."]
KNOWN = ("prefix_exact_tokens", "reused_tokens")


@pytest.fixture
def client(serve: Serve) -> Client:
    return serve()


def report(client: Client, documents: list[str], **reuse: Any) -> dict[str, Any]:
    reply = client.ask(documents=documents, max_tokens=2, chunkweave=reuse)
    assert reply.status_code == 200, reply.text
    return reply.json()["chunkweave"]


def known(found: dict[str, Any]) -> int:
    return sum(found[name] for name in KNOWN)


@pytest.mark.backend("engine")
@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_read_uses_what_is_stored_and_stores_nothing(client: Client, method: str):
    store = client.engine.store
    assert known(report(client, DOCUMENTS, method=method, cache="read")) == 0
    assert len(store) == 0
    first = report(client, DOCUMENTS, method=method)
    stored = {record.id for record in store.records()}
    assert "cache" not in first
    assert stored
    again = report(client, DOCUMENTS, method=method, cache="read")
    assert again["cache"] == "read"
    assert known(again) > 0
    if method == "cacheblend":
        turned = report(client, DOCUMENTS[::-1], method=method, cache="read")
        assert turned["reused_tokens"] > 0
    report(client, [OTHERS[0], *DOCUMENTS], method=method, cache="read")
    assert {record.id for record in store.records()} == stored


@pytest.mark.backend("engine")
def test_off_does_not_look(client: Client, monkeypatch: pytest.MonkeyPatch):
    store = client.engine.store
    report(client, DOCUMENTS, method="cacheblend")
    stored, counts = {record.id for record in store.records()}, store.stats
    looked: list[Any] = []
    lookup = type(store).lookup
    monkeypatch.setattr(type(store), "lookup", lambda self, prompt: looked.append(prompt) or lookup(self, prompt))
    found = report(client, DOCUMENTS, cache="off")
    assert (found["method"], found["cache"], known(found)) == ("full", "off", 0)
    assert looked == []
    assert {record.id for record in store.records()} == stored
    assert (store.stats.hits, store.stats.misses) == (counts.hits, counts.misses)
    assert engine_of(client.service).batching.stats.finished >= 2
    report(client, DOCUMENTS, method="cacheblend")
    assert looked


@pytest.mark.backend("engine")
def test_neither_is_computed_in_idle_time(serve: Serve):
    client = serve(contexts="corpus", improve_share=0.5, promotion_threshold=1)
    for cache in ("read", "off"):
        report(client, DOCUMENTS, cache=cache, order="free")
    assert client.service.backend.cache.improving.stats()["improving"]["queued"] == 0


@pytest.mark.parametrize("reuse", [{"method": "cacheblend"}, {"recompute_ratio": 0.2}, {"focus": False}])
def test_off_takes_no_method_that_reuses(client: Client, reuse: dict[str, Any]):
    refused = client.ask(documents=DOCUMENTS, chunkweave={"cache": "off", **reuse})
    assert refused.status_code == 400
    assert "cache off reuses nothing" in refused.json()["error"]["message"]
    assert client.ask(documents=DOCUMENTS, chunkweave={"cache": "off", "method": "full"}).status_code == 200


@pytest.mark.backend("vllm")
def test_vllm_is_sent_what_it_may_do(client: Client):
    fake = client.fake
    report(client, DOCUMENTS, method="cacheblend", cache="read")
    assert fake.seen[-1]["kv_transfer_params"]["chunkweave"]["cache"] == "read"
    for _ in range(2):
        found = report(client, DOCUMENTS, cache="off")
        assert (found["method"], found["cache"]) == ("full", "off")
        assert "kv_transfer_params" not in fake.seen[-1]
    salts = [one.get("cache_salt", "") for one in fake.seen[-2:]]
    assert len({*salts, ""}) == 3, "no two requests share blocks of vLLM's own prefix cache"
    (replica,) = client.service.backend.fleet.replicas
    assert replica.contents.tokens == 0, "the front expects nothing to be stored"
    report(client, DOCUMENTS, method="cacheblend")
    assert "cache" not in fake.seen[-1]["kv_transfer_params"]["chunkweave"]
    assert replica.contents.tokens > 0
