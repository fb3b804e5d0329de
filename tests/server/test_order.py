"""An answer is that to the request as it was sent, whatever the quality, unless somebody says that order is free."""

import pytest

from chunkweave_server.app import create_app
from chunkweave_server.backend import Stage
from tests.server.conftest import KEYS, Client, key_ring, toy_service, vllm_service, wait_until
from tests.server.fake_vllm import FakeVllm

FERRY = "The ferry leaves at seven, at noon and at six."
CHOIR = "The choir sings on Sundays behind the old wall."


def arranged(client, **reuse):
    """Where chunks of a request came from whose second one is asked for most, and what put them there."""
    for _ in range(3):
        client.ask(documents=[CHOIR], chunkweave={"order": "free"})
    report = client.ask(documents=[FERRY, CHOIR], chunkweave=reuse).json()["chunkweave"]
    return [chunk["rank"] for chunk in report["chunks"] if chunk["rank"] is not None], report["order"]


@pytest.mark.parametrize("reuse", [{}, {"quality": "exact"}, {"method": "prefix"}, {"method": "cacheblend"}])
def test_chunks_stand_as_they_were_sent(serve, reuse):
    ranks, order = arranged(serve(), **reuse)
    assert ranks == [0, 1]
    assert order == "original"


def test_the_client_may_say_that_order_is_free(serve):
    assert arranged(serve(), order="free") == ([1, 0], "frequency")


def test_the_operator_may_say_that_order_is_free_and_the_client_that_it_is_not(serve):
    client = serve(order="free")
    assert arranged(client) == ([1, 0], "frequency")
    assert arranged(client, order="fixed") == ([0, 1], "original")


def ranks_of(client, *documents, **body):
    report = client.ask(documents=list(documents), **body).json()["chunkweave"]
    return [chunk["rank"] for chunk in report["chunks"] if chunk["rank"] is not None]


@pytest.mark.parametrize(("popular", "other"), [(FERRY, CHOIR), (CHOIR, FERRY)])
def test_what_one_tenant_asks_pushes_out_nothing_of_another_ones(serve, popular, other):
    """CRAFT §4.1 counts over a window of requests: each tenant has its own."""
    client = serve(keys=key_ring(), order="free", ordering_window=3)
    for _ in range(2):
        client.ask(documents=[popular], key=KEYS["acme"])
    for _ in range(3):
        client.ask(documents=["The tower has 230 steps."], key=KEYS["bolt"])
    assert ranks_of(client, other, popular, key=KEYS["acme"]) == [1, 0]


@pytest.mark.parametrize(("popular", "other"), [(FERRY, CHOIR), (CHOIR, FERRY)])
def test_what_was_asked_for_is_known_after_a_restart(server_backend, tmp_path, popular, other):
    def restarted() -> Client:
        values = {"order": "free", "cache_dir": tmp_path / "kv"}
        service = toy_service(**values) if server_backend == "engine" else vllm_service(vllm, **values)
        client = Client(create_app(service))
        client.service = service
        return client

    with FakeVllm(str(tmp_path / "reports")) as vllm:
        for expected in (None, [1, 0]):
            with restarted() as client:
                wait_until(lambda: client.service.stage in (Stage.READY, Stage.FAILED))
                if expected is None:
                    for _ in range(3):
                        client.ask(documents=[popular])
                else:
                    assert ranks_of(client, other, popular) == expected
    assert len(list((tmp_path / "kv").rglob("*access-counts.json"))) == 1
