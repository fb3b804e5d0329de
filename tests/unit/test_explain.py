"""A plan explained as data, and shown as a table."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from chunkweave.cli.ask import explanation, variant_words
from chunkweave.metrics import ReuseReport
from chunkweave.planning.outcome import PartExplanation, Stop, describe_pass, explain_plan
from chunkweave.planning.plan import KeepTop, KVSource, PartPlan, Pass, Plan, RecomputeScore, StopUnfocused
from chunkweave.prompt.parts import PartKind, PromptPart, chunk_id
from chunkweave.store.records import AttentionProfile, SegmentRecord
from chunkweave.types import ChunkId, Span

REPORT = ReuseReport(
    method="cachecraft",
    prompt_tokens=49,
    prefix_exact_tokens=10,
    reused_tokens=20,
    recomputed_tokens=10,
    computed_tokens=9,
    recompute_fraction=0.25,
    queue_s=0.0,
    weave_s=0.1,
    ttft_s=0.1,
    decode_s=0.0,
    new_tokens=3,
    prefill_flops=1.0,
    full_prefill_flops=2.0,
    why="calibrated",
    parameters={"alpha": 0.5},
)


def chunk(source: str, tokens: int, kind: PartKind = PartKind.CHUNK) -> PromptPart:
    ids = tuple(sum(map(ord, source)) + i for i in range(tokens))
    return PromptPart(kind, ids, chunk_id("f", "", ids), source)


SYSTEM, TIDES, STORMS, BOATS = (
    chunk("", 10, PartKind.SYSTEM),
    chunk("tides", 12),
    chunk("storms", 8),
    chunk("boats", 10),
)
QUESTION = PromptPart(PartKind.QUESTION, (7,) * 9)


def record_of(part: PromptPart, *before: PromptPart, gone: str = "", attention=None) -> SegmentRecord:
    context = (*(one.id for one in before), *([ChunkId(gone)] if gone else []))
    return SegmentRecord.of(part.id, context, part.token_ids, exact=True, nbytes=1, attention=attention)


RECORDS = {
    record.id: record
    for record in (
        record_of(SYSTEM),
        record_of(TIDES, SYSTEM, STORMS, gone="0123456789abcdef" * 2),
        record_of(STORMS),
        record_of(BOATS, SYSTEM, TIDES),
    )
}
BY_CHUNK = {record.chunk_id: record.id for record in RECORDS.values()}


def make_plan(*, rules=()) -> Plan:
    """System exact; tides, storms and boats reused, of which 3, 1 and 2 tokens are candidates."""
    parts, start = [], 0
    for part, kv_source, score in (
        (SYSTEM, KVSource.EXACT, None),
        (TIDES, KVSource.REUSED, RecomputeScore(0.75, 0.5, 0.25, 3)),
        (STORMS, KVSource.REUSED, RecomputeScore(0.5, 1.0, 0.0, 0)),
        (BOATS, KVSource.REUSED, None),
        (QUESTION, KVSource.COMPUTED, None),
    ):
        span = Span(start, start + len(part))
        parts.append(PartPlan(part, span, kv_source, BY_CHUNK.get(part.id), score))
        start = span.stop
    candidates = (Span(10, 13), Span(29, 31), Span(32, 33))
    return Plan("cachecraft", tuple(parts), (Pass((Span(40, 49),), candidates, rules),))


FIXED = (Span(10, 13), Span(29, 31))


def explained(recomputed=FIXED, stop=None, records=RECORDS, rules=()):
    return explain_plan(make_plan(rules=rules), num_layers=8, recomputed=recomputed, records=records, stop=stop)


def explained_with_tides(record: SegmentRecord):
    """The explanation of the plan with another record for tides."""
    plan = make_plan()
    parts = tuple(replace(one, segment=record.id) if one.part is TIDES else one for one in plan.parts)
    return explain_plan(replace(plan, parts=parts), num_layers=8, recomputed=(), records={record.id: record})


def rendered(renderable) -> str:
    console = Console(width=150, record=True, file=None, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(renderable)
    return capture.get()


def test_each_part_says_what_was_taken_why_and_what_was_computed_again():
    system, tides, storms, boats, question = explained().parts
    assert (system.kv_source, system.context, system.alone, system.recomputed) == (KVSource.EXACT, (), True, ())
    assert (tides.start, tides.tokens, tides.context) == (10, 12, ("storms", "01234567"))
    assert (tides.cci, tides.overlap, tides.cfo, tides.recomputed_tokens) == (0.75, 0.5, 0.25, 3)
    assert tides.recomputed == (Span(0, 3),)
    assert (storms.context, storms.alone, storms.cfo, storms.recomputed) == ((), True, 0.0, (Span(7, 8),))
    assert not tides.alone
    assert (boats.context, boats.cci, boats.recomputed) == (("tides",), None, (Span(0, 1),))
    assert (question.kv_source, question.variant, question.context) == (KVSource.COMPUTED, None, None)


def test_spans_that_cross_parts_are_cut_at_their_edges():
    _, tides, storms, boats, _ = explained(recomputed=(Span(21, 31),)).parts
    assert (tides.recomputed, storms.recomputed, boats.recomputed) == ((Span(11, 12),), (Span(0, 8),), (Span(0, 1),))


def test_what_was_stopped_is_told_from_what_was_finished():
    stop = Stop(5, (Span(10, 22),), (Span(30, 31), Span(32, 33)))
    _, tides, _, boats, _ = explained(recomputed=(Span(10, 13),), stop=stop).parts
    assert (tides.partly, tides.stopped_at_layer) == ((), None)
    assert (boats.recomputed, boats.partly, boats.stopped_at_layer) == ((), (Span(0, 1), Span(2, 3)), 5)


def test_a_segment_that_left_the_store_has_an_unknown_context():
    _, tides, *_ = explained(records={}).parts
    assert tides.context is None
    assert variant_words(tides) == tides.variant[:8]


def test_a_profile_names_the_chunks_and_leaves_out_what_is_none():
    other = chunk("", 5, PartKind.SYSTEM)
    profile = AttentionProfile((STORMS.id,), (8,), (0.5,), 1.0, 0.1, (0.1,) * 12)
    record = record_of(TIDES, other, STORMS, attention=profile)
    made = explained_with_tides(record)
    assert made.parts[1].context == ("storms",)


def test_a_mean_names_the_chunks_of_all_its_contexts():
    """Once each, also if they were in several; what this prompt lacks has the start of its id."""
    contexts = [(SYSTEM.id, STORMS.id), (SYSTEM.id, BOATS.id, STORMS.id), (ChunkId("0123456789abcdef" * 2),)]
    record = record_of(TIDES).mean_over(contexts, nbytes=1, attention=None, read=())
    made = explained_with_tides(record)
    tides = made.parts[1]
    assert (tides.contexts, set(tides.context)) == (3, {"storms", "boats", "01234567"})
    assert variant_words(tides).startswith(f"{record.id[:8]} mean over 3 contexts of 3 chunks (")
    assert made.parts[2].contexts == 0


def test_passes_in_words():
    rules = (KeepTop(1, 3), StopUnfocused((Span(10, 22), Span(22, 30), Span(30, 40)), Span(40, 49), 3))
    assert describe_pass(Pass((Span(40, 49),))) == "9 tokens at every layer"
    assert describe_pass(make_plan(rules=rules).passes[0]) == (
        "9 tokens at every layer; 6 more from layer 0 on; of these the 3 with the most kv deviation from layer 1 on; "
        "only focused chunks continue once 3 layers agree which they are"
    )


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (PartExplanation(PartKind.QUESTION, "question", 0, 3, KVSource.COMPUTED), "-"),
        (PartExplanation(PartKind.CHUNK, "a", 0, 3, KVSource.REUSED, "ab" * 16, (), True), "abababab alone"),
        (PartExplanation(PartKind.CHUNK, "a", 0, 3, KVSource.EXACT, "ab" * 16, ()), "abababab as first chunk"),
        (
            PartExplanation(PartKind.CHUNK, "a", 0, 3, KVSource.REUSED, "ab" * 16, ("b",)),
            "abababab in context of 1 chunk (b)",
        ),
    ],
)
def test_variants_in_words(part, words):
    assert variant_words(part) == words


def test_the_whole_plan_on_a_screen():
    stop = Stop(5, (Span(10, 22),), (Span(30, 31), Span(32, 33)))
    shown = rendered(explanation(explained(recomputed=(Span(10, 13),), stop=stop), REPORT))
    for said in (
        "cachecraft (calibrated): 49 tokens: 10 prefix-exact, 20 reused, 10 recomputed, 9 computed\nalpha 0.5\n",
        "in context of 2 chunks (storms, 01234567)",
        "0.75",
        "0 + 2 below layer 5",
        "pass 1 of 1: 9 tokens at every layer; 6 more from layer 0 on",
        "stopped at layer 5 of 8; focused: tides",
        "0.250",
        "first token after",
    ):
        assert said in shown


def test_source_names_are_no_markup():
    part = PartExplanation(
        PartKind.CHUNK, "[red]x[/red]", 0, 3, KVSource.REUSED, "ab" * 16, ("[b]",), recomputed=(Span(0, 1),)
    )
    shown = rendered(explanation(replace(explained(), parts=(part,)), REPORT))
    assert shown.count("[red]x[/red]") == 1
    assert "([b])" in shown


def test_as_data_it_is_json():
    stop = Stop(5, (Span(10, 22),), (Span(30, 31),))
    data = json.loads(json.dumps(explained(recomputed=(Span(10, 13),), stop=stop).as_dict()))
    assert data["method"] == "cachecraft"
    assert data["stop"]["layer"] == 5
    assert data["parts"][1]["recomputed"] == [{"start": 0, "stop": 3}]
    assert data["parts"][1]["kv_source"] == "reused"
    assert data["parts"][3]["partly"] == [{"start": 0, "stop": 1}]
