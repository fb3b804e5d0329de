"""Chunk ids."""

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.prompt.parts import chunk_id

FIELDS = st.tuples(st.text("ab\0", max_size=4), st.text("ab\0", max_size=4), st.lists(st.integers(0, 300), max_size=4))


def test_it_is_blake2_over_length_prefixed_fields() -> None:
    """The bytes are spelled out: a store on disk outlives the version that wrote it."""
    fields = b"\5\0\0\0\0\0\0\0model" + b"\2\0\0\0\0\0\0\0\xc3\xa9" + b"\2\0\0\0\0\0\0\0" + b"\1\0\0\0\x70\x11\1\0"
    expected = hashlib.blake2b(fields, digest_size=16).hexdigest()
    assert chunk_id("model", "é", [1, 70_000]) == chunk_id("model", "é", (1, 70_000)) == expected


@settings(deadline=None)
@given(FIELDS, FIELDS)
def test_different_inputs_have_different_ids(
    one: tuple[str, str, list[int]], other: tuple[str, str, list[int]]
) -> None:
    assert (chunk_id(*one) == chunk_id(*other)) == (one == other)


def test_fields_cannot_flow_into_each_other() -> None:
    as_salt = chunk_id("m", "ab", [])
    assert len({as_salt, chunk_id("ma", "b", []), chunk_id("mab", "", []), chunk_id("", "mab", [])}) == 4
    assert chunk_id("m", "", [0x61]) != chunk_id("m", "a\0\0\0", [])
