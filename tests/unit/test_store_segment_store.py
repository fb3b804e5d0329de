"""The segment store: lookup, pins, budget, replacement, loss, and what an interrupt leaves behind."""

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import RLock
from types import FrameType
from typing import Any

import pytest

from chunkweave.errors import StoreError, UsageError
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.eviction import LRUPolicy, PathRequest
from chunkweave.store.index import StoreFollower
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.store.records import SegmentRecord
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId, SegmentId


@dataclass(frozen=True, slots=True)
class Payload:
    nbytes: int


Store = SegmentStore[Payload]


_NO_PATH = PathRequest((), (), 0, 1)


def _tokens(chunk: str) -> tuple[int, ...]:
    return (ord(chunk), 7)


def _record(path: str, *, exact: bool = True, nbytes: int = 10) -> SegmentRecord:
    """The segment of the last chunk of `path` (a letter a chunk), computed after the others."""
    context = tuple(ChunkId(chunk) for chunk in path[:-1])
    return SegmentRecord.of(ChunkId(path[-1]), context, _tokens(path[-1]), exact=exact, nbytes=nbytes)


def _prompt(path: str, *, system: bool = False) -> Prompt:
    parts = [
        PromptPart(PartKind.SYSTEM if system and i == 0 else PartKind.CHUNK, _tokens(chunk), ChunkId(chunk))
        for i, chunk in enumerate(path)
    ]
    return Prompt(
        (PromptPart(PartKind.START, (1,)), *parts, PromptPart(PartKind.QUESTION, (2, 3))),
    )


def _store(*paths: str, budget_bytes: int = 1000) -> Store:
    store: Store = SegmentStore(HostTier(), budget_bytes=budget_bytes)
    for path in paths:
        assert _put(store, path)
    store.check()
    return store


def _put(store: Store, path: str, *, exact: bool = True, nbytes: int = 10) -> bool:
    return store.insert(_record(path, exact=exact, nbytes=nbytes), Payload(nbytes))


def _id(path: str) -> SegmentId:
    return _record(path).id


def _exact(store: Store, path: str, *, system: bool = False) -> str:
    """The chunks of the longest exact prefix of a prompt."""
    parts = store.lookup(_prompt(path, system=system)).parts
    return "".join(part.part.id or "" for part in parts if part.exact is not None)


def _paths(store: Store) -> set[str]:
    return {"".join((*record.context, record.chunk_id)) for record in store.records()}


# --- lookup -------------------------------------------------------------------------------------------------


def test_the_longest_exact_prefix_ends_at_the_first_gap() -> None:
    store = _store("S", "SA", "SAB", "SABC")
    assert _exact(store, "SABC", system=True) == "SABC"
    assert _exact(store, "SAXC", system=True) == "SA"
    assert _exact(store, "SBA", system=True) == "S"
    assert _exact(store, "A") == ""


def test_start_and_question_are_neither_found_nor_counted() -> None:
    store = _store("S", "SA")
    found = store.lookup(_prompt("SAX", system=True))
    assert [len(part.variants) for part in found.parts] == [0, 1, 1, 0, 0]
    assert [part.span.start for part in found.parts] == [0, 1, 3, 5, 7]
    assert (store.stats.hits, store.stats.misses) == (2, 1)


def test_an_inexact_segment_is_a_variant_and_never_part_of_the_prefix() -> None:
    store = _store("A")
    assert _put(store, "AB", exact=False)
    found = store.lookup(_prompt("AB")).parts[2]
    assert found.exact is None
    assert [record.id for record in found.variants] == [_id("AB")]


def test_variants_come_most_recently_used_first() -> None:
    store = _store("C", "A", "AC", "B")
    _put(store, "BC", exact=False)
    store.note_request(_NO_PATH, [_id("C")])
    variants = store.lookup(_prompt("XC")).parts[2].variants
    assert [record.id for record in variants] == [_id("C"), _id("BC"), _id("AC")]


def test_a_chunk_may_repeat_in_a_prompt() -> None:
    store = _store("A", "AA", "AAB")
    assert _exact(store, "AAB") == "AAB"
    with store.lease(store.lookup(_prompt("AAB"))) as lease:
        assert set(lease.ids) == {_id("A"), _id("AA"), _id("AAB")}


def test_equal_ids_with_other_tokens_are_a_miss_that_ends_the_prefix(caplog: pytest.LogCaptureFixture) -> None:
    store = _store("A", "AB")
    collided = PromptPart(PartKind.CHUNK, (99,), ChunkId("A"))
    found = store.lookup(Prompt((collided, *_prompt("B").parts[1:]))).parts
    assert found[0].variants == ()
    assert found[0].exact is None
    assert found[1].exact is None, "exact only after an exact part"
    assert [record.id for record in found[1].variants] == [_id("AB")]
    assert store.stats.mismatched == 1
    assert "other tokens" in caplog.text


def test_lookup_is_no_use_in_the_policys_eyes() -> None:
    store = _store("A", "B", budget_bytes=20)
    store.lookup(_prompt("A"))
    _put(store, "C")
    assert _paths(store) == {"B", "C"}


# --- the path index -----------------------------------------------------------------------------------------


def test_exact_children_wait_for_a_missing_parent_and_join_when_it_comes() -> None:
    store = _store("SAB", "SA", "SABC")
    assert _exact(store, "SABC") == ""
    assert _put(store, "S")
    assert _exact(store, "SABC") == "SABC"
    store.check()


def test_descendants_of_a_removed_inner_node_stay_as_variants_and_return_with_it() -> None:
    store = _store("A", "AB", "ABC", "AD")
    assert store.remove(_id("A"))
    store.check()
    assert _exact(store, "ABC") == ""
    assert _paths(store) == {"AB", "ABC", "AD"}
    assert store.used_bytes == 30
    assert _put(store, "A")
    assert _exact(store, "ABC") == "ABC"
    assert _exact(store, "AD") == "AD"
    assert store.remove(_id("AB"))
    assert store.remove(_id("ABC")), "a waiting segment can leave too"
    assert _put(store, "AB")
    assert _exact(store, "ABC") == "AB"
    store.check()


def test_an_inexact_parent_does_not_bring_exact_children_in() -> None:
    store = _store("AB")
    _put(store, "A", exact=False)
    assert _exact(store, "AB") == ""
    assert _put(store, "A")
    assert _exact(store, "AB") == "AB"
    store.check()


# --- insert and the budget ----------------------------------------------------------------------------------


def test_exact_replaces_inexact_and_never_the_other_way_round() -> None:
    store = _store("A")
    inexact, exact = Payload(10), Payload(10)
    assert store.insert(_record("AB", exact=False), inexact)
    assert store.insert(_record("AB", exact=True), exact)
    assert store.get(_id("AB")) is exact
    assert _exact(store, "AB") == "AB"
    assert store.insert(_record("AB", exact=False), inexact)
    assert store.get(_id("AB")) is exact
    assert store.used_bytes == 20
    store.check()


def test_a_replaced_segment_stays_pinned_and_its_bytes_are_counted_once() -> None:
    store = _store(budget_bytes=20)
    _put(store, "A", exact=False)
    with store.lease([_id("A")]):
        assert _put(store, "A", nbytes=15)
        assert store.used_bytes == 15
        assert not _put(store, "B"), "A is still pinned"
        store.check()
    assert _put(store, "B")


def test_inserting_what_is_there_is_no_use_of_it_and_keeps_the_old_payload() -> None:
    store = _store("A", "B", budget_bytes=20)
    kept = store.get(_id("A"))
    assert _put(store, "A")
    assert store.get(_id("A")) is kept
    assert store.stats.inserts == 2
    _put(store, "C")
    assert _paths(store) == {"B", "C"}, "A is still the one that was used longest ago"


class _WatchedTier(HostTier[Payload]):
    most_bytes = 0

    def put(self, record: SegmentRecord, payload: Payload) -> None:
        super().put(record, payload)
        self.most_bytes = max(self.most_bytes, sum(held.nbytes for held in self.records()))


def test_the_tier_never_holds_more_than_the_budget_not_even_in_flight() -> None:
    tier = _WatchedTier()
    store: Store = SegmentStore(tier, budget_bytes=25)
    for i, path in enumerate(["A", "B", "AB", "C", "ABC", "D", "A", "AB"]):
        assert _put(store, path, nbytes=5 + 3 * (i % 3), exact=i % 2 == 0)
        store.check()
    assert 0 < tier.most_bytes <= 25
    assert store.stats.evictions > 0


def test_what_cannot_fit_is_rejected_and_nothing_is_evicted_for_it() -> None:
    store = _store("A", "B", budget_bytes=20)
    assert not _put(store, "C", nbytes=21)
    with store.lease([_id("A")]):
        assert not _put(store, "C", nbytes=11)
        assert _paths(store) == {"A", "B"}
        assert _put(store, "C", nbytes=10)
        assert _paths(store) == {"A", "C"}
    assert store.stats.rejected == 2
    assert store.stats.evictions == 1
    store.check()


def test_a_budget_of_zero_stores_nothing() -> None:
    store = _store(budget_bytes=0)
    assert not _put(store, "A")
    assert len(store) == 0


def test_leaves_go_before_the_inner_nodes_that_are_older() -> None:
    store = _store("S", "SA", "SAB", budget_bytes=30)
    assert _put(store, "X")
    assert _paths(store) == {"S", "SA", "X"}
    assert _exact(store, "SAB") == "SA"


def test_the_ancestors_of_an_incoming_segment_are_spared_while_others_can_go() -> None:
    store = _store("A", "B", "C", budget_bytes=30)
    assert _put(store, "AB")
    assert _paths(store) == {"A", "C", "AB"}
    store = _store("A", "B", budget_bytes=20)
    assert _put(store, "BC", nbytes=15)
    assert _paths(store) == {"BC"}, "but they do go when nothing else can"
    store.check()


def test_who_holds_more_than_its_share_is_evicted_first() -> None:
    store: Store = SegmentStore(HostTier(), budget_bytes=60)
    store.shares = lambda owner, among: {"a": 0.5, "b": 0.5}[owner] if len(set(among)) > 1 else 1.0

    def put(path: str, owner: str) -> bool:
        record = replace(_record(path), owner=owner)
        return store.insert(record, Payload(record.nbytes))

    for path in "PQRS":
        assert put(path, "b")
    for path in "ABC":
        assert put(path, "a")
    assert _paths(store) == set("QRS") | set("ABC"), "b has more than its half, and is the older one"
    assert put("D", "a")
    assert _paths(store) == set("QRS") | set("BCD"), "its own first, though others were not used for longer"
    store.note_request(_NO_PATH, [_id(path) for path in "BCD"])
    with store.lease([_id(path) for path in "BCD"]):
        assert put("E", "a")
    assert _paths(store) == set("RS") | set("BCDE"), "of whom it must"
    assert put("T", "b")
    assert _paths(store) == set("RST") | set("BCE"), "what a request used first counts as the last"
    store.check()


def test_a_segment_is_not_evicted_for_its_own_better_copy() -> None:
    store = _store(budget_bytes=30)
    _put(store, "A", exact=False)
    _put(store, "B")
    _put(store, "C")
    assert _put(store, "A", nbytes=20)
    assert _paths(store) == {"A", "C"}
    assert store.stats.evictions == 1, "B alone makes the room; A is replaced, not evicted"


def test_an_inexact_segment_is_no_inner_node_of_the_exact_path_through_its_place() -> None:
    store = _store("B", budget_bytes=20)
    _put(store, "A", exact=False)
    _put(store, "AB")
    assert _paths(store) == {"A", "AB"}
    _put(store, "C")
    assert _paths(store) == {"AB", "C"}


def test_an_inner_node_goes_when_nothing_else_is_unpinned() -> None:
    store = _store("A", "AB", budget_bytes=20)
    with store.lease([_id("AB")]):
        assert _put(store, "C")
        assert _paths(store) == {"AB", "C"}
        assert _exact(store, "AB") == ""
        store.check()


def test_what_is_pinned_or_looked_up_is_not_used() -> None:
    store = _store("A", "B", "C", budget_bytes=30)
    store.lease([_id("A")]).release()
    store.lookup(_prompt("A"))
    _put(store, "D")
    assert _paths(store) == {"B", "C", "D"}


def test_a_request_leaves_its_deepest_part_the_oldest() -> None:
    store = _store("A", "B", "C", budget_bytes=30)
    store.note_request(_NO_PATH, [_id("A"), _id("B"), _id("C")])
    _put(store, "D")
    assert _paths(store) == {"A", "B", "D"}


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_segment_without_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(UsageError, match="no bytes"):
        _put(_store(), "A", nbytes=nbytes)


def test_a_record_that_is_not_that_of_its_chunk_is_refused_and_leaves_nothing() -> None:
    store = _store("A")
    stray = SegmentRecord(_id("B"), ChunkId("C"), (), _tokens("C"), True, 10)
    with pytest.raises(UsageError, match="wrong id"):
        store.insert(stray, Payload(10))
    store.check()
    assert _paths(store) == {"A"}


class _Codec(HostTier[Payload]):
    """Says that a payload takes `said` bytes, and then holds `taken`."""

    said, taken = 6, 6

    def size_of(self, record: SegmentRecord, payload: Payload) -> int:
        return self.said

    def put(self, record: SegmentRecord, payload: Payload) -> None:
        super().put(record, Payload(self.taken))


def test_a_record_counts_for_what_it_takes_in_the_tier() -> None:
    tier = _Codec()
    store: Store = SegmentStore(tier, budget_bytes=12)
    assert _put(store, "A", nbytes=10)
    assert _put(store, "B", nbytes=10)
    assert store.used_bytes == 12
    assert [record.nbytes for record in store.records()] == [6, 6]
    tier.taken = 5
    assert _put(store, "C")
    assert store.used_bytes == 11, "it may take less than was reserved"
    tier.taken = 7
    assert not _put(store, "D"), "but not more"
    assert _id("D") not in {record.id for record in tier.records()}
    assert store.stats.rejected == 1
    store.check()


def test_other_tokens_under_a_stored_id_are_rejected() -> None:
    store = _store("A")
    other = SegmentRecord.of(ChunkId("A"), (), (99,), exact=True, nbytes=10)
    assert not store.insert(other, Payload(10))
    assert [record.token_ids for record in store.records()] == [_tokens("A")]
    assert (store.stats.rejected, store.stats.mismatched) == (1, 1)


def test_a_store_starts_from_a_fresh_policy_and_a_sane_budget() -> None:
    used = LRUPolicy()
    used.on_insert(_record("A"))
    with pytest.raises(UsageError, match="new eviction policy"):
        SegmentStore(HostTier[Payload](), budget_bytes=10, policy=used)
    with pytest.raises(UsageError, match="negative"):
        SegmentStore(HostTier[Payload](), budget_bytes=-1)


def test_a_store_over_a_tier_that_holds_records_has_them_and_keeps_to_its_budget() -> None:
    tier: HostTier[Payload] = HostTier()
    for path in ("AB", "A", "ABC", "X"):
        tier.put(_record(path), Payload(10))
    store: Store = SegmentStore(tier, budget_bytes=40)
    store.check()
    assert _exact(store, "ABC") == "ABC"
    assert store.get(_id("X")) == Payload(10)
    smaller: Store = SegmentStore(tier, budget_bytes=20)
    smaller.check()
    assert (smaller.used_bytes, smaller.stats.evictions) == (20, 2)
    assert {record.id for record in tier.records()} == {record.id for record in smaller.records()}
    assert _paths(smaller) == {"A", "X"}, "leaves go first: ABC, then AB, which is older than X"


# --- pins ---------------------------------------------------------------------------------------------------


def test_two_leases_pin_until_both_are_released_and_releasing_twice_is_harmless() -> None:
    store = _store("A", budget_bytes=10)
    first, second = store.lease([_id("A")]), store.lease([_id("A"), _id("A"), _id("missing")[::-1]])
    assert second.ids == (_id("A"),)
    first.release()
    first.release()
    assert first.ids == ()
    assert not _put(store, "B")
    second.release()
    assert _put(store, "B")


def test_leaving_the_context_releases_even_on_an_error() -> None:
    store = _store("A", budget_bytes=10)
    with pytest.raises(KeyError), store.lease([_id("A")]):
        raise KeyError
    assert _put(store, "B")


def test_a_lease_of_a_lookup_pins_every_segment_that_it_names() -> None:
    store = _store("A", "AB", "B", budget_bytes=30)
    with store.lease(store.lookup(_prompt("AB"))) as lease:
        assert set(lease.ids) == {_id("A"), _id("AB"), _id("B")}
        assert not _put(store, "C")


def test_an_abandoned_lease_pins_nothing() -> None:
    store = _store("A", budget_bytes=10)
    store.lease([_id("A")])
    gc.collect()
    assert _put(store, "B")
    store.check()


def test_an_old_lease_does_not_pin_a_segment_stored_later_under_the_same_id() -> None:
    store = _store("A", budget_bytes=10)
    old = store.lease([_id("A")])
    assert store.remove(_id("A"))
    assert old.ids == ()
    _put(store, "A")
    new = store.lease([_id("A")])
    old.release()
    assert not _put(store, "B"), "the new lease still pins it"
    new.release()
    assert _put(store, "B")


# --- withdrawal and loss ------------------------------------------------------------------------------------


def test_a_lost_payload_is_a_miss_that_drops_the_record(caplog: pytest.LogCaptureFixture) -> None:
    tier: HostTier[Payload] = HostTier()
    store: Store = SegmentStore(tier, budget_bytes=100)
    _put(store, "A")
    _put(store, "AB")
    tier.delete(_id("A"))
    with pytest.raises(StoreError, match="tier"):
        store.check()
    with store.lease([_id("A")]) as lease:
        assert store.get(_id("A")) is None
        assert lease.ids == ()
    assert "lost" in caplog.text
    assert store.stats.lost == 1
    assert _paths(store) == {"AB"}
    assert _exact(store, "AB") == ""
    store.check()
    assert store.get(_id("A")) is None
    assert store.stats.lost == 1, "an unknown segment is not a lost one"


def test_inserting_over_a_lost_payload_stores_the_new_one() -> None:
    tier: HostTier[Payload] = HostTier()
    store: Store = SegmentStore(tier, budget_bytes=100)
    _put(store, "A")
    tier.delete(_id("A"))
    fresh = Payload(10)
    assert store.insert(_record("A"), fresh)
    assert store.get(_id("A")) is fresh
    store.check()


def test_remove_discard_and_clear() -> None:
    store = _store("A", "B", "AB", "AC")
    assert store.remove_where(lambda record: record.chunk_id == ChunkId("B")) == 2
    assert store.remove_where(lambda record: record.chunk_id == ChunkId("B")) == 0
    assert _paths(store) == {"A", "AC"}
    store.check()
    assert store.remove(_id("A"))
    assert not store.remove(_id("A"))
    assert _id("AC") in store
    with store.lease([_id("AC")]) as lease:
        store.clear()
        assert lease.ids == ()
    store.check()
    stats = store.stats
    assert (stats.segments, stats.chunks, stats.bytes, stats.inserts) == (0, 0, 0, 4)


# --- check, interrupts, threads -----------------------------------------------------------------------------


def _break_bytes(store: Store) -> None:
    store._index._used_bytes += 1


def _break_policy(store: Store) -> None:
    store._index._policy.on_remove(_id("A"))


def _break_chunk_index(store: Store) -> None:
    del store._index._chunks[ChunkId("A")][_id("A")]


def _break_path_index(store: Store) -> None:
    store._index.paths.remove(_record("AB"))


def _let_inexact_in(store: Store) -> None:
    store._index.paths.add(_record("X"))


def _orphan(store: Store) -> None:
    store._index.paths._nodes[_id("A")].value = None


def _break_budget(store: Store) -> None:
    store.budget_bytes = 5


def _break_tier(store: Store) -> None:
    store.tier.put(_record("Z", nbytes=1), Payload(1))


def _break_pins(store: Store) -> None:
    store._test_lease = lease = store.lease([_id("A")])  # type: ignore[attr-defined]
    lease._ids = (SegmentId("stray"),)


@pytest.mark.parametrize(
    "damage",
    [
        _break_bytes,
        _break_policy,
        _break_chunk_index,
        _break_path_index,
        _let_inexact_in,
        _orphan,
        _break_budget,
        _break_tier,
        _break_pins,
    ],
)
def test_check_notices(damage: Callable[[Store], None]) -> None:
    store = _store("A", "AB")
    _put(store, "X", exact=False)
    store.check()
    damage(store)
    with pytest.raises(StoreError):
        store.check()


def _interrupt_after(lines: int, action: Callable[[], object]) -> bool:
    """Run `action`, raising KeyboardInterrupt at its n-th line inside the package; False if it ended before."""
    left = lines

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return local

    def tracer(frame: FrameType, event: str, arg: Any) -> Any:
        return local if frame.f_globals.get("__name__", "").startswith("chunkweave.") else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


INTERRUPTED: dict[str, Callable[[Store], object]] = {
    "insert": lambda store: _put(store, "ABC", nbytes=15),
    "replace": lambda store: _put(store, "AX", nbytes=15),
    "lease": lambda store: store.lease([_id("A"), _id("AB")]),
    "discard": lambda store: store.remove_where(lambda record: record.chunk_id == ChunkId("B")),
    "clear": lambda store: store.clear(),
    "refused": lambda store: _put_refused(store, "ABC"),
    "refused in place": lambda store: _put_refused(store, "AX"),
}


def _put_refused(store: Store, path: str) -> None:
    def put(record: SegmentRecord, payload: Payload) -> None:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch, suppress(OSError):
        patch.setattr(store.tier, "put", put)
        _put(store, path, nbytes=15)


def _told(store: Store) -> set[ChunkId | SegmentId]:
    """What a follower is to say of a store: its chunks, and its exact segments."""
    records = store.records()
    return {record.chunk_id for record in records} | {record.id for record in records if record.exact}


@pytest.mark.parametrize("name", ["insert", "replace", "discard", "clear"])
def test_an_interrupt_at_any_line_leaves_tree_and_follower_with_what_is_stored(name: str) -> None:
    for lines in range(1, 1000):
        store = _store("A", "AB", "B", budget_bytes=45)
        _put(store, "AX", exact=False)
        tree: KnowledgeTree[ChunkId] = KnowledgeTree(["host"])
        follower = StoreFollower(lambda one, store=store: one in _told(store))
        follower._lock = RLock()  # type: ignore[assignment]  # unlike a signal, the tracer may interrupt a release
        store.show_in(tree, "host")
        store.report_to(follower)
        known = set(follower.take().added)
        interrupted = _interrupt_after(lines, lambda store=store: INTERRUPTED[name](store))
        store.check()
        changes = follower.take()
        known = (known | changes.added) - changes.removed
        assert known == _told(store)
        if not interrupted:
            return
    pytest.fail("it never ends")


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_at_any_line_leaves_a_store_that_checks_and_works(name: str) -> None:
    for lines in range(1, 1000):
        store = _store("A", "AB", "B", budget_bytes=45)
        _put(store, "AX", exact=False)
        before = _paths(store)
        if not _interrupt_after(lines, lambda store=store: INTERRUPTED[name](store)):
            assert lines > 5, "the action was never interrupted"
            return
        store.check()
        assert _paths(store) <= before | {"ABC"}
        if name == "lease":
            assert _paths(store) == before
        assert _put(store, "D", nbytes=45), "nothing stays pinned"
        store.check()
    pytest.fail("the action never ended")


class _FullDisk(HostTier[Payload]):
    full = False

    def put(self, record: SegmentRecord, payload: Payload) -> None:
        if self.full:
            raise OSError("no space left")
        super().put(record, payload)


def test_a_tier_that_raises_leaves_a_consistent_store(caplog: pytest.LogCaptureFixture) -> None:
    tier = _FullDisk()
    store: Store = SegmentStore(tier, budget_bytes=30)
    for path in ("A", "AB", "C"):
        _put(store, path)
    tier.full = True
    with pytest.raises(OSError, match="no space"):
        _put(store, "D")
    store.check()
    assert not caplog.records, "nothing was interrupted, and no index is made anew"
    assert _exact(store, "A") == "A"
    tier.full = False
    assert _put(store, "D")


def test_a_write_that_arrives_and_fails_all_the_same_leaves_nothing() -> None:
    class Late(HostTier[Payload]):
        def put(self, record: SegmentRecord, payload: Payload) -> None:
            super().put(record, payload)
            if record.exact:
                raise TimeoutError("no answer in time")

    tier = Late()
    store: Store = SegmentStore(tier, budget_bytes=30)
    _put(store, "A", exact=False)
    for path in ("A", "B"):
        with pytest.raises(TimeoutError):
            _put(store, path, nbytes=20)
        store.check()
        assert not list(tier.records())
    assert _put(store, "B", exact=False, nbytes=30), "the room is given back"


def test_a_pinned_segment_whose_better_copy_fails_to_come_in_stays() -> None:
    tier = _FullDisk()
    store: Store = SegmentStore(tier, budget_bytes=30)
    _put(store, "A", exact=False)
    lease = store.lease([_id("A")])
    tier.full = True
    with pytest.raises(OSError, match="no space"):
        _put(store, "A", exact=True)
    store.check()
    assert lease.ids == (_id("A"),)
    assert not next(iter(store.records())).exact
    assert store.used_bytes == 10, "the room is given back"


def test_threads_share_one_store() -> None:
    store = _store(budget_bytes=65)

    def work(seed: int) -> None:
        for i in range(150):
            path = "".join("ABCDE"[(seed * 7 + i * 3 + j * (1 + i % 3)) % 5] for j in range(1 + (seed + i) % 4))
            with store.lease(store.lookup(_prompt(path))) as lease:
                assert all(store.get(segment) is not None for segment in lease.ids), "a pinned segment left"
                _put(store, path, exact=i % 3 > 0, nbytes=5 + i % 11)
            assert store.used_bytes <= store.budget_bytes

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, seed) for seed in range(4)]:
                done.result(timeout=30)
    finally:
        sys.setswitchinterval(interval)
    store.check()
    assert store.stats.evictions > 0
