"""The worker's half with weaves that compute nothing: what it remembers, and that saving cannot end the engine."""

from collections import Counter
from math import inf
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from chunkweave.conversation.weave_request import WeaveRequest
from chunkweave.kv.segment import SegmentKV
from chunkweave.planning.cost import CostModel
from chunkweave.store.records import AttentionProfile, SegmentRecord, segment_id
from chunkweave.tiers.device import Staging
from chunkweave.types import Geometry
from chunkweave.vllm import worker as worker_module
from chunkweave.vllm.background_work import BackgroundWork, Work
from chunkweave.vllm.lora import Adapters
from chunkweave.vllm.orders import AskedOrder, LookupOrder, NotWoven, SaveOrder, StepOrders, StepResults, WeaveOrder
from chunkweave.vllm.paged_kv import RequestBlocks
from chunkweave.vllm.releases import copy_before_sleep
from chunkweave.vllm.removal import RemovalOrder, Removed
from chunkweave.vllm.request import Defaults, from_wire
from chunkweave.vllm.settings import PluginSettings
from chunkweave.vllm.weave_queue import Alone, WeaveQueue
from chunkweave.vllm.worker import ConnectorWorker
from chunkweave.weaving.segments import PlanSources, WeavingStore
from tests.server.conftest import wait_until
from tests.unit.test_background_work import Copy
from tests.vllm import test_paged_cache

LAYERS, HEADS, HEAD_DIM = test_paged_cache.LAYERS, 1, 4
GEOMETRY = Geometry(LAYERS, 8, 2, HEADS, HEAD_DIM, 8, 64, 256)
IDS = tuple(range(40))
BLOCKS = ((3, 4, 5),)
WORK = 2
"""Of a layer of an imitated weave."""


class FakePaged(test_paged_cache.FakePaged):
    """Blocks that read as zeros, or cannot be read."""

    block_size = kernel_block = 16
    shape = (HEADS, HEAD_DIM)
    num_slots = 1024
    broken = False

    def __init__(self) -> None:
        self.written: list[tuple[int, list[int]]] = []

    def read(self, layer, slots):
        if self.broken:
            raise RuntimeError("the device is out of memory")
        return torch.zeros(2, len(slots), *self.shape)

    def reserve(self, nbytes):
        if self.broken:
            raise torch.OutOfMemoryError("the device is out of memory")

    def write(self, layer, slots, keys, values):
        assert keys.shape == values.shape == (len(slots), *self.shape)
        self.written.append((layer, slots.tolist()))

    read_stored = read


class FakeJob:
    """A weave that chooses position 21 at layer 1 and notes what it was given to choose."""

    given: ClassVar[list] = []
    outline: ClassVar[tuple] = ()
    scratch_bytes = device_bytes = 100

    def __init__(self, _layers, _blocks, plan, *_args, first, chosen=None, captured=None, **_kwargs) -> None:
        self.layer, self.first = 0, first
        self.captured = captured
        self.given.append(chosen)
        self.chosen = {(0, 1): torch.tensor([21])}
        self.recomputed = plan.reused_among([21])
        self.recompute_work = LAYERS
        self.stopped_at_layer = None

    @property
    def done(self):
        return self.layer == LAYERS

    def run(self, layers=inf, work=inf):
        done = 0
        while layers > 0 and done < work and not self.done:
            self.layer, layers, done = self.layer + 1, layers - 1, done + WORK
        return done


@pytest.fixture
def paged() -> FakePaged:
    return FakePaged()


@pytest.fixture
def side(paged, monkeypatch):
    monkeypatch.setattr(worker_module, "WeaveJob", FakeJob)
    monkeypatch.setattr(FakeJob, "given", [])
    made = side_of(paged)
    yield made
    made.close()


def side_of(paged: FakePaged, ranks: Alone | None = None, *, extra: dict | None = None, **more) -> ConnectorWorker:
    """A worker over imitated layers, with `extra` keys of its config."""
    rotations = SimpleNamespace(inverse=lambda _layer, keys, _positions: keys)
    layers = SimpleNamespace(
        adapters=Adapters(SimpleNamespace()),
        paged=paged,
        device=paged.device,
        rotations=rotations,
        geometry=GEOMETRY,
        own_geometry=GEOMETRY,
        dtype=torch.float32,
        num_layers=LAYERS,
    )
    settings = PluginSettings.from_config({"weave_step_tokens": 1, **(extra or {})}, {})
    return ConnectorWorker(layers, "model", settings, ranks, **more)


class FakeCaptured:
    """Captures the last chunk, with a profile, or fails to tell of it."""

    captures: ClassVar[tuple] = ()
    attention = None
    broken: ClassVar[bool] = False
    exact_to: ClassVar[list] = []

    def __init__(self, _layers, _prompt, _plan, _sources, _store, _config, *, first, before) -> None:
        assert before is None, "all of them, with their attention"
        self.part = list(request().stored_parts())[-1]
        self.spans = frozenset({self.part.span})

    def segments(self, exact_to, _memory):
        if self.broken:
            raise RuntimeError("the device is out of memory")
        self.exact_to.append(exact_to)
        kv = SegmentKV(torch.ones(LAYERS, 2, len(self.part.span), HEADS, HEAD_DIM))
        profile = AttentionProfile((), (), (), 1.0, 0.5, (0.0,) * 15)
        yield (
            SegmentRecord.of(
                self.part.id, self.part.context, self.part.token_ids, exact=True, nbytes=kv.nbytes, attention=profile
            ),
            kv,
        )


def request(method: str = "cacheblend", *, ids=IDS, start=(), **more) -> WeaveRequest:
    params = {"chunks": [[10, 20], [20, 35]], "method": method, **more}
    return from_wire(params, ids, fingerprint="model", salt="", start=start, defaults=Defaults())


def whole(side: ConnectorWorker, **orders) -> None:
    """A step, and what follows it."""
    side.begin(StepOrders(**orders))
    side.step(StepOrders(**orders))
    side.save(StepOrders(**orders))
    side.end()
    side._between_steps.finish()


def hold(side: ConnectorWorker, context: tuple = ()) -> None:
    """Let the store hold the request's two chunks as computed behind `context`."""
    for part in list(request().stored_parts())[1:]:
        kv = SegmentKV(torch.zeros(LAYERS, 2, len(part.span), HEADS, HEAD_DIM))
        assert side._store.insert(
            SegmentRecord.of(part.id, context, part.token_ids, exact=not context, nbytes=kv.nbytes), kv
        )


def order(name: str = "a", asked: WeaveRequest | None = None, first: int = 0, stop: int = 35, **more) -> WeaveOrder:
    return WeaveOrder(name, asked or request(), BLOCKS, first, stop, **more)


def save_order(asked: WeaveRequest | None = None, name: str = "a", **more) -> SaveOrder:
    """To store all parts of a request, which vLLM has computed."""
    return SaveOrder(name, asked or request(), BLOCKS, 0, 40, exact=True, **more)


def weave(side: ConnectorWorker, *orders: WeaveOrder, failed: bool = False) -> StepResults:
    """Weave one or several at once in steps of their own, all of which arrive, or fail; what is reported of them."""
    names = {one.request_id for one in orders}
    side.step(StepOrders(weaves=list(orders), idle=True))
    arrived, results = side.take_outcome()
    assert (arrived, results.failed) == (names, names if failed else set())
    side.forget(names)
    return results


def orders_of(*names: str) -> list[WeaveOrder]:
    return [order(name) for name in names]


def saved_parts(side: ConnectorWorker, asked: WeaveRequest | None = None) -> None:
    """A step after which all parts of a request are stored."""
    whole(side, saves=[save_order(asked)])


def worker(side: ConnectorWorker, **config) -> ConnectorWorker:
    """Another one over the same layers."""
    return ConnectorWorker(side._layers, "model", PluginSettings.from_config(config, {}))


def arrived_in_steps(side: ConnectorWorker, orders: list[WeaveOrder], *, idle: bool) -> list[set[str]]:
    """What arrives in each step until all has."""
    steps: list[set[str]] = []
    while sum(map(len, steps)) < len(orders):
        side.step(StepOrders(weaves=[] if steps else orders, idle=idle))
        steps.append(side.take_outcome()[0])
        assert len(steps) < 20
    return steps


def test_a_weave_that_the_device_has_no_memory_for_is_computed_by_vllm(side, paged):
    hold(side)
    paged.broken = True
    weave(side, order(), failed=True)


@pytest.mark.parametrize(("room", "failed"), [(199, True), (200, False)])
def test_weaves_take_no_more_memory_than_there_is_beside_vllms_budget(paged, monkeypatch, room, failed):
    monkeypatch.setattr(worker_module, "WeaveJob", FakeJob)
    monkeypatch.setattr(WeaveQueue, "device_bytes", 100)  # of another that waits for its layers
    side = side_of(paged, room_bytes=room)
    hold(side)
    weave(side, order(), failed=failed)
    side.close()


def test_what_vllm_has_is_not_sent_and_the_rest_within_the_setting_until_the_weave_is_done(paged, monkeypatch):
    monkeypatch.setattr(worker_module, "WeaveJob", FakeJob)
    pin, given, dropped = WeavingStore.pin, [], []

    def pinned(store, plan, **more):
        given.append((store.staging, more["first"]))
        return pin(store, plan, **more)

    monkeypatch.setattr(WeavingStore, "pin", pinned)
    monkeypatch.setattr(PlanSources, "drop_sent", lambda _self: dropped.append(True))
    monkeypatch.setattr(worker_module, "Staging", lambda _: Staging(1 << 20))
    side = side_of(paged)
    hold(side)
    side.step(StepOrders(weaves=[order(first=16)], idle=True))
    ((staging, first),) = given
    assert (first, staging.take(1 << 20), staging.take(1), dropped) == (16, True, False, [True])
    side.close()


@pytest.mark.parametrize(
    ("names", "idle", "work", "steps"),
    [
        ("ab", False, 1, ["", "a", "", "b"]),
        ("abcd", False, 3 * LAYERS * WORK, ["abc", "d"]),
        ("ab", False, LAYERS * WORK + 1, ["a", "b"]),
        ("cde", False, LAYERS * WORK + 1, ["c", "de"]),
        ("ab", True, 1, ["a", "b"]),
    ],
    ids=[
        "a layer at least",
        "several of little work",
        "the next",
        "the next with what is left",
        "alone a whole prompt",
    ],
)
def test_a_step_weaves_so_much_beside_other_requests(side, names, idle, work, steps):
    hold(side)
    side._step_work = work
    assert arrived_in_steps(side, orders_of(*names), idle=idle) == [set(one) for one in steps]


def test_a_weave_that_fails_leaves_its_time_to_the_next_one(side, monkeypatch):
    def run(job, layers=inf, work=inf):
        if not side._woven.keys() - {"a"}:
            raise RuntimeError("the device is out of memory")
        job.layer = LAYERS
        return WORK

    hold(side)
    monkeypatch.setattr(FakeJob, "run", run)
    side.step(StepOrders(weaves=orders_of("a", "b")))
    arrived, results = side.take_outcome()
    assert (arrived, results.failed) == ({"a", "b"}, {"a"})


def test_a_weave_behind_cached_blocks_chooses_what_the_whole_one_chose(side):
    hold(side)
    weave(side, order("whole"))
    weave(side, order("rest", first=16))
    nothing, remembered = FakeJob.given
    assert nothing is None
    assert remembered[0, 1].tolist() == [21]


def test_a_weave_behind_exact_blocks_of_vllms_own_cache_chooses_for_itself(side):
    hold(side)
    for first in (0, 8, 8):
        weave(side, order(first=first, exact=10))
    assert FakeJob.given == [None, None, None]
    weave(side, order("rest", first=16))
    assert FakeJob.given[-1] is not None, "what the last of them chose"


def test_nothing_approximate_is_brought_where_others_may_take_the_blocks(side):
    """The exact segment that the scheduler knew of was evicted, and another of the same chunk is there."""
    hold(side, context=("elsewhere",))
    weave(side, order("shared", exact=20), failed=True)
    weave(side, order("apart", exact=10))
    assert len(FakeJob.given) == 1


def test_what_is_stored_exactly_is_not_read_from_the_blocks_again(side, paged, caplog):
    saved_parts(side, request("prefix"))
    assert len(side._store) == 3
    paged.broken = True
    saved_parts(side, request("prefix"))
    assert not caplog.records


def saved(side: ConnectorWorker, name: str, number: int) -> None:
    """A step that completes the request's parts, without the time that follows."""
    side.begin(StepOrders())
    side.save(StepOrders(saves=[save_order(name=name, number=number)]))


def test_what_is_saved_is_copied_when_the_step_is_over(side):
    saved(side, "a", 7)
    assert not len(side._store)
    assert not side.take_outcome()[1].saved
    side.step(StepOrders(held=["a"]))
    assert not side.take_released()
    side.end()
    side._between_steps.finish()
    assert len(side._store) == 3
    assert side.take_outcome()[1].saved == {7: 1}
    assert (side.take_released(), side.take_released()) == ({"a"}, set())


def test_blocks_are_kept_until_copies_on_the_device_have_ended_and_no_step_waits_for_them(side, monkeypatch):
    copy = Copy()
    monkeypatch.setattr(side._saving, "mark", lambda: copy)
    saved(side, "a", 7)
    side.step(StepOrders(held=["a"]))
    side.end()
    assert copy.awaited.wait(10)
    side.begin(StepOrders())
    assert (side.take_released(), len(side._store)) == (set(), 0)
    assert not side.take_outcome()[1].saved
    copy.ended.set()
    side._between_steps.finish()
    assert (side.take_released(), len(side._store)) == ({"a"}, 3)
    assert side.take_outcome()[1].saved == {7: 1}


def test_blocks_of_a_preempted_request_are_copied_before_others_get_them(side):
    saved(side, "a", 7)
    saved(side, "b", 8)
    side.begin(StepOrders(preempted=frozenset("a")))
    assert side.take_outcome()[1].saved == {7: 1}


def test_what_a_weave_needs_is_copied_before_it(side):
    saved(side, "a", 7)
    side.begin(StepOrders())
    assert weave(side, order("b", request("full-reuse"))).reports["b"].as_dict()["computed_tokens"] == 5


@pytest.mark.parametrize("forgotten", ["other segments", "too many positions"])
def test_a_choice_is_remembered_for_the_same_segments_and_within_bounds(side, monkeypatch, forgotten):
    if forgotten == "too many positions":
        monkeypatch.setattr(worker_module, "_CHOSEN_POSITIONS", 0)
    hold(side)
    weave(side, order("whole"))
    if forgotten == "other segments":
        side._store.clear()
        hold(side, context=("elsewhere",))
    weave(side, order("rest", first=16))
    assert FakeJob.given == [None, None]


def test_what_cannot_be_read_from_the_blocks_is_not_stored_and_hurts_no_request(side, paged, caplog):
    paged.broken = True
    saved_parts(side)
    assert "could not be stored" in caplog.text
    assert not len(side._store)
    paged.broken = False
    saved_parts(side)
    assert len(side._store) == 3
    ids = [one for part in request().stored_parts() for one in (part.id, segment_id(part.id, part.context))]
    assert side.take_outcome()[1].copies == dict.fromkeys(ids, 1)


def test_what_is_computed_before_the_first_reused_chunk_is_exact(side):
    hold(side)
    weave(side, order())
    system, *chunks = (
        [record for record in side._store.records() if record.chunk_id == part.id] for part in request().stored_parts()
    )
    assert [record.exact for record in system] == [True]
    assert all(record.context == () for records in chunks for record in records)


@pytest.mark.parametrize("broken", [False, True])
def test_what_was_captured_is_stored_with_what_it_attended_to(side, monkeypatch, broken, caplog):
    monkeypatch.setattr(worker_module, "CapturedParts", FakeCaptured)
    monkeypatch.setattr(FakeCaptured, "broken", broken)
    monkeypatch.setattr(FakeCaptured, "exact_to", [])
    wanted = request("cachecraft")
    weave(side, order("a", wanted))
    system, first, last = wanted.stored_parts()
    profiles = {record.chunk_id: record.attention for record in side._store.records()}
    assert (profiles[system.id], profiles[first.id]) == (None, None)  # those are read from the blocks
    assert broken == ("could not be stored" in caplog.text) == (last.id not in profiles)
    if not broken:
        assert profiles[last.id] is not None
        assert FakeCaptured.exact_to == [len(wanted.prompt)]


COUNTS = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")


@pytest.mark.parametrize("local", [0, 16])
def test_what_lies_in_exact_blocks_of_vllms_own_cache_is_stored_and_counted(side, monkeypatch, local):
    """A weave that captures begins behind them: of the chunks before it the store had nothing."""
    monkeypatch.setattr(worker_module, "CapturedParts", FakeCaptured)
    results = weave(side, order("a", request("prefix", capture=True), local, exact=40))
    assert stored_paths(side) == {"system", "first", "last"}
    assert all(record.exact for record in side._store.records())
    report = results.reports["a"].as_dict()
    assert [report[name] for name in COUNTS] == [local, 0, 0, 40 - local]
    assert report["engine_cached_tokens"] == report["local_tokens"] == local
    assert report["hits"] == ({"vllm": local} if local else {})


def test_what_is_claimed_ends_before_the_exact_path_does(side):
    """With vLLM's last whole block: it computes the rest, and the report counts that."""
    saved_parts(side, request("prefix"))
    report = weave(side, order("b", request("prefix"), 16, 32, exact=40)).reports["b"].as_dict()
    assert [report[name] for name in COUNTS] == [32, 0, 0, 8]
    assert (report["engine_cached_tokens"], report["hits"]) == (16, {"vllm": 16, "host": 19})
    assert report["kv_sources"] == {"prefix-exact": [[0, 32]], "computed": [[32, 40]]}


def started(method: str) -> WeaveRequest:
    """A request whose first two tokens belong to no chunk."""
    return request(method, start=IDS[:2], start_tokens=2, chunks=[[2, 20], [20, 35]])


@pytest.mark.parametrize(("method", "placed"), [("prefix", True), ("cacheblend", False)])
def test_what_a_prompt_begins_with_is_brought_as_vllm_computed_it(paged, side, method, placed):
    """No segment has it; computed alone it would be rounded otherwise, and an exact answer with it."""
    saved_parts(side, started("prefix"))
    reports = {}
    for name, adapter in (("b", 0), ("c", 7)):
        exact = 40 if placed else 0
        reports |= weave(side, order(name, started(method), stop=32, exact=exact, adapter=adapter)).reports
    slots = RequestBlocks(BLOCKS, paged).of(0).slots(torch.arange(2)).tolist()
    assert paged.written == ([(layer, slots) for layer in range(LAYERS)] if placed else [])
    assert [reports[name].as_dict()["computed_tokens"] for name in "bc"] == ([8, 10] if placed else [10, 10])


def stored_paths(side: ConnectorWorker) -> set[str]:
    """Which parts of the request are stored behind the very parts that are before them in it."""
    names = zip(("system", "first", "last"), request().stored_parts(), strict=True)
    return {name for name, part in names if side._store.record(segment_id(part.id, part.context)) is not None}


def test_an_exact_path_is_stored_as_far_as_it_is_promoted(side):
    """CRAFT §4.2, of what vLLM computes: what is stored, and the promoted chunks that go on from there."""

    def save(method="prefix", **more):
        saved_parts(side, request(method, **more))
        return stored_paths(side)

    assert save(promoted=[]) == {"system"}
    assert save(promoted=[1]) == {"system"}, "not behind a chunk that is not"
    assert save(promoted=[0]) == {"system", "first"}
    assert save(promoted=[]) == {"system", "first"}
    assert save(promoted=[1]) == {"system", "first", "last"}
    side._store.clear()
    assert save("cacheblend", promoted=[]) == {"system", "first", "last"}, "what is stored can be woven"


def test_what_a_weave_computes_is_stored_as_far_as_it_is_promoted(side):
    hold(side)
    weave(side, order("a", request("prefix", promoted=[0])))
    assert stored_paths(side) == {"system", "first"}


@pytest.mark.parametrize(("first", "grown"), [(0, {"system", "first"}), (16, set())])
def test_a_weaving_method_computes_the_chunk_that_its_exact_prefix_grows_by(side, first, grown):
    """CRAFT §4.2, not behind what vLLM's own cache has of it: that may be approximate."""
    hold(side)
    report = weave(side, order("a", request(continued=[0]), first)).reports["a"].as_dict()
    assert report["reused_tokens"] == (14 if grown else 24)
    found = report["prefix_exact_tokens"] + report["reused_tokens"] + report["recomputed_tokens"]
    assert report["hits"] == ({"vllm": 16, "host": 35 - 16} if first else {"host": found})
    assert stored_paths(side) == grown
    records = (side._store.record(segment_id(part.id, part.context)) for part in request().stored_parts())
    assert all(record.exact for record in records if record is not None)


def test_what_is_not_stored_any_more_is_left_to_vllm(side, caplog):
    weave(side, order(), failed=True)
    assert not caplog.records


@pytest.mark.parametrize("method", ["cacheblend", "full-reuse"])
def test_the_last_chunk_is_computed_where_no_question_follows(side, caplog, method):
    """As no plan reuses the last token; a prompt of one chunk is left to vLLM."""
    hold(side)
    for chunks, hits in ([[10, 20], [20, 35]], {"host": 10}), ([[20, 35]], {}):
        ends = request(method, ids=IDS[:35], chunks=chunks)
        results = weave(side, order("a", ends, stop=34), failed=not hits)
        assert {name: dict(report.hits) for name, report in results.reports.items()} == ({"a": hits} if hits else {})
    assert not caplog.records


def test_the_scheduler_gets_changes_only_and_answers(side):
    hold(side)
    parts = list(request().stored_parts())[1:]
    stored = {one for part in parts for one in (part.id, segment_id(part.id, ()))}
    assert side.holdings().stored == stored
    assert not side.take_outcome()[1]
    side._store.clear()
    side.step(StepOrders(lookups=[LookupOrder("waiting", request().prompt)]))
    copies, answered = Counter(), Counter()

    def is_answered() -> bool:
        sent = side.take_outcome()[1]
        copies.update(sent.copies)
        answered.update(sent.answered)
        return bool(answered)

    wait_until(is_answered)
    assert (copies, answered) == (dict.fromkeys(stored, -1), {"waiting": 1})


@pytest.fixture
def restarted(side, tmp_path):
    """A worker with the two chunks on disk, as an earlier process left them."""
    hold(side)
    before = worker(side, cache_dir=str(tmp_path))
    for record in side._store.records():
        before._store.insert(record, side._store.get(record.id))
    before.close()
    after = worker(side, cache_dir=str(tmp_path), weave_step_tokens=1)
    yield after
    after.close()


def test_what_is_read_from_disk_is_woven_and_then_in_memory(restarted):
    assert restarted.holdings().shared
    restarted.step(StepOrders(weaves=[order()]))

    def has_arrived() -> bool:
        restarted.step(StepOrders())
        arrived, results = restarted.take_outcome()
        assert not results.failed
        return arrived == {"a"}

    wait_until(has_arrived)
    chunks = [part.id for part in list(request().stored_parts())[1:]]
    store = restarted._store
    assert [store.tier_of(one.id) for one in store.records() if one.chunk_id in chunks] == ["host", "host"]


def test_what_a_waiting_request_will_need_is_read_while_it_waits(restarted, monkeypatch):
    """Cache-Craft §3.5: from a tier that is slower than computing too, which else is not read."""
    restarted._cost = CostModel((0,), (1,), ((0.01,),), 1000, {"host": 1e9, "disk": 2e4})
    monkeypatch.setattr(ConnectorWorker, "_alone", True)
    with pytest.raises(NotWoven):
        restarted.plan(order(), restarted.look_up(order()))
    restarted.step(StepOrders(waiting={"a": request(), "b": request()}))

    def is_read() -> bool:
        ahead = restarted._ahead.find("a")
        return ahead is not None and all(one.complete for one in ahead._loader.segments)

    wait_until(is_read)
    ahead = restarted._ahead.find("a")
    prepared = restarted.plan(order(), restarted.look_up(order()))
    assert prepared.pinned.complete, "nothing is left to be read when its turn comes"
    assert {id(one.segment) for one in prepared.pinned.placements} == {id(one) for one in ahead._loader.segments}
    prepared.pinned.close()
    restarted.forget(["a", "b"])
    wait_until(lambda: not any(level.store._pins.ids() for level in restarted._store.levels))


def test_one_that_gets_its_blocks_at_once_reads_for_itself(restarted):
    restarted.step(StepOrders(waiting={"a": request()}, weaves=[order()]))
    assert restarted._ahead.find("a") is None
    assert not restarted._ahead._reading


def test_a_segment_that_is_gone_from_disk_is_planned_without(side, restarted, tmp_path):
    first, last = (record.id for record in sorted(side._store.records(), key=lambda record: len(record.token_ids)))
    next(tmp_path.rglob(f"{first}.safetensors")).unlink()
    prepared = restarted.plan(order(), restarted.look_up(order()))
    assert list(prepared.plan.segments()) == [last]
    prepared.pinned.close()
    assert restarted._store.levels[1].store.drop(last)


@pytest.fixture
def ranking(side):
    """A worker whose store ranks by PGDSF."""
    made = worker(side, policy="pgdsf", weave_step_tokens=1)
    yield made
    made.close()


def test_a_request_counts_once_whether_it_is_woven_or_vllm_computes_it(ranking):
    """RAGCache eq. 3: a miss costs, and a hit in vLLM's own cache is a use of what is stored of it."""
    policy = ranking._store.levels[0].store._index._policy

    def counts() -> list[tuple[int, int]]:
        return [(policy._known[one].frequency, policy._known[one].misses) for one in path if one in policy._known]

    path = [segment_id(part.id, part.context) for part in request().stored_parts()]
    whole(ranking, asked=[AskedOrder("a", request().prompt, 0)])
    assert counts() == [(1, 1)] * 3
    saved_parts(ranking)
    assert counts() == [(1, 1)] * 3
    whole(ranking, asked=[AskedOrder("a", request().prompt, 40)])
    assert counts() == [(2, 1)] * 3
    weave(ranking, order("b"))
    assert counts() == [(3, 1)] * 3
    weave(ranking, order("c", request(counts_as_request=False)))
    assert counts() == [(3, 1)] * 3, "nobody asked for it"


def test_what_vllms_own_cache_has_of_a_woven_prompt_is_used_too(ranking):
    """Chunks that are asked for again and again stay hot, though nothing of them is read any more."""
    policy = ranking._store.levels[0].store._index._policy
    hold(ranking, context=("another",))
    stored = [record.id for record in ranking._store.records()]
    approximate = request()
    whole(ranking, asked=[AskedOrder("a", approximate.prompt, 35, approximate)])
    assert [policy._known[one].frequency for one in stored if one in policy._known] == [1, 1]


def test_whichever_thread_ends_what_another_one_began_to_copy_works_without_gradients():
    """Else it may not write into what the other one has allocated."""
    found, work = [], BackgroundWork(1000)
    work.begin_step()
    work.add(Work(iter(lambda: found.append(torch.is_inference_mode_enabled()), None), "a"))
    work.finish()
    work.close()
    assert found == [True]


def loading_at(share: float) -> CostModel:
    """A token comes in from the host's memory in that share of the time that computing it takes."""
    return CostModel((0,), (1,), ((0.01,),), 1000, {"host": 1e5 / share})


def parameters(side: ConnectorWorker, *requests: WeaveRequest, idle: bool = True) -> dict:
    """Of the first of requests that are woven at once."""
    orders = [order(str(number), one) for number, one in enumerate(requests)]
    whole(side, weaves=orders, idle=idle)
    side.step(StepOrders(idle=True))
    side.forget([order.request_id for order in orders])
    return side.take_outcome()[1].reports["0"].parameters


def test_a_weave_that_is_alone_recomputes_what_its_loading_hides(side):
    hold(side, ("elsewhere",))
    usual = {"recompute_ratio": 0.15, "check_layers": [1]}
    assert parameters(side, request()) == usual, "nothing is known of costs"
    side._cost = loading_at(0.5)
    # The system part, which is exact by now, is loaded too.
    raised = {"recompute_ratio": pytest.approx(0.5 * 35 / 25), "check_layers": [1]}
    assert parameters(side, request()) == raised
    assert parameters(side, request("cacheblend:ratio=0.15")) == usual, "that much was asked for"
    assert parameters(side, request("cacheblend:ratio=0.15", at_least=True)) == raised
    assert parameters(side, request(), idle=False) == usual
    assert parameters(side, request(), request("cacheblend:layers=2")) == usual
    side._cost = loading_at(0.01)
    assert parameters(side, request()) == usual


def test_what_loads_slower_than_it_is_computed_is_computed(side):
    hold(side, ("elsewhere",))
    side._cost = loading_at(1.5)
    weave(side, order("slow"), failed=True)  # nothing is left of it to weave
    assert parameters(side, request(), idle=False)["recompute_ratio"] == 0.15, "others compute while it loads"


def removal(name: str = "remove", *, everything: bool = False, requests: tuple[str, ...] = ()) -> RemovalOrder:
    ids = [part.id for part in request().stored_parts()]
    return RemovalOrder(name, None if everything else frozenset(ids[1:2]), frozenset(requests))


@pytest.mark.parametrize("everything", [False, True])
def test_what_is_ordered_to_be_removed_is_and_is_counted(side, everything):
    hold(side)
    before = side.holdings().stored
    assert len(side._store) == 2
    whole(side, removals=[removal(everything=everything)])
    _, results = side.take_outcome()
    assert results.removed == {"remove": [Removed(2 if everything else 1)]}
    assert len(side._store) == (0 if everything else 1)
    gone = {one for one, change in results.copies.items() if change < 0}
    assert gone <= before
    assert gone
    assert not side.take_outcome()[1].removed


def test_what_is_still_to_be_stored_is_stored_first_and_removed_then(side):
    saved(side, "a", 7)
    side.step(StepOrders(removals=[removal(everything=True)]))
    side.end()
    side._between_steps.finish()
    assert side.take_outcome()[1].removed["remove"][0].removed > 0
    assert len(side._store) == 0


@pytest.mark.parametrize(("requests", "stored"), [(("a",), 0), ((), 1)])
def test_a_weave_that_ends_after_a_removal_stores_nothing_if_it_uses_that(side, requests, stored):
    hold(side)
    (gone,) = removal().chunks
    side._store.forget_chunks([gone])
    whole(side, removals=[removal(requests=requests)], weaves=[order()])
    assert not side.take_outcome()[0], "it has only begun"
    whole(side)
    assert side.take_outcome()[0] == {"a"}
    assert sum(record.chunk_id == gone for record in side._store.records()) == stored
    side.forget(["a"])
    assert not side._outdated


def test_a_store_that_fails_to_remove_answers_that_it_may_have_it_yet(side, monkeypatch):
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(side._store, "clear", fail)
    whole(side, removals=[removal(everything=True)])
    (removed,) = side.take_outcome()[1].removed["remove"]
    assert (removed.removed, len(removed.unasked), removed.lasting) == (0, 1, False)


def test_a_reset_drops_all_kv_and_leaves_what_is_being_woven_to_vllm(side):
    saved_parts(side, started("prefix"))
    hold(side)
    weave(side, order("before"))
    side.step(StepOrders(weaves=orders_of("woven", "waiting")))
    side.take_outcome()
    assert side._starts
    assert side._choices
    whole(side, reset=True)
    arrived, results = side.take_outcome()
    assert arrived == results.failed == {"woven", "waiting"}
    assert len(side._store) == len(side._queue) == 0
    assert set(results.copies.values()) == {-1}
    assert not side._starts
    assert not side._choices


@pytest.mark.parametrize("frees", ["sleep", "discard"])
def test_what_is_to_be_saved_is_copied_before_vllm_frees_its_blocks(side, frees):
    class Worker:
        def sleep(self, level):
            return level, len(side._store)

        discard = sleep

    for _ in range(2):  # of two engines in one process the second one counts, once
        copy_before_sleep(object, Worker, side.before_sleep)
    saved(side, "a", 7)
    assert len(side._store) == 0
    assert getattr(Worker(), frees)(2) == (2, 3)
