"""Eviction, admission, variants and promotion do what a server is told: each test fails if its setting is not wired."""

import pytest

FERRY = "The ferry leaves at seven, at noon and at six."
CHOIR = "The choir sings on Sundays behind the old wall."
TOWER = "The tower has two hundred and thirty steps and a copper roof."

pytestmark = pytest.mark.backend("engine")


def ask(client, *documents, **reuse):
    """The report of one answer over documents."""
    reply = client.ask(documents=list(documents), max_tokens=1, chunkweave={"method": "prefix", **reuse})
    assert reply.status_code == 200, reply.text
    return reply.json()["chunkweave"]


def exact(report) -> int:
    """How many chunks were an exact prefix."""
    return sum(chunk["kv_source"] == "prefix-exact" for chunk in report["chunks"] if chunk["rank"] is not None)


def test_a_cap_on_all_instances_holds_all_chunks_together(serve):
    """Cache-Craft's N x M as it is printed: one total, whatever chunk they are of."""
    client = serve(max_instances=3, max_variants=None)
    for documents in ((FERRY, CHOIR), (CHOIR, FERRY), (TOWER,), (TOWER, CHOIR)):
        ask(client, *documents)
    assert len(client.engine.store) == 3
    assert client.engine.store.stats.variants_dropped > 0


@pytest.mark.parametrize(("policy", "kept"), [("lru", TOWER), ("lfu", FERRY), ("pgdsf", FERRY)])
def test_the_policy_says_what_leaves_memory(serve, policy, kept):
    """One document is asked for often and long ago, another once and just now."""
    probe = serve()
    sizes = []
    for document in (FERRY, TOWER, CHOIR):
        ask(probe, document)
        sizes.append(probe.engine.store.used_bytes)
    client = serve(policy=policy, host_budget=sizes[-1] - 1)
    for document in (FERRY, FERRY, FERRY, TOWER, CHOIR):
        ask(client, document)
    assert exact(ask(client, kept)) == 1


def test_admission_keeps_what_was_seen_once_off_the_disk(serve, tmp_path):
    client = serve(cache_dir=tmp_path / "kv", admission=2)
    disk = client.engine.store.levels[-1]
    ask(client, FERRY)
    client.engine.store.flush(5)
    assert disk.name == "disk"
    assert len(disk.store) == 0
    ask(client, FERRY)
    client.engine.store.flush(5)
    assert len(disk.store) > 0


def test_a_threshold_keeps_what_was_asked_for_once_off_the_exact_paths(serve):
    """CRAFT's promotion: with a free order a chunk is stored once so many recent requests asked for it."""
    usual, promoting = serve(order="free"), serve(order="free", promotion_threshold=3)
    assert [exact(ask(usual, FERRY)) for _ in range(4)] == [0, 1, 1, 1]
    assert [exact(ask(promoting, FERRY)) for _ in range(4)] == [0, 0, 0, 1]
