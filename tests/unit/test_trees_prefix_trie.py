"""The trie: paths, prefixes, and subtrees that leave as a whole."""

import pytest

from chunkweave.errors import StoreError
from chunkweave.trees.prefix_trie import PrefixTrie


def _trie(*paths: str) -> PrefixTrie[str, str]:
    trie: PrefixTrie[str, str] = PrefixTrie()
    for path in paths:
        assert trie.attach(path, path.upper())
    trie.check()
    return trie


def test_longest_prefix_stops_at_the_first_key_that_is_not_held() -> None:
    trie = _trie("a", "ab", "abc", "b", "bc")
    assert trie.longest_prefix("abx") == ["A", "AB"]
    assert trie.longest_prefix("abcd") == ["A", "AB", "ABC"]
    assert trie.longest_prefix("xab") == []
    assert trie.longest_prefix("") == []


def test_a_path_is_refused_while_its_parent_is_missing() -> None:
    trie = _trie("a")
    assert not trie.attach("abc", "ABC")
    assert "abc" not in trie
    assert "ab" not in trie
    assert len(trie) == 1


def test_a_key_may_repeat_in_a_path() -> None:
    trie = _trie("a", "aa", "aaa")
    assert trie.longest_prefix("aaaa") == ["A", "AA", "AAA"]
    assert len(trie) == 3


def test_attaching_a_held_path_changes_its_value_and_keeps_what_is_below() -> None:
    trie = _trie("a", "ab")
    assert trie.attach("a", "new")
    assert trie.longest_prefix("ab") == ["new", "AB"]
    assert len(trie) == 2


def test_detach_returns_the_whole_subtree_parents_first_and_nothing_else() -> None:
    trie = _trie("a", "ab", "abc", "abd", "ac")
    left = trie.detach("ab")
    assert left[0] == (("a", "b"), "AB")
    assert {"".join(path): value for path, value in left} == {"ab": "AB", "abc": "ABC", "abd": "ABD"}
    assert {"".join(path) for path, _ in trie.items()} == {"a", "ac"}
    assert trie.detach("ab") == []
    trie.check()


def test_detaching_a_root_leaves_the_other_roots() -> None:
    trie = _trie("a", "ab", "b")
    assert len(trie.detach("a")) == 2
    assert list(trie.items()) == [(("b",), "B")]
    trie.check()


def test_inner_means_held_and_continued() -> None:
    trie = _trie("a", "ab")
    assert trie.is_inner("a")
    assert not trie.is_inner("ab")
    assert not trie.is_inner("x")
    assert trie.get("ab") == "AB"
    assert trie.get("x") is None


def test_the_root_has_no_value() -> None:
    trie = _trie("a")
    with pytest.raises(ValueError, match="root"):
        trie.attach("", "root")
    assert "" not in trie


def test_a_path_deeper_than_the_recursion_limit() -> None:
    trie: PrefixTrie[int, int] = PrefixTrie()
    depth = 3000
    for i in range(depth):
        assert trie.attach(range(i + 1), i)
    trie.check()
    assert len(trie.longest_prefix(range(depth + 1))) == depth
    assert len(trie.detach([0])) == depth
    assert len(trie) == 0


def test_check_notices_a_wrong_count_and_a_misfiled_node() -> None:
    trie = _trie("a", "ab")
    trie._size += 1
    with pytest.raises(StoreError, match="counts 3"):
        trie.check()
    trie = _trie("a", "b")
    trie._roots["a"].children["b"] = trie._roots["b"]
    with pytest.raises(StoreError, match="wrong parent"):
        trie.check()
