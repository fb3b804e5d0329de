"""Overlap and savings over request sequences, against brute force and the example of CRAFT §3.1."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.errors import UsageError
from chunkweave_lab.chunk_order import (
    Overlap,
    ReplayConfig,
    overlap_of,
    read_requests,
    repeated_across_turns,
    replay,
    saving_bound,
)
from chunkweave_lab.simulator.trace import Arrival, Part

SYSTEM = Part("s", 9)
sequences = st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True), min_size=1, max_size=12)


def arrivals_of(requests, *, system: bool = True) -> list[Arrival]:
    return [
        Arrival(float(n), (*([SYSTEM] if system else ()), *(Part(one, 10 + ord(one)) for one in request)), 5, system)
        for n, request in enumerate(requests)
    ]


def common_prefix(one, other) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(sequences)
def test_overlap_is_what_the_formulas_say(requests):
    prefix, total, seen = [], [], []
    for i in range(1, len(requests)):
        own = requests[i]
        prefix.append(max(common_prefix(own, requests[j]) for j in range(i)) / len(own))
        total.append(max(len({*own} & {*requests[j]}) for j in range(i)) / len(own))
        seen.append(len({*own} & {one for j in range(i) for one in requests[j]}) / len(own))
    found = overlap_of(requests)
    means = [sum(shares) / len(shares) if shares else 0.0 for shares in (prefix, total, seen)]
    assert [found.prefix, found.total, found.seen] == pytest.approx(means)


def test_the_example_of_section_3_1():
    assert overlap_of([["C1", "C4", "C5", "C6", "C7"], ["C1", "C2", "C3", "C4", "C5"]]) == Overlap(0.2, 0.6, 0.6)


def test_repeats_across_turns():
    """CRAFT §3.2: [C1..C5], then [C1, C3, C6, C7, C8] in one conversation; another one in between."""
    turns = [("c", [1, 2, 3, 4, 5]), ("other", [1, 3, 6, 7, 8]), ("c", [1, 3, 6, 7, 8]), ("", [1]), ("", [1])]
    assert repeated_across_turns(turns) == pytest.approx(2 / 5)
    assert repeated_across_turns([("c", [1]), ("d", [1]), ("", [1])]) is None


@given(sequences, st.booleans())
def test_the_original_order_saves_what_prefix_caching_saves(requests, system):
    saved = 0
    for i, own in enumerate(requests):
        longest = max((common_prefix(own, requests[j]) for j in range(i)), default=0)
        saved += sum(10 + ord(one) for one in own[:longest])
    found = replay(arrivals_of(requests, system=system), "original")
    assert found.saved_tokens == saved
    assert found.document_tokens == sum(10 + ord(one) for own in requests for one in own)


@given(sequences)
def test_no_order_exceeds_the_bound(requests):
    arrivals = arrivals_of(requests)
    bound = saving_bound(arrivals)
    for name in ("original", "frequency"):
        assert replay(arrivals, name).saved_tokens <= bound
    brute = sum(
        max((sum(10 + ord(one) for one in {*own} & {*requests[j]}) for j in range(i)), default=0)
        for i, own in enumerate(requests)
    )
    assert bound == brute


def test_a_threshold_delays_what_is_stored():
    arrivals = arrivals_of(["ab"] * 4)
    hits = [replay(arrivals, "frequency", ReplayConfig(promotion_threshold=n)).hit_chunks for n in (1, 2, 3)]
    assert hits == [6, 4, 2]


def test_requests_come_from_every_format(tmp_path):
    own = tmp_path / "own.jsonl"
    lines = [
        {"arrival_s": 2, "chunks": [{"id": "a", "tokens": 3}], "conversation_id": "c"},
        {"arrival_s": 1, "system": {"id": "s", "tokens": 9}, "chunks": [{"id": n, "tokens": 4} for n in "abc"]},
    ]
    own.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    kind, requests = read_requests(own, top_k=2)
    assert kind == "request trace"
    assert [[part.name for part in one.documents] for one in requests] == [["a", "b"], ["a"]]
    assert requests[1].conversation == "c"

    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text('{"timestamp": 5, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}')
    assert read_requests(mooncake)[0] == "Mooncake trace"

    musique = tmp_path / "musique.json"
    entry = {
        "question": "Who?",
        "answers": ["x"],
        "ctxs": [{"title": "T", "text": "A b."}, {"title": "", "text": "C."}],
    }
    musique.write_text(json.dumps([entry, entry]), encoding="utf-8")
    kind, requests = read_requests(musique)
    assert (kind, [len(one.documents) for one in requests]) == ("data set", [2, 2])
    assert all(part.tokens > 0 for part in requests[0].parts)

    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "Who?", "chunks": ["one", "two"]}), encoding="utf-8")
    assert len(read_requests(questions)[1][0].documents) == 2
    with pytest.raises(UsageError, match="at least 1"):
        read_requests(own, top_k=0)
