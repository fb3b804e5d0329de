"""Traces from files and from generators."""

import json
from collections import Counter

import pytest

from chunkweave.calibration.questions import Example
from chunkweave.errors import DocumentError, UsageError
from chunkweave.types import Chunk
from chunkweave_lab.simulator.trace import Arrival, Part, build_trace, poisson_times, read_trace
from chunkweave_lab.simulator.workloads import (
    Corpus,
    SourceConfig,
    ask_again,
    draw_requests,
    exponent_for,
    mmlu_like,
    open_source,
)


def _write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_mooncake_lines_become_chains_of_blocks(tmp_path):
    path = _write(
        tmp_path,
        {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]},
        "",
        {"timestamp": 0, "input_length": 28, "output_length": 3, "hash_ids": [9]},
    )
    arrivals = read_trace(path)
    assert arrivals[0] == Arrival(1.5, (Part("7", 512), Part("8", 512)))
    trace = build_trace("t", arrivals, bytes_per_token=10)
    assert [request.arrival_s for request in trace.requests] == [0.0, 1.5]
    last = trace.requests[1].path[1]
    assert (last.context, last.nbytes, len(last)) == (("7",), 5120, 512)
    assert trace.equal_sizes
    assert trace.working_set_bytes == 3 * 5120


def test_our_own_lines_have_a_system_part_and_a_question(tmp_path):
    path = _write(
        tmp_path,
        {
            "arrival_s": 0.5,
            "system": {"id": "s", "tokens": 9},
            "chunks": [{"id": "é", "tokens": 4}],
            "question_tokens": 3,
        },
        {"arrival_s": 1, "chunks": [{"id": "é", "tokens": 4}]},
    )
    first, second = build_trace("t", read_trace(path), 1).requests
    assert [len(record) for record in first.path] == [9, 4]
    assert first.documents == first.path[1:]
    assert first.prompt_tokens == 16
    assert second.documents == second.path
    assert first.path[1].chunk_id == second.path[0].chunk_id
    assert first.path[1].id != second.path[0].id


GOOD = {"arrival_s": 0, "chunks": [{"id": "a", "tokens": 4}]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not an object but list"),
        ({"arrival_s": 0}, "no 'chunks'"),
        ({"chunks": GOOD["chunks"]}, "no 'arrival_s'"),
        ({**GOOD, "arrival_s": -1}, "'arrival_s' is not a number of at least 0: -1"),
        ({**GOOD, "arrival_s": True}, "'arrival_s' is not a number"),
        ({**GOOD, "chunks": []}, "'chunks' is not a non-empty list"),
        ({**GOOD, "chunks": ["a"]}, "chunk 0 is not an object but str"),
        ({**GOOD, "chunks": [{"id": "a", "tokens": 0}]}, "chunk 0 has no tokens"),
        ({**GOOD, "chunks": [{"id": "a", "tokens": 1.5}]}, "'tokens' is not a whole number: 1.5"),
        ({**GOOD, "chunks": [{"tokens": 1}]}, "no 'id'"),
        ({**GOOD, "system": 3}, "system is not an object but int"),
        ({**GOOD, "question_tokens": "x"}, "'question_tokens' is not a number"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_reason(tmp_path, line, reason):
    path = _write(tmp_path, GOOD, line)
    with pytest.raises(DocumentError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)


def test_files_that_are_no_traces(tmp_path):
    with pytest.raises(DocumentError, match="has no request"):
        read_trace(_write(tmp_path, ""))
    with pytest.raises(DocumentError, match="cannot read the trace"):
        read_trace(tmp_path / "absent.jsonl")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe{")
    with pytest.raises(DocumentError, match="not UTF-8"):
        read_trace(binary)


def test_three_percent_of_the_documents_get_sixty_percent_of_the_requests():
    corpus = mmlu_like(2000, top_k=1)
    arrivals = draw_requests(corpus, poisson_times(20_000, 1.0, 0), seed=1)
    asked = Counter(arrival.parts[1].name for arrival in arrivals)
    top = sum(count for _, count in asked.most_common(60))
    assert top / 20_000 == pytest.approx(0.6, abs=0.02)


def test_a_document_has_one_length_and_a_request_no_document_twice():
    arrivals = draw_requests(Corpus(50, 1.0, 3), poisson_times(500, 1.0, 0), seed=1)
    lengths: dict[str, int] = {}
    for arrival in arrivals:
        names = [part.name for part in arrival.parts]
        assert len(set(names)) == len(names) == 4
        for part in arrival.parts:
            assert lengths.setdefault(part.name, part.tokens) == part.tokens
    assert arrivals == draw_requests(Corpus(50, 1.0, 3), poisson_times(500, 1.0, 0), seed=1)


def test_popularity_drifts_if_it_is_to():
    def favourites(drift):
        arrivals = draw_requests(Corpus(200, 1.5, 1, drift=drift), poisson_times(6000, 1.0, 0), seed=1)
        return {
            Counter(one.parts[1].name for one in arrivals[start : start + 1000]).most_common(1)[0][0]
            for start in range(0, 6000, 1000)
        }

    assert len(favourites(0.0)) == 1
    assert len(favourites(1.0)) > 3
    with pytest.raises(UsageError, match="drift must be from 0 to 1"):
        Corpus(drift=2.0)


def test_a_skew_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="cannot get"):
        exponent_for(100, 0.5, 0.3)
    with pytest.raises(UsageError, match="needs as many documents"):
        Corpus(5, 1.0, top_k=7)
    with pytest.raises(UsageError, match="must not be negative"):
        Corpus(exponent=-1.0)


def test_questions_recur_with_mostly_the_same_passages_first():
    chunks = [tuple(Chunk(f"{q}-{rank} word") for rank in range(10)) for q in range(5)]
    examples = [Example(f"question {q}", chunks[q], ()) for q in range(5)]
    arrivals = ask_again(
        examples, lambda text: len(text.split()), poisson_times(2000, 1.0, 0), top_k=3, exponent=1.0, seed=0
    )
    first = Counter(arrival.parts[1].name[2] for arrival in arrivals)
    assert first.most_common(1)[0][0] == "0"
    assert 1000 < first["0"] < 2000, "ranked first mostly, not always"
    assert {part.tokens for arrival in arrivals for part in arrival.parts[1:]} == {2}
    with pytest.raises(UsageError, match="top-k 11"):
        ask_again(examples, len, [0.0], top_k=11, exponent=1.0, seed=0)


def test_a_source_is_a_name_or_a_file(tmp_path):
    path = _write(tmp_path, GOOD, {**GOOD, "arrival_s": 5})
    assert [arrival.arrival_s for arrival in open_source(str(path), SourceConfig())] == [0.0, 5.0]
    assert len(open_source(str(path), SourceConfig(requests=1))) == 1
    moved = open_source(str(path), SourceConfig(rate_per_s=10.0))
    assert 0 < moved[0].arrival_s < moved[1].arrival_s < 5
    assert len(open_source("zipf", SourceConfig(requests=7, documents=20))) == 7
    for config in (SourceConfig(top_k=2), SourceConfig(exponent=1.0)):
        with pytest.raises(UsageError, match="a trace file defines its requests"):
            open_source(str(path), config)
    with pytest.raises(UsageError, match="a fixed skew"):
        open_source("mmlu-like", SourceConfig(exponent=2.0))
    with pytest.raises(UsageError, match="positive rate"):
        SourceConfig(rate_per_s=0.0)


def test_a_data_set_is_counted_with_the_bundled_tokenizer(tmp_path):
    path = tmp_path / "set.json"
    path.write_text(
        json.dumps([{"question": "Who?", "answers": [], "ctxs": [{"title": "T", "text": "some words here"}] * 6}])
    )
    arrivals = open_source(str(path), SourceConfig(requests=3))
    assert len(arrivals) == 3
    assert all(2 < part.tokens < 20 for arrival in arrivals for part in arrival.parts[1:])
