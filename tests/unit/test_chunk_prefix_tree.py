"""The CP-Tree: CRAFT §4.2 step by step, and against a dict of promoted paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.errors import UsageError
from chunkweave.ordering.arrangement import AccessTable
from chunkweave.trees.chunk_prefix_tree import ChunkPrefixTree, Location

GPU, CPU = Location("gpu", "1"), Location("cpu", "1")
requests = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True), max_size=30)


def serve(tree: ChunkPrefixTree[str], table: AccessTable[str], chunks: list[str]) -> int:
    """One request as the paper has it: look up, serve, count, grow; returns how many chunks it reused."""
    reused = tree.longest_prefix(chunks).nodes
    table.note(chunks)
    tree.promote(chunks, [100] * len(chunks), GPU)
    tree.check()
    return reused


def test_the_worked_example_of_section_4_2():
    table: AccessTable[str] = AccessTable(1000)
    table.note(["C1", "C2"])
    tree: ChunkPrefixTree[str] = ChunkPrefixTree([GPU, CPU], table.count, threshold=2)

    assert serve(tree, table, ["C1", "C2", "C5"]) == 0
    assert [table.count(one) for one in ("C1", "C2", "C5")] == [2, 2, 1]
    assert tree.longest_prefix(["C1", "C2", "C5"]).nodes == 2, "[C1, C2] is promoted, C5 is not"
    assert tree.locations(["C1", "C2"]) == {GPU}

    assert serve(tree, table, ["C1", "C2", "C6"]) == 2, "only C6 is computed"
    assert [table.count(one) for one in ("C1", "C2", "C6")] == [3, 3, 1]
    assert len(tree) == 2, "unchanged"

    assert serve(tree, table, ["C1", "C2", "C6"]) == 2
    assert len(tree) == 3, "now C6 is a child of C2"
    assert tree.locations(["C1", "C2", "C6"]) == {GPU}
    assert serve(tree, table, ["C1", "C2", "C6"]) == 3

    for path in (["C1"], ["C1", "C2"]):  # evicted from the GPU to CPU memory
        tree.placed(path, CPU, 100)
        tree.displaced(path, GPU)
    match = tree.longest_prefix(["C1", "C2", "C6"])
    assert match.tokens_by_tier == {"cpu@1": 200, "gpu@1": 100}
    assert tree.locations(["C1", "C2"]) == {CPU}

    tree.displaced(["C1", "C2"], CPU)  # removed entirely
    assert tree.longest_prefix(["C1", "C2", "C6"]).nodes == 1
    assert not tree.locations(["C1", "C2"])
    tree.check()


def test_a_longer_prefix_serves_shorter_requests():
    """Prefix slicing, §4.2: [C1, C2, C3] is held; [C1, C10, C11] reuses C1."""
    table: AccessTable[str] = AccessTable(1000)
    tree: ChunkPrefixTree[str] = ChunkPrefixTree([GPU], table.count)
    for _ in range(2):
        serve(tree, table, ["C1", "C2", "C3"])
    assert tree.longest_prefix(["C1", "C10", "C11"]).nodes == 1
    assert tree.longest_prefix(["C1", "C2", "C10"]).tokens == 200
    assert tree.longest_prefix(["C10", "C1"]).nodes == 0


@given(requests, st.integers(1, 4), st.integers(1, 20))
def test_what_is_promoted_follows_from_the_counts(asked, threshold, window):
    table: AccessTable[str] = AccessTable(window)
    tree: ChunkPrefixTree[str] = ChunkPrefixTree([GPU], table.count, threshold=threshold)
    held: set[str] = set()
    for number, chunks in enumerate(asked, start=1):
        path = "".join(chunks)
        reused = max(n for n in range(len(path) + 1) if all(path[:m] in held for m in range(1, n + 1)))
        assert serve(tree, table, chunks) == reused
        recent = asked[:number][-window:]
        end = reused
        while end < len(path) and sum(path[end] in one for one in recent) >= threshold:
            end += 1
            held.add(path[:end])
        assert {"".join(one) for one in tree.tree.paths("gpu@1")} == held


def test_a_threshold_below_one_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        ChunkPrefixTree([GPU], lambda _: 0, threshold=0)
