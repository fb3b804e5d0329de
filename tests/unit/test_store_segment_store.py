"""The segment store: what it evicts, refuses and counts, and what interrupts, failures and threads leave behind.

Lookups, replacement, leases, removal and loss are tested against a model in tests/property/test_store_machine.py.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
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
from tests.unit.tier_fakes import Payload, id_of, payload_of, prompt_of, record_of, tokens

Store = SegmentStore[Payload]


_NO_PATH = PathRequest((), (), 0, 1)


def _store(*paths: str, budget_bytes: int = 1000) -> Store:
    """A store with these segments; those after a `~` are inexact."""
    store: Store = SegmentStore(HostTier(), budget_bytes=budget_bytes)
    for path in paths:
        assert _put(store, path.lstrip("~"), exact=not path.startswith("~"))
    store.check()
    return store


def _put(store: Store, path: str, *, exact: bool = True, nbytes: int = 10) -> bool:
    record = record_of(path, exact=exact, nbytes=nbytes)
    return store.insert(record, payload_of(record))


def _exact(store: Store, path: str) -> str:
    """The chunks of the longest exact prefix of a prompt."""
    parts = store.lookup(prompt_of(path)).parts
    return "".join(part.part.id or "" for part in parts if part.exact is not None)


def _paths(store: Store) -> set[str]:
    return {"".join((*record.context, record.chunk_id)) for record in store.records()}


# --- lookup -------------------------------------------------------------------------------------------------


def test_start_and_question_are_neither_found_nor_counted() -> None:
    store = _store("S", "SA")
    found = store.lookup(prompt_of("SAX"))
    assert [len(part.variants) for part in found.parts] == [0, 1, 1, 0, 0]
    assert [part.span.start for part in found.parts] == [0, 1, 3, 5, 7]
    assert (store.stats.hits, store.stats.misses) == (2, 1)


def test_variants_come_most_recently_used_first() -> None:
    store = _store("C", "A", "AC", "B")
    _put(store, "BC", exact=False)
    store.note_request(_NO_PATH, [id_of("C")])
    variants = store.lookup(prompt_of("XC")).parts[2].variants
    assert [record.id for record in variants] == [id_of("C"), id_of("BC"), id_of("AC")]


def test_equal_ids_with_other_tokens_are_a_miss_that_ends_the_prefix(caplog: pytest.LogCaptureFixture) -> None:
    store = _store("A", "AB")
    collided = PromptPart(PartKind.CHUNK, (99,), ChunkId("A"))
    found = store.lookup(Prompt((collided, *prompt_of("B").parts[1:]))).parts
    assert found[0].variants == ()
    assert found[0].exact is None
    assert found[1].exact is None, "exact only after an exact part"
    assert [record.id for record in found[1].variants] == [id_of("AB")]
    assert store.stats.mismatched == 1
    assert "other tokens" in caplog.text


# --- insert and the budget ----------------------------------------------------------------------------------


def test_inserting_what_is_there_is_no_use_of_it_and_keeps_the_old_payload() -> None:
    store = _store("A", "B", budget_bytes=20)
    kept = store.get(id_of("A"))
    assert _put(store, "A")
    assert store.get(id_of("A")) is kept
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


@pytest.mark.parametrize(
    ("stored", "incoming", "nbytes", "left"),
    [
        (["S", "SA", "SAB"], "X", 10, {"S", "SA", "X"}),
        (["A", "B", "C"], "AB", 10, {"A", "C", "AB"}),
        (["A", "B", "C"], "BC", 25, {"BC"}),
        (["~A", "B", "C"], "A", 20, {"A", "C"}),
        (["~A", "AB", "C"], "D", 10, {"AB", "C", "D"}),
    ],
    ids=[
        "leaves before inner nodes that are older",
        "ancestors of the incoming one are spared",
        "unless nothing else can go",
        "one is not evicted for its own better copy",
        "an inexact one is no inner node of the path through its place",
    ],
)
def test_what_is_evicted_for_an_incoming_segment(stored: list[str], incoming: str, nbytes: int, left: set[str]) -> None:
    store = _store(*stored, budget_bytes=30)
    assert _put(store, incoming, nbytes=nbytes)
    assert _paths(store) == left
    assert store.stats.evictions == len(stored) + 1 - len(left) - (incoming == "A"), "a replaced one is not evicted"
    store.check()


def test_who_holds_more_than_its_share_is_evicted_first() -> None:
    store: Store = SegmentStore(HostTier(), budget_bytes=60)
    store.shares = lambda owner, among: {"a": 0.5, "b": 0.5}[owner] if len(set(among)) > 1 else 1.0

    def put(path: str, owner: str) -> bool:
        record = replace(record_of(path), owner=owner)
        return store.insert(record, payload_of(record))

    for path in "PQRS":
        assert put(path, "b")
    for path in "ABC":
        assert put(path, "a")
    assert _paths(store) == set("QRS") | set("ABC"), "b has more than its half, and is the older one"
    assert put("D", "a")
    assert _paths(store) == set("QRS") | set("BCD"), "its own first, though others were not used for longer"
    store.note_request(_NO_PATH, [id_of(path) for path in "BCD"])
    with store.lease([id_of(path) for path in "BCD"]):
        assert put("E", "a")
    assert _paths(store) == set("RS") | set("BCDE"), "of whom it must"
    assert put("T", "b")
    assert _paths(store) == set("RST") | set("BCE"), "what a request used first counts as the last"
    store.check()


def test_what_is_pinned_or_looked_up_is_not_used() -> None:
    store = _store("A", "B", "C", budget_bytes=30)
    store.lease([id_of("A")]).release()
    store.lookup(prompt_of("A"))
    _put(store, "D")
    assert _paths(store) == {"B", "C", "D"}


def test_a_request_leaves_its_deepest_part_the_oldest() -> None:
    store = _store("A", "B", "C", budget_bytes=30)
    store.note_request(_NO_PATH, [id_of("A"), id_of("B"), id_of("C")])
    _put(store, "D")
    assert _paths(store) == {"A", "B", "D"}


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_segment_without_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(UsageError, match="no bytes"):
        _put(_store(), "A", nbytes=nbytes)


def test_a_record_that_is_not_that_of_its_chunk_is_refused_and_leaves_nothing() -> None:
    store = _store("A")
    stray = SegmentRecord(id_of("B"), ChunkId("C"), (), tokens("C"), True, 10)
    with pytest.raises(UsageError, match="wrong id"):
        store.insert(stray, payload_of(stray))
    store.check()
    assert _paths(store) == {"A"}


class _Codec(HostTier[Payload]):
    """Says that a payload takes `said` bytes, and then holds `taken`."""

    said, taken = 6, 6

    def size_of(self, record: SegmentRecord, payload: Payload) -> int:
        return self.said

    def put(self, record: SegmentRecord, payload: Payload) -> None:
        super().put(record, payload_of(replace(record, nbytes=self.taken)))


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
    assert id_of("D") not in {record.id for record in tier.records()}
    assert store.stats.rejected == 1
    store.check()


def test_other_tokens_under_a_stored_id_are_rejected() -> None:
    store = _store("A")
    other = SegmentRecord.of(ChunkId("A"), (), (99,), exact=True, nbytes=10)
    assert not store.insert(other, payload_of(other))
    assert [record.token_ids for record in store.records()] == [tokens("A")]
    assert (store.stats.rejected, store.stats.mismatched) == (1, 1)


def test_a_store_starts_from_a_fresh_policy_and_a_sane_budget() -> None:
    used = LRUPolicy()
    used.on_insert(record_of("A"))
    with pytest.raises(UsageError, match="new eviction policy"):
        SegmentStore(HostTier[Payload](), budget_bytes=10, policy=used)
    with pytest.raises(UsageError, match="negative"):
        SegmentStore(HostTier[Payload](), budget_bytes=-1)


def test_a_store_over_a_tier_that_holds_records_has_them_and_keeps_to_its_budget() -> None:
    tier: HostTier[Payload] = HostTier()
    for path in ("AB", "A", "ABC", "X"):
        tier.put(record_of(path), payload_of(record_of(path)))
    store: Store = SegmentStore(tier, budget_bytes=40)
    store.check()
    assert _exact(store, "ABC") == "ABC"
    assert store.get(id_of("X")) == payload_of(record_of("X"))
    smaller: Store = SegmentStore(tier, budget_bytes=20)
    smaller.check()
    assert (smaller.used_bytes, smaller.stats.evictions) == (20, 2)
    assert {record.id for record in tier.records()} == {record.id for record in smaller.records()}
    assert _paths(smaller) == {"A", "X"}, "leaves go first: ABC, then AB, which is older than X"


# --- pins ---------------------------------------------------------------------------------------------------


def test_leaving_the_context_releases_even_on_an_error() -> None:
    store = _store("A", budget_bytes=10)
    with pytest.raises(KeyError), store.lease([id_of("A")]):
        raise KeyError
    assert _put(store, "B")


# --- withdrawal and loss ------------------------------------------------------------------------------------


def test_a_lost_payload_is_a_miss_that_drops_the_record(caplog: pytest.LogCaptureFixture) -> None:
    tier: HostTier[Payload] = HostTier()
    store: Store = SegmentStore(tier, budget_bytes=100)
    _put(store, "A")
    _put(store, "AB")
    tier.delete(id_of("A"))
    with pytest.raises(StoreError, match="tier"):
        store.check()
    with store.lease([id_of("A")]) as lease:
        assert store.get(id_of("A")) is None
        assert lease.ids == ()
    assert "lost" in caplog.text
    assert store.stats.lost == 1
    assert _paths(store) == {"AB"}
    assert _exact(store, "AB") == ""
    store.check()
    assert store.get(id_of("A")) is None
    assert store.stats.lost == 1, "an unknown segment is not a lost one"


# --- check, interrupts, threads -----------------------------------------------------------------------------


DAMAGE: dict[str, Callable[[Store, pytest.MonkeyPatch], object]] = {
    "bytes": lambda store, patch: patch.setattr(store._index, "_used_bytes", 1),
    "policy": lambda store, patch: store._index._policy.on_remove(id_of("A")),
    "chunk index": lambda store, patch: store._index._chunks[ChunkId("A")].pop(id_of("A")),
    "path index": lambda store, patch: store._index.paths.remove(record_of("AB")),
    "inexact in the path index": lambda store, patch: store._index.paths.add(record_of("X")),
    "orphan": lambda store, patch: patch.setattr(store._index.paths._nodes[id_of("A")], "value", None),
    "budget": lambda store, patch: patch.setattr(store, "budget_bytes", 5),
    "tier": lambda store, patch: store.tier.put(record_of("Z", nbytes=1), payload_of(record_of("Z", nbytes=1))),
    "pins": lambda store, patch: patch.setattr(store.lease([id_of("A")]), "_ids", (SegmentId("stray"),)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_check_notices(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store("A", "AB", "~X")
    DAMAGE[damage](store, monkeypatch)
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
    "lease": lambda store: store.lease([id_of("A"), id_of("AB")]),
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
        store = _store("A", "AB", "B", "~AX", budget_bytes=45)
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
        store = _store("A", "AB", "B", "~AX", budget_bytes=45)
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
    lease = store.lease([id_of("A")])
    tier.full = True
    with pytest.raises(OSError, match="no space"):
        _put(store, "A", exact=True)
    store.check()
    assert lease.ids == (id_of("A"),)
    assert not next(iter(store.records())).exact
    assert store.used_bytes == 10, "the room is given back"


def test_threads_share_one_store() -> None:
    store = _store(budget_bytes=65)

    def work(seed: int) -> None:
        for i in range(150):
            path = "".join("ABCDE"[(seed * 7 + i * 3 + j * (1 + i % 3)) % 5] for j in range(1 + (seed + i) % 4))
            with store.lease(store.lookup(prompt_of(path))) as lease:
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
