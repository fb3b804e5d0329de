"""The directory of replicas against the stores it follows, with in-process stand-ins for engines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.errors import UsageError
from chunkweave.ordering.arrangement import AccessTable
from chunkweave.ordering.replicas import Replica, ReplicaDirectory
from chunkweave.trees.knowledge_tree import KnowledgeTree

TIERS = ("host", "remote")
moves = st.lists(
    st.tuples(st.sampled_from("ab"), st.booleans(), st.text("xyz", min_size=1, max_size=3), st.sampled_from(TIERS)),
    max_size=40,
)


def two_replicas(**options) -> tuple[ReplicaDirectory, dict[str, KnowledgeTree], dict[str, AccessTable]]:
    directory = ReplicaDirectory([Replica("a", ("host",)), Replica("b", ("host",))], ["remote"], **options)
    trees: dict[str, KnowledgeTree] = {name: KnowledgeTree(TIERS) for name in "ab"}
    tables: dict[str, AccessTable] = {name: AccessTable(4) for name in "ab"}
    for name in "ab":
        assert directory.join(name, trees[name], tables[name]) is directory.views[name]
    return directory, trees, tables


@given(moves, st.integers(0, 40))
def test_views_show_what_lies_on_own_and_on_shared_tiers(said, applied_after):
    directory, trees, _ = two_replicas()
    lying: set[tuple[str, str, str]] = set()
    for number, (name, place, path, tier) in enumerate(said):
        if place:
            trees[name].placed(path, tier, len(path))
            lying.add((path, tier, name))
        else:
            trees[name].displaced(path, tier)
            lying.discard((path, tier, name))
        if number == applied_after:
            directory.apply_pending()
            directory.check()
    directory.apply_pending()
    directory.check()
    for name, view in directory.views.items():
        for path in {path for path, _, _ in lying} | {"x"}:
            shown = {(tier, who) for where, tier, who in lying if where == path and (tier == "remote" or who == name)}
            assert view.placement(path) == {f"{tier}@{who}" for tier, who in shown}
    everything = {(path, f"{tier}@{who}") for path, tier, who in lying}
    tree = directory.tree.tree
    assert {("".join(path), name) for name in tree.tiers for path in tree.paths(name)} == everything


def test_nothing_is_shown_before_it_is_applied():
    directory, trees, _ = two_replicas()
    trees["a"].placed("x", "remote", 7)
    assert directory.views["b"].stored_tokens("x") == 0
    assert directory.apply_pending() == 1
    assert directory.views["b"].stored_tokens("x") == 7
    assert directory.views["b"].match("x").tokens_by_tier == {"remote@a": 7}
    trees["a"].displaced("x", "remote")
    directory.apply_pending()
    assert directory.views["b"].stored_tokens("x") == 0


def test_what_was_stored_before_joining_is_shown():
    directory = ReplicaDirectory([Replica("a", ("host",))], ["remote"])
    stored: KnowledgeTree = KnowledgeTree(TIERS)
    stored.placed("x", "host", 3)
    directory.join("a", stored, AccessTable(4))
    directory.apply_pending()
    assert directory.views["a"].stored_tokens("x") == 3
    directory.check()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sets(st.sampled_from("xyz"))), max_size=12))
def test_each_table_counts_the_requests_of_all(asked):
    directory, _, tables = two_replicas(window=4)
    for name, chunks in asked:
        tables[name].note(sorted(chunks))
        directory.apply_pending()
    for key in "xyz":
        expected = sum(key in chunks for _, chunks in asked[-4:])
        assert directory.table.count(key) == tables["a"].count(key) == tables["b"].count(key) == expected


def test_promotion_counts_requests_of_all_replicas():
    directory, trees, tables = two_replicas(threshold=2)
    for name in "ab":
        tables[name].note("xy")
    directory.apply_pending()
    trees["a"].placed("x", "host", 5)
    directory.apply_pending()
    location = next(iter(directory.tree.locations("x")))
    assert directory.tree.promote("xyz", [5, 5, 5], location) == 1


def test_a_thread_applies_what_comes():
    directory, trees, _ = two_replicas()
    with directory.running(0.001):
        for number in range(200):
            trees["ab"[number % 2]].placed((str(number),), "remote", 1)
    assert len(directory.tree) == 200
    directory.check()


def test_odd_replicas_are_refused():
    with pytest.raises(UsageError, match="not both"):
        ReplicaDirectory([Replica("a", ("host", "remote"))], ["remote"])
    directory, _, _ = two_replicas()
    for name in ("a", "c"):
        with pytest.raises(UsageError, match="no replica"):
            directory.join(name, KnowledgeTree(TIERS), AccessTable(4))
