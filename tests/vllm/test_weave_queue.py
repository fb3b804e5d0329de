"""The queue of weaves over fakes: who may begin when, alone and among ranks, and that nothing is left pinned."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from threading import Barrier, Event
from types import SimpleNamespace

import pytest

from chunkweave.kv.segment import SegmentLost
from chunkweave.store.index import PartLookup, PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import Span
from chunkweave.vllm.orders import NotWoven, WeaveOrder
from chunkweave.vllm.weave_queue import AHEAD, Alone, WeaveQueue
from tests.server.conftest import wait_until
from tests.unit.tier_fakes import Clock, prompt_of, record_of

LAYERS = 4
TIMEOUT_S = 10.0


@dataclass
class FakeSegments:
    """Layers that come in when the test says so."""

    layers_in: int = LAYERS
    failure: SegmentLost | None = None
    closed: bool = False

    @property
    def complete(self) -> bool:
        return self.layers_in == LAYERS

    def close(self) -> None:
        self.closed = True


@dataclass
class FakePreparation:
    """Plans what was found, as a text."""

    held: dict[str, tuple[SegmentRecord, ...]] = field(default_factory=dict)
    segments: dict[str, FakeSegments] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    gate: Event | None = None
    planned: list[str] = field(default_factory=list)

    def look_up(self, order):
        if self.gate is not None:
            assert self.gate.wait(10)
        prompt = prompt_of("ABC")
        return PromptLookup(
            tuple(
                PartLookup(part, Span(0, 1), variants=self.held.get(part.id, ()) if part.id else ())
                for part in prompt.parts
            )
        )

    def plan(self, order, found):
        name = order.request_id
        self.planned.append(name)
        if name in self.failing:
            raise OSError("no plan today")
        text = " ".join(record.id for part in found.parts for record in part.variants)
        return SimpleNamespace(plan=text, pinned=self.segments.setdefault(name, FakeSegments()))


def order(name: str) -> WeaveOrder:
    return WeaveOrder(name, None, (), 0, 8)


def queue(preparation, *names: str, ranks=None, background=False, clock=None) -> WeaveQueue:
    """A queue in which weaves of these names wait."""
    made = WeaveQueue(
        preparation.look_up,
        preparation.plan,
        Alone() if ranks is None else ranks,
        background=background,
        timeout_s=TIMEOUT_S,
        clock=clock or Clock(),
    )
    for name in names:
        made.add(order(name))
    return made


def name_of(weave) -> str | None:
    return None if weave is None else weave.order.request_id


def test_the_first_that_can_go_on_goes_on():
    preparation = FakePreparation(segments={"a": FakeSegments(0), "b": FakeSegments(1)})
    weaves = queue(preparation, "a", "b")
    found = weaves.next()
    assert name_of(found) == "b"
    assert found.layers == 1
    preparation.segments["a"].layers_in = 2
    assert name_of(weaves.next()) == "a"


def test_a_weave_waits_for_the_layers_that_it_needs_next():
    preparation = FakePreparation(segments={"a": FakeSegments(2)})
    weaves = queue(preparation, "a")
    found = weaves.next()
    found.job = SimpleNamespace(layer=int(found.layers))
    assert weaves.next() is None
    preparation.segments["a"].layers_in = LAYERS
    assert weaves.next().layers == inf  # of several passes, say


def test_the_memory_of_all_weaves_that_have_begun_is_counted():
    weaves = queue(FakePreparation(), *"abc")
    for number, weave in enumerate([*weaves._weaves.values()][:2]):
        weaves.begin(weave, lambda number=number: SimpleNamespace(device_bytes=10 + number))
    assert weaves.device_bytes == 21
    weaves.remove("a")
    assert weaves.device_bytes == 11


def test_what_cannot_be_planned_is_an_error():
    assert "no plan today" in str(queue(FakePreparation(failing={"a"}), "a").next().error)


def test_a_segment_that_is_lost_before_its_weave_began_fails_it():
    lost = FakeSegments(0, SegmentLost("x", "gone"))
    assert isinstance(queue(FakePreparation(segments={"a": lost}), "a").next().error, SegmentLost)


@pytest.mark.parametrize("layers_in", [0, 1])
def test_what_does_not_come_in_time_is_given_up(layers_in):
    clock = Clock()
    weaves = queue(FakePreparation(segments={"a": FakeSegments(layers_in)}), "a", clock=clock)
    found = weaves.next()
    if found is not None:
        found.job = SimpleNamespace(layer=layers_in)
    clock.now_s += TIMEOUT_S
    assert weaves.next() is None
    clock.now_s += 1
    assert isinstance(weaves.next().error, NotWoven)


def test_the_worker_does_not_wait_for_a_tier_that_does_not_answer():
    preparation = FakePreparation(gate=Event())
    weaves = queue(preparation, "a", background=True)
    assert weaves.next() is None
    preparation.gate.set()
    wait_until(lambda: name_of(weaves.next()) == "a")
    weaves.close()


def test_only_so_many_are_prepared_ahead():
    names = "abcdefgh"
    preparation = FakePreparation(segments={name: FakeSegments(0) for name in names})
    weaves = queue(preparation, *names)
    weaves.next()
    assert preparation.planned == list(names[:AHEAD])
    weaves.remove("b")
    weaves.next()
    assert preparation.planned == list(names[: AHEAD + 1])


def test_one_that_is_called_off_pins_nothing():
    preparation = FakePreparation(gate=Event())
    weaves = queue(preparation, "a", background=True)
    weaves.next()
    assert weaves.remove("a")
    assert not weaves.remove("a")
    preparation.gate.set()
    weaves.close()
    weaves._executor.shutdown(wait=True)
    assert preparation.segments["a"].closed


def test_a_preempted_one_begins_with_the_plan_that_it_had():
    preparation = FakePreparation()
    weaves = queue(preparation)
    planned = SimpleNamespace(plan="as before", pinned=FakeSegments())
    weaves.add(order("a"), planned)
    assert weaves.next().planned is planned
    assert not preparation.planned


class Meeting:
    """Ranks in threads of one process, which meet at every call."""

    def __init__(self, rank: int, meeting: "Table") -> None:
        self.rank, self.size = rank, 2
        self._table = meeting

    def least(self, numbers):
        return [min(both) for both in zip(*self._table.put(self.rank, numbers), strict=True)]

    def gather(self, what):
        self._table.gathered += self.rank == 0
        return self._table.put(self.rank, what)


class Table:
    def __init__(self) -> None:
        self.barrier = Barrier(2, timeout=10)
        self.lying = [None, None]
        self.gathered = 0

    def put(self, rank, what):
        self.lying[rank] = what
        self.barrier.wait()
        both = list(self.lying)
        self.barrier.wait()
        return both


@dataclass
class Pair:
    """Two ranks that step together."""

    preparations: tuple[FakePreparation, FakePreparation]
    clocks: tuple[Clock, Clock] = field(default_factory=lambda: (Clock(), Clock()))
    table: Table = field(default_factory=Table)

    def __post_init__(self) -> None:
        self.queues = [
            queue(one, "a", ranks=Meeting(rank, self.table), clock=self.clocks[rank])
            for rank, one in enumerate(self.preparations)
        ]

    def next(self):
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda weaves: weaves.next(), self.queues))


RECORDS = [record_of(path) for path in ("A", "B", "BA")]


def held(*records: SegmentRecord) -> dict:
    by_chunk: dict = {}
    for record in records:
        by_chunk[record.chunk_id] = (*by_chunk.get(record.chunk_id, ()), record)
    return by_chunk


def test_ranks_go_on_together_by_the_layers_that_both_have():
    segments = FakeSegments(LAYERS), FakeSegments(0)
    pair = Pair(tuple(FakePreparation(held(*RECORDS), {"a": one}) for one in segments))
    assert pair.next() == [None, None]
    segments[1].layers_in = 2
    begun = pair.next()
    assert [(name_of(weave), weave.layers) for weave in begun] == [("a", 2)] * 2
    for weave in begun:
        weave.job = SimpleNamespace(layer=2)
    assert pair.next() == [None, None]
    segments[1].layers_in = LAYERS
    assert [weave.layers for weave in pair.next()] == [inf, inf]
    assert not pair.table.gathered


@pytest.mark.parametrize("how", ["lost", "late"])
def test_what_one_rank_loses_on_the_way_both_give_up(how):
    """None of them is left in a layer in which it would wait for the other."""
    segments = FakeSegments(2), FakeSegments(LAYERS)
    pair = Pair(tuple(FakePreparation(held(*RECORDS), {"a": one}) for one in segments))
    for weave in pair.next():
        weave.job = SimpleNamespace(layer=2)
    if how == "lost":
        segments[0].failure = SegmentLost("x", "gone")
    else:
        pair.clocks[1].now_s += TIMEOUT_S + 1
    assert all(weave.error is not None for weave in pair.next())


def test_ranks_plan_with_what_both_have_in_whatever_order_it_was_used():
    pair = Pair((FakePreparation(held(*RECORDS)), FakePreparation(held(RECORDS[2], RECORDS[0]))))
    one, other = pair.next()
    assert one.planned.plan == other.planned.plan == " ".join(sorted(r.id for r in (RECORDS[0], RECORDS[2])))
    assert pair.table.gathered == 1
    turned = Pair((FakePreparation(held(RECORDS[0], RECORDS[2])), FakePreparation(held(RECORDS[2], RECORDS[0]))))
    assert all(weave.planned for weave in turned.next())
    assert not turned.table.gathered


def test_a_segment_that_is_exact_on_one_rank_only_is_on_neither():
    worse = replace(RECORDS[0], exact=False)
    pair = Pair((FakePreparation(held(RECORDS[0], RECORDS[1])), FakePreparation(held(worse, RECORDS[1]))))
    assert [weave.planned.plan for weave in pair.next()] == [RECORDS[1].id] * 2


@pytest.mark.parametrize("how", ["plan", "lost", "late"])
def test_what_one_rank_cannot_weave_none_does(how):
    preparations = FakePreparation(held(*RECORDS)), FakePreparation(held(*RECORDS))
    if how == "plan":
        preparations[1].failing.add("a")
    elif how == "lost":
        preparations[0].segments["a"] = FakeSegments(0, SegmentLost("x", "gone"))
    else:
        preparations[0].segments["a"] = FakeSegments(0)
    pair = Pair(preparations)
    found = pair.next()
    if how == "late":
        assert found == [None, None]
        pair.clocks[0].now_s += TIMEOUT_S + 1
        found = pair.next()
    assert all(weave.error is not None for weave in found)
    for weaves, preparation in zip(pair.queues, preparations, strict=True):
        weaves.remove("a")
        assert all(segments.closed for segments in preparation.segments.values())


def test_ranks_that_plan_otherwise_do_not_weave():
    preparations = FakePreparation(held(*RECORDS)), FakePreparation(held(*RECORDS))
    preparations[1].plan = lambda order, found: SimpleNamespace(plan="another", pinned=FakeSegments())
    assert all(isinstance(weave.error, NotWoven) for weave in Pair(preparations).next())
