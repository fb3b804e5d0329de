"""The knowledge tree against a dict of placements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.errors import UsageError
from chunkweave.store.prefix_trie import KnowledgeTree, PathMatch

TIERS = ("device", "host", "disk")
paths = st.text("ab", min_size=1, max_size=4)
moves = st.lists(st.tuples(st.booleans(), paths, st.sampled_from(TIERS)), max_size=40)


def _stored(placement: dict[str, set[str]], path: str) -> int:
    """Keys of the longest prefix every node of which lies somewhere."""
    return next((n for n in range(len(path)) if not placement.get(path[: n + 1])), len(path))


@given(moves, paths)
def test_it_agrees_with_a_dict_of_placements(moves, asked):
    tree = KnowledgeTree(TIERS)
    told = []
    tree.subscribe(lambda path: told.append("".join(path)))
    placement: dict[str, set[str]] = {}
    flips = []
    for place, path, tier in moves:
        tiers = placement.setdefault(path, set())
        before = bool(tiers)
        if place:
            tree.placed(path, tier, len(path))
            tiers.add(tier)
        else:
            tree.displaced(path, tier)
            tiers.discard(tier)
        if bool(tiers) != before:
            flips.append(path)
    tree.check()
    assert told == flips
    assert len(tree) == sum(map(bool, placement.values()))
    stored = _stored(placement, asked)
    prefixes = [asked[: n + 1] for n in range(stored)]
    match = tree.match(asked)
    assert (match.nodes, match.tokens) == (stored, sum(map(len, prefixes)))
    assert tree.stored_tokens(asked) == match.tokens
    fastest: dict[str, int] = {}
    for prefix in prefixes:
        tier = next(tier for tier in TIERS if tier in placement[prefix])
        fastest[tier] = fastest.get(tier, 0) + len(prefix)
    assert match.tokens_by_tier == fastest
    for path, tiers in placement.items():
        assert tree.placement(path) == tiers
    for tier in TIERS:
        assert sorted("".join(path) for path in tree.paths(tier)) == sorted(
            p for p, t in placement.items() if tier in t
        )


def test_an_unknown_path_matches_nothing():
    assert KnowledgeTree(TIERS).match("ab") == PathMatch()


def test_the_hottest_nodes_are_the_most_used_with_their_ancestors():
    tree = KnowledgeTree(TIERS)
    for path in ("s", "sa", "sab", "sb", "t"):
        tree.placed(path, "device", 1)
    for used in ("sab", "sab", "sb", "t", "t", "t"):
        tree.used(used)
    assert ["".join(path) for path in tree.hottest(4, "device")] == ["s", "t", "sa", "sab"]
    tree.displaced("sa", "device")
    tree.placed("sa", "host", 1)
    assert ["".join(path) for path in tree.hottest(9, "device")] == ["s", "t", "sb"], "nothing below a gap"


@pytest.mark.parametrize(
    ("tiers", "path", "tier"),
    [((), "a", "host"), (("host", "host"), "a", "host"), (TIERS, "a", "tape"), (TIERS, "", "host")],
)
def test_names_that_mean_nothing_are_refused(tiers, path, tier):
    with pytest.raises(UsageError):
        KnowledgeTree(tiers).placed(path, tier, 1)


def test_places_are_walked_as_far_as_something_is_stored():
    tree = KnowledgeTree(TIERS)
    for path in ("a", "ab", "abc"):
        tree.placed(path, "host", len(path))
    tree.displaced("ab", "host")
    place = tree.at("a")
    assert place is not None
    assert place.child("b") is None
    assert tree.at("ab") is None
    assert tree.at("abc") is None
    tree.placed("ab", "disk", 2)
    deep = tree.at("ab").child("c")
    assert deep is not None
