"""What a store says of chunks beside that they are stored, and the command that asks for it."""

import json

import pytest

from chunkweave.errors import UsageError
from chunkweave.prompt.parts import chunk_id, neutral_id
from chunkweave.store.level import Level
from chunkweave.store.records import LEAST_READ, Mark, SegmentRecord, marked
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.types import ChunkId
from chunkweave.vllm.inventory import Inventory, asked_chunks, inventory_params, inventory_report
from tests.unit.tier_fakes import FaultyTier, Payload, payload_of

BYTES = 10
CHUNK, OTHER, CONTEXT = (chunk_id("model", "", (number,)) for number in range(3))
PASSAGE = neutral_id(CONTEXT)


@pytest.fixture
def store():
    tiers = TieredStore([Level("host", SegmentStore(FaultyTier(), budget_bytes=1000))])
    yield tiers
    tiers.check()


def first_pass(chunk: ChunkId) -> SegmentRecord:
    return SegmentRecord.of(chunk, (PASSAGE,), (1, 2), exact=True, nbytes=BYTES)


def mean(chunk: ChunkId, read: int = 0) -> SegmentRecord:
    one = SegmentRecord.of(chunk, (CONTEXT,), (1, 2), exact=False, nbytes=BYTES)
    ids = [chunk_id("model", "", (9, number)) for number in range(read)]
    return one.mean_over([(CONTEXT,)], nbytes=BYTES, attention=None, read=ids)


def hold(store: TieredStore[Payload], *records: SegmentRecord) -> None:
    for record in records:
        assert store.insert(record, payload_of(record))


def test_a_follower_hears_of_means_and_of_what_contexts_are_woven_from(store):
    follower = store.follow()
    hold(store, first_pass(CHUNK))
    assert marked(CHUNK, Mark.CONTEXT) in follower.take().added
    hold(store, mean(CHUNK), mean(OTHER, read=LEAST_READ), mean(CONTEXT, read=LEAST_READ + 1))
    added = follower.take().added
    assert {marked(one, Mark.MEAN) for one in (CHUNK, OTHER, CONTEXT)} <= added
    assert marked(OTHER, Mark.CONTEXT) in added
    assert marked(CONTEXT, Mark.CONTEXT) not in added, "it has read too much"
    store.remove(first_pass(CHUNK).id)
    gone = follower.take()
    assert marked(CHUNK, Mark.CONTEXT) not in gone.removed, "there is its mean yet"
    store.forget_chunks([CHUNK])
    assert {marked(CHUNK, Mark.MEAN), marked(CHUNK, Mark.CONTEXT)} <= follower.take().removed
    assert not store.follow().take().added & {marked(CHUNK, mark) for mark in Mark}


def test_first_passes_are_dropped_of_chunks_that_are_named_and_have_a_mean(store):
    alone = SegmentRecord.of(CHUNK, (), (1, 2), exact=True, nbytes=BYTES)
    kept = [first_pass(OTHER), first_pass(CONTEXT), mean(CHUNK), mean(OTHER), alone]
    hold(store, first_pass(CHUNK), *kept)
    assert store.drop_first_passes([CHUNK, CONTEXT]) == 1
    assert {record.id for record in store.records()} == {record.id for record in kept}


def test_the_answer_names_chunks_by_their_numbers():
    chunks = [[5, 6], [7], [8, 9]]
    params = json.loads(json.dumps(inventory_params(chunks, [1])))
    asked = asked_chunks(params["stored"], fingerprint="model", salt="s", start=(1,))
    assert asked == [chunk_id("model", "s", tuple(chunk)) for chunk in chunks]
    stored = {marked(asked[1], Mark.MEAN), marked(asked[1], Mark.CONTEXT), marked(asked[2], Mark.CONTEXT), asked[0]}
    report = json.loads(json.dumps(inventory_report(asked, stored.__contains__)))
    assert Inventory.of(report) == Inventory(frozenset({1}), frozenset({1, 2}))


@pytest.mark.parametrize(
    "report", [None, {}, {"means": [1]}, {"means": 1, "contexts": []}, {"error": "unknown fields"}]
)
def test_without_an_answer_nothing_is_known(report):
    assert Inventory.of(report) == Inventory()


@pytest.mark.parametrize(
    "given", [None, 3, {}, {"chunks": []}, {"chunks": [["a"]]}, {"chunks": [[1]], "salt": "s"}, {"everything": True}]
)
def test_a_command_that_is_wrong_is_refused(given):
    with pytest.raises(UsageError):
        asked_chunks(given, fingerprint="model", salt="", start=())
