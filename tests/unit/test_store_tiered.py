"""The hierarchy: union, promotion, demotion, write-through, failures, removal, time to live."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from chunkweave.errors import NotRemovedError, UsageError
from chunkweave.store.level import BackgroundWriter, Level, Write
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.store.shared_folder import Tombstones
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.types import ChunkId, SegmentId
from tests.unit.tier_fakes import (
    Clock,
    FaultyTier,
    Payload,
    SharedFaultyTier,
    id_of,
    payload_of,
    prompt_of,
    record_of,
    use_of,
)


class Stack:
    """Host, disk and remote over fakes; writes happen when the test says so."""

    def __init__(
        self,
        *,
        host_bytes: int = 20,
        disk_bytes: int = 200,
        admission: int = 1,
        ttl_s: float | None = None,
        **limits: int,
    ) -> None:
        self.clock = Clock()
        self.host, self.disk, self.remote = FaultyTier(), SharedFaultyTier(0.5), SharedFaultyTier()
        self.writer: BackgroundWriter[Payload] = BackgroundWriter(threaded=False, **limits)
        self.store: TieredStore[Payload] = TieredStore(
            [
                Level("host", SegmentStore(self.host, budget_bytes=host_bytes), clock=self.clock),
                self._slow("disk", self.disk, disk_bytes),
                self._slow("remote", self.remote, 1000),
            ],
            admission=admission,
            ttl_s=ttl_s,
            clock=self.clock,
            writer=self.writer,
        )

    def _slow(self, name: str, tier: FaultyTier, budget_bytes: int) -> Level[Payload]:
        store = SegmentStore(tier, budget_bytes=budget_bytes, shared=True)
        return Level(name, store, background=True, patience=2, pause_s=30.0, clock=self.clock)

    def put(self, *paths: str, exact: bool = True) -> None:
        for path in paths:
            record = record_of(path, exact=exact)
            assert self.store.insert(record, payload_of(record))
        self.store.check()

    def put_down(self, *paths: str, exact: bool = True) -> None:
        """Store, and write to the slower levels."""
        self.put(*paths, exact=exact)
        self.store.flush()

    def exact(self, path: str) -> str:
        return "".join(part.part.id or "" for part in self.store.lookup(prompt_of(path)).parts if part.exact)


def with_a_below() -> Stack:
    """A is on the disk and remote; B has pushed it out of the host."""
    stack = Stack(host_bytes=10)
    stack.put_down("A")
    stack.put("B")
    return stack


def test_what_is_computed_reaches_every_level_and_host_evictions_cost_nothing_more() -> None:
    stack = Stack()
    stack.put("A", "AB", "ABC")
    assert stack.store.stats.writes_queued == 6
    assert stack.store.flush()
    assert stack.store.tier_of(id_of("ABC")) == "host"
    gone = next(path for path in ("A", "AB", "ABC") if stack.store.tier_of(id_of(path)) == "disk")
    assert stack.exact("ABC") == "ABC", "the exact prefix runs over levels"
    assert stack.store.get(id_of(gone)) == payload_of(record_of(gone))
    assert (stack.disk.puts, stack.remote.puts, stack.store.stats.demotions) == (3, 3, 1)
    stack.put_down("D")
    assert (stack.disk.puts, stack.store.stats.demotions) == (4, 1), "swapped out once: what is below just goes"
    stack.store.check()


def test_use_promotes_to_host_once() -> None:
    stack = with_a_below()
    assert stack.store.tier_of(id_of("A")) == "disk"
    payload = stack.store.get(id_of("A"))
    assert payload is not None
    assert stack.store.promote(id_of("A"), payload)
    assert stack.store.tier_of(id_of("A")) == "host"
    assert not stack.store.promote(id_of("A"), payload)
    assert not stack.store.promote(id_of("X"), payload), "unknown"
    assert stack.store.stats.promotions == 1


def test_admission_counts_sightings_and_guards_the_way_down() -> None:
    stack = Stack(admission=2)
    stack.put("A", "B")
    assert stack.store.stats.writes_queued == 0
    stack.store.note_request(use_of("A"))
    assert stack.store.stats.writes_queued == 2
    stack.put_down("C", "D")
    assert set(stack.disk.payloads()) == {id_of("A")}, "B was seen once and is evicted for good"


def test_a_full_queue_skips_and_never_waits() -> None:
    stack = Stack(host_bytes=100, max_items=1)
    stack.put("A", "B")
    assert stack.store.stats.writes_skipped == 3
    stack.store.flush()
    assert set(stack.disk.payloads()) == {id_of("A")}
    stack = Stack(host_bytes=100, max_bytes=15)
    stack.put("A", "B")
    assert (stack.store.stats.writes_queued, stack.store.stats.writes_skipped) == (1, 3)


def test_a_write_that_is_cancelled_in_the_queue_counts_as_rejected() -> None:
    stack = Stack(host_bytes=100)
    stack.put("A", exact=False)
    stack.put_down("A")
    stats = stack.store.stats
    assert (stats.writes_queued, stats.writes_done, stats.writes_rejected) == (4, 2, 2)


def test_what_the_queue_skipped_is_demoted_when_host_evicts_it() -> None:
    stack = Stack(host_bytes=20, max_items=2)
    stack.put_down("A", "B")
    assert set(stack.disk.payloads()) == {id_of("A")}
    stack.store.note_request(use_of("A"))
    stack.store.flush()
    stack.put_down("C")
    assert id_of("B") in stack.disk.payloads()
    assert stack.store.stats.demotions == 1


def test_a_level_that_fails_is_passed_over_then_paused_then_tried_again() -> None:
    stack = with_a_below()
    stack.disk.broken = True
    assert stack.store.get(id_of("A")) == payload_of(record_of("A")), "from the remote"
    assert stack.store.get(id_of("A")) is not None
    assert stack.store.tier_of(id_of("A")) == "remote", "the disk is left alone now"
    stack.store.flush()
    assert stack.store.stats.writes_skipped == 1
    stack.disk.broken = False
    stack.clock.now_s += 31
    assert stack.store.tier_of(id_of("A")) == "disk"
    stack.store.check()


def test_a_follower_is_told_of_what_a_paused_level_holds() -> None:
    stack = Stack(host_bytes=10)
    stack.remote.late = True
    stack.put_down("A")
    stack.put_down("B")
    assert not stack.store.levels[2].available
    stack.disk.broken = True
    for _ in range(2):
        stack.store.get(id_of("A"))
    assert stack.store.tier_of(id_of("A")) is None, "both are paused"
    told = stack.store.follow().take().added
    assert told == {ChunkId("A"), id_of("A"), ChunkId("B"), id_of("B")}


def test_a_level_whose_layers_come_late_again_and_again_is_paused() -> None:
    stack = with_a_below()
    stack.store.was_late(id_of("A"))
    stack.clock.now_s += 31
    stack.store.was_late(id_of("A"))
    assert stack.store.tier_of(id_of("A")) == "disk", "two in a minute are chance"
    stack.store.was_late(id_of("A"))
    assert stack.store.tier_of(id_of("A")) == "remote"
    stack.clock.now_s += 31
    assert stack.store.tier_of(id_of("A")) == "disk"


def test_a_lost_payload_is_looked_for_further_down() -> None:
    stack = with_a_below()
    stack.disk.lose(id_of("A"))
    assert stack.store.get(id_of("A")) is not None
    assert stack.store.tier_of(id_of("A")) == "remote"
    assert stack.store.stats.lost == 1
    stack.remote.lose(id_of("A"))
    assert stack.store.get(id_of("A")) is None
    assert stack.exact("A") == ""


def test_an_unreachable_remote_forgets_nothing() -> None:
    stack = with_a_below()
    stack.disk.lose(id_of("A"))
    held = stack.remote.payloads()
    stack.remote.broken = True
    assert stack.store.get(id_of("A")) is None
    assert stack.remote.payloads() == held


def test_an_inexact_copy_never_stands_in_for_an_exact_one() -> None:
    stack = Stack(host_bytes=10)
    stack.put_down("A", exact=False)
    stack.put("A")
    assert stack.store.record(id_of("A")) == record_of("A")
    assert not stack.disk.payloads(), "the inexact copies below are gone"
    stack.store.flush()
    assert all(payload.exact for payload in stack.disk.payloads().values())
    stack.put("A", exact=False)
    assert stack.store.get(id_of("A"), exact=True) == payload_of(record_of("A"))
    stack.put("B", exact=False)
    assert stack.store.get(id_of("B"), exact=True) is None


def test_a_copy_that_another_process_replaced_by_a_worse_one_is_lost() -> None:
    stack = with_a_below()
    stack.remote.lose(id_of("A"))
    worse = record_of("A", exact=False)
    stack.disk.put(worse, payload_of(worse))
    assert stack.exact("A") == "A"
    assert stack.store.get(id_of("A")) is None
    assert stack.exact("A") == "", "it is found again as what it is"
    assert stack.store.get(id_of("A")) == payload_of(worse)


def test_a_shared_level_is_asked_once_a_lookup_and_only_for_what_the_faster_ones_lack() -> None:
    stack = Stack(host_bytes=100)
    stack.put("A")
    stack.remote.asked.clear()
    other = record_of("AB")
    stack.remote.put(other, payload_of(other))
    assert stack.exact("AB") == "AB"
    assert stack.remote.asked == [[id_of("AB"), id_of("B")]]
    stack.put("B")
    stack.remote.asked.clear()
    assert stack.exact("AB") == "AB"
    assert stack.remote.asked == []


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.remove(id_of("A")),
        lambda store: store.remove_where(lambda record: record.chunk_id == ChunkId("A")),
        lambda store: store.remove_where(lambda record: record.document == "A"),
        lambda store: store.clear(),
    ],
)
def test_removal_acts_on_every_level_and_on_what_waits_to_be_written(
    act: Callable[[TieredStore[Payload]], object],
) -> None:
    for writes in range(3):
        stack = Stack(host_bytes=100)
        unknown = record_of("A")
        stack.put("A")
        for _ in range(writes):
            stack.writer.write_one()
        stack.remote.put(unknown, payload_of(unknown))
        act(stack.store)
        stack.store.flush()
        assert not {**stack.host.payloads(), **stack.disk.payloads(), **stack.remote.payloads()}
        assert stack.exact("A") == ""
        stack.store.check()


def test_a_removal_in_the_middle_of_a_write_wins() -> None:
    disk = SharedFaultyTier()
    disk.gate = Event()
    levels = [
        Level("host", SegmentStore(FaultyTier(), budget_bytes=100)),
        Level("disk", SegmentStore(disk, budget_bytes=100, shared=True), background=True),
    ]
    store: TieredStore[Payload] = TieredStore(levels)
    record = record_of("A")
    assert store.insert(record, payload_of(record))
    while id_of("A") not in levels[1].store._claims:
        time.sleep(0.001)
    assert store.lookup(prompt_of("A")).parts[1].exact is not None, "a slow write keeps nobody waiting"
    assert store.remove_where(lambda record: record.document == "A") == 1
    disk.gate.set()
    assert store.close(5)
    assert not disk.payloads()
    assert id_of("A") not in store
    store.check()


class Undeletable(SharedFaultyTier):
    """One whose copies cannot be removed, as files of a folder that cannot be written."""

    stuck = True

    def delete(self, segment: SegmentId) -> None:
        if self.stuck:
            raise PermissionError("not yours to remove")
        super().delete(segment)


class OnDisk:
    """Stores, one after the other or beside each other, over one disk that removes nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.disk = Undeletable()

    def open(self, *, budget_bytes: int = 100) -> TieredStore[Payload]:
        removed = Tombstones(self.folder, "model", "disk")
        disk = SegmentStore(self.disk, budget_bytes=budget_bytes, shared=True, removed=removed)
        levels = [Level("host", SegmentStore(FaultyTier(), budget_bytes=100)), Level("disk", disk, background=True)]
        return TieredStore(levels, writer=BackgroundWriter(threaded=False))


def put(store: TieredStore[Payload], *paths: str) -> None:
    for path in paths:
        assert store.insert(record_of(path), payload_of(record_of(path)))
    store.flush()


def found(store: TieredStore[Payload], path: str) -> str:
    store.check()
    return "".join(part.part.id or "" for part in store.lookup(prompt_of(path)).parts if part.exact)


def test_what_was_removed_and_is_still_there_is_not_served_again(tmp_path: Path) -> None:
    stack = OnDisk(tmp_path)
    store = stack.open()
    put(store, "A", "AB", "C")
    for copies in (2, 0):
        with pytest.raises(NotRemovedError) as error:
            store.forget_chunks([ChunkId("A")])
        assert (error.value.removed, error.value.left, error.value.lasting) == (copies, 2, True)
    assert store.forget_chunks([ChunkId("X")]) == 0
    again = stack.open()
    for one in (store, again):
        assert (found(one, "AB"), found(one, "C"), one.stats.undeletable) == ("", "C", 2)
        assert one.get(id_of("A")) is None
    with pytest.raises(NotRemovedError):
        again.clear()
    stack.disk.stuck = False
    assert again.forget_chunks([ChunkId("A")]) == 2
    assert stack.open().stats.undeletable == 0
    assert not stack.disk.payloads()


def test_a_level_that_does_not_say_what_it_holds_may_have_more(tmp_path: Path) -> None:
    stack = Stack()
    stack.remote.put(record_of("A"), payload_of(record_of("A")))
    stack.remote.broken = True
    for _ in range(2):
        with pytest.raises(NotRemovedError, match="the remote tier could not list") as error:
            stack.store.forget_chunks([ChunkId("A")])
        assert (error.value.removed, error.value.left, error.value.unasked) == (0, 0, ("remote",))
    stack.remote.broken = False
    assert stack.store.forget_chunks([ChunkId("A")]) == 1


def test_what_is_stored_again_is_served_again(tmp_path: Path) -> None:
    stack = OnDisk(tmp_path)
    store = stack.open()
    put(store, "A", "C")
    with pytest.raises(NotRemovedError):
        store.forget_chunks([ChunkId("A"), ChunkId("C")])
    put(store, "A")
    for one in (store, stack.open()):
        assert (found(one, "A"), one.stats.undeletable) == ("A", 1)
    stack.disk.stuck = False
    put(store, "D")
    assert set(stack.disk.payloads()) == {id_of("A"), id_of("D")}, "tried again when something was stored"


def test_what_another_process_could_not_remove_is_not_read(tmp_path: Path) -> None:
    stack = OnDisk(tmp_path)
    store = stack.open()
    put(store, "A")
    other = stack.open()
    with pytest.raises(NotRemovedError):
        store.forget_chunks([ChunkId("A")])
    assert other.get(id_of("A")) is None


def test_what_was_evicted_and_not_removed_can_be_asked_to_be_removed(tmp_path: Path) -> None:
    stack = OnDisk(tmp_path)
    store = stack.open(budget_bytes=10)
    put(store, "A", "B")
    store.levels[0].store.clear()
    assert (found(store, "A"), found(store, "B")) == ("", "B")
    with pytest.raises(NotRemovedError):
        store.forget_chunks([ChunkId("A")])
    assert found(stack.open(), "A") == ""


@pytest.mark.parametrize("reason", ["no folder", "no place to write"])
def test_without_a_place_to_write_it_is_remembered_as_long_as_the_process_runs(tmp_path: Path, reason: str) -> None:
    (tmp_path / "file").write_text("")
    stack = OnDisk(None if reason == "no folder" else tmp_path / "file")
    store = stack.open()
    put(store, "A")
    with pytest.raises(NotRemovedError, match="until this process ends") as error:
        store.forget_chunks([ChunkId("A")])
    assert not error.value.lasting
    assert found(store, "A") == ""
    stack.disk.stuck = False
    assert store.forget_chunks([ChunkId("A")]) == 1


def test_a_write_that_is_removed_in_its_middle_and_cannot_be_deleted_stays_removed(tmp_path: Path) -> None:
    stack = OnDisk(tmp_path)
    stack.disk.gate = Event()
    store = stack.open()
    record = record_of("A")
    assert store.insert(record, payload_of(record))
    writing = Thread(target=store.flush)
    writing.start()
    while id_of("A") not in store.levels[1].store._claims:
        time.sleep(0.001)
    assert store.forget_chunks([ChunkId("A")]) == 1
    stack.disk.gate.set()
    writing.join(10)
    assert stack.disk.payloads()
    for one in (store, stack.open()):
        assert (found(one, "A"), one.stats.undeletable) == ("", 1)


def test_a_model_with_other_weights_has_nothing_in_memory_and_writes_nothing_down() -> None:
    stack = Stack()
    stack.put_down("A")
    stack.store.leave_slow_levels()
    assert stack.store.tier_of(id_of("A")) == "disk", "for other servers"
    written = stack.disk.puts, stack.remote.puts
    stack.put("B", "C", "D")
    stack.store.note_request(use_of("D"))
    stack.store.flush()
    assert (stack.disk.puts, stack.remote.puts) == written
    assert (stack.exact("D"), stack.store.shared) == ("D", False)
    stack.store.check()


def test_what_is_too_old_is_not_found_and_goes_everywhere() -> None:
    stack = Stack(ttl_s=10.0)
    stack.put_down("A")
    stack.clock.now_s += 5
    stack.put("B")
    stack.clock.now_s += 5
    assert stack.exact("A") == ""
    assert not {**stack.disk.payloads()}.keys() & {id_of("A")}
    assert stack.exact("B") == "B"
    assert stack.store.expire(stack.clock() + 5) == 1
    assert len(stack.store) == 0
    assert stack.store.stats.expired == 2
    stack.store.check()


def test_waiting_to_be_written_makes_nothing_younger() -> None:
    stack = Stack(host_bytes=10, ttl_s=10.0)
    stack.put("A")
    stack.put("B")
    stack.clock.now_s += 9
    assert stack.store.expire() == 0
    stack.store.flush()
    assert stack.exact("A") == "A"
    stack.clock.now_s += 1
    assert stack.exact("A") == ""


def test_a_clock_that_was_ahead_makes_nothing_live_longer() -> None:
    stack = Stack(ttl_s=10.0)
    stack.clock.now_s += 1000
    stack.put("A")
    stack.clock.now_s -= 1000
    assert stack.exact("A") == "A"
    stack.clock.now_s += 10
    assert stack.exact("A") == ""


def test_pins_hold_on_every_level() -> None:
    stack = Stack(host_bytes=10, disk_bytes=5)
    stack.put_down("A")
    with stack.store.lease(stack.store.lookup(prompt_of("A"))) as lease:
        assert lease.ids == (id_of("A"),)
        record = record_of("B")
        assert stack.store.insert(record, payload_of(record)), "it goes below"
        stack.store.flush()
        assert stack.store.tier_of(id_of("A")) == "host"
        assert set(stack.disk.payloads()) == {id_of("A")}
        assert stack.store.tier_of(id_of("B")) == "remote"
    assert lease.ids == ()


def test_a_second_store_over_the_same_tiers_has_what_the_first_one_wrote() -> None:
    stack = Stack()
    stack.put("A", "AB", "ABC")
    assert stack.store.close()
    again: TieredStore[Payload] = TieredStore(
        [Level("host", SegmentStore(FaultyTier(), budget_bytes=20)), stack._slow("disk", stack.disk, 200)]
    )
    found = again.lookup(prompt_of("ABC")).parts[1:-1]
    assert [part.exact and part.exact.id for part in found] == [id_of("A"), id_of("AB"), id_of("ABC")]
    assert again.get(id_of("AB")) == payload_of(record_of("AB"))


def test_the_writer_thread_counts_failures_and_takes_nothing_after_closing() -> None:
    disk = FaultyTier()
    level = Level("disk", SegmentStore(disk, budget_bytes=100), background=True)
    writer: BackgroundWriter[Payload] = BackgroundWriter()
    record = record_of("A")
    disk.broken = True
    assert writer.offer(Write(level, record, payload_of(record), 10))
    assert writer.flush(5)
    disk.broken = False
    assert writer.offer(Write(level, record, payload_of(record), 10))
    assert writer.close(5)
    assert id_of("A") in level.store
    assert not writer.offer(Write(level, record_of("B"), payload_of(record_of("B")), 10))
    assert writer.counts == {"queued": 2, "done": 1, "failed": 1, "skipped": 1}
    level.store.check()


def test_flushing_gives_up_in_time() -> None:
    disk = FaultyTier()
    disk.gate = Event()
    writer: BackgroundWriter[Payload] = BackgroundWriter()
    level = Level("disk", SegmentStore(disk, budget_bytes=100), background=True)
    writer.offer(Write(level, record_of("A"), payload_of(record_of("A")), 10))
    assert not writer.flush(0.05)
    disk.gate.set()
    assert writer.close(5)


def test_levels_that_make_no_hierarchy_are_refused() -> None:
    host = Level("host", SegmentStore(FaultyTier(), budget_bytes=1))
    disk = Level("disk", SegmentStore(FaultyTier(), budget_bytes=1), background=True)
    for levels in ([], [disk], [disk, host], [host, host]):
        with pytest.raises(UsageError, match="memory first"):
            TieredStore(levels)
    with pytest.raises(UsageError, match="admission"):
        TieredStore([host], admission=0)


@pytest.mark.parametrize("moved", ["down by a use", "up by a load"])
def test_what_is_moved_while_it_is_removed_does_not_come_back(moved: str) -> None:
    """Whatever level the removal has reached."""
    stack = Stack() if moved == "down by a use" else with_a_below()
    if moved == "down by a use":
        stack.put("A")
    removal = stack.store.levels[0 if moved == "down by a use" else 2].store
    withdraw, payload = removal.withdraw, stack.store.get(id_of("A"))
    assert payload is not None

    def withdrawn(*given, **more):
        if moved == "down by a use":  # of the slow levels it is removed already, of memory not yet
            stack.store.note_request(use_of("A"))
        found = withdraw(*given, **more)
        if moved == "up by a load":  # of the slowest level it is removed already, of the disk not yet
            stack.store.promote(id_of("A"), payload)
        stack.store.flush()
        return found

    removal.withdraw = withdrawn  # type: ignore[method-assign]
    assert stack.store.forget_chunks([ChunkId("A")]) >= 1
    assert not any(level.store.holds(id_of("A")) for level in stack.store.levels)
    assert id_of("A") not in {*stack.host.payloads(), *stack.disk.payloads(), *stack.remote.payloads()}
    stack.put("A")
    assert stack.store.tier_of(id_of("A")) == "host", "what is computed later is stored"


def test_a_mean_takes_the_place_of_an_earlier_one_on_every_level() -> None:
    stack = Stack(host_bytes=200)
    stack.put("XA", "B", exact=False)

    def mean_over(*contexts: str) -> SegmentRecord:
        found = [tuple(map(ChunkId, context)) for context in contexts]
        return record_of("A", exact=False).mean_over(found, nbytes=10, attention=None, read=())

    old, new, other = mean_over("X", "Y"), mean_over("Y", "Z"), replace(mean_over("X", "Y"), chunk_id=ChunkId("B"))
    other = replace(other, id=segment_id(other.chunk_id, other.context))
    for record in (old, other):
        assert stack.store.insert(record, payload_of(record))
    stack.store.flush()
    assert stack.store.means(ChunkId("A")) == (old,)
    assert stack.store.insert(new, payload_of(new))
    stack.store.flush()
    assert stack.store.means(ChunkId("A")) == (new,)
    assert {record.id for record in stack.store.records()} == {id_of("XA"), id_of("B"), other.id, new.id}
    for level in stack.store.levels:
        assert level.store.record(old.id) is None
        assert level.store.record(new.id) is not None
    assert stack.store.insert(new, payload_of(new)), "the same mean computed again"
    assert stack.store.means(ChunkId("A")) == (new,)
    stack.store.check()
