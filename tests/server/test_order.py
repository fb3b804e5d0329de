"""An answer is that to the request as it was sent, whatever the quality, unless somebody says that order is free."""

import pytest

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
