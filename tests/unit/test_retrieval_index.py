"""Indexes against brute force, and the last stage of every search against the search without stages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.errors import DimensionMismatchError, TopKError, UsageError
from chunkweave.retrieval.faiss_indexes import IvfIndex, build_index
from chunkweave.retrieval.indexes import (
    FlatIndex,
    Hits,
    IndexConfig,
    IndexKind,
    merged,
    top_hits,
)

KINDS = list(IndexKind)


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def clustered(rows: int, dimension: int, seed: int, *, twins: bool = True) -> np.ndarray:
    """Vectors around a few centres; with `twins` some occur several times, as the same text in two documents does."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((max(1, rows // 16), dimension))
    vectors = unit(centres[rng.integers(len(centres), size=rows)] + 0.4 * rng.standard_normal((rows, dimension)))
    if twins:
        vectors[rng.integers(rows, size=rows // 3)] = vectors[rng.integers(rows, size=rows // 3)]
    return vectors


def index_over(config: IndexConfig, vectors: np.ndarray) -> FlatIndex | IvfIndex:
    return FlatIndex(vectors) if config.kind is IndexKind.FLAT else build_index(config, vectors)


def brute_force(vectors: np.ndarray, query: np.ndarray, k: int) -> np.ndarray:
    return np.sort(vectors.astype(np.float64) @ query.astype(np.float64))[::-1][:k]


@pytest.mark.parametrize("config", [IndexConfig(), IndexConfig(IndexKind.IVF, lists=7, probes=7)], ids=KINDS)
@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 300), seed=st.integers(0, 10_000), data=st.data())
def test_a_search_of_all_rows_finds_what_brute_force_finds(config, rows, seed, data):
    k = data.draw(st.integers(1, rows))
    vectors = clustered(rows, 8, seed)
    query = unit(np.random.default_rng(seed + 1).standard_normal(8))
    index = index_over(config, vectors)
    hits = index.search(query, k)
    np.testing.assert_allclose(hits.scores, brute_force(vectors, query, k), atol=1e-6)
    np.testing.assert_allclose(vectors[list(hits.rows)] @ query, hits.scores, atol=1e-6)
    assert len(set(hits.rows)) == k
    assert list(hits.scores) == sorted(hits.scores, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 300), seed=st.integers(0, 10_000), stages=st.integers(1, 7), data=st.data())
def test_the_last_stage_is_the_search_without_stages(kind, rows, seed, stages, data):
    k = data.draw(st.integers(1, rows))
    lists = data.draw(st.integers(1, rows))
    probes = data.draw(st.integers(1, lists))
    dimension = data.draw(st.sampled_from([3, 8, 33, 384]))
    vectors = clustered(rows, dimension, seed)
    query = unit(np.random.default_rng(seed + 1).standard_normal(dimension))
    config = IndexConfig(kind, lists=lists, probes=probes, stages=stages)
    index = index_over(config, vectors)
    found = list(index.stages(query, k))
    assert found[-1].hits == index.search(query, k)
    assert [stage.number for stage in found] == list(range(1, len(found) + 1))
    assert [stage.last for stage in found] == [False] * (len(found) - 1) + [True]
    best = [stage.hits.scores[0] if stage.hits.scores else -2.0 for stage in found]
    assert best == sorted(best), "a later stage has seen all that an earlier one saw"


def test_twins_come_in_the_order_of_their_rows_whichever_stage_sees_them():
    base = clustered(40, 8, 3, twins=False)
    vectors = np.concatenate([base, base[::-1], base])
    for kind in KINDS:
        index = index_over(IndexConfig(kind, lists=6, probes=6, stages=4), vectors)
        hits = index.search(base[7], 2)
        assert hits.rows == (7, 72), kind
        assert list(index.stages(base[7], 2))[-1].hits.rows == (7, 72), kind


def test_ivf_scans_a_list_once_and_probes_the_nearest_first():
    vectors = clustered(400, 16, 1)
    index = index_over(IndexConfig(IndexKind.IVF, lists=10, probes=10, stages=5), vectors)
    found = list(index.stages(vectors[17], 5))
    assert len(found) == 5
    assert sum(stage.distances for stage in found) == 400 + 10
    assert found[0].hits.scores[0] == pytest.approx(1.0, abs=1e-6), "the vector's own list is the nearest"
    fewer = index_over(IndexConfig(IndexKind.IVF, lists=10, probes=2, stages=5), vectors)
    stages = list(fewer.stages(vectors[17], 5))
    assert len(stages) == 2
    assert sum(stage.distances for stage in stages) < 400


def test_rows_added_later_are_found_also_in_an_index_that_was_stored():
    vectors = clustered(120, 8, 4, twins=False)
    index = build_index(IndexConfig(IndexKind.IVF, lists=3, probes=2), vectors[:80])
    index.add(vectors[80:])
    restored = IvfIndex.restored(index.as_stored(), vectors)
    assert (len(index), len(restored)) == (120, 120)
    assert index.search(vectors[100], 1).rows == (100,)
    for query in vectors[::10]:
        assert list(restored.stages(query, 7)) == list(index.stages(query, 7))


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_searched_for_is_refused_at_once(kind):
    index = index_over(IndexConfig(kind), clustered(5, 8, 0, twins=False))
    query = np.ones(8, dtype=np.float32)
    for call in (index.search, index.stages):
        with pytest.raises(TopKError, match="6 best of 5 chunks"):
            call(query, 6)
        with pytest.raises(UsageError, match="at least 1"):
            call(query, 0)
        with pytest.raises(DimensionMismatchError, match=r"\[1, 7\]"):
            call(query[:7], 2)
        with pytest.raises(DimensionMismatchError, match="finite"):
            call(np.full(8, np.nan, dtype=np.float32), 2)
    if kind is IndexKind.FLAT:
        return
    with pytest.raises(DimensionMismatchError, match=r"\[1, 9\]"):
        index.add(np.ones((1, 9), dtype=np.float32))
    with pytest.raises(DimensionMismatchError, match="finite"):
        index.add(np.full((1, 8), np.inf, dtype=np.float32))


def test_ivf_of_nothing_is_refused():
    with pytest.raises(UsageError, match="there are none"):
        build_index(IndexConfig(IndexKind.IVF), np.zeros((0, 8), dtype=np.float32))


def test_sizes_are_chosen_by_the_number_of_vectors():
    million = IndexConfig(IndexKind.IVF).resolved(1_000_000)
    assert (million.lists, million.probes) == (4000, 500)
    few = IndexConfig(IndexKind.IVF).resolved(30)
    assert (few.lists, few.probes) == (1, 1)
    assert IndexConfig(IndexKind.IVF, lists=8, probes=5).resolved(100).probes == 5


@pytest.mark.parametrize("wrong", [{"lists": -1}, {"stages": 0}, {"lists": 3, "probes": 4}])
def test_odd_sizes_are_refused(wrong):
    with pytest.raises(UsageError):
        IndexConfig(IndexKind.IVF, **wrong)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 5))
def test_merging_keeps_the_best_by_score_then_row(scores, k, parts):
    rows = np.arange(len(scores))
    values = np.array(scores, dtype=np.float32)
    pieces = [top_hits(rows[i::parts], values[i::parts], k) for i in range(parts)]
    best = sorted(zip(-values, rows, strict=True))[:k]
    expected = Hits(tuple(int(row) for _, row in best), tuple(float(-score) for score, _ in best))
    assert merged(pieces, k) == expected
