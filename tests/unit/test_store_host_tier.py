"""The host tier holds and returns, nothing more."""

from dataclasses import replace

from chunkweave.tiers.host import HostTier
from tests.unit.tier_fakes import Payload, id_of, payload_of, record_of


def test_records_is_a_snapshot() -> None:
    tier: HostTier[Payload] = HostTier()
    for name in "ABC":
        tier.put(record_of(name), payload_of(record_of(name)))
    for record in tier.records():
        tier.delete(record.id)
    assert list(tier.records()) == []


def test_a_payload_is_moved_into_this_memory_first() -> None:
    tier: HostTier[Payload] = HostTier(lambda payload: Payload(replace(payload.record, nbytes=4)))
    tier.put(record_of("A"), payload_of(record_of("A")))
    assert tier.get(id_of("A")) == payload_of(record_of("A", nbytes=4))
