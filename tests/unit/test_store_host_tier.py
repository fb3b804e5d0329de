"""The host tier holds and returns, nothing more."""

from dataclasses import dataclass

from chunkweave.tiers.host import HostTier
from chunkweave.types import SegmentId


@dataclass(frozen=True, slots=True)
class Payload:
    nbytes: int


def test_put_get_replace_delete() -> None:
    tier: HostTier[Payload] = HostTier()
    a, b = SegmentId("a"), SegmentId("b")
    first, second = Payload(3), Payload(5)
    tier.put(a, first)
    assert tier.get(a) is first
    assert (tier.nbytes(a), tier.nbytes(b)) == (3, 0)
    tier.put(a, second)
    assert tier.get(a) is second
    assert list(tier.ids()) == [a]
    tier.delete(a)
    tier.delete(a)
    assert tier.get(a) is None
    assert list(tier.ids()) == []


def test_ids_is_a_snapshot() -> None:
    tier: HostTier[Payload] = HostTier()
    for name in "abc":
        tier.put(SegmentId(name), Payload(1))
    for segment in tier.ids():
        tier.delete(segment)
    assert list(tier.ids()) == []
