"""Sums over contexts: which shares count, when a mean is whole, and what is dropped when something is removed."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from typing import Any

import pytest
import torch

from chunkweave.config import StoreConfig
from chunkweave.kv.segment import SegmentKV
from chunkweave.planning.scores import prefix_overlap
from chunkweave.prompt.contexts import MeanShare
from chunkweave.prompt.parts import mean_id
from chunkweave.store.records import ANYTHING, MOST_READ, AttentionProfile, SegmentRecord
from chunkweave.types import ChunkId
from chunkweave.weaving import means as module
from chunkweave.weaving.means import Means, mean_profile
from chunkweave.weaving.stores import open_store
from tests.toys import run_at_once

A, B, C, D, X, Y = (ChunkId(letter * 32) for letter in "abcdef")
TOKENS = 3
CONTEXTS = ((A,), (B, C), (D,))
MANY = [ChunkId(f"{number:032x}") for number in range(MOST_READ)]


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


def complete(means: Means, *last: Any) -> tuple[SegmentRecord, SegmentKV]:
    """The mean that is whole with the last share."""
    mean = means.take(*last)
    assert mean is not None
    return mean


def assert_mean(mean: tuple[SegmentRecord, SegmentKV], *seeds: int) -> None:
    torch.testing.assert_close(mean[1].kv, torch.stack([kv(seed).kv for seed in seeds]).mean(0))


def profile(chunks: Sequence[ChunkId], inter: Sequence[float], *, intra: float = 0.5) -> AttentionProfile:
    outward = tuple(sum(inter) * weight for weight in (0.5, 0.3, 0.2))
    return AttentionProfile(tuple(chunks), (4,) * len(chunks), tuple(inter), intra, 0.25, outward)


# --- which shares count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_there_with_the_last_context(dtype):
    means, parts = Means(), [kv(seed, dtype) for seed in range(3)]
    for context, one in zip(CONTEXTS[:2], parts[:2], strict=True):
        assert means.take(share(), computed(context), one) is None
    record, mean = complete(means, share(), computed(CONTEXTS[2]), parts[2])
    expected = torch.stack([one.kv.float() for one in parts]).mean(0).to(dtype)
    torch.testing.assert_close(mean.kv, expected)
    assert mean.kv.dtype is dtype
    assert mean.keys_at is None
    assert (record.context, record.contexts) == ((mean_id(CONTEXTS),), tuple(sorted(CONTEXTS)))
    assert (record.nbytes, record.exact, record.source, record.owner) == (mean.nbytes, False, "doc", "acme")
    assert all(torch.equal(one.kv, kv(seed, dtype).kv) for seed, one in enumerate(parts)), "parts are not changed"


def test_bfloat16_is_summed_in_float32():
    """1 and 1/256 are 1 in bfloat16: a running sum there would lose all but the first."""
    means, tiny = Means(), 2.0**-8
    values = (1.0, tiny, tiny, tiny)
    for number, value in enumerate(values):
        one = SegmentKV(torch.full((1, 2, TOKENS, 1, 1), value, dtype=torch.bfloat16))
        mean = means.take(share(4), computed([ChunkId(f"{number:032x}")]), one)
    assert mean is not None
    assert mean[1].kv.unique().tolist() == [torch.tensor(sum(values) / 4).to(torch.bfloat16).item()]


def test_the_same_context_twice_counts_once():
    """As when two calls compute the same chunk at once, or one was interrupted and is made again."""
    means = Means()
    for _ in range(2):
        assert means.take(share(2), computed(CONTEXTS[0]), kv(0)) is None
    assert len(means) == 1
    mean = complete(means, share(2), computed(CONTEXTS[1]), kv(1))
    assert_mean(mean, 0, 1)
    assert mean[0].contexts == tuple(sorted(CONTEXTS[:2]))


@pytest.mark.parametrize(
    ("other", "chunk"),
    [(share(2, "y"), X), (share(3), X), (share(2), Y)],
    ids=["group", "number of contexts", "chunk: two clients' groups may have one name"],
)
def test_shares_that_differ_in_their_group_number_or_chunk_do_not_mix(other, chunk):
    means = Means()
    assert means.take(share(2), computed(CONTEXTS[0]), kv(0)) is None
    assert means.take(replace(other, begun_s=time.monotonic()), computed(CONTEXTS[1], chunk=chunk), kv(1)) is None
    assert_mean(complete(means, share(2), computed(CONTEXTS[1]), kv(2)), 0, 2)


def test_a_mean_over_one_context_is_its_kv():
    record, mean = complete(Means(), share(1), computed(CONTEXTS[1]), kv(0))
    assert torch.equal(mean.kv, kv(0).kv)
    assert record.contexts == (CONTEXTS[1],)


def test_a_mean_that_is_computed_again_begins_anew():
    means = Means()
    for seed in (0, 10):
        assert means.take(share(2), computed(CONTEXTS[0]), kv(seed)) is None
        assert_mean(complete(means, share(2), computed(CONTEXTS[1]), kv(seed + 1)), seed, seed + 1)


def test_rotated_keys_have_no_mean():
    with pytest.raises(AssertionError, match="positions"):
        Means().take(share(), computed(CONTEXTS[0]), SegmentKV(kv(0).kv, keys_at=5))


# --- what was read


@pytest.mark.parametrize(
    ("first", "second", "read", "sources"),
    [([C], [A, D], (C, D), {A, B, C, D}), (MANY, [], (ANYTHING,), {A, B, ANYTHING})],
    ids=["what its contexts were woven from", "too much: it is removed with anything"],
)
def test_a_mean_has_read_what_its_contexts_have(first, second, read, sources):
    means = Means()
    means.take(share(2), computed([A], read=first), kv(0))
    record, _ = complete(means, share(2), computed([B], read=second), kv(1))
    assert record.read == read
    assert record.sources == sources


# --- what is removed meanwhile


@pytest.mark.parametrize(
    ("gone", "read"),
    [({X}, C), ({A}, C), ({B}, C), ({C}, C), ({Y}, ANYTHING), (None, C)],
    ids=["itself", "a context", "another", "what that was woven from", "what it may have read", "everything"],
)
def test_what_is_pending_is_dropped_with_what_it_has_read(gone, read):
    means, begun = Means(), [share(3) for _ in range(2)]
    means.take(begun[0], computed([A], read=[read]), kv(0))
    means.take(begun[1], computed([B], read=[read]), kv(1))
    means.forget(gone and frozenset(gone))
    time.sleep(0.001)
    assert means.take(share(3), computed([D]), kv(2)) is None, "two shares are missing again"
    assert means.take(share(3), computed([A]), kv(3)) is None
    assert_mean(complete(means, share(3), computed([B]), kv(4)), 2, 3, 4)


def test_what_has_not_read_it_stays():
    means = Means()
    means.take(share(2), computed([A]), kv(0))
    means.forget(frozenset({B, Y}))
    assert means.take(share(2), computed([C]), kv(1)) is not None


@pytest.mark.parametrize("gone", [{X}, {A}, {D}, None])
def test_a_share_that_was_begun_before_a_removal_is_dropped_and_one_begun_after_it_taken(gone):
    """It was being computed while what it reads was removed: it comes too late for what was pending then."""
    means, begun = Means(), share(2)
    means.forget(gone and frozenset(gone))
    assert means.take(begun, computed([A], read=[D]), kv(0)) is None
    time.sleep(0.001)
    assert means.take(share(2), computed([B]), kv(1)) is None
    assert means.take(begun, computed([A], read=[D]), kv(0)) is None, "however often it comes"
    assert_mean(complete(means, share(2), computed([A]), kv(2)), 1, 2)


def test_a_removal_that_comes_with_the_last_share_removes_the_mean(monkeypatch):
    """Whatever thread it comes in, and though the last share has not read what is removed."""
    store = open_store(StoreConfig(host_budget_bytes=1 << 20), "model", torch.device("cpu"))
    means, insert, gone = Means(), store.insert, frozenset({A})
    removal = threading.Thread(target=lambda: (means.forget(gone), store.forget_chunks(gone)))
    means.store_shares(store, share(2), [(computed([A]), kv(0))])

    def inserted(*mean):
        removal.start()
        removal.join(0.2)
        return insert(*mean)

    monkeypatch.setattr(store, "insert", inserted)
    assert means.store_shares(store, share(2), [(computed([B]), kv(1))])
    removal.join()
    assert not store.records()
    store.check()
    store.close()


# --- bounds


def test_what_is_pending_is_bounded(caplog):
    means, most = Means(), module._MOST_PENDING
    for number in range(most + 1):
        means.take(share(2, f"group {number}"), computed([A], chunk=ChunkId(f"{number:032x}")), kv(number))
    assert "starts over" in caplog.text
    for number, is_whole in ((most, True), (1, True), (0, False)):
        last = computed([B], chunk=ChunkId(f"{number:032x}"))
        assert (means.take(share(2, f"group {number}"), last, kv(0)) is not None) is is_whole, "the oldest went"


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
    means.take(share(2), computed([A]), kv(0))
    complete(means, share(2), computed([B]), kv(1))
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
    taken, means = [], Means()

    def give(first: int) -> None:
        taken.extend(means.take(share(24), computed(contexts[number]), kv(number)) for number in range(first, 24, 4))

    run_at_once(4, give)
    (mean,) = [mean for mean in taken if mean is not None]
    assert len(mean[0].contexts) == 24
    assert_mean(mean, *range(24))


# --- the attention of a mean


@pytest.mark.parametrize(
    ("parts", "masses"),
    [
        ([([A, C], (0.6, 0.4)), ([D], (1.2,))], {A: 0.3, C: 0.2, D: 0.6}),
        ([([A], (0.6,)), ([B, A], (0.2, 0.4))], {A: 0.5, B: 0.1}),
        ([([], ()), ([A], (1.0,))], {A: 0.5}),
    ],
    ids=["what one context lacks has mass 0 there", "a chunk of several contexts", "a context with no chunk before"],
)
def test_a_means_masses_are_means_over_its_contexts(parts, masses):
    mean = mean_profile([profile(*part) for part in parts])
    assert mean is not None
    assert mean.mass_on == pytest.approx(masses)


def test_ccis_a_and_b_and_beta_follow_from_the_means_over_the_contexts():
    """Behind A and C the chunk gave them .6 and .4, behind D 1.2: of 1.1 in all, .3 are A's and .6 D's."""
    parts = [profile([A, C], (0.6, 0.4), intra=0.5), profile([D], (1.2,), intra=0.3)]
    mean = mean_profile(parts)
    assert mean is not None
    assert (mean.intra, mean.sink) == (pytest.approx(0.4), pytest.approx(0.25))
    assert mean.outward == pytest.approx((0.55, 0.33, 0.22))
    a, b = (1.0 / 12 + 1.2 / 12) / 2, (0.5 / 9 + 0.3 / 9) / 2
    assert (mean.inter_per_pair, mean.intra_per_pair) == (pytest.approx(a), pytest.approx(b))
    assert mean.cci == pytest.approx(1 / (1 + exp(-a / b)))
    assert mean.inter_per_pair == pytest.approx(sum(one.inter_per_pair for one in parts) / 2)
    for chunks, beta in (({A, D, Y}, 0.9 / 1.1), ({Y}, 0.0), ({A, C, D}, 1.0)):
        assert prefix_overlap(mean, chunks) == pytest.approx(beta)


def test_one_context_without_attention_leaves_the_mean_without():
    assert mean_profile([profile([A], (1.0,)), None]) is None
    assert mean_profile([None]) is None
    assert mean_profile([]) is None


def test_the_mean_is_stored_with_its_attention():
    means = Means()
    means.take(share(2), computed([A], attention=profile([A], (0.6,))), kv(0))
    record, _ = complete(means, share(2), computed([B], attention=profile([B], (0.2,))), kv(1))
    assert record.attention == mean_profile([profile([A], (0.6,)), profile([B], (0.2,))])
