"""The trie: paths, prefixes, and free nodes that stay only while something below them is held."""

import pytest

from chunkweave.errors import StoreError
from chunkweave.store.prefix_trie import PrefixTrie


def _trie(*paths: str) -> PrefixTrie[str, str]:
    trie: PrefixTrie[str, str] = PrefixTrie()
    for path in paths:
        trie.grow(path).value = path.upper()
    trie.check()
    return trie


def _let_go(trie: PrefixTrie[str, str], path: str) -> None:
    node = trie.find(path)
    assert node is not None
    node.value = None
    trie.prune(node)
    trie.check()


def _held(trie: PrefixTrie[str, str]) -> dict[str, str | None]:
    return {"".join(node.path): node.value for node in trie.held()}


def test_the_prefix_stops_at_the_first_key_that_is_not_held() -> None:
    trie = _trie("a", "ab", "abc", "b", "bc")
    assert list(trie.prefix("abx")) == ["A", "AB"]
    assert list(trie.prefix("abcd")) == ["A", "AB", "ABC"]
    assert list(trie.prefix("xab")) == []
    assert list(trie.prefix("")) == []


def test_what_lies_below_a_free_node_is_on_no_prefix_until_that_is_held() -> None:
    trie = _trie("a", "abc")
    assert list(trie.prefix("abc")) == ["A"]
    assert _held(trie) == {"a": "A", "abc": "ABC"}
    trie.grow("ab").value = "AB"
    assert list(trie.prefix("abc")) == ["A", "AB", "ABC"]


def test_a_key_may_repeat_in_a_path() -> None:
    trie = _trie("a", "aa", "aaa")
    assert list(trie.prefix("aaaa")) == ["A", "AA", "AAA"]
    assert len(_held(trie)) == 3


def test_a_held_path_changes_its_value_and_keeps_what_is_below() -> None:
    trie = _trie("a", "ab")
    trie.grow("a").value = "new"
    assert list(trie.prefix("ab")) == ["new", "AB"]
    assert _held(trie) == {"a": "new", "ab": "AB"}


def test_an_inner_node_that_is_let_go_is_found_again_with_all_below_it() -> None:
    trie = _trie("a", "ab", "abc", "abd", "ac")
    _let_go(trie, "ab")
    assert _held(trie) == {"a": "A", "abc": "ABC", "abd": "ABD", "ac": "AC"}
    assert list(trie.prefix("abc")) == ["A"]
    trie.grow("ab").value = "AB"
    assert list(trie.prefix("abd")) == ["A", "AB", "ABD"]


def test_letting_go_of_the_last_reason_for_a_node_drops_it_and_nothing_else() -> None:
    trie = _trie("abc", "b")
    _let_go(trie, "abc")
    assert trie.find("a") is None
    assert _held(trie) == {"b": "B"}


def test_held_nodes_come_parents_first_and_from_the_top_that_is_given() -> None:
    trie = _trie("a", "ab", "abc", "abd", "ac")
    top = trie.find("ab")
    assert top is not None
    below = list(trie.held(top))
    assert below[0] is top
    assert {node.value for node in below} == {"AB", "ABC", "ABD"}
    assert trie.find("x") is None


def test_a_path_deeper_than_the_recursion_limit() -> None:
    trie: PrefixTrie[int, bool] = PrefixTrie()
    depth = 3000
    for end in range(1, depth + 1):
        trie.grow(range(end)).value = True
    trie.check()
    assert len(list(trie.prefix(range(depth + 1)))) == depth
    deepest = trie.grow(range(depth))
    assert deepest.path == tuple(range(depth))
    for node in tuple(trie.held()):
        node.value = False
    trie.prune(deepest)
    assert not trie.root.children


def test_check_notices_a_free_end_and_a_misfiled_node() -> None:
    trie = _trie("a", "ab")
    trie.grow("abc")
    with pytest.raises(StoreError, match="nothing below"):
        trie.check()
    trie = _trie("a", "b")
    trie.root.children["a"].children["b"] = trie.root.children["b"]
    with pytest.raises(StoreError, match="wrong parent"):
        trie.check()
