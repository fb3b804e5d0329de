"""The scheduler's side against fakes: what is ordered, saved, cancelled and reported."""

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from itertools import product, takewhile
from operator import eq
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool

from chunkweave.conversation.answer import PrefillReport
from chunkweave.conversation.weave_request import WeaveRequest
from chunkweave.planning.plan import KVSource
from chunkweave.store.records import segment_id
from chunkweave.types import Span
from chunkweave.vllm.orders import Holdings, StepResults
from chunkweave.vllm.removal import Removed
from chunkweave.vllm.request import Defaults, from_wire
from chunkweave.vllm.scheduler import ConnectorScheduler

BOS = 0
CHUNKS = {"chunks": [[1, 41], [41, 91], [91, 121]]}
IDS = [BOS, *range(100, 230)]
BLOCK = 16
BLOCKS = (7, 8, 9, 10)
BY_GROUP = (BLOCKS,)


def hashed(request) -> list[bytes]:
    """What vLLM's hasher does: a chain over full blocks, on from those that have a hash."""
    hashes = list(request.block_hashes)
    for stop in range(BLOCK * (len(hashes) + 1), request.num_tokens + 1, BLOCK):
        before = hashes[-1] if hashes else (request.cache_salt or "").encode()
        hashes.append(sha256(before + repr(request.prompt_token_ids[stop - BLOCK : stop]).encode()).digest())
    return hashes[len(request.block_hashes) :]


class FakeRequest:
    """What the connector sees of vLLM's request."""

    def __init__(self, params=None, *, name="a", ids=IDS, salt=None, lora=None, images=()) -> None:
        self.request_id = name
        self.kv_transfer_params = None if params is None else {"chunkweave": params}
        self.prompt_token_ids = ids
        self.num_tokens = len(ids)
        self.cache_salt = salt
        self.lora_request = lora
        self.mm_features = list(images)
        self.pooling_params = None
        self._block_hasher = hashed
        self.block_hashes: list[bytes] = []
        self.update_block_hashes()
        self.plain = list(self.block_hashes)

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self._block_hasher(self))

    @property
    def shared_blocks(self) -> int:
        """How many of its blocks have the hashes that they have without chunks."""
        return sum(1 for _ in takewhile(bool, map(eq, self.block_hashes, self.plain)))


class FakeManager:
    """Block bookkeeping with vLLM's own pool."""

    def __init__(self) -> None:
        self.block_pool = BlockPool(64, enable_caching=True, hash_block_size=BLOCK)
        managers = (SimpleNamespace(block_pool=self.block_pool),)
        self.coordinator = SimpleNamespace(single_type_managers=managers, scheduler_block_size=BLOCK)

    def get_block_ids(self, request_id):
        return (list(BLOCKS),)


class FakeBlocks:
    def get_block_ids(self):
        return (list(BLOCKS),)


def step(scheduled=(), cached=(), preempted=()):
    """A scheduler output: `(request id, computed before, scheduled now)` of new and of running requests."""
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        total_num_scheduled_tokens=sum(now for *_, now in (*scheduled, *cached)),
        num_scheduled_tokens={name: now for name, _, now in (*scheduled, *cached)},
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=before) for name, before, _ in scheduled],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached], num_computed_tokens=[before for _, before, _ in cached]
        ),
    )


def bound(
    defaults: Defaults | None = None, *, weaving: Iterable[int] | None = None, shared: bool = False, **more: Any
) -> ConnectorScheduler:
    """A scheduler's side that has vLLM's bookkeeping of blocks; ranks that are `weaving` begin with empty stores."""
    made = ConnectorScheduler("model", (BOS,), defaults or Defaults(), **more)
    made.bind_kv_cache_manager(FakeManager())
    if weaving is not None:
        made.begin_with(dict.fromkeys(weaving, Holdings(frozenset(), shared)))
    return made


def computed(side: ConnectorScheduler, name: str = "a", before: int = 0, count: int = 131, *, running=False):
    """vLLM computes so many tokens of a request, all of them if nothing else is said; returns what is saved."""
    scheduled = [(name, before, count)]
    (save,) = side.orders(step(cached=scheduled) if running else step(scheduled)).saves
    return save


@pytest.fixture
def side() -> ConnectorScheduler:
    return bound()


def stored_chunks(
    side: ConnectorScheduler, *indices: int, params=CHUNKS, ids=IDS, salt=None, lora=None, exact=True
) -> None:
    """Let a worker report that it holds the chunks of these places, as exact segments behind those before them."""
    request = FakeRequest(params, name="first", ids=ids, salt=salt, lora=lora)
    side.add(request)
    parts = list(side._requests["first"].request.stored_parts())
    side.finished(request)
    copies = Counter(parts[index].id for index in indices)
    if exact:
        copies.update(segment_id(parts[index].id, parts[index].context) for index in indices)
    side.note(StepResults(copies=copies), set())


def by(method: str, *, name: str = "a", ids=IDS, salt: str | None = None, **more: Any) -> FakeRequest:
    """A request for the chunks by a method, and what else it says of them."""
    return FakeRequest({**CHUNKS, "method": method, **more}, name=name, ids=ids, salt=salt)


def asks(side: ConnectorScheduler, request: FakeRequest, local: int = 0) -> int | None:
    """A request comes in; how many tokens are brought to it."""
    side.add(request)
    return side.matched(request, local)


def begun(side: ConnectorScheduler, request: FakeRequest, local: int = 0) -> int:
    """A request comes in and gets blocks; how many tokens are brought to it."""
    external = asks(side, request, local)
    assert external is not None
    side.allocated(request, FakeBlocks(), external)
    return external


def woven(side: ConnectorScheduler, request: FakeRequest, local: int = 0):
    """Schedule a request's weave; returns its order."""
    begun(side, request, local)
    (order,) = side.orders(step()).weaves
    return order


def test_blocks_may_be_given_steps_after_the_match_or_never(side):
    """vLLM may wait until earlier steps no longer read the blocks."""
    stored_chunks(side, 0, 1)
    requests = [by("cacheblend", name=name) for name in ("late", "never")]
    for request in requests:
        assert asks(side, request) == 91
    for _ in range(2):
        assert not side.orders(step()).weaves
    side.allocated(requests[0], FakeBlocks(), 91)
    assert [order.request_id for order in side.orders(step()).weaves] == ["late"]
    assert not side.finished(requests[1])[0]
    assert not side.orders(step()).cancelled


@pytest.mark.parametrize("params", [None, "nonsense", {"other": 1}], ids=["none", "no object", "somebody else's"])
def test_a_request_without_chunks_is_left_as_it_is(side, params):
    request = FakeRequest()
    request.kv_transfer_params = params
    assert begun(side, request) == 0
    assert request.block_hashes == request.plain
    assert request.cache_salt is None
    assert side.finished(request) == (False, None)
    orders = side.orders(step([("a", 0, 20)]))
    assert orders.weaves == orders.saves == orders.cancelled == []


def test_what_is_woven_has_its_blocks_apart_from_others(side):
    methods = ("cacheblend", "cacheblend", "epic", "prefix")
    requests = [by(method, name=str(number), salt="tenant") for number, method in enumerate(methods)]
    for request in requests:
        side.add(request)
    woven, again, other, exact = requests
    assert woven.cache_salt.startswith("tenant|chunkweave-1:")
    assert woven.shared_blocks == 0
    assert again.block_hashes == woven.block_hashes
    assert not set(other.block_hashes) & set(woven.block_hashes)
    assert (exact.cache_salt, exact.block_hashes) == ("tenant", exact.plain)


def test_a_full_prefill_shares_no_block_and_is_stored_under_the_tenants_salt(side):
    first, again = (by("full", salt="tenant") for _ in range(2))
    for request in (first, again):  # of the same id, as an engine may be given it
        assert begun(side, request) == 0
        assert request.shared_blocks == 0
        save = computed(side)
        assert (save.saved, save.computed, save.exact) == (0, 131, True)
        side.note(StepResults(saved=Counter({save.number: 1})), set())
        report = side.finished(request)[1]["chunkweave"]
        assert (report["method"], report["computed_tokens"]) == ("full", 131)
    assert not set(first.block_hashes) & set(again.block_hashes)
    stored_chunks(side, 0, 1, salt="tenant")
    assert asks(side, by("full", name="b", salt="tenant", capture=True)) == 0
    assert asks(side, by("prefix", name="c", salt="tenant")) == 91 // BLOCK * BLOCK


@pytest.mark.parametrize(("stored", "exact"), [((), 1), ((0,), 41), ((1,), 1), ((0, 1), 91), ((0, 1, 2), len(IDS))])
def test_a_woven_request_shares_the_blocks_of_the_exact_path(side, stored, exact):
    stored_chunks(side, *stored)
    stored_chunks(side, 0, 1, 2, exact=False)
    request = by("cacheblend")
    order = woven(side, request)
    assert (request.shared_blocks, order.exact) == (exact // BLOCK, exact)


def test_what_is_exact_in_vllms_own_cache_is_saved_if_the_stores_lack_it(side):
    stored_chunks(side, 0)
    assert asks(side, by("prefix"), 112) == 0
    save = computed(side, "a", 112, 19)
    assert (save.saved, save.computed, save.exact) == (0, 131, True)
    assert not side.orders(step(cached=[("a", 131, 1)])).saves


def test_a_wrong_request_is_served_and_reported(side):
    request = FakeRequest({"chunks": []})
    assert asks(side, request) == 0
    assert request.block_hashes == request.plain
    assert side.finished(request)[1] == {
        "chunkweave": {"error": "chunks must name at least one chunk, and no empty one"}
    }
    assert side.finished(request) == (False, None)


def test_a_prompt_with_an_image_is_never_matched_and_never_stored(side):
    """Tokens of an image have KV that its ids do not tell; the same ids as text find nothing of it."""
    seen = FakeRequest(CHUNKS, name="seen", images=["an image"])
    assert begun(side, seen) == 0
    assert not side.orders(step([("seen", 0, len(IDS))])).saves
    reason = "its prompt has parts that are not text, such as images"
    assert side.finished(seen) == (False, {"chunkweave": {"error": reason}})
    assert seen.block_hashes == seen.plain
    stored_chunks(side, 0, 1, 2)
    assert side.matched(seen, 0) == 0
    assert asks(side, FakeRequest(CHUNKS, name="text")) > 0


@pytest.mark.parametrize(("stored", "stop"), [((0,), 41), ((1,), 91), ((0, 2), 121), ((2,), 121)])
def test_the_weave_ends_where_the_last_stored_chunk_ends(side, stored, stop):
    stored_chunks(side, *stored, exact=False)
    request = by("cacheblend")
    assert asks(side, request) == stop
    assert side.matched(request, 32) == stop - 32
    assert side.matched(request, 128) == 0


@pytest.mark.parametrize(("stored", "stop"), [((), 0), ((0,), 32), ((0, 1), 80), ((1,), 0), ((0, 2), 32), ((1, 2), 0)])
def test_an_exact_weave_ends_with_the_last_whole_block_of_the_exact_path(side, stored, stop):
    """What no weave makes fewer, vLLM computes sooner; and its own prefix cache would leave it as many tokens."""
    stored_chunks(side, *stored)
    stored_chunks(side, 0, 1, 2, exact=False)
    assert begun(side, by("prefix")) == stop
    assert len(side.orders(step()).weaves) == (stop > 0)


def test_one_token_is_left_for_vllm(side):
    stored_chunks(side, 0, 1, 2)
    assert asks(side, by("epic", ids=IDS[:121])) == 120
    whole = FakeRequest({"chunks": [[1, 41], [41, 128]]}, name="whole", ids=IDS[:128])
    side.add(whole)
    parts = side._requests["whole"].segments
    side.note(StepResults(copies=Counter(parts)), set())
    assert side.matched(whole, 0) == 112, "the last block would leave none"


def test_chunks_of_another_salt_or_adapter_do_not_count(side, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    adapter = LoRARequest("adapter", 3, str(tmp_path))
    stored_chunks(side, 0, 1, 2)
    for request in (FakeRequest(CHUNKS, salt="tenant"), FakeRequest(CHUNKS, lora=adapter)):
        assert asks(side, request) == 0
        side.finished(request)
    stored_chunks(side, 0, 1, lora=adapter)
    for number in (3, 4):  # the same files under another name
        lora = LoRARequest(f"adapter {number}", number, str(tmp_path))
        assert asks(side, FakeRequest(CHUNKS, name=str(number), lora=lora)) == 80


def test_a_weave_is_ordered_once_into_the_requests_blocks(side):
    stored_chunks(side, 0, 1)
    request = FakeRequest(CHUNKS)
    order = woven(side, request, local=32)
    assert (order.request_id, order.block_ids, order.first, order.stop) == ("a", BY_GROUP, 32, 80)
    assert not side.orders(step()).weaves
    side.allocated(request, FakeBlocks(), 0)  # blocks for the tokens behind it
    assert not side.orders(step()).weaves


def test_idle_means_that_no_other_request_is_computed(side):
    assert side.orders(step()).idle
    assert not side.orders(step([("other", 0, 20)])).idle


def test_parts_are_saved_in_the_step_that_completes_them(side):
    assert asks(side, FakeRequest(CHUNKS)) == 0
    assert not side.orders(step([("a", 0, 40)])).saves
    save = computed(side, "a", 40, 40, running=True)
    assert (save.saved, save.computed, save.block_ids, save.exact) == (0, 80, BY_GROUP, True)
    save = computed(side, "a", 80, 51, running=True)
    assert (save.saved, save.computed) == (41, 131)
    assert not side.orders(step(cached=[("a", 131, 1)])).saves


def test_blocks_are_kept_until_every_rank_has_copied_them():
    side = bound(ranks=2, weaving=(0, 1))
    numbers = {}
    for name in "abc":
        asks(side, FakeRequest(CHUNKS, name=name))
        numbers[name] = computed(side, name).number
    side.note(StepResults(saved=Counter({numbers["a"]: 1, numbers["b"]: 2})), set())
    assert [side.finished(FakeRequest(CHUNKS, name=name))[0] for name in "abc"] == [True, False, True]
    orders = side.orders(step())
    assert orders.held == ["a", "c"]
    side.note(StepResults(saved=Counter({numbers["a"]: 1})), set())
    side.note(StepResults(saved=Counter({numbers["c"]: 2})), set())
    assert not side.orders(step()).held


def test_preemption_takes_the_blocks_which_workers_are_told_in_that_step(side):
    request = FakeRequest(CHUNKS)
    asks(side, request)
    save = computed(side)
    assert side.orders(step(preempted=["a", "plain"])).preempted == {"a"}
    assert not side.orders(step()).preempted
    assert side.finished(request)[0] is False, "there are no blocks to be kept"
    side.note(StepResults(saved=Counter({save.number: 1})), set())


@pytest.mark.parametrize("method", ["prefix", "epic"])
def test_what_is_to_be_copied_is_woven_as_if_it_were_stored(side, method):
    """Workers copy it before they weave. What could not be stored is expected no longer."""
    asks(side, by(method))
    save = computed(side)
    stop = 112 if method == "prefix" else 121
    for name, saved, tokens in (("b", {}, stop), ("c", {save.number: 1}, 0)):
        side.note(StepResults(saved=Counter(saved)), set())
        assert asks(side, by(method, name=name)) == tokens


@pytest.mark.parametrize(("promoted", "expected"), [([], 0), ([1, 2], 0), ([0], 32), ([0, 2], 32), ([0, 1], 80)])
def test_only_what_may_be_kept_is_expected(side, promoted, expected):
    asks(side, by("prefix", promoted=promoted))
    assert side.orders(step([("a", 0, 131)])).saves
    assert asks(side, by("prefix", name="b")) == expected


@pytest.fixture
def windowed() -> ConnectorScheduler:
    return bound(window=48)


def test_where_blocks_leave_windows_every_step_says_what_it_has_computed(windowed):
    assert asks(windowed, FakeRequest(CHUNKS)) == 0
    for before, count in ((0, 30), (30, 50), (80, 50)):
        save = computed(windowed, "a", before, count, running=before > 0)
        assert (save.readable, save.computed, save.windowed) == (before, before + count, True)
    assert not windowed.orders(step(cached=[("a", 130, 1)])).saves


def test_where_blocks_leave_windows_nothing_is_woven_behind_vllms_own_cache(windowed):
    """With blocks for more than a window, vLLM drops those before it of its own."""
    stored_chunks(windowed, 0, 1)
    request = by("cacheblend")
    windowed.add(request)
    before = list(request.block_hashes)
    assert windowed.matched(request, 32) is None, "it was preempted: it is asked again, without its blocks"
    assert request.block_hashes != before
    assert windowed.matched(request, 0) == 91
    exact = by("prefix", name="exact")
    assert asks(windowed, exact, 79) == 0, "what is missing is soon computed"
    assert windowed.matched(exact, 32) is None
    assert windowed.matched(exact, 0) == 80
    other = by("prefix", name="other")
    assert asks(windowed, other, 32) is None
    assert other.block_hashes != exact.block_hashes, "it would find what was woven anew, and be asked again for each"


def test_where_blocks_leave_windows_an_approximate_request_shares_no_block(windowed):
    salts = []
    for name, method in product(("a", "b"), ("cacheblend", "prefix")):
        request = by(method, name=name)
        windowed.add(request)
        salts.append(request.cache_salt)
    assert salts[0] != salts[2]
    assert salts[1] is salts[3] is None


def test_within_a_window_all_blocks_are_there_and_a_weave_begins_behind_vllms_own_cache(windowed):
    stored_chunks(windowed, 0)
    assert asks(windowed, FakeRequest(CHUNKS), 16) == 16


def test_what_vllm_computes_behind_a_weave_is_not_exact(side):
    stored_chunks(side, 0)
    woven(side, FakeRequest(CHUNKS))
    side.note(None, {"a"})
    save = computed(side, "a", 32, 99)
    assert (save.saved, save.computed, save.exact) == (32, 131, False)


@pytest.mark.parametrize(("method", "exact"), [("cacheblend", False), ("prefix", True)])
def test_what_vllm_computes_behind_woven_blocks_of_its_own_cache_is_not_exact(side, method, exact):
    asks(side, by(method), 32)
    save = computed(side, "a", 32, 99)
    assert save.exact is exact


def test_a_failed_weave_is_not_tried_again_and_its_parts_are_saved(side):
    stored_chunks(side, 0, 1)
    request = FakeRequest(CHUNKS)
    woven(side, request)
    side.note(StepResults(failed={"a"}), {"a"})
    assert side.matched(request, 0) == 0
    save = computed(side)
    assert (save.saved, save.computed, save.exact) == (0, 131, True)
    report = side.finished(request)[1]["chunkweave"]
    assert (report["method"], report["effective_method"], report["computed_tokens"]) == ("prefix", "full", 131)


COUNTS = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")


@pytest.mark.parametrize("method", ["cacheblend", "query", "prefix"])
@pytest.mark.parametrize(("stored", "local"), [((), 0), ((), 112), ((0, 1, 2), 128)])
def test_a_report_names_the_method_that_was_requested_and_what_it_came_to(side, method, stored, local):
    """Nothing of it is woven. What vLLM's own cache has of the exact path is exact, with any method."""
    stored_chunks(side, *stored)
    request = by(method)
    local = local if method == "prefix" or stored else 0
    assert begun(side, request, local) == 0
    report = side.finished(request)[1]["chunkweave"]
    assert (report["method"], report["why"]) == (method, "asked for")
    assert report["effective_method"] == ("prefix" if local else "full")
    assert [report[name] for name in COUNTS] == [local, 0, 0, 131 - local]
    assert report["engine_cached_tokens"] == report["local_tokens"] == local
    assert report["hits"] == ({"vllm": min(local, 121) - 1} if local else {})


def test_what_a_preempted_request_finds_of_itself_was_not_cached(side):
    request = by("prefix")
    begun(side, request)
    assert side.matched(request, 64) == 0
    side.allocated(request, FakeBlocks(), 0)
    assert side.finished(request)[1]["chunkweave"]["engine_cached_tokens"] == 0


def test_the_workers_report_is_the_answers(side):
    stored_chunks(side, 0)
    request = FakeRequest(CHUNKS)
    woven(side, request)
    first = PrefillReport({KVSource.REUSED: [Span(0, 131)]}, [4, 5], 2)
    side.note(StepResults(reports={"a": first, "gone": PrefillReport({})}), {"a"})
    side.note(StepResults(reports={"a": PrefillReport({}, local_tokens=9)}), {"a"})  # after preemption
    report = side.finished(request)[1]["chunkweave"]
    assert report.items() >= first.as_dict().items()
    assert report["method"] == report["effective_method"]


def test_woven_blocks_of_vllms_own_cache_are_reported_as_what_they_are(side):
    """A prompt that comes again is found whole, and nothing of it is woven anew; it is no exact prefix for that."""
    stored_chunks(side, 0, 2, exact=False)
    first = by("cacheblend")
    woven(side, first)
    spans = {
        KVSource.REUSED: [Span(1, 41), Span(91, 121)],
        KVSource.COMPUTED: [Span(0, 1), Span(41, 91), Span(121, 131)],
    }
    woven_report = PrefillReport(spans, range(91, 101), 10, 0.2, {"recompute_ratio": 0.2}, [1], 3)
    side.note(StepResults(reports={"a": woven_report}), {"a"})
    report = side.finished(first)[1]["chunkweave"]
    assert report.items() >= woven_report.as_dict().items()

    again = by("cacheblend", name="b", ids=[*IDS, 7, 8])
    begun(side, again, 128)
    found = side.finished(again)[1]["chunkweave"]
    changed = {"prompt_tokens": 133, "computed_tokens": 63, "local_tokens": 128, "hits": {"vllm": 120}}
    sources = {"reused": [[1, 41], [91, 121]], "computed": [[0, 1], [41, 91], [121, 133]]}
    assert found.items() >= {**report, **changed, "kv_sources": sources}.items()
    assert (found["effective_method"], found["engine_cached_tokens"]) == ("cacheblend", 0)

    computed = by("cacheblend", name="c")
    asks(side, computed)
    side.finished(computed)  # its blocks had left the cache, and vLLM computed all of them
    again = by("cacheblend", name="d")
    begun(side, again, 128)
    found = side.finished(again)[1]["chunkweave"]
    assert (found["method"], found["effective_method"], found["engine_cached_tokens"]) == ("cacheblend", "prefix", 128)


def test_ending_a_request_calls_its_weave_off_only_while_it_runs(side):
    stored_chunks(side, 0, 1, 2)
    running, arrived = FakeRequest(CHUNKS), FakeRequest(CHUNKS, name="b")
    woven(side, running)
    woven(side, arrived)
    side.note(None, {"b"})
    side.finished(running)
    side.finished(arrived)
    assert side.orders(step()).cancelled == ["a"]
    side.note(StepResults(reports={"a": PrefillReport({})}, failed={"a"}), {"a"})  # too late, without effect
    assert not side._requests


def test_what_ranks_say_is_added_up():
    one = StepResults(Counter(x=1, y=1), {"a": {}}, {"b"}, Counter(q=1))
    other = StepResults(Counter(x=1, y=-1, z=1), {"a": {}}, {"c"}, Counter(q=1))
    assert one.aggregate(other) == StepResults(Counter(x=2, y=0, z=1), {"a": {}}, {"b", "c"}, Counter(q=2))
    removals = answer("a", Removed(1)).aggregate(StepResults(removed={"a": [Removed(2)], "b": [Removed(3)]}))
    assert removals.removed == {"a": [Removed(1), Removed(2)], "b": [Removed(3)]}
    assert removals


def test_a_chunk_counts_once_every_rank_has_reported_it():
    side = bound(ranks=2)
    request = FakeRequest(CHUNKS)
    side.add(request)
    stored_chunks(side, 0)
    assert side.matched(request, 0) == 0
    stored_chunks(side, 0, 1)  # the other one, in another step, and more
    assert side.matched(request, 0) == 32
    side.note(StepResults(copies=Counter(dict.fromkeys(side._stored._copies, -1))), set())
    assert side.matched(request, 0) == 0


def test_what_the_tiers_held_at_start_up_counts():
    side = bound(ranks=2)
    request = FakeRequest(CHUNKS)
    side.add(request)
    first, second, _ = (segment_id(part.id, part.context) for part in side._requests["a"].parts)
    side.begin_with({0: Holdings(frozenset({first, second}), False), 1: Holdings(frozenset({first}), False)})
    assert side.matched(request, 0) == 32
    assert not side.orders(step()).lookups


def test_where_others_fill_a_tier_a_request_waits_for_a_lookup():
    side = bound(ranks=2, weaving=(0, 1), shared=True)
    request = FakeRequest(CHUNKS)
    side.add(request)
    (lookup,) = side.orders(step()).lookups
    assert (lookup.request_id, lookup.prompt.token_ids) == ("a", tuple(IDS))
    assert side.matched(request, 0) is None
    side.note(StepResults(answered=Counter(a=1)), set())
    assert side.matched(request, 0) is None
    first, *_ = side._requests["a"].parts
    copies = Counter({segment_id(first.id, first.context): 2})
    side.note(StepResults(copies=copies, answered=Counter(a=1, gone=2)), set())
    assert side.matched(request, 0) == 32
    assert not side.orders(step()).lookups


def test_workers_hear_of_requests_that_get_no_blocks_yet():
    """What they need is read meanwhile; those that got blocks in the step in which they came read for themselves."""
    side = bound(weaving=[0], shared=True)
    stored_chunks(side, 0, 1, 2)
    side.orders(step())
    waits, placed, gone = (FakeRequest(CHUNKS, name=name) for name in "abc")
    for request in (waits, placed, gone):
        side.add(request)
    side.allocated(placed, FakeBlocks(), side.matched(placed, 0))
    side.finished(gone)
    assert list(side.orders(step()).waiting) == ["a"]
    assert not side.orders(step()).waiting, "once"


def test_nothing_is_looked_up_that_is_known_or_where_a_worker_weaves_nothing():
    known = bound(weaving=[0], shared=True)
    stored_chunks(known, 0, 1, 2)
    known.orders(step())
    known.add(FakeRequest(CHUNKS))
    assert not known.orders(step()).lookups
    half = bound(ranks=2, weaving=[0], shared=True)
    assert asks(half, FakeRequest(CHUNKS)) == 0
    assert not half.orders(step()).lookups


def test_a_request_whose_parts_are_saved_costs_a_decoding_step_nothing(side, monkeypatch):
    side.add(FakeRequest(CHUNKS))
    assert side.orders(step([("a", 0, 131)])).saves
    monkeypatch.setattr(side, "_manager", None)  # would fail if blocks were looked up
    assert side._requests["a"].all_saved
    assert not side.orders(step(cached=[("a", 131, 1)])).saves


def test_what_is_captured_is_woven_though_nothing_is_stored(side):
    for request in (by("cachecraft"), by("prefix", name="b", capture=True)):
        assert asks(side, request) == 121
        assert side.matched(request, 128) == 0


@pytest.mark.parametrize("weaving", [(), (0,)])
def test_nothing_is_woven_captured_or_saved_unless_every_worker_weaves(weaving):
    side = bound(ranks=2, weaving=weaving)
    request = by("cachecraft")
    assert asks(side, request) == 0
    assert not side.orders(step([("a", 0, 131)])).saves
    assert not side.finished(request)[0], "nobody would say that its blocks are copied"


def test_what_only_reads_is_woven_from_what_is_stored_and_saves_nothing(side):
    stored_chunks(side, 0, 1, 2)
    salts = []
    for cache in ("use", "read", "read"):
        request = by("cacheblend", cache=cache)
        assert asks(side, request)
        salts.append(request.cache_salt)
        side.finished(request)
    assert len({*salts}) == 3, "no other request finds its blocks in vLLM's own cache"
    alone = bound(weaving=[0], shared=True)
    asks(alone, by("prefix", cache="read"))
    assert not alone.orders(step([("a", 0, len(IDS))])).saves


@pytest.mark.parametrize(("usual", "keeps"), [("prefix", True), ("full", False)])
def test_full_waits_for_no_lookup_and_keeps_nothing_where_it_alone_answers(usual, keeps):
    side = bound(Defaults.from_config({"method": usual}), weaving=[0], shared=True)
    assert asks(side, by("full")) == 0
    orders = side.orders(step([("a", 0, len(IDS))]))
    assert (bool(orders.lookups), bool(orders.saves)) == (False, keeps)


def test_a_request_that_is_not_woven_counts_when_it_first_gets_blocks(side):
    for request in (FakeRequest(CHUNKS), FakeRequest({**CHUNKS, "counts_as_request": False}, name="b")):
        assert begun(side, request, 48) == 0
        side.allocated(request, FakeBlocks(), 0)  # preempted meanwhile
        side.finished(request)
    [asked] = side.orders(step()).asked
    assert asked.local == 48
    stored_chunks(side, 0)
    assert woven(side, FakeRequest(CHUNKS, name="c")).stop == 32
    assert not side.orders(step()).asked, "its weave counts it"


def parse_of(params: dict[str, Any], salt: str = "") -> WeaveRequest:
    return from_wire(params, IDS, fingerprint="model", salt=salt, start=(BOS,), defaults=Defaults())


def part_id(params: dict[str, Any], salt: str = "", **more: Any) -> str:
    """Of the first chunk."""
    parts = {part.span.start: part.id for part in parse_of({**params, **more}, salt).stored_parts()}
    return parts[CHUNKS["chunks"][0][0]]


def command(name: str = "remove", salt: str | None = None, **forget: Any) -> FakeRequest:
    return FakeRequest({"forget": forget}, name=name, ids=[BOS], salt=salt)


def answer(name: str, *removed: Removed) -> StepResults:
    return StepResults(removed={name: list(removed)})


def test_a_removal_is_ordered_once_and_answered_when_every_rank_has_done_it():
    side = bound(ranks=2)
    request = command(chunks=[IDS[1:41]], start=[BOS])
    assert asks(side, request) is None
    (order,) = side.orders(step()).removals
    assert order.chunks == {next(iter(parse_of(CHUNKS).stored_parts())).id}
    assert not side.orders(step()).removals
    side.note(answer("remove", Removed(2)), set())
    assert side.matched(request, 0) is None
    side.note(answer("remove", Removed(1, 3, ("remote",), lasting=False)), set())
    assert side.matched(request, 0) == 0
    side.allocated(request, FakeBlocks(), 0)
    report = {"removed": 3, "left": 3, "unasked": ["remote"], "lasting": False}
    assert side.finished(request) == (False, {"chunkweave": report})


def test_a_removal_names_chunks_of_its_own_salt_and_start():
    def ids(**more: Any) -> frozenset[str]:
        side = bound()
        side.add(command(**more))
        (order,) = side.orders(step()).removals
        return order.chunks

    chunk = IDS[1:41]
    whole = ids(chunks=[chunk], start=[BOS])
    assert ids(chunks=[chunk]) == whole
    assert ids(chunks=[chunk], start=[]) == {part_id(CHUNKS, start_tokens=0)} != whole
    assert ids(chunks=[chunk], salt="tenant") == {part_id(CHUNKS, salt="tenant")} != whole
    assert ids(everything=True, salt="tenant") is None


def test_requests_that_use_what_is_removed_store_nothing_more(side):
    using, other = FakeRequest(CHUNKS, name="using"), FakeRequest(CHUNKS, name="other", ids=[BOS, *range(300, 430)])
    for request in (using, other):
        asks(side, request)
    side.add(command(chunks=[IDS[1:41]]))
    orders = side.orders(step([("using", 0, 131), ("other", 0, 131)]))
    assert orders.removals[0].requests == {"using"}
    assert [save.request_id for save in orders.saves] == ["other"]
    side.add(command("all", everything=True))
    orders = side.orders(step(cached=[("other", 0, 131)]))
    assert orders.removals[0].requests == {"using", "other"}
    assert not orders.saves


def test_an_aborted_removal_says_that_a_worker_may_not_have_done_it(side):
    request = command(everything=True)
    side.add(request)
    side.orders(step())
    assert side.finished(request)[1]["chunkweave"]["unasked"] == ["a worker"]
    side.note(answer("remove", Removed(1)), set())


@pytest.mark.parametrize(("stores", "lasting", "unasked"), [(2, True, 0), (1, False, 0), (1, True, 1)])
def test_a_worker_without_a_store_is_not_waited_for(stores, lasting, unasked):
    """It may have been given a cache folder, in which there is something from earlier on."""
    side = bound(ranks=2, lasting=lasting, weaving=range(stores))
    request = command(everything=True)
    side.add(request)
    side.note(answer("remove", *[Removed(1)] * stores), set())
    assert side.matched(request, 0) == 0
    report = side.finished(request)[1]["chunkweave"]
    assert (report["removed"], len(report["unasked"])) == (stores, unasked)


@pytest.mark.parametrize(
    "forget",
    [
        *([], {}, {"chunks": []}, {"chunks": 4}, {"chunks": [[1], "a"]}, {"chunks": [[-1]]}, {"chunks": [[1 << 32]]}),
        *({"everything": False}, {"everything": True, "chunks": [[1]]}, {"chunks": [[1]], "salt": "x"}),
        *({"everything": True, "first_passes": True}, {"chunks": [[1]], "first_passes": 1}),
    ],
)
def test_a_wrong_removal_is_refused_and_removes_nothing(side, forget):
    request = FakeRequest({"forget": forget}, ids=[BOS])
    assert asks(side, request) == 0
    assert not side.orders(step()).removals
    assert "error" in side.finished(request)[1]["chunkweave"]


def test_after_a_reset_nothing_that_was_stored_is_found(side):
    stored_chunks(side, 0, 1, 2)
    before, waiting = FakeRequest(CHUNKS, name="before"), FakeRequest(CHUNKS, name="waiting")
    assert woven(side, before).stop > 0
    side.add(waiting)
    side.reset()
    orders = side.orders(step([("before", 0, 131)]))
    assert orders.reset
    assert not orders.saves, "its KV may be of two models"
    assert not side.orders(step()).reset
    assert side.matched(waiting, 0) == side.matched(before, 0) == 0
    after = FakeRequest(CHUNKS, name="after")
    assert asks(side, after) == 0
    saves = side.orders(step([("after", 0, 131), ("waiting", 0, 131)])).saves
    assert [save.request_id for save in saves] == ["after"]
    assert asks(side, FakeRequest(CHUNKS, name="again")) > 0, "what is computed after it is used"


def test_after_a_reset_no_lookup_is_waited_for():
    side = bound(weaving=[0], shared=True)
    side.reset()
    assert asks(side, FakeRequest(CHUNKS)) == 0
    assert not side.orders(step()).lookups


def test_a_removal_after_a_reset_names_what_the_slow_tiers_keep(side):
    side.reset()
    side.add(command(chunks=[IDS[1:41]]))
    (order,) = side.orders(step()).removals
    assert part_id(CHUNKS) in order.chunks
    assert len(order.chunks) == 2


def test_a_reset_forgets_vllms_own_blocks(side):
    request = by("prefix")
    side.add(request)
    pool = side._manager.block_pool
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 2, BLOCK, 0)
    side.reset()
    assert all(block.block_hash is None for block in blocks)


LONG = [BOS, *range(100, 1100)]


def test_chunks_are_found_in_requests_that_name_none_and_may_be_read_from_a_cache():
    finding, off = bound(finds=True), bound()
    for name, change in {"images": {"mm_features": [1]}, "pooling": {"pooling_params": 1}}.items():
        request = FakeRequest(name=name, ids=LONG)
        for attribute, value in {**change, "skip_reading_prefix_cache": name == "pooling"}.items():
            setattr(request, attribute, value)
        finding.add(request)
        assert name not in finding._requests
    for side, params, found in (
        (finding, None, True),
        (finding, {"find_chunks": False}, False),
        (finding, {"method": "prefix"}, True),
        (off, None, False),
        (off, {"find_chunks": True}, True),
    ):
        request = FakeRequest(params, ids=LONG)
        side.add(request)
        assert ("a" in side._requests) == found
        if found:
            assert side._requests["a"].request.prompt.token_ids == tuple(LONG)
            assert [part.span for part in side._requests["a"].parts] == [Span(1, len(LONG) - 33)]
        assert side.finished(request)[1] is None or found


@pytest.mark.parametrize("ids", [LONG, LONG[:20]])
def test_a_request_that_only_reads_leaves_no_blocks_to_others_where_chunks_are_found(ids: list[int]):
    side, salts = bound(finds=True), []
    for cache in ("read", "read", "use"):
        request = FakeRequest({"find_chunks": True, "cache": cache}, ids=ids)
        side.add(request)
        salts.append(request.cache_salt)
        assert "error" not in (side.finished(request)[1] or {}).get("chunkweave", {})
    assert len({*salts}) == 3
    assert salts[2] is None


def test_an_exact_part_of_a_found_prompt_is_woven_only_on_the_exact_path():
    side = bound(Defaults.from_config({"method": "cacheblend"}), finds=True)
    first = FakeRequest(name="first", ids=LONG)
    side.add(first)
    parts = side._requests["first"].parts
    side.finished(first)
    side.note(StepResults(copies=Counter(part.id for part in parts)), set())
    assert asks(side, FakeRequest(ids=LONG)) == 0  # without a tokenizer nothing is known to be a passage
