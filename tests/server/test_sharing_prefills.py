"""Requests that come at the same time compute the documents that they share once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.conftest import wait_until

DOCUMENTS = [
    "The Selmond Choir is led by Otto Gunmark. It sings on Sundays. " * 6,
    "The Gerfern Tower has 230 steps and a copper roof. " * 6,
]

pytestmark = pytest.mark.backend("engine")


def reports(client, documents, count: int, **fields) -> list:
    """The reports of so many requests at once, of which none begins before all have come."""

    def ask(number: int):
        reply = client.ask(f"Who is number {number}?", documents=documents(number), max_tokens=2, chunkweave=fields)
        assert reply.status_code == 200, reply.text
        return reply.json()["chunkweave"]

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(ask, range(count))]


@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_six_requests_at_once_compute_their_documents_once(serve, method):
    """One after the other compute the documents and six questions."""
    apart, together = serve(), serve(max_num_batched_tokens=64)
    one_by_one = [reports(apart, lambda _: DOCUMENTS, 1, method=method)[0] for _ in range(6)]
    at_once = reports(together, lambda _: DOCUMENTS, 6, method=method)
    expected = sum(report["computed_tokens"] for report in one_by_one)
    assert sum(report["computed_tokens"] for report in at_once) <= 1.1 * expected
    assert "chunkweave:shared_prefills_total" in together.get("/metrics").text


def test_requests_over_other_documents_run_beside_each_other(serve):
    client = serve(max_num_seqs=4)
    client.ask(documents=["A short one."], max_tokens=1)  # the system part is stored
    reports(client, lambda number: [f"Document {number}. " + DOCUMENTS[number % 2]], 4, method="prefix")
    wait_until(lambda: "chunkweave:num_requests_running" in client.get("/metrics").text)
    metrics = client.get("/metrics").text
    [line] = [one for one in metrics.splitlines() if one.startswith("chunkweave:shared_prefills_total")]
    assert float(line.rsplit(" ", 1)[1]) == 0
