"""What a record says of a mean: its contexts, what was read, and which combinations are refused."""

from dataclasses import replace

import pytest

from chunkweave.prompt.parts import is_mean, is_neutral, mean_id, neutral_id
from chunkweave.store.records import ANYTHING, MOST_READ, AttentionProfile, SegmentRecord, all_read, segment_id
from chunkweave.types import ChunkId

A, B, C, D, X = (ChunkId(letter * 32) for letter in "abcde")
NEUTRAL = neutral_id(D)
CONTEXTS = ((A, B), (C,))


def computed(context=(A, B), *, read=(), exact=False, chunk=X) -> SegmentRecord:
    return SegmentRecord.of(chunk, context, (1, 2, 3), exact=exact, nbytes=10, source="doc#1", owner="acme", read=read)


def profile_of(*chunks: ChunkId) -> AttentionProfile:
    ones = (1.0,) * len(chunks)
    return AttentionProfile(chunks, (4,) * len(chunks), ones, 0.5, 0.1, (1.0, 1.0, 1.0))


def mean(contexts=CONTEXTS, *, read=(), attention=None) -> SegmentRecord:
    return computed().mean_over(contexts, nbytes=20, attention=attention, read=read)


def test_a_mean_is_named_after_its_contexts():
    one = mean()
    assert one.contexts == ((A, B), (C,))
    assert one.context == (mean_id(CONTEXTS),)
    assert is_mean(one.context)
    assert one.id == segment_id(X, one.context)
    assert (one.chunk_id, one.token_ids, one.source, one.owner) == (X, (1, 2, 3), "doc#1", "acme")
    assert (one.nbytes, one.exact, one.generation) == (20, False, 0)


def test_contexts_have_no_order_but_their_chunks_have():
    assert mean(((C,), (A, B))) == mean()
    assert mean(((B, A), (C,))).id != mean().id
    assert mean(((A,), (B,))).id != mean(((A, B),)).id, "where one ends and the next begins counts"
    assert mean(((A,), (B,))).id != mean(((A,), (B,), (C,))).id


def test_a_mean_of_what_was_exact_or_woven_again_is_neither():
    assert not computed(exact=True).mean_over([(A,)], nbytes=1, attention=None, read=()).exact
    woven = replace(computed(), generation=3)
    assert woven.mean_over([(A,)], nbytes=1, attention=None, read=()).generation == 0


def test_what_a_mean_has_read_are_its_contexts_and_what_these_were_woven_from():
    one = mean(read=[NEUTRAL, A, D, C])
    assert one.read == tuple(sorted((NEUTRAL, D))), "what is in a context is not listed twice"
    assert one.sources == {A, B, C, D, NEUTRAL}
    assert X not in one.sources
    assert one.context[0] not in one.sources, "the name of its contexts is no chunk"


def test_what_another_segment_has_read_is_its_context_and_what_that_was_woven_from():
    assert computed((A, B)).sources == {A, B}
    assert computed((A, B), read=[D, B]).read == (D,)
    assert computed((A, B), read=[D, B]).sources == {A, B, D}
    assert computed(()).sources == frozenset()


def test_a_mean_is_neither_alone_nor_behind_neutral_passages():
    for contexts in (CONTEXTS, ((),), ((NEUTRAL,),), ((A, NEUTRAL), (NEUTRAL,))):
        one = mean(contexts)
        assert not one.alone
        assert not one.neutral
        assert not is_neutral(one.context[0])


@pytest.mark.parametrize(
    "change",
    [
        {"exact": True},
        {"contexts": ()},
        {"context": (A, B)},
        {"contexts": ((A, B),)},
        {"contexts": ((A,), (B, C))},
        {"contexts": (*CONTEXTS, (D,))},
        {"context": (*mean().context, A)},
        {"context": (), "contexts": CONTEXTS},
    ],
)
def test_what_contradicts_itself_is_refused(change):
    with pytest.raises(ValueError, match=r"mean"):
        replace(mean(), **change)


def test_only_what_has_read_nothing_but_its_context_is_exact():
    assert computed(exact=True).exact
    with pytest.raises(ValueError, match="cannot be a mean or depend on ids beside its context"):
        computed(exact=True, read=[D])
    with pytest.raises(ValueError, match="mean"):
        replace(computed(), contexts=CONTEXTS)


def test_a_profile_is_of_what_was_read():
    assert mean(attention=profile_of(A, B, C)).attention is not None
    assert mean(attention=profile_of(D), read=[D]).attention is not None
    with pytest.raises(ValueError, match="not in the segment's context"):
        mean(attention=profile_of(A, D))


def test_too_many_ids_are_anything():
    many = [ChunkId(f"{number:032x}") for number in range(MOST_READ + 1)]
    assert all_read(many[:-1]) == frozenset(many[:-1])
    assert all_read(many) == {ANYTHING}
    assert all_read([A, A, B]) == {A, B}


def test_what_has_read_anything_makes_its_readers_so_too():
    assert all_read([A, ANYTHING]) == {ANYTHING}
    assert ANYTHING in mean(read=all_read([A, ANYTHING])).sources


def test_anything_is_an_id_that_a_file_can_hold_and_no_chunk_is_likely_to_have():
    assert len(ANYTHING) == len(A)
    assert set(ANYTHING) <= set("0123456789abcdef")
    assert not is_neutral(ANYTHING)
    assert not is_mean((ANYTHING,))
