"""The plans of `cachecraft` and `set-cache`: variants, tokens, focus, and every odd prompt."""

import sys
import time
from dataclasses import replace
from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.config import CaptureConfig, ReuseConfig
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import KVSource, Plan, RecomputeScore, StopUnfocused
from chunkweave.planning.scores import focused_by_gap
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, neutral_id
from chunkweave.store.index import PromptLookup, look_up
from chunkweave.store.records import AttentionProfile, SegmentRecord, segment_id
from chunkweave.types import ChunkId, Scattered, Span
from chunkweave_lab.baselines import focused_as_printed
from tests.unit.test_planning import GEOMETRY
from tests.unit.test_planning import plan as plan_by
from tests.unit.test_scores import adjusted_overlap

TOKENS = 4


def tokens_of(name: str) -> int:
    """Capital letters are chunks of 4 tokens, small ones of 1; `*` is the instruction, of 2."""
    return 2 if name == "*" else TOKENS if name.isupper() else 1


def part_of(name: str) -> PromptPart:
    kind = PartKind.SYSTEM if name == "*" else PartKind.CHUNK
    return PromptPart(kind, (ord(name),) * tokens_of(name), ChunkId(name))


def prompt_of(path: str) -> Prompt:
    """START, the parts, a question of 3."""
    parts = (PromptPart(PartKind.START, (1,)), *map(part_of, path), PromptPart(PartKind.QUESTION, (7, 7, 7)))
    return Prompt(parts)


def record_of(
    path: str, inter: tuple[float, ...] | None = None, *, outward=None, intra=0.5, exact=True
) -> SegmentRecord:
    """The last chunk of `path`, computed after the others, with mass `inter` on them (the instruction has none)."""
    chunks = path[:-1].lstrip("*")
    n = tokens_of(path[-1])
    profile = None
    if inter is not None:
        profile = AttentionProfile(
            tuple(map(ChunkId, chunks)),
            tuple(map(tokens_of, chunks)),
            inter,
            intra,
            0.1,
            outward or (sum(inter) / n,) * n,
        )
    context = tuple(map(ChunkId, path[:-1]))
    return SegmentRecord.of(
        ChunkId(path[-1]), context, part_of(path[-1]).token_ids, exact=exact, nbytes=1, attention=profile
    )


def lookup_of(path: str, *stored: SegmentRecord, broken: bool = False) -> PromptLookup:
    """What a store that holds `stored` (most recently used first) says; `broken`: no exact prefix is known."""
    ids = {record.id for record in stored if record.exact}
    exact = []
    for length in range(1, len(path) + 1):
        segment = segment_id(ChunkId(path[length - 1]), tuple(map(ChunkId, path[: length - 1])))
        if broken or segment not in ids:
            break
        exact.append(segment)
    return look_up(prompt_of(path), exact, lambda part: tuple(r for r in stored if r.chunk_id == part.id))


def plan_of(lookup: PromptLookup, method: str = "cachecraft", **config) -> Plan:
    plan = plan_by(method, lookup, **config)
    assert sum(plan.tokens(kv_source) for kv_source in KVSource) == lookup.prompt_tokens
    return plan


def sources(plan: Plan) -> str:
    """E(xact), R(eused) or C(omputed) of each part with an id."""
    return "".join(part.kv_source.name[0] for part in plan.parts if part.part.id is not None)


def chosen(plan: Plan, place: int) -> tuple[str | None, RecomputeScore | None]:
    parts = [part for part in plan.parts if part.part.id is not None]
    return parts[place].segment, parts[place].score


def recomputed(plan: Plan) -> list[int]:
    """Candidates' positions, in the order of the plan."""
    (only,) = plan.passes
    return [position for group in only.candidates for position in group.positions()]


CCI = record_of("AB", (1.0,)).attention.cci
"""a = 1/16, b = .5/16: the sigmoid of 2."""


def test_a_chunk_in_a_new_context_by_hand():
    """B was computed after A, B gave A .6 and C .4 of its mass, now it comes after A and D."""
    stored = record_of("ACB", (0.6, 0.4), outward=(0.1, 0.5, 0.1, 0.3))
    plan = plan_of(lookup_of("ADB", stored), alpha=1.2)
    segment, score = chosen(plan, 2)
    assert (sources(plan), segment) == ("CCR", stored.id)
    assert score is not None
    assert score.overlap == pytest.approx(0.6)
    assert score.cci == stored.attention.cci
    assert score.cfo == pytest.approx(1.2 * score.cci * 0.4)
    assert score.tokens == ceil(score.cfo * 4) == 2
    assert score.coverage == 0.5
    assert recomputed(plan) == [9 + 1, 9 + 3], "the two that looked outside most"
    assert plan.passes[0].required == (Span(0, 9), Span(13, 16))


def test_alpha_scales_the_tokens_and_zero_reuses_everything():
    stored = record_of("AB", (1.0,))
    counts = [len(recomputed(plan_of(lookup_of("DB", stored), alpha=alpha))) for alpha in (0.0, 0.2, 0.5, 1.0, 9.0)]
    assert counts == [0, 1, 2, 4, 4]
    nothing = plan_of(lookup_of("DB", stored), alpha=0.0)
    assert nothing.passes == plan_of(lookup_of("DB", stored), "full-reuse").passes


# --- odd prompts


def test_the_first_chunk_of_a_prompt():
    """Nothing before it: what it saw elsewhere is all missing; computed alone or after the instruction it is right."""
    for context, inter, overlap in (("A", (1.0,), 0.0), ("", (), 1.0), ("*", (), 1.0)):
        _, score = chosen(plan_of(lookup_of("B", record_of(context + "B", inter), broken=True)), 0)
        assert score is not None
        assert score.overlap == overlap
    assert score.tokens == 0


def test_a_prompt_of_one_chunk():
    alone = record_of("B", ())
    assert sources(plan_of(lookup_of("B", alone))) == "E"
    plan = plan_of(lookup_of("*B", alone))
    assert (sources(plan), recomputed(plan)) == ("CR", []), "the instruction enters no score"
    assert plan.passes[0].rules == ()


def test_the_same_chunk_twice_in_one_prompt():
    """Its first place is exact, the second is scored with the first before it."""
    alone, after_itself = record_of("B", ()), record_of("BB", (2.0,), exact=False)
    plan = plan_of(lookup_of("BCB", alone, after_itself))
    assert sources(plan) == "ECR"
    assert chosen(plan, 2) == (after_itself.id, RecomputeScore(CCI_OF_TWO, 1.0, 0.0, 0, 0.5))
    both = plan_of(lookup_of("DBB", alone))
    assert [chosen(both, place)[0] for place in (1, 2)] == [alone.id, alone.id]
    assert both.segments() == (alone.id,)


CCI_OF_TWO = record_of("BB", (2.0,)).attention.cci


def test_an_empty_old_prefix():
    """Computed alone, or after the instruction only, then chunks before it: overlap 0, from the start on."""
    for record in (record_of("B", ()), record_of("B"), record_of("*B", ())):
        plan = plan_of(lookup_of("DB", record))
        assert chosen(plan, 1) == (record.id, RecomputeScore(0.5, 0.0, 0.5, 2, 0.0))
        assert recomputed(plan) == [5, 6]


def test_a_chunk_of_a_single_token():
    """It has no intra mass: CCI is 1 if it looked at a chunk, and all of it, one token, is recomputed."""
    looked = record_of("Ab", (0.8,), intra=0.0)
    assert chosen(plan_of(lookup_of("Db", looked)), 1)[1] == RecomputeScore(1.0, 0.0, 1.0, 1, 0.0)
    alone = record_of("b", (), intra=0.0)
    assert chosen(plan_of(lookup_of("Db", alone)), 1)[1] == RecomputeScore(0.5, 0.0, 0.5, 1, 0.0)


def test_all_chunks_new():
    plan = plan_of(lookup_of("*ABC"))
    assert sources(plan) == "CCCC"
    assert plan.passes == plan_of(lookup_of("*ABC"), "full").passes


def test_a_chunk_in_the_exact_prefix_and_among_the_variants():
    """The exact one is taken, though another one is as good and was used later."""
    other, first, second = record_of("CB", (0.0,)), record_of("A", ()), record_of("AB", (1.0,))
    plan = plan_of(lookup_of("ABD", other, first, second, record_of("D", ())))
    assert sources(plan) == "EER"
    assert chosen(plan, 1) == (second.id, None)


def test_an_exact_segment_behind_a_gap_needs_no_fix():
    """Same context, but the chunk before it is stored no more: overlap 1."""
    plan = plan_of(lookup_of("AB", record_of("AB", (1.0,))))
    assert (sources(plan), recomputed(plan)) == ("CR", [])


def test_a_longer_new_prefix_is_not_seen_and_is_reported():
    """Context A, now B and A before C: CFO is 0 by the formula, and coverage says what it does not see."""
    stored = record_of("AC", (1.0,))
    _, score = chosen(plan_of(lookup_of("BAC", stored)), 2)
    assert score == RecomputeScore(CCI, 1.0, 0.0, 0, 0.5)


def test_a_reused_instruction_is_a_chunk_with_none_before_it():
    stored = SegmentRecord.of(ChunkId("*"), (), part_of("*").token_ids, exact=False, nbytes=1)
    plan = plan_of(lookup_of("*AB", stored))
    assert (sources(plan), recomputed(plan)) == ("RCC", [])


# --- variants


def test_the_least_impact_wins_and_of_equal_ones_the_least_id_whenever_it_was_used():
    near, far, alone = record_of("AB", (1.0,)), record_of("CB", (1.0,)), record_of("B", ())
    assert chosen(plan_of(lookup_of("AB", far, near, alone)), 1)[0] == near.id
    assert chosen(plan_of(lookup_of("DB", far, near, alone)), 1)[0] == alone.id, "CCI .5 against .88"
    for order in ((far, near), (near, far)):
        assert chosen(plan_of(lookup_of("DB", *order)), 1)[0] == min(far.id, near.id)


def test_of_equal_impact_the_earlier_generation_wins():
    far, near = record_of("AB", (1.0,)), record_of("CB", (1.0,))
    last = replace(max(far, near, key=lambda one: one.id), exact=False)
    first = replace(min(far, near, key=lambda one: one.id), exact=False, generation=1)
    segment, score = chosen(plan_of(lookup_of("DB", first, last)), 1)
    assert (segment, score.generation) == (last.id, 0)
    segment, score = chosen(plan_of(lookup_of("DB", first)), 1)
    assert (segment, score.generation) == (first.id, 1)


@pytest.mark.parametrize(("limit", "tokens"), [(1, 4), (2, 4), (3, 2), (None, 2)])
def test_a_variant_of_so_many_generations_is_recomputed_whole(limit, tokens):
    """B was computed after A and C, .6 and .4 of its mass; now it comes after A and D: 2 of 4 tokens by CFO."""
    woven = replace(record_of("ACB", (0.6, 0.4), exact=False), generation=2)
    capture = CaptureConfig(variant_generations=limit)
    _, score = chosen(plan_of(lookup_of("ADB", woven), alpha=1.2, capture=capture), 2)
    assert score.tokens == tokens
    assert score.cfo == (1.0 if tokens == 4 else pytest.approx(1.2 * score.cci * 0.4))
    _, score = chosen(plan_of(lookup_of("ACB", woven), alpha=1.2, capture=capture), 2)
    assert score.tokens == 0, "in its own context nothing is missing"


def test_without_a_profile_all_may_depend_on_what_is_gone():
    unknown, known = record_of("AB"), record_of("CB", (4.0,))
    plan = plan_of(lookup_of("AB", unknown))
    assert chosen(plan, 1) == (unknown.id, RecomputeScore(1.0, 0.0, 1.0, 4, 1.0))
    half = plan_of(lookup_of("AB", unknown), alpha=0.5)
    assert recomputed(half) == [5, 6], "from the start on"
    assert chosen(plan_of(lookup_of("AB", unknown, known)), 1)[0] == known.id


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), alpha=st.floats(0, 3))
def test_the_choice_by_brute_force(seed, alpha):
    rng = Random(seed)
    path = "".join(rng.sample("ABCDEF", rng.randint(1, 5)))
    stored = []
    for name in "ABCDEF":
        for _ in range(rng.randint(0, 4)):
            context = rng.sample("ABCDEFG", rng.randint(1, 5))
            outward = tuple(rng.random() for _ in range(TOKENS))
            record = record_of("".join(context) + name, tuple(rng.random() for _ in context), outward=outward)
            if record.id not in {other.id for other in stored}:
                stored.append(record)
    plan = plan_of(lookup_of(path, *stored, broken=True), alpha=alpha)
    expected = []
    for place, name in enumerate(path):
        mine = [record for record in stored if record.chunk_id == name]
        segment, score = chosen(plan, place)
        if not mine:
            assert segment is score is None
            continue
        before = {ChunkId(other): i for i, other in enumerate(path[:place])}
        impacts = [r.attention.cci * (1 - adjusted_overlap(r.attention, before)) for r in mine]
        best = min(range(len(mine)), key=lambda i: (impacts[i], mine[i].id))
        count = ceil(min(1.0, alpha * impacts[best]) * TOKENS)
        assert (segment, score.tokens, score.impact) == (mine[best].id, count, impacts[best])
        outward = mine[best].attention.outward
        top = sorted(range(TOKENS), key=lambda i: (-outward[i], i))[:count]
        expected += [1 + TOKENS * place + i for i in top]
    assert recomputed(plan) == expected


# --- focus


def test_the_focus_rule_names_all_chunks_and_the_question():
    stored = (record_of("A", ()), record_of("AB", (1.0,)), record_of("XC", (1.0,)))
    plan = plan_of(lookup_of("ABCD", *stored))
    assert sources(plan) == "EERC"
    chunks = (Span(1, 5), Span(5, 9), Span(9, 13), Span(13, 17))
    assert plan.passes[0].rules == (StopUnfocused(chunks, Span(17, 20), 3, focused_by_gap),)
    assert plan.passes[0].stop_unfocused is plan.passes[0].rules[0]
    printed = plan_of(lookup_of("ABCD", *stored), "cachecraft:printed")
    assert printed.passes[0].rules == (StopUnfocused(chunks, Span(17, 20), 3, focused_as_printed),)
    assert plan.passes[0].candidates_at(3) == plan.passes[0].candidate_tokens == 4


def test_no_rule_where_it_could_do_nothing():
    stored = (record_of("XB", (1.0,)), record_of("A", ()))
    assert plan_of(lookup_of("CDB", *stored)).passes[0].rules
    assert not plan_of(lookup_of("CDB", *stored), focus=False).passes[0].rules
    assert not plan_of(lookup_of("CDB", *stored), alpha=0.0).passes[0].rules, "no candidates"
    assert not plan_of(lookup_of("CB", *stored)).passes[0].rules, "two chunks never settle"


def test_the_instruction_is_no_chunk_to_focus_on():
    stored = record_of("XB", (1.0,))
    assert not plan_of(lookup_of("*DB", stored)).passes[0].rules
    assert plan_of(lookup_of("*CDB", stored)).passes[0].stop_unfocused.chunks[0] == Span(3, 7)


# --- ablation


def test_without_overlap_every_chunk_is_fixed_as_in_a_strange_context():
    stored = record_of("AB", (1.0,))
    assert chosen(plan_of(lookup_of("AB", stored), "cachecraft:no-overlap"), 1)[1] == RecomputeScore(
        CCI, 0.0, CCI, 4, 1.0
    )


def test_without_cci_the_share_is_that_of_the_overlap_and_tokens_are_drawn():
    n = 40
    stored = SegmentRecord.of(
        ChunkId("B"),
        (ChunkId("A"), ChunkId("C")),
        (66,) * n,
        exact=True,
        nbytes=1,
        attention=AttentionProfile((ChunkId("A"), ChunkId("C")), (4, 4), (1.0, 1.0), 0.5, 0.0, (0.05,) * n),
    )
    parts = (part_of("A"), PromptPart(PartKind.CHUNK, (66,) * n, ChunkId("B")), PromptPart(PartKind.QUESTION, (7,)))
    lookup = look_up(Prompt(parts), [], lambda part: (stored,) if part.id == stored.chunk_id else ())
    plan = plan_of(lookup, "cachecraft:no-cci")
    assert plan.parts[1].score == RecomputeScore(1.0, 0.5, 0.5, 20, 1.0)
    assert sorted(recomputed(plan)) != list(range(4, 24))
    assert plan == plan_of(lookup, "cachecraft:no-cci") != plan_of(lookup, "cachecraft:no-cci", seed=1)


# --- the baselines


def test_what_was_computed_behind_neutral_passages_depends_on_none_of_them():
    """B gave what stood before it twice as much as itself; of neutral passages nothing follows from that."""
    stored = record_of("AB", (1.0,))
    passage = (neutral_id(ChunkId("0" * 32)),)
    profile = replace(stored.attention, chunks=passage)
    neutral = replace(stored, id=segment_id(ChunkId("B"), passage), context=passage, attention=profile)
    for record, cci in ((stored, CCI), (neutral, 0.5)):
        _, score = chosen(plan_of(lookup_of("DB", record), alpha=0.8), 1)
        assert (score.cci, score.overlap, score.cfo) == pytest.approx((cci, 0.0, 0.8 * cci))


def mean_of(inter: tuple[float, ...] | None) -> SegmentRecord:
    """The mean of B's KV behind A and C, and behind D; `inter` are its mean masses on these."""
    profile = None
    if inter is not None:
        outward = (0.1, 0.5, 0.1, 0.3)
        profile = AttentionProfile(tuple(map(ChunkId, "ACD")), (TOKENS,) * 3, inter, 0.5, 0.1, outward)
    contexts = [tuple(map(ChunkId, context)) for context in ("AC", "D")]
    return record_of("AB", (1.0,)).mean_over(contexts, nbytes=1, attention=profile, read=())


def test_a_mean_is_scored_by_its_mean_masses():
    """Behind A and C, B gave them .6 and .4, behind D 1: means .3, .2, .5. Of that A has .3."""
    stored = mean_of((0.3, 0.2, 0.5))
    segment, score = chosen(plan_of(lookup_of("AXB", stored), alpha=1.2), 2)
    assert segment == stored.id
    assert score.cci == pytest.approx(CCI), "a = 1/16 in both contexts, so in the mean"
    assert score.overlap == pytest.approx(0.3)
    assert (score.coverage, score.tokens) == (0.5, ceil(1.2 * CCI * 0.7 * 4))
    _, score = chosen(plan_of(lookup_of("ACDB", stored)), 3)
    assert (score.overlap, score.tokens) == (pytest.approx(1.0), 0)


def test_a_mean_has_no_order():
    """Of one variant behind A and C, C and A is the other way round (gamma 1); a mean has seen no order of all."""
    one = record_of("ACB", (0.6, 0.4))
    assert chosen(plan_of(lookup_of("CAB", one)), 2)[1].overlap == 0.0
    assert chosen(plan_of(lookup_of("CAB", mean_of((0.3, 0.2, 0.5)))), 2)[1].overlap == pytest.approx(0.5)


def test_a_mean_without_a_profile_is_as_good_as_one_behind_neutral_passages():
    stored = mean_of(None)
    for path, covered in (("ACB", 1.0), ("XYB", 0.0)):
        segment, score = chosen(plan_of(lookup_of(path, stored), alpha=0.8), 2)
        assert segment == stored.id
        assert score == RecomputeScore(0.5, 0.0, 0.4, 2, covered)
    assert recomputed(plan_of(lookup_of("XYB", stored), alpha=0.8)) == [9, 10], "from the start on"


def set_cache(path: str, *stored: str, inexact: tuple[str, ...] = ()) -> tuple[str, tuple[str | None, ...]]:
    """Fates, and of each reused part the path that it was computed at."""
    records = {name: record_of(name) for name in stored} | {name: record_of(name, exact=False) for name in inexact}
    names = {record.id: name for name, record in records.items()}
    plan = plan_of(lookup_of(path, *records.values()), "set-cache")
    assert not plan.passes[0].candidates, "nothing is recomputed"
    where = [part for part in plan.parts if part.part.id is not None]
    return sources(plan), tuple(names.get(part.segment) for part in where if part.kv_source is not KVSource.COMPUTED)


def test_set_cache_takes_the_longest_prefix_in_another_order():
    assert set_cache("ABC", "C", "CA", "CAB", "B") == ("RRR", ("CA", "CAB", "C"))
    assert set_cache("ABCD", "C", "CA") == ("RCRC", ("CA", "C"))


def test_set_cache_needs_every_link_exact_and_every_part_here():
    assert set_cache("AB", "B", "BX", "BXA") == ("CR", ("B",)), "X is not in this prompt"
    assert set_cache("ABC", "CA", "B") == ("CRC", ("B",)), "C before A is not stored"
    assert set_cache("ABC", "C", "CAB", "B", inexact=("CA",)) == ("CRC", ("B",)), "an inexact link"
    assert set_cache("AB") == ("CC", ())


def test_set_cache_goes_by_tokens():
    assert set_cache("bcA", "c", "cb", "A") == ("CCR", ("A",)), "four tokens against two"


def test_set_cache_takes_the_exact_prefix_as_such():
    assert set_cache("*AB", "*", "*A", "*AB") == ("EEE", ("*", "*A", "*AB"))
    assert set_cache("*AB", "*", "*B", "*BA") == ("ERR", ("*", "*BA", "*B"))
    assert set_cache("*ABC", "*", "*A", "*C", "*CB") == ("EERR", ("*", "*A", "*CB", "*C"))


def test_set_cache_with_a_chunk_twice():
    assert set_cache("BAA", "A", "AA") == ("CRR", ("A", "AA"))
    assert set_cache("BA", "A", "AA") == ("CR", ("A",)), "the prompt has A once"


# --- speed


def test_ten_chunks_with_five_variants_are_planned_at_once(monkeypatch):
    """Plan and check; the bar is 0.2 ms. The best of many runs gets five times that."""
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", 512)
    rng, names, stored = Random(0), "ABCDEFGHIJ", []
    for name in names * 5:
        context = "".join(rng.sample([other for other in f"{names}XYZ" if other != name], 9))
        inter, outward = (tuple(rng.uniform(1, 20) for _ in range(count)) for count in (9, 512))
        stored.append(record_of(context + name, inter, outward=outward, intra=rng.uniform(50, 200), exact=False))
    lookup = lookup_of(names, *stored, broken=True)
    method = make_method("cachecraft", ReuseConfig())
    plan = method.plan(lookup, GEOMETRY)
    assert plan.passes[0].candidate_tokens > 500
    for group, part in zip(plan.passes[0].candidates, plan.spans(KVSource.REUSED), strict=True):
        assert isinstance(group, Scattered)
        assert group.hull() == part, "its offsets were ranked within it, so that none need be looked at"
    times_s = []
    for _ in range(100):
        started_s = time.perf_counter()
        method.plan(lookup, GEOMETRY).validate(GEOMETRY.num_layers)
        times_s.append(time.perf_counter() - started_s)
    assert min(times_s) < 1e-3
