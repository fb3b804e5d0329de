"""Watchers by path against a list of them."""

from hypothesis import given
from hypothesis import strategies as st

from chunkweave.store.prefix_trie import PrefixWatch

paths = st.text("ab", max_size=4)


@given(st.lists(paths, max_size=12), st.data())
def test_it_finds_exactly_those_whose_path_begins_so(watched, data):
    watch: PrefixWatch[str, int] = PrefixWatch()
    for number, path in enumerate(watched):
        watch.add(path, number)
    gone = data.draw(st.sets(st.integers(0, max(0, len(watched) - 1)))) if watched else set()
    for number in gone:
        watch.remove(watched[number], number)
        watch.remove(watched[number], number)
    for prefix in {"", *watched, "ba"}:
        expected = {n for n, path in enumerate(watched) if n not in gone and path.startswith(prefix)}
        assert sorted(watch.below(prefix)) == sorted(expected)
