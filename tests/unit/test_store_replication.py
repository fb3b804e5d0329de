"""Replicas of hot upper nodes in a store with payloads."""

from chunkweave.store.index import RequestUse
from chunkweave.store.level import Level
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import REPLICATED_EVERY, TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from tests.unit.tier_fakes import Payload, payload_of, prompt_of, record_of


def _store(*names: str) -> TieredStore[Payload]:
    return TieredStore([Level(name, SegmentStore(HostTier(), budget_bytes=100)) for name in names], replicas=2)


def _ask(store: TieredStore[Payload], path: str) -> None:
    store.note_request(RequestUse.of(store.lookup(prompt_of(path)), ()))


def _insert(store: TieredStore[Payload], path: str) -> SegmentRecord:
    record = record_of(path, nbytes=1)
    assert store.insert(record, payload_of(record))
    return record


def test_the_hottest_nodes_get_a_copy_that_answers_when_the_device_is_empty():
    store = _store("device", "host")
    records = {path: _insert(store, path) for path in ("s", "sa", "sb", "t")}
    for path in ("sa", "sa", "sb"):
        _ask(store, path)
    assert store.replicate() == 2
    assert store.flush(5)
    assert store.replicate() == 0
    store.levels[0].store.clear()
    assert {record.id for record in store.records()} == {records["s"].id, records["sa"].id}
    assert store.tree.match("sa").tokens_by_tier == {"host": 4}
    assert store.get(records["sa"].id) == payload_of(records["sa"])
    store.check()
    store.close()


def test_requests_replicate_every_so_often():
    store = _store("device", "host")
    _insert(store, "s")
    for number in range(REPLICATED_EVERY):
        assert not store.levels[1].store.records(), number
        _ask(store, "s")
    assert store.flush(5)
    assert len(store.levels[1].store.records()) == 1
    store.close()


def test_with_one_memory_there_is_nowhere_to_copy_to():
    store = _store("host")
    _insert(store, "s")
    assert store.replicate() == 0
    store.close()


def test_what_is_removed_while_it_is_copied_does_not_come_back(monkeypatch):
    store = _store("device", "host")
    record = _insert(store, "s")
    _ask(store, "s")
    read = store.levels[0].get

    def removed_meanwhile(segment):
        payload = read(segment)
        assert store.remove(record.id)
        return payload

    monkeypatch.setattr(store.levels[0], "get", removed_meanwhile)
    assert store.replicate() == 0
    assert store.flush(5)
    assert not store.records()
    store.close()
