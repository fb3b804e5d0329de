"""benchmarks/retrieval_patterns.py: what it says of retrievals whose repetition is known."""

import sys
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import retrieval_patterns as patterns  # noqa: E402

from chunkweave.retrieval.indexes import Hits, SearchStage  # noqa: E402


def found(*lists: tuple[int, ...]) -> list[SearchStage]:
    """A search that found these lists, stage by stage."""
    return [SearchStage(Hits(rows), n, n == len(lists), 1) for n, rows in enumerate(lists, start=1)]


def test_the_most_accessed_are_counted_up_to_a_whole_one():
    accesses = Counter({"a": 6, "b": 3, "c": 1})
    assert patterns.share_of_top(accesses, of=20, share=0.05) == 0.6
    assert patterns.share_of_top(accesses, of=20, share=0.06) == 0.9


def test_a_beginning_is_seen_where_an_earlier_request_has_it_in_the_same_order():
    assert patterns.seen_beginnings([[1, 2, 3], [1, 2, 4], [2, 1, 3]], 3) == [0.5, 0.5, 0.0]


def test_chunks_are_found_in_as_few_earlier_requests_as_have_them():
    assert list(patterns.sources_of([[1, 2, 3], [4, 5, 6], [1, 4, 5], [1, 2, 4], [7, 1, 2]])) == [
        None,
        None,
        2,
        2,
        None,
    ]
    assert list(patterns.sources_of([[1, 2], [2, 1]])) == [None, 1]


def test_a_list_is_final_from_where_it_stays_on():
    assert patterns.final_stage(found((1, 2), (2, 1), (2, 1))) == 2
    assert patterns.final_stage(found((2, 1), (1, 2), (2, 1))) == 3


def test_a_row_says_how_often_chunks_come_again():
    searched = [found((0, 1)), found((0, 1)), found((1, 0)), found((2, 3))]
    row = patterns.row(searched, [10, 20, 30, 40], [[0, 1], [0, 1], [1, 0], [2, 1]])
    assert row["prefix_overlap"] == pytest.approx(1 / 3)
    assert row["total_overlap"] == row["chunks_seen"] == pytest.approx(2 / 3)
    assert row["sources"] == {"1": 0.5, "some are new": 0.5}
    assert row["recall"] == pytest.approx(7 / 8)
    assert row["saved"]["original"] == pytest.approx(30 / 160)
    assert row["saved"]["tree-greedy"] == pytest.approx(60 / 160)
    assert {"access", "overlap"} == set(patterns.tables({"rows": [{"embedder": "e", "index": "i", **row}]}))
