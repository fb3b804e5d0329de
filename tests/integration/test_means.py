"""Sums over contexts: which shares count, when a mean is whole, and what is dropped when something is removed."""

import threading
import time
from collections.abc import Sequence
from math import exp

import pytest
import torch

from chunkweave.kv.segment import SegmentKV
from chunkweave.planning.scores import prefix_overlap
from chunkweave.prompt.contexts import MeanShare
from chunkweave.prompt.parts import mean_id
from chunkweave.store.records import ANYTHING, MOST_READ, AttentionProfile, SegmentRecord
from chunkweave.types import ChunkId
from chunkweave.weaving import means as module
from chunkweave.weaving.means import Means, mean_profile

A, B, C, D, X, Y = (ChunkId(letter * 32) for letter in "abcdef")
TOKENS = 3
CONTEXTS = ((A,), (B, C), (D,))


def computed(
    context: Sequence[ChunkId], *, chunk: ChunkId = X, attention: AttentionProfile | None = None, **more
) -> SegmentRecord:
    return SegmentRecord.of(
        chunk, tuple(context), (1, 2, 3), exact=False, nbytes=1, attention=attention, source="doc", owner="acme", **more
    )


def kv(seed: int, dtype: torch.dtype = torch.float32) -> SegmentKV:
    generator = torch.Generator().manual_seed(seed)
    return SegmentKV(torch.randn(2, 2, TOKENS, 2, 4, generator=generator).to(dtype))


def share(of: int = 3, group: str = "x") -> MeanShare:
    return MeanShare(group, of)


def profile(chunks: Sequence[ChunkId], inter: Sequence[float], *, intra: float = 0.5) -> AttentionProfile:
    outward = tuple(sum(inter) * weight for weight in (0.5, 0.3, 0.2))
    return AttentionProfile(tuple(chunks), (4,) * len(chunks), tuple(inter), intra, 0.25, outward)


# --- which shares count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_there_with_the_last_context(dtype):
    means, parts = Means(), [kv(seed, dtype) for seed in range(3)]
    for context, one in zip(CONTEXTS[:2], parts[:2], strict=True):
        assert means.take(share(), computed(context), one) is None
    found = means.take(share(), computed(CONTEXTS[2]), parts[2])
    assert found is not None
    record, mean = found
    expected = torch.stack([one.kv.float() for one in parts]).mean(0).to(dtype)
    torch.testing.assert_close(mean.kv, expected)
    assert mean.kv.dtype is dtype
    assert mean.keys_at is None
    assert (record.context, record.contexts) == ((mean_id(CONTEXTS),), tuple(sorted(CONTEXTS)))
    assert (record.nbytes, record.exact, record.source, record.owner) == (mean.nbytes, False, "doc", "acme")


def test_bfloat16_is_summed_in_float32():
    """1 and 1/256 are 1 in bfloat16: a running sum there would lose all but the first."""
    means, tiny = Means(), 2.0**-8
    values = (1.0, tiny, tiny, tiny)
    for number, value in enumerate(values):
        one = SegmentKV(torch.full((1, 2, TOKENS, 1, 1), value, dtype=torch.bfloat16))
        found = means.take(share(4), computed([ChunkId(f"{number:032x}")]), one)
    assert found is not None
    assert found[1].kv.unique().tolist() == [torch.tensor(sum(values) / 4).to(torch.bfloat16).item()]


def test_what_is_given_is_not_changed():
    means, first = Means(), kv(0)
    before = first.kv.clone()
    means.take(share(2), computed(CONTEXTS[0]), first)
    means.take(share(2), computed(CONTEXTS[1]), kv(1))
    assert torch.equal(first.kv, before)


def test_the_same_context_twice_counts_once():
    """As when two calls compute the same chunk at once, or one was interrupted and is made again."""
    means = Means()
    for _ in range(2):
        assert means.take(share(2), computed(CONTEXTS[0]), kv(0)) is None
    assert len(means) == 1
    found = means.take(share(2), computed(CONTEXTS[1]), kv(1))
    assert found is not None
    torch.testing.assert_close(found[1].kv, (kv(0).kv + kv(1).kv) / 2)
    assert found[0].contexts == tuple(sorted(CONTEXTS[:2]))


def test_groups_do_not_mix():
    means = Means()
    assert means.take(share(2, "x"), computed(CONTEXTS[0]), kv(0)) is None
    assert means.take(share(2, "y"), computed(CONTEXTS[1], chunk=Y), kv(1)) is None
    found = means.take(share(2, "x"), computed(CONTEXTS[1]), kv(2))
    assert found is not None
    torch.testing.assert_close(found[1].kv, (kv(0).kv + kv(2).kv) / 2)


def test_a_mean_over_one_context_is_its_kv():
    found = Means().take(share(1), computed(CONTEXTS[1]), kv(0))
    assert found is not None
    assert torch.equal(found[1].kv, kv(0).kv)
    assert found[0].contexts == (CONTEXTS[1],)


def test_a_mean_that_is_computed_again_begins_anew():
    means = Means()
    for seed in (0, 10):
        assert means.take(share(2), computed(CONTEXTS[0]), kv(seed)) is None
        found = means.take(share(2), computed(CONTEXTS[1]), kv(seed + 1))
        assert found is not None
        torch.testing.assert_close(found[1].kv, (kv(seed).kv + kv(seed + 1).kv) / 2)


def test_rotated_keys_have_no_mean():
    with pytest.raises(AssertionError, match="positions"):
        Means().take(share(), computed(CONTEXTS[0]), SegmentKV(kv(0).kv, keys_at=5))


# --- what was read


def test_a_mean_has_read_what_its_contexts_were_woven_from():
    means = Means()
    means.take(share(2), computed([A], read=[C]), kv(0))
    found = means.take(share(2), computed([B], read=[A, D]), kv(1))
    assert found is not None
    assert found[0].read == (C, D)
    assert found[0].sources == {A, B, C, D}


def test_a_mean_that_has_read_too_much_is_removed_with_anything():
    means, many = Means(), [ChunkId(f"{number:032x}") for number in range(MOST_READ)]
    means.take(share(2), computed([A], read=many), kv(0))
    found = means.take(share(2), computed([B]), kv(1))
    assert found is not None
    assert found[0].read == (ANYTHING,)
    assert {A, B, ANYTHING} == found[0].sources


# --- what is removed meanwhile


@pytest.mark.parametrize("gone", [X, A, B, C])
def test_what_is_pending_is_dropped_with_what_it_has_read(gone):
    """Itself, a chunk of one of its contexts, and what that was woven from."""
    means, begun = Means(), [share(3) for _ in range(2)]
    means.take(begun[0], computed([A], read=[C]), kv(0))
    means.take(begun[1], computed([B]), kv(1))
    means.forget(frozenset({gone}))
    assert means.take(share(3), computed([D]), kv(2)) is None, "two shares are missing again"
    assert means.take(share(3), computed([A]), kv(3)) is None
    found = means.take(share(3), computed([B]), kv(4))
    assert found is not None
    torch.testing.assert_close(found[1].kv, (kv(2).kv + kv(3).kv + kv(4).kv) / 3)


def test_what_has_not_read_it_stays():
    means = Means()
    means.take(share(2), computed([A]), kv(0))
    means.forget(frozenset({B, Y}))
    assert means.take(share(2), computed([C]), kv(1)) is not None


@pytest.mark.parametrize("gone", [X, A, D])
def test_a_share_that_was_begun_before_it_is_dropped(gone):
    """It was being computed while what it reads was removed: it comes too late for what was pending then."""
    means, begun = Means(), share(2)
    means.forget(frozenset({gone}))
    assert means.take(begun, computed([A], read=[D]), kv(0)) is None
    assert means.take(share(2), computed([B]), kv(1)) is None
    assert means.take(begun, computed([A], read=[D]), kv(0)) is None, "however often it comes"


def test_a_share_that_was_begun_before_everything_was_removed_is_dropped():
    means, begun = Means(), share(1)
    means.forget(None)
    assert means.take(begun, computed([A]), kv(0)) is None
    time.sleep(0.001)
    assert means.take(share(1), computed([A]), kv(0)) is not None


def test_a_share_that_was_begun_after_it_is_taken():
    """The document was added again."""
    means = Means()
    means.forget(frozenset({A, X}))
    time.sleep(0.001)
    means.take(share(2), computed([A]), kv(0))
    assert means.take(share(2), computed([B]), kv(1)) is not None


# --- bounds


def test_what_is_pending_is_bounded(caplog):
    means, most = Means(), module._MOST_PENDING
    for number in range(most + 1):
        means.take(share(2, f"group {number}"), computed([A], chunk=ChunkId(f"{number:032x}")), kv(number))
    assert "starts over" in caplog.text
    last = computed([B], chunk=ChunkId(f"{most:032x}"))
    assert means.take(share(2, f"group {most}"), last, kv(0)) is not None
    second = computed([B], chunk=ChunkId(f"{1:032x}"))
    assert means.take(share(2, "group 1"), second, kv(0)) is not None, "the oldest went"
    first = computed([B], chunk=ChunkId(f"{0:032x}"))
    assert means.take(share(2, "group 0"), first, kv(0)) is None


def test_what_was_forgotten_is_bounded_and_then_all_that_was_begun_before_is_dropped(monkeypatch):
    monkeypatch.setattr(module, "_MOST_FORGOTTEN", 2)
    means, begun = Means(), share(1)
    for gone in (A, B, C, D):
        means.forget(frozenset({gone}))
    for context in ([A], [B], [D], [Y]):
        assert means.take(begun, computed(context), kv(0)) is None
    time.sleep(0.001)
    assert means.take(share(1), computed([A]), kv(0)) is not None


def test_a_share_that_comes_when_the_mean_is_whole_is_dropped():
    """Another call has computed all of them meanwhile; this one's would stay for ever."""
    means, late = Means(), share(2)
    for context, seed in (([A], 0), ([B], 1)):
        found = means.take(share(2), computed(context), kv(seed))
    assert found is not None
    assert means.take(late, computed([A]), kv(2)) is None
    assert len(means) == 0
    assert means.take(share(2), computed([A]), kv(3)) is None
    assert len(means) == 1, "computed anew"


def test_shares_over_contexts_that_are_given_up_go_when_the_mean_is_whole():
    """A chunk of a context was removed, and the chunk begun anew over others; another chunk is not touched."""
    means = Means()
    means.take(share(2, "before"), computed([A]), kv(0))
    means.take(share(2, "of another"), computed([A], chunk=Y), kv(1))
    assert means.take(share(1, "after"), computed([C]), kv(2)) is not None
    assert len(means) == 1
    assert means.take(share(2, "of another"), computed([B], chunk=Y), kv(3)) is not None


def test_threads_that_give_shares_at_once_get_one_mean():
    contexts = [[ChunkId(f"{number:032x}")] for number in range(24)]
    found, barrier, means = [], threading.Barrier(4), Means()

    def give(own: Sequence[int]) -> None:
        barrier.wait()
        for number in own:
            mean = means.take(share(24), computed(contexts[number]), kv(number))
            if mean is not None:
                found.append(mean)

    threads = [threading.Thread(target=give, args=(range(first, 24, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((record, mean),) = found
    assert len(record.contexts) == 24
    torch.testing.assert_close(mean.kv, torch.stack([kv(number).kv for number in range(24)]).mean(0))


# --- the attention of a mean


def test_a_means_masses_are_means_over_its_contexts():
    """Behind A and C the chunk gave them .6 and .4, behind D 1.2; what one context lacks has mass 0 there."""
    mean = mean_profile([profile([A, C], (0.6, 0.4), intra=0.5), profile([D], (1.2,), intra=0.3)])
    assert mean is not None
    assert mean.mass_on == pytest.approx({A: 0.3, C: 0.2, D: 0.6})
    assert (mean.intra, mean.sink) == (pytest.approx(0.4), pytest.approx(0.25))
    assert mean.outward == pytest.approx((0.55, 0.33, 0.22))


def test_ccis_a_and_b_are_means_over_the_contexts():
    parts = [profile([A, C], (0.6, 0.4), intra=0.5), profile([D], (1.2,), intra=0.3)]
    mean = mean_profile(parts)
    assert mean is not None
    a, b = (1.0 / 12 + 1.2 / 12) / 2, (0.5 / 9 + 0.3 / 9) / 2
    assert (mean.inter_per_pair, mean.intra_per_pair) == (pytest.approx(a), pytest.approx(b))
    assert mean.cci == pytest.approx(1 / (1 + exp(-a / b)))
    assert mean.inter_per_pair == pytest.approx(sum(one.inter_per_pair for one in parts) / 2)


def test_beta_is_the_covered_share_of_all_mass():
    """.3 of A and .6 of D, of 1.1 in all."""
    mean = mean_profile([profile([A, C], (0.6, 0.4)), profile([D], (1.2,))])
    assert mean is not None
    assert prefix_overlap(mean, {A, D, Y}) == pytest.approx(0.9 / 1.1)
    assert prefix_overlap(mean, {Y}) == 0.0
    assert prefix_overlap(mean, {A, C, D}) == pytest.approx(1.0)


def test_a_chunk_of_several_contexts_has_its_mass_of_all():
    mean = mean_profile([profile([A], (0.6,)), profile([B, A], (0.2, 0.4))])
    assert mean is not None
    assert mean.mass_on == pytest.approx({A: 0.5, B: 0.1})


def test_a_context_with_no_chunk_before_counts_as_a_context():
    mean = mean_profile([profile([], ()), profile([A], (1.0,))])
    assert mean is not None
    assert mean.mass_on == pytest.approx({A: 0.5})


def test_one_context_without_attention_leaves_the_mean_without():
    assert mean_profile([profile([A], (1.0,)), None]) is None
    assert mean_profile([None]) is None
    assert mean_profile([]) is None


def test_the_mean_is_stored_with_its_attention():
    means = Means()
    means.take(share(2), computed([A], attention=profile([A], (0.6,))), kv(0))
    found = means.take(share(2), computed([B], attention=profile([B], (0.2,))), kv(1))
    assert found is not None
    assert found[0].attention == mean_profile([profile([A], (0.6,)), profile([B], (0.2,))])
