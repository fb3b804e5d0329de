"""The scheduler's side against fakes: requests that wait for parts that others compute."""

from collections import Counter

import pytest

from chunkweave.store.records import segment_id
from chunkweave.vllm.orders import StepResults
from chunkweave.vllm.removal import FORGET
from tests.vllm.test_scheduler import BLOCK, BOS, FakeBlocks, FakeRequest, asks, begun, bound, side, step, stored_chunks

__all__ = ["side"]
FIRST, SECOND, THIRD = range(100, 180), range(200, 290), range(300, 370)
QUESTION = range(400, 410)


def request(name: str, *chunks: range, method: str = "cacheblend", **more) -> FakeRequest:
    spans, at = [], 1
    for chunk in chunks:
        spans.append([at, at + len(chunk)])
        at += len(chunk)
    ids = [BOS, *(token for chunk in chunks for token in chunk), *QUESTION]
    return FakeRequest({"chunks": spans, "method": method, **more}, name=name, ids=ids)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("chunks", "before", "found"),
    [((FIRST, THIRD), 80, 81), ((SECOND, FIRST), 120, 171)],
    ids=["while the owner computes more", "all that comes"],
)
def test_a_part_is_waited_for_until_the_step_that_completes_it(ranks, chunks, before, found):
    """Whatever ranks have copied by then: each does that before it weaves."""
    side = bound(ranks=ranks, weaving=range(ranks))
    begun(side, request("owner", FIRST, SECOND))
    waiting = request("waiting", *chunks)
    assert asks(side, waiting) is None
    side.orders(step([("owner", 0, before)]))
    assert side.matched(waiting, 0) is None
    side.orders(step(cached=[("owner", before, 40 if before == 80 else 61)]))
    assert side.matched(waiting, 0) == found


def test_what_vllms_own_cache_has_is_not_waited_for(side):
    begun(side, request("owner", FIRST, SECOND))
    assert asks(side, request("waiting", FIRST, SECOND), local=160) == 0


@pytest.mark.parametrize("how", ["cancelled", "preempted", "removed"])
def test_if_the_owner_is_gone_a_waiter_computes(side, how):
    owner, one, other = request("owner", FIRST), request("one", FIRST), request("other", FIRST)
    begun(side, owner)
    assert asks(side, one) is None
    if how == "cancelled":
        side.finished(owner)
    elif how == "preempted":
        side.orders(step(preempted=["owner"]))
    else:
        removal = FakeRequest({FORGET: {"everything": True}}, name="removal")
        side.add(removal)
    assert side.matched(one, 0) == 0
    side.allocated(one, FakeBlocks(), 0)
    if how != "removed":
        assert asks(side, other) is None, "for the one that computes now"
        if how == "preempted":
            assert side.matched(owner, 0) is None


@pytest.mark.parametrize("fails", [False, True], ids=["", "and is prefilled where it failed"])
def test_what_a_weave_computes_is_waited_for_until_it_has_ended(side, fails):
    stored_chunks(side, 1, params={"chunks": [[1, 81], [81, 171]]}, ids=[BOS, *FIRST, *SECOND, *QUESTION])
    owner, waiting = request("owner", FIRST, SECOND), request("waiting", THIRD, FIRST)
    assert begun(side, owner) == 171
    assert asks(side, waiting) is None
    side.orders(step())
    assert side.matched(waiting, 0) is None
    if fails:
        side.note(StepResults(failed={"owner"}), {"owner"})
        assert side.matched(owner, 0) == 0
        side.allocated(owner, FakeBlocks(), 0)
        assert side.matched(waiting, 0) is None
        side.orders(step([("owner", 0, 181)]))
    else:
        first = side._requests["owner"].parts[0].id
        side.note(StepResults(copies=Counter([first])), {"owner"})
    assert side.matched(waiting, 0) == 151


def test_an_exact_request_waits_for_the_same_chunks_behind_the_same_ones(side):
    begun(side, request("owner", FIRST, SECOND))
    assert asks(side, request("same", FIRST, SECOND, method="prefix")) is None
    assert asks(side, request("other", SECOND, FIRST, method="prefix")) == 0
    side.orders(step([("owner", 0, 181)]))
    assert side.matched(request("same", FIRST, SECOND, method="prefix"), 0) == 171 // BLOCK * BLOCK


@pytest.mark.parametrize(("method", "waits"), [("full", False), ("epic", True), ("cachecraft", False)])
def test_only_those_wait_to_which_the_part_is_of_use(side, method, waits):
    """`full` reuses nothing, and `cachecraft` wants profiles, which vLLM's prefill does not leave."""
    begun(side, request("owner", FIRST, SECOND))
    assert (asks(side, request("waiting", SECOND, FIRST, method=method)) is None) is waits


@pytest.mark.parametrize(("promoted", "waits"), [([], False), ([0], True)])
def test_what_the_owner_does_not_keep_is_not_waited_for(side, promoted, waits):
    begun(side, request("owner", FIRST, SECOND, method="prefix", promoted=promoted))
    assert (asks(side, request("waiting", FIRST)) is None) is waits


def test_what_is_woven_behind_something_approximate_is_no_exact_path(side):
    stored_chunks(side, 0, params={"chunks": [[1, 81]]}, ids=[BOS, *FIRST, *QUESTION], exact=False)
    owner = request("owner", FIRST, SECOND)
    assert begun(side, owner) == 81
    second = side._requests["owner"].parts[1]
    assert segment_id(second.id, second.context) not in side._stored
    assert asks(side, request("exact", FIRST, SECOND, method="prefix")) == 0
    assert asks(side, request("woven", SECOND)) is None


def test_nothing_is_waited_for_unless_every_worker_weaves():
    side = bound(ranks=2, weaving=[0])
    begun(side, request("owner", FIRST))
    assert asks(side, request("waiting", FIRST)) == 0
