"""The worker's half with weaves that compute nothing: what it notes of what was read, and of means that are pending."""

from dataclasses import replace

import pytest
import torch

from chunkweave.conversation.weave_request import WeaveRequest
from chunkweave.kv.segment import SegmentKV
from chunkweave.prompt.contexts import MeanShare
from chunkweave.prompt.parts import neutral_id
from chunkweave.store.records import ANYTHING, SegmentRecord
from chunkweave.types import ChunkId
from chunkweave.vllm import worker as worker_module
from chunkweave.vllm.orders import SaveOrder, StepOrders
from chunkweave.vllm.removal import RemovalOrder, Removed
from chunkweave.vllm.worker import ConnectorWorker
from tests.vllm.test_worker import BLOCKS, HEAD_DIM, HEADS, IDS, LAYERS, order, paged, request, side, weave, whole

__all__ = ["paged", "side"]

READ, ELSEWHERE = ChunkId("a" * 32), ChunkId("b" * 32)
WOVEN_TO = 20
"""Where the first chunk ends, of which a mean is stored; the second one is vLLM's to compute."""


def zeros(tokens: int) -> SegmentKV:
    return SegmentKV(torch.zeros(LAYERS, 2, tokens, HEADS, HEAD_DIM))


def hold_mean(side: ConnectorWorker) -> None:
    """Let the store hold a mean of the first chunk, over one context."""
    _, part, _ = request().stored_parts()
    kv = zeros(len(part.span))
    alone = SegmentRecord.of(part.id, (READ,), part.token_ids, exact=False, nbytes=kv.nbytes)
    assert side._store.insert(alone.mean_over([(READ,)], nbytes=kv.nbytes, attention=None, read=()), kv)


def begin(side: ConnectorWorker, **more: int) -> None:
    """Weave the first chunk of a request that continues."""
    side.step(StepOrders(weaves=[order(stop=WOVEN_TO, **more)], idle=True))
    assert not side.take_outcome()[1].failed


def save(side: ConnectorWorker, *, exact: bool = False) -> None:
    """vLLM has computed what is behind the weave."""
    whole(side, saves=[SaveOrder("a", request(), BLOCKS, WOVEN_TO, 40, exact, number=3)])
    assert side.take_outcome()[1].saved == {3: 1}


def remove(side: ConnectorWorker, *chunks: ChunkId, **more: bool) -> None:
    whole(side, removals=[RemovalOrder("command", frozenset(chunks), **more)])


def second_chunk(side: ConnectorWorker) -> list[SegmentRecord]:
    *_, part = request().stored_parts()
    return [record for record in side._store.records() if record.chunk_id == part.id]


def test_what_is_computed_behind_a_mean_has_read_what_the_mean_has(side):
    hold_mean(side)
    begin(side)
    save(side)
    (record,) = second_chunk(side)
    assert READ in record.sources
    assert READ not in record.context
    assert not record.exact
    remove(side, ELSEWHERE)
    assert second_chunk(side) == [record]
    remove(side, READ)
    assert not second_chunk(side)


@pytest.mark.parametrize("woven", [False, True], ids=["all of it", "up to a weave"])
def test_behind_blocks_of_vllms_own_cache_that_are_not_exact_anything_may_have_been_read(side, woven):
    if woven:
        hold_mean(side)
        begin(side, first=16, exact=10)
    save(side)
    assert [record.read for record in second_chunk(side)] == [(ANYTHING,)]
    remove(side, ELSEWHERE)
    assert not second_chunk(side)


def test_what_vllm_has_computed_whole_has_read_its_context_alone(side):
    save(side, exact=True)
    assert [(record.exact, record.read) for record in second_chunk(side)] == [(True, ())]


@pytest.mark.parametrize("removed", [READ, ELSEWHERE], ids=["of it", "of another"])
def test_a_running_request_stores_nothing_behind_what_has_read_a_removed_chunk(side, removed):
    """Though the chunk is none of its own."""
    hold_mean(side)
    begin(side)
    remove(side, removed)
    save(side)
    assert bool(second_chunk(side)) == (removed == ELSEWHERE)


class FakeShare:
    """Captures the last chunk of a request for a mean."""

    captures, attention = (), None

    def __init__(self, _layers, prompt, _plan, _sources, _store, config, *, first, before) -> None:
        assert (config, before) == (None, None)
        self._part, self._context = prompt.parts[-1], prompt.contexts()[-1]
        assert first == prompt.spans()[-1].start, "nothing before it is kept"
        self.spans = frozenset({prompt.spans()[-1]})

    def segments(self, _exact_to, _memory):
        kv, part = zeros(len(self._part)), self._part
        yield SegmentRecord.of(part.id, self._context, part.token_ids, exact=False, nbytes=kv.nbytes), kv


def share(context: int) -> WeaveRequest:
    """The last chunk behind another first one."""
    ids = (*IDS[:10], *(context + one for one in range(10)), *IDS[20:35])
    return request("full-reuse", ids=ids, mean={"group": "one", "of": 2})


def compute(side: ConnectorWorker, name: str, context: int, mean: MeanShare | None = None, **orders) -> None:
    asked = share(context)
    whole(side, weaves=[order(name, replace(asked, mean=mean or asked.mean), stop=34)], idle=True, **orders)
    arrived, results = side.take_outcome()
    assert (arrived, results.failed) == ({name}, set())
    side.forget([name])


@pytest.fixture
def shares(side, monkeypatch) -> ConnectorWorker:
    monkeypatch.setattr(worker_module, "CapturedParts", FakeShare)
    return side


def test_a_mean_is_all_that_is_stored_of_its_shares(shares):
    compute(shares, "a", 100)
    assert not shares._store.records()
    compute(shares, "b", 100)
    assert not shares._store.records(), "the same context once more"
    compute(shares, "c", 200)
    (record,) = shares._store.records()
    contexts = sorted(share(context).prompt.contexts()[-1] for context in (100, 200))
    assert (list(record.contexts), record.exact) == (contexts, False)
    assert record.chunk_id == share(100).prompt.parts[-1].id


@pytest.mark.parametrize("chunks", [None, {share(100).prompt.parts[1].id}, {share(1).prompt.parts[-1].id}])
def test_what_is_pending_of_a_mean_does_not_outlive_a_removal(shares, chunks):
    compute(shares, "a", 100)
    whole(shares, removals=[RemovalOrder("command", None if chunks is None else frozenset(chunks))])
    compute(shares, "b", 200)
    assert not shares._store.records()
    compute(shares, "c", 300)
    (record,) = shares._store.records()
    assert {context[-1] for context in record.contexts} == {share(one).prompt.parts[1].id for one in (200, 300)}


def test_a_share_that_ran_during_the_removal_is_not_taken(shares):
    gone = frozenset({share(100).prompt.parts[1].id})
    compute(shares, "a", 100, removals=[RemovalOrder("command", gone, frozenset({"a"}))])
    compute(shares, "b", 200)
    assert not shares._store.records()
    compute(shares, "c", 100)
    assert len(shares._store.records()) == 1, "what came in behind the removal is"


@pytest.mark.parametrize("anew", [False, True])
def test_a_mean_that_is_stored_gives_place_only_to_one_that_is_computed_anew(shares, anew):
    compute(shares, "a", 100)
    compute(shares, "b", 200)
    (old,) = shares._store.records()
    for name, context in (("c", 300), ("d", 400)):
        compute(shares, name, context, MeanShare("two", 2, anew=anew))
    (kept,) = shares._store.records()
    contexts = (300, 400) if anew else (100, 200)
    assert sorted(kept.contexts) == sorted(share(context).prompt.contexts()[-1] for context in contexts)
    assert (kept.id == old.id) is not anew


def test_a_mean_that_is_reused_says_so_in_the_report(side):
    hold_mean(side)
    assert weave(side, order(stop=WOVEN_TO)).reports["a"].as_dict()["contexts"] == [[10, 1]]


def test_first_passes_are_removed_of_what_is_named_and_running_requests_store_theirs(side):
    hold_mean(side)
    _, first, second = request().stored_parts()
    kv = zeros(len(first.span))
    for part in (first, second):
        passage = neutral_id(ELSEWHERE)
        record = SegmentRecord.of(part.id, (passage,), part.token_ids, exact=True, nbytes=kv.nbytes)
        assert side._store.insert(record, zeros(len(part.span)))
    begin(side)
    remove(side, first.id, first_passes=True)
    assert side.take_outcome()[1].removed["command"] == [Removed(1)]
    left = {(record.chunk_id, record.neutral) for record in side._store.records()}
    assert {(first.id, False), (second.id, True)} <= left
    assert (first.id, True) not in left
    save(side)
    assert len(second_chunk(side)) == 2
