"""What a mean's contexts are woven from, and which variant is taken where a mean is stored."""

import pytest

from chunkweave.planning.adaptive_methods import ContextMethod, FirstPassMethod
from chunkweave.planning.method import prefer_least_read, prefer_mean
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, neutral_id
from chunkweave.store.index import PromptLookup, look_up
from chunkweave.store.records import LEAST_READ, SegmentRecord, segment_id
from chunkweave.types import ChunkId, Span
from tests.unit.test_cachecraft import part_of, plan_of, sources
from tests.unit.test_planning import GEOMETRY

NEUTRAL = neutral_id(ChunkId("0" * 32))


def computed(chunk: str, context: str = "", *, exact: bool = True, generation: int = 0, read=()) -> SegmentRecord:
    ids = tuple(map(ChunkId, context))
    tokens = part_of(chunk).token_ids
    return SegmentRecord.of(ChunkId(chunk), ids, tokens, exact=exact, nbytes=1, generation=generation, read=read)


def neutral(chunk: str) -> SegmentRecord:
    return SegmentRecord.of(ChunkId(chunk), (NEUTRAL,), part_of(chunk).token_ids, exact=True, nbytes=1)


def mean(chunk: str, *contexts: str, read=()) -> SegmentRecord:
    over = [tuple(map(ChunkId, context)) for context in contexts]
    return computed(chunk).mean_over(over, nbytes=1, attention=None, read=map(ChunkId, read))


def lookup_of(path: str, *stored: SegmentRecord, exact: int = 0) -> PromptLookup:
    """A context and the chunk behind it, without a question; the first `exact` parts are an exact prefix."""
    prompt = Prompt((PromptPart(PartKind.START, (1,)), *map(part_of, path)))
    ids = [segment_id(ChunkId(path[place]), tuple(map(ChunkId, path[:place]))) for place in range(exact)]
    return look_up(prompt, ids, lambda part: tuple(one for one in stored if one.chunk_id == part.id))


def context_plan(path: str, *stored: SegmentRecord, exact: int = 0) -> Plan:
    made = ContextMethod().plan(lookup_of(path, *stored, exact=exact), GEOMETRY)
    made.validate(GEOMETRY.num_layers)
    return made


# --- which variant


def test_the_mean_over_most_contexts_is_preferred():
    stored = [
        computed("B"),
        computed("B", "XY", exact=False, generation=1),
        computed("B", "XY"),
        neutral("B"),
        mean("B", "X", "Y"),
        mean("B", "X", "Y", "Z"),
    ]
    for best in range(len(stored), 0, -1):
        assert prefer_mean(stored[:best]) == prefer_mean(stored[:best][::-1]) == stored[best - 1]
    assert prefer_mean(()) is None


def test_contexts_are_woven_from_what_is_behind_neutral_passages_first_then_from_the_mean_that_has_read_least():
    little, more = mean("B", "X"), mean("B", "X", "Y", read="Z")
    assert prefer_least_read((more, little, neutral("B"))) == neutral("B")
    assert prefer_least_read((more, little)) == prefer_least_read((little, more)) == little
    assert prefer_least_read((more,)) == more


def test_contexts_are_woven_from_nothing_else_but_what_was_computed_alone():
    """What was computed in requests has read what these were about. Alone is the last choice: it reads as a beginning,
    and is there where no neutral passages are wanted."""
    assert prefer_least_read((computed("B", "X"), computed("B", "XY", exact=False))) is None
    assert prefer_least_read(()) is None
    for better in (neutral("B"), mean("B", "X")):
        assert prefer_least_read((computed("B"), better)) == prefer_least_read((better, computed("B"))) == better
    assert prefer_least_read((computed("B", "X"), computed("B"))) == computed("B")


def test_a_mean_that_has_read_much_is_none_of_them():
    chunks = [chr(300 + number) for number in range(LEAST_READ + 1)]
    assert prefer_least_read((mean("B", "X", read=chunks),)) is None
    assert prefer_least_read((mean("B", "X", read=chunks[1:]),)) is not None


@pytest.mark.parametrize("method", ["full-reuse", "epic", "query", "cacheblend"])
def test_methods_without_scores_take_the_mean(method):
    stored = mean("B", "X", "Y")
    prompt = Prompt((PromptPart(PartKind.START, (1,)), part_of("A"), part_of("B"), PromptPart(PartKind.QUESTION, (7,))))
    variants = {ChunkId("B"): (computed("B", "XY"), neutral("B"), stored, computed("B"))}
    plan = plan_of(look_up(prompt, (), lambda part: variants.get(part.id, ())), method, recompute_ratio=0.5)
    assert plan.parts[2].segment == stored.id
    assert plan.parts[2].kv_source is KVSource.REUSED


# --- the plan of a context


def test_the_last_part_is_computed_though_it_is_stored():
    plan = context_plan("ABC", neutral("A"), neutral("B"), neutral("C"), mean("C", "AB"), computed("C", "AB"))
    assert sources(plan) == "RRC"
    assert plan.passes[0].required == (Span(0, 1), Span(9, 13)), "the model's BOS and the last chunk"


def test_also_where_an_exact_prefix_reaches_it():
    path = (computed("A"), computed("B", "A"), computed("C", "AB"))
    plan = context_plan("ABC", *path, exact=3)
    assert sources(plan) == "EEC"
    assert context_plan("ABC", *path, exact=1).parts[1].kv_source is KVSource.EXACT


def test_the_parts_before_are_reused_from_their_first_pass():
    plan = context_plan("ABC", neutral("A"), mean("A", "X"), mean("B", "X"), computed("B", "X"))
    assert sources(plan) == "RRC"
    assert [part.segment for part in plan.parts[1:3]] == [neutral("A").id, mean("B", "X").id]


def test_what_is_missing_of_a_context_is_computed():
    plan = context_plan("*ABC", neutral("A"), computed("B", "X"), computed("B", "A"))
    assert sources(plan) == "CRCC", "the instruction, and a chunk of which only requests have left something"
    assert plan.passes[0].required == (Span(0, 3), Span(7, 15))


def test_nothing_is_recomputed():
    (only,) = context_plan("ABC", neutral("A"), neutral("B")).passes
    assert (only.candidates, only.rules) == ((), ())


def test_a_chunk_with_nothing_before_it_is_computed():
    assert sources(context_plan("C", mean("C", "A"))) == "C"


def test_a_first_pass_takes_an_exact_prefix_alone_and_computes_its_last_part_too():
    """Two calls may compute the same chunk: the second one finds all of it stored when it begins."""
    path = (computed("A"), computed("B", "A"), computed("C", "AB"), neutral("B"))
    for exact, expected in ((3, "EEC"), (2, "EEC"), (1, "ECC"), (0, "CCC")):
        plan = FirstPassMethod().plan(lookup_of("ABC", *path, exact=exact), GEOMETRY)
        plan.validate(GEOMETRY.num_layers)
        assert (plan.method, sources(plan)) == ("prefix", expected)
