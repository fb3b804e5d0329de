"""Two engines that share a remote tier: one finds, by its view, what the other has promoted."""

from pathlib import Path

import pytest

from chunkweave import Chunk, Engine, OrderingConfig, StoreConfig
from chunkweave.ordering.replicas import Replica, ReplicaDirectory
from chunkweave.testing import toy_model

CHUNKS = [Chunk(f"The {what} of Halvik is older than its harbour.", what) for what in ("mole", "tower", "bell", "dyke")]


@pytest.fixture(scope="module")
def model():
    return toy_model("llama")


def ask(engine: Engine, chunks, **options):
    return engine.generate("What is old?", chunks, max_new_tokens=2, order="free", **options)


def two_engines(model, folder: Path) -> tuple[ReplicaDirectory, Engine, Engine]:
    directory = ReplicaDirectory([Replica("a", ("host",)), Replica("b", ("host",))], ["remote"])
    engines = []
    for name in "ab":
        config = StoreConfig(remote_url=f"file://{folder}/segments")
        engine = Engine(model, store=config, ordering=OrderingConfig("tree-greedy", continuation_threshold=2))
        arranger = engine.preparer.arranger
        arranger.look_into(directory.join(name, engine.store.tree, arranger.table))
        engines.append(engine)
    return directory, *engines


@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_what_one_engine_promotes_the_other_follows_and_reuses(model, tmp_path, method):
    directory, one, other = two_engines(model, tmp_path)
    with one, other, directory.running(0.001):
        if method == "cacheblend":
            one.precompute(CHUNKS)
        for _ in range(5):
            first = ask(one, CHUNKS[:3], method=method)
        assert {chunk.kv_source for chunk in first.report.chunks} == {"prefix-exact"}
        assert one.store.flush()
        stood = [CHUNKS[chunk.rank].source for chunk in first.report.chunks[1:]]
        path = [chunk.id for chunk in first.report.chunks]
    directory.check()
    assert directory.views["b"].match(path).nodes == 4
    assert all(str(location).startswith(("host@a", "remote@a")) for location in directory.tree.locations(path))
    assert [directory.table.count(chunk) for chunk in path[1:]] == [5, 5, 5]

    answer = ask(other, [CHUNKS[3], *CHUNKS[:3][::-1]], method="prefix")
    assert [chunk.source for chunk in answer.report.chunks[1:4]] == stood, "the other's path, not the caller's order"
    assert [(chunk.kv_source, chunk.tier) for chunk in answer.report.chunks[:4]] == [("prefix-exact", "remote")] * 4
    reference = Engine(model, method="full")
    stood_in_all = [[CHUNKS[3], *CHUNKS[:3][::-1]][chunk.rank] for chunk in answer.report.chunks[1:]]
    assert answer.token_ids == reference.generate("What is old?", stood_in_all, max_new_tokens=2).token_ids
    directory.apply_pending()
    directory.check()
    for engine in (one, other):
        engine.store.check()


def test_what_leaves_a_store_leaves_the_global_tree_and_the_views(model, tmp_path):
    directory, one, other = two_engines(model, tmp_path)
    with one, other:
        for _ in range(2):
            ask(one, CHUNKS[:2])
        assert one.store.flush()
        directory.apply_pending()
        path = next(path for path in directory.views["a"].paths("host@a") if len(path) == 3)
        assert {str(location) for location in directory.tree.locations(path)} == {"host@a", "remote@a"}
        for record in one.store.records():  # evicted from memory: the remote copy is what is left
            one.store.levels[0].store.drop(record.id)
        directory.apply_pending()
        directory.check()
        assert {str(location) for location in directory.tree.locations(path)} == {"remote@a"}
        assert directory.views["b"].match(path).nodes == 3
        assert directory.views["a"].match(path).tokens_by_tier.keys() == {"remote@a"}
        one.store.clear()
        directory.apply_pending()
        directory.check()
        assert len(directory.tree) == 0
        assert directory.views["b"].match(path).nodes == 0
