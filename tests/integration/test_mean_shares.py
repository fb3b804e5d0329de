"""What is collected for means while several clients send shares, and documents are removed."""

import threading

import pytest
import torch

from chunkweave import Engine
from chunkweave.config import StoreConfig
from chunkweave.kv.segment import SegmentKV
from chunkweave.prompt.contexts import MeanShare
from chunkweave.store.records import ANYTHING, SegmentRecord
from chunkweave.types import ChunkId
from chunkweave.weaving.means import Means
from chunkweave.weaving.stores import open_store
from tests.toys import toy_model

LAYERS, TOKENS, HEADS, DIM = 2, 3, 1, 4


def name(letter: str) -> ChunkId:
    return ChunkId(letter * 32)


CHUNK, OTHER, FIRST, SECOND = map(name, "abcd")


def computed(chunk: ChunkId, context: ChunkId, value: float, read=()) -> tuple[SegmentRecord, SegmentKV]:
    kv = SegmentKV(torch.full((LAYERS, 2, TOKENS, HEADS, DIM), value))
    tokens = (1, 2, 3)
    return SegmentRecord.of(chunk, (context,), tokens, exact=False, nbytes=kv.nbytes, read=read), kv


@pytest.fixture
def store():
    with_budget = open_store(StoreConfig(host_budget_bytes=1 << 20), "model", torch.device("cpu"))
    yield with_budget
    with_budget.check()
    with_budget.close()


def value_of(store, stored) -> float:
    (segment,) = stored
    (value,) = store.get(segment).layer(1).unique().tolist()
    return value


def test_groups_of_two_clients_that_have_one_name_are_not_mixed(store):
    """Chunks of two tenants have different ids, also if their tokens are the same."""
    means, share = Means(), MeanShare("mine", 2)
    assert not means.store_shares(store, share, [computed(CHUNK, FIRST, 2.0)])
    assert not means.store_shares(store, share, [computed(OTHER, FIRST, 100.0)])
    assert value_of(store, means.store_shares(store, share, [computed(CHUNK, SECOND, 4.0)])) == 3.0
    assert value_of(store, means.store_shares(store, share, [computed(OTHER, SECOND, 200.0)])) == 150.0


def test_shares_of_means_over_more_contexts_do_not_count_for_one_over_fewer(store):
    means = Means()
    for context in (FIRST, SECOND):
        assert not means.store_shares(store, MeanShare("mine", 3), [computed(CHUNK, context, 100.0)])
    alone = means.store_shares(store, MeanShare("mine", 1), [computed(CHUNK, FIRST, 2.0)])
    assert value_of(store, alone) == 2.0


@pytest.mark.parametrize("removed", [{CHUNK}, {FIRST}, {SECOND}, None], ids=["itself", "context", "read", "everything"])
def test_what_is_pending_is_dropped_with_what_it_has_read(store, removed):
    means, share = Means(), MeanShare("mine", 2, begun_s=0.0)
    means.store_shares(store, share, [computed(CHUNK, FIRST, 2.0, read=(SECOND,))])
    means.forget(None if removed is None else frozenset(removed))
    later = MeanShare("mine", 2)
    assert not means.store_shares(store, later, [computed(CHUNK, OTHER, 4.0)])
    assert value_of(store, means.store_shares(store, later, [computed(CHUNK, name("e"), 6.0)])) == 5.0


def test_what_may_have_read_anything_is_dropped_with_whatever_is_removed(store):
    means, share = Means(), MeanShare("mine", 2)
    means.store_shares(store, share, [computed(CHUNK, FIRST, 2.0, read=(ANYTHING,))])
    means.forget(frozenset({name("f")}))
    assert not means.store_shares(store, MeanShare("mine", 2), [computed(CHUNK, SECOND, 4.0)])


def test_a_removal_that_comes_with_the_last_share_removes_the_mean(store, monkeypatch):
    """Whatever thread it comes in, and though the last share has not read what is removed."""
    means, share, insert = Means(), MeanShare("mine", 2), store.insert
    means.store_shares(store, share, [computed(CHUNK, FIRST, 2.0)])
    gone = frozenset({FIRST})
    removal = threading.Thread(target=lambda: (means.forget(gone), store.forget_chunks(gone)))

    def inserted(*mean):
        removal.start()
        removal.join(0.2)
        return insert(*mean)

    monkeypatch.setattr(store, "insert", inserted)
    means.store_shares(store, share, [computed(CHUNK, SECOND, 4.0)])
    removal.join()
    assert not store.records()


def test_a_chunk_that_has_a_mean_is_not_computed_again_where_it_comes_alone():
    texts = ["Ada lives at number 1.", "Bo lives at number 2.", "Cy lives at number 3."]
    engine = Engine(toy_model())
    assert engine.precompute(texts) == len(texts)
    before = engine.store.records()
    assert engine.precompute(texts[:1]) == 0
    assert engine.store.records() == before


def test_a_long_chunk_that_leaves_no_room_for_contexts_is_computed_behind_what_fits():
    texts = [f"{name} lives at number {number}. " * 8 for number, name in enumerate(("Ada", "Bo", "Cy", "Di"))]
    engine = Engine(toy_model())
    part = engine.builder.chunk_part(texts[0])
    contexts = [[engine.builder.chunk_part(text)] for text in texts[1:]]
    most = len(part) + sum(map(len, engine.builder.opening())) + 4
    (one,) = engine.preparer.beforehand(part, contexts, most_tokens=most)
    assert one.mean is None
    assert engine.compute(one)
