"""The trie at its ends. What it finds and drops is tested through the knowledge tree and the watchers of paths."""

import pytest

from chunkweave.errors import StoreError
from chunkweave.store.prefix_trie import PrefixTrie


def _trie(*paths: str) -> PrefixTrie[str, str]:
    trie: PrefixTrie[str, str] = PrefixTrie()
    for path in paths:
        trie.grow(path).value = path.upper()
    trie.check()
    return trie


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
