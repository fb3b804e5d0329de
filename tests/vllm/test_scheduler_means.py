"""The scheduler's side against fakes: requests that compute a share of a mean."""

from collections import Counter

import pytest

from chunkweave.conversation.answer import PrefillReport
from chunkweave.prompt.parts import chunk_id
from chunkweave.store.records import Mark, marked
from chunkweave.vllm.inventory import inventory_params
from chunkweave.vllm.orders import StepResults
from chunkweave.vllm.removal import removal_params
from tests.vllm.test_scheduler import (
    BLOCK,
    BOS,
    CHUNKS,
    IDS,
    FakeRequest,
    asks,
    begun,
    bound,
    by,
    side,
    step,
    stored_chunks,
    woven,
)

__all__ = ["side"]
SPANS = CHUNKS["chunks"]
WHOLE = IDS[: SPANS[-1][1]]


def share(name: str = "a") -> FakeRequest:
    return by("full-reuse", name=name, ids=WHOLE, mean={"group": "a group", "of": 2})


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("stored", [(), (0,), (0, 1), (0, 1, 2), (2,)])
def test_its_last_chunk_is_woven_whatever_is_stored_and_found_in_no_cache(side, stored, exact):
    stored_chunks(side, *stored, exact=exact)
    first, again = share(), share("b")
    order = woven(side, first)
    prefix = SPANS[min(2, len(stored))][0] if stored != (2,) and exact else SPANS[0][0]
    assert (order.first, order.stop, order.exact) == (0, len(WHOLE) - 1, prefix)
    assert order.request.mean is not None
    side.finished(first)
    side.add(again)
    assert first.shared_blocks == again.shared_blocks == prefix // BLOCK
    assert not set(first.block_hashes[prefix // BLOCK :]) & set(again.block_hashes)
    assert side.matched(again, prefix // BLOCK * BLOCK) == len(WHOLE) - 1 - prefix // BLOCK * BLOCK


def test_with_windows_it_shares_no_block(side):
    windowed = bound(window=64)
    stored_chunks(windowed, 0, 1, 2)
    order = woven(windowed, request := share())
    assert (order.first, order.stop, order.exact, request.shared_blocks) == (0, len(WHOLE) - 1, 0, 0)


def test_none_of_its_parts_is_saved_by_step(side):
    woven(side, share())
    side.note(None, {"a"})
    assert not side.orders(step([("a", len(WHOLE) - 1, 1)])).saves
    assert not side.finished(share())[0], "its blocks are free at once"


def test_it_waits_for_no_request_and_none_waits_for_it(side):
    owner = by("prefix", name="owner")
    begun(side, owner)
    assert begun(side, share()) == len(WHOLE) - 1
    side.finished(owner)
    for method in ("prefix", "cacheblend"):
        assert asks(side, by(method, name=method)) is not None, "it would wait for what is never stored"


def test_a_removal_concerns_it_from_its_arrival_on(side):
    side.add(share())
    side.add(command(removal_params([WHOLE[1:41]], [BOS])))
    (order,) = side.orders(step()).removals
    assert order.requests == {"a"}


def test_its_report_is_not_kept_for_blocks_that_no_request_finds(side):
    one = share()
    woven(side, one)
    side.note(StepResults(reports={"a": PrefillReport({}, local_tokens=7)}, copies=Counter()), {"a"})
    assert side.finished(one)[1]["chunkweave"]["local_tokens"] == 7
    assert not side._reports


def command(params, salt: str | None = None) -> FakeRequest:
    return FakeRequest(params, name="command", ids=[BOS], salt=salt)


def test_it_says_of_which_chunks_all_workers_have_a_mean():
    side = bound(ranks=2)
    chunks = [WHOLE[start:stop] for start, stop in SPANS]
    first, second, _ = (chunk_id("model", "", tuple(one)) for one in chunks)
    on_both, on_one = marked(first, Mark.MEAN), marked(second, Mark.MEAN)
    side.note(StepResults(copies=Counter({on_both: 2, on_one: 1, marked(second, Mark.CONTEXT): 2})), set())
    for salt, wanted in ((None, {"means": [0], "contexts": [1]}), ("other", {"means": [], "contexts": []})):
        asked = command(inventory_params(chunks, [BOS]), salt=salt)
        assert begun(side, asked) == 0
        assert side.finished(asked) == (False, {"chunkweave": wanted})
        assert side.finished(asked) == (False, None)
    wrong = command({**inventory_params(chunks, [BOS]), "chunks": [[0, 1]]})
    side.add(wrong)
    assert "error" in side.finished(wrong)[1]["chunkweave"]


def test_a_removal_of_first_passes_concerns_no_request_and_no_block(side):
    begun(side, by("prefix", name="running"))
    side.add(command(removal_params([WHOLE[1:41]], [BOS], first_passes=True)))
    assert side._forgotten == set()
    (order,) = side.orders(step([("running", 0, 131)])).removals
    assert (order.first_passes, order.requests) == (True, frozenset())
    assert side._requests["running"].saved == 121, "it is saved as ever"
