"""Which chunks a chunk is computed behind: who is near, how contexts are dealt, and what fits."""

import numpy as np
import pytest

from chunkweave.config import CaptureConfig, ContextSource
from chunkweave.errors import UsageError
from chunkweave.prompt.contexts import ContextPool, ContextRule, MeanShare, dealt, fitting, rule_of, token_vectors
from chunkweave.prompt.parts import PartKind, PromptPart, chunk_id

BRIDGE, FERRY, TIDE = range(1000, 1012), range(2000, 2012), range(3000, 3012)
"""Token ids of three topics; `FILLER` is in every chunk."""

FILLER = tuple(range(50))


def part(*ids: int, salt: str = "") -> PromptPart:
    return PromptPart(PartKind.CHUNK, ids, chunk_id("f", salt, ids), f"chunk {ids[-1]}")


def of_topics(bridge: int = 0, ferry: int = 0, tide: int = 0, own: int = 0) -> PromptPart:
    """A chunk with so many ids of each topic, and one of its own."""
    return part(*FILLER, *BRIDGE[:bridge], *FERRY[:ferry], *TIDE[:tide], 9000 + own)


def sized(*tokens: int) -> list[PromptPart]:
    """Chunks of so many tokens, all different."""
    return [part(*range(100 * number, 100 * number + size)) for number, size in enumerate(tokens)]


A = of_topics(bridge=12, own=1)
NEAR = of_topics(bridge=8, own=2)
LESS_NEAR = of_topics(bridge=4, ferry=6, own=3)
FAR = of_topics(ferry=10, own=4)
ELSEWHERE = of_topics(tide=12, own=5)


def pool_with(chunks, vectors) -> ContextPool:
    """A pool in which chunks are near as these vectors say."""
    pool = ContextPool(chunks)
    pool.vectors = vectors
    return pool


POOL = ContextPool([ELSEWHERE, FAR, LESS_NEAR, A, NEAR])


def test_near_is_what_shares_most_rare_tokens():
    assert POOL.nearest(A)[:2] == [NEAR, LESS_NEAR]
    assert POOL.nearest(FAR)[0] == LESS_NEAR
    assert A not in POOL.nearest(A)
    assert len(POOL.nearest(A)) == len(POOL) - 1 == 4


def test_equally_near_ones_come_in_the_pools_order():
    """Chunks of a topic each: none is near to another. So many that a sort may not be stable by chance."""
    vectors, chunks = np.eye(60, dtype=np.float32), sized(*[1] * 60)
    assert pool_with(chunks, vectors).nearest(chunks[2]) == [*chunks[:2], *chunks[3:]]
    assert pool_with(chunks[::-1], vectors).nearest(chunks[2]) == [*chunks[:2:-1], *chunks[1::-1]]


def test_a_chunk_that_comes_twice_counts_once_and_keeps_its_first_place():
    twice = ContextPool([FAR, A, FAR, NEAR, A])
    assert twice.parts == (FAR, A, NEAR)
    assert np.array_equal(twice.vectors, ContextPool([FAR, A, NEAR]).vectors), "nor does it make its tokens common"


def test_chunks_of_another_salt_are_other_chunks():
    assert len(ContextPool([part(1, 2), part(1, 2, salt="other"), part(1, 2)])) == 2


def test_the_same_pool_gives_the_same_contexts():
    rule = ContextRule(2, 60)
    again = ContextPool([ELSEWHERE, FAR, LESS_NEAR, A, NEAR])
    assert [POOL.contexts(one, rule) for one in POOL.parts] == [again.contexts(one, rule) for one in again.parts]


def test_contexts_have_none_of_what_they_are_to_be_without():
    rule = ContextRule(2, 1)
    assert POOL.contexts(A, rule) == [(NEAR,), (LESS_NEAR,)]
    remaining = POOL.contexts(A, rule, without={NEAR.id})
    assert remaining[0] == (LESS_NEAR,)
    assert NEAR not in [one for context in remaining for one in context]
    assert POOL.contexts(A, rule, without=[one.id for one in POOL.parts]) == []


def test_a_chunk_that_is_not_in_the_pool_is_refused():
    stranger = of_topics(bridge=3, own=6)
    for ask in (POOL.nearest, lambda one: POOL.contexts(one, ContextRule())):
        with pytest.raises(UsageError, match="is not in the pool"):
            ask(stranger)


def test_a_pool_of_one_has_no_contexts():
    assert ContextPool([A]).contexts(A, ContextRule()) == []
    assert len(ContextPool([])) == 0


# --- dealt


def test_ranks_are_dealt_in_turns_and_the_nearest_is_last():
    """Ranks 0, 3, 6 to the first of three contexts, 1, 4, 7 to the second: all are about equally near."""
    ranked = sized(*[10] * 9)
    contexts = dealt(ranked, ContextRule(3, 30))
    assert contexts == [tuple(ranked[rank] for rank in ranks) for ranks in ((6, 3, 0), (7, 4, 1), (8, 5, 2))]


def test_a_context_ends_with_the_chunk_that_reaches_its_tokens():
    ranked = sized(10, 10, 10, 10, 10, 10)
    for tokens, lengths in ((1, 1), (10, 1), (11, 2), (20, 2), (21, 3), (1000, 3)):
        assert [len(context) for context in dealt(ranked, ContextRule(2, tokens))] == [lengths, lengths]


def test_fewer_chunks_than_contexts_make_as_many_contexts():
    ranked = sized(5, 5)
    assert dealt(ranked, ContextRule(4, 400)) == [(ranked[0],), (ranked[1],)]
    assert dealt([], ContextRule(4, 400)) == []


# --- fitting


@pytest.mark.parametrize(("room", "kept"), [(60, 3), (59, 2), (50, 2), (49, 1), (30, 1), (29, 0), (0, 0), (-5, 0)])
def test_the_nearest_chunks_fit_first(room, kept):
    """The last one is the nearest: it is kept longest. No chunk is cut, and none is left out before a further one."""
    context = tuple(sized(10, 20, 30))
    assert fitting(context, room) == context[len(context) - kept :]


def test_a_context_that_has_a_long_chunk_ends_there():
    context = tuple(sized(5, 50, 10))
    assert fitting(context, 20) == context[2:], "the 5 tokens before the long chunk would fit, but are further away"


# --- token_vectors


def test_vectors_have_length_one():
    lengths = np.linalg.norm(token_vectors([A, NEAR, FAR, ELSEWHERE]), axis=1)
    assert lengths == pytest.approx(np.ones(4), abs=1e-6)


def test_weights_by_hand():
    """Of three chunks: token 7 is in two, 5 in one, three times."""
    vectors = token_vectors([part(7, 5, 5, 5), part(7, 9), part(11)])
    seven, five = np.log(3 / 2), (1 + np.log(3)) * np.log(3)
    expected = seven * seven / (np.hypot(seven, five) * np.hypot(seven, np.log(3)))
    assert vectors[0] @ vectors[1] == pytest.approx(expected, abs=1e-6)


def test_tokens_that_all_chunks_have_count_nothing():
    assert not token_vectors([part(1, 2), part(2, 1)]).any()
    assert not token_vectors([part(1, 2)]).any()


def test_an_empty_pool_has_no_vectors():
    assert token_vectors([]).shape == (0, 1024)


# --- what settings ask for


def test_the_rule_is_the_settings():
    assert rule_of(CaptureConfig(context_count=8, context_tokens=100)) == ContextRule(8, 100)
    assert rule_of(CaptureConfig()) is not None
    assert rule_of(CaptureConfig(contexts=ContextSource.BUNDLED)) is None


def test_shares_of_a_mean_are_the_same_whenever_they_begin():
    assert MeanShare("a", 4, 1.0) == MeanShare("a", 4, 2.0)
    assert MeanShare("a", 4) != MeanShare("b", 4)
    assert MeanShare("a", 4) != MeanShare("a", 3)
