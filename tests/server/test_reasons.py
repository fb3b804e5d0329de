"""A report says why: by how much a chunk was recomputed, at which layers it was chosen, and where focus stopped."""

from math import ceil

import pytest

from tests.server.conftest import Client
from tests.server.test_fields import DOCUMENTS

MOVED = [*DOCUMENTS[2:], *DOCUMENTS[:2]]
NAMES = ["overlap", "cci", "cfo", "coverage", "generation"]


def woven(client: Client, salt: str = "", **reuse) -> dict:
    """The report of a request over chunks that were computed with profiles, in another order."""
    asked = {"question": "Who counts the bees?", "cache_salt": salt}
    client.ask(documents=DOCUMENTS, chunkweave={"method": "cachecraft", "alpha": 1}, **asked)
    reply = client.ask(documents=MOVED, chunkweave=reuse, **asked)
    assert reply.status_code == 200, reply.text
    return reply.json()["chunkweave"]


@pytest.mark.backend("engine")
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_scores_of_each_chunk_are_those_that_were_recomputed_by(client: Client, alpha: float):
    """Cache-Craft eq. 12, of the numbers as they are shown: N = ceil(alpha CCI (1 - beta') |C|)."""
    report = woven(client, method="cachecraft", alpha=alpha, focus=False)
    chunks = [chunk for chunk in report["chunks"] if chunk["kv_source"] == "reused"]
    assert len(chunks) == len(DOCUMENTS)
    for chunk in chunks:
        why = chunk["reasons"]
        assert list(why) == NAMES
        assert why["cfo"] == pytest.approx(min(1.0, alpha * why["cci"] * (1 - why["overlap"])), abs=0.002)
        assert chunk["recomputed_tokens"] in {ceil((why["cfo"] + d) * chunk["tokens"]) for d in (-0.001, 0, 0.001)}
        assert why["generation"] == 0
    moved_to_the_front, without_a_predecessor = chunks[0]["reasons"], chunks[2]["reasons"]
    assert (moved_to_the_front["overlap"], moved_to_the_front["coverage"]) == (0, 1), "nothing is before it"
    assert (without_a_predecessor["cci"], without_a_predecessor["coverage"]) == (0.5, 0), "it was the first chunk"


@pytest.mark.backend("engine")
def test_where_focus_stopped_is_in_the_report(client: Client):
    whole = woven(client, "a", method="cachecraft", focus=False)
    report = woven(client, "b", method="cachecraft")
    assert (whole["stopped_at_layer"], report["stopped_at_layer"]) == (None, 3)
    assert [one["reasons"] for one in whole["chunks"]] == [one["reasons"] for one in report["chunks"]]
    recomputed = [[chunk["recomputed_tokens"] for chunk in one["chunks"][1:]] for one in (whole, report)]
    stopped = [before for before, after in zip(*recomputed, strict=True) if after < before]
    assert stopped, "the question does not attend to them"
    assert sum(recomputed[0]) - sum(recomputed[1]) == sum(stopped), "a chunk is stopped as a whole"


def test_the_layers_at_which_tokens_were_chosen_are_in_the_report(client: Client):
    report = woven(client, method="cacheblend", check_layers=[1, 3], recompute_ratio=0.4)
    assert report["check_layers"] == report["parameters"]["check_layers"] == [1, 3]
    assert {len(chunk["reasons"]) for chunk in report["chunks"]} == {0}
    assert report["stopped_at_layer"] is None


@pytest.mark.backend("vllm")
def test_what_the_plug_in_says_is_shown_by_chunk(client: Client):
    report = woven(client, method="cachecraft")
    assert [chunk["reasons"] for chunk in report["chunks"]] == [{"cfo": 0.25, "generation": 1}] * len(DOCUMENTS)
    assert report["stopped_at_layer"] == 3
    assert "reasons" not in report


def test_a_report_over_many_chunks_stays_small(client: Client):
    """Some 100 bytes a chunk are its reasons: the numbers are rounded."""
    documents = [f"The boat number {number} lies at the pier." for number in range(20)]
    for order in (documents, documents[::-1]):
        reply = client.ask(documents=order, chunkweave={"method": "cachecraft"})
        assert reply.status_code == 200, reply.text
    reasons = [chunk["reasons"] for chunk in reply.json()["chunkweave"]["chunks"] if chunk["reasons"]]
    assert len(reasons) >= 19
    assert max(len(str(one)) for one in reasons) < 110
