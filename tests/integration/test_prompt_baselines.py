"""MapReduce, MapRerank and compression on the bundled reader, against the engine asked the same thing step by step."""

import time
from dataclasses import replace
from math import ceil
from statistics import fmean

import pytest
import torch

from chunkweave.calibration.fidelity import answer_text
from chunkweave.calibration.prompts import Warmth
from chunkweave.engine.engine import Engine
from chunkweave.errors import UsageError
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave_lab.prompt_baselines import (
    MAP_INSTRUCTION,
    LikelyTokensDropped,
    MapReduce,
    MapRerank,
    log_probs_of_last_part,
    split_baselines,
)
from chunkweave_lab.quality import QualityConfig, measure_quality
from chunkweave_lab.summaries import summarize_quality
from chunkweave_lab.worlds.records import QuestionKind
from chunkweave_lab.worlds.world import world_examples

BASELINES = {"map-reduce": MapReduce(12), "map-rerank": MapRerank(), "compress": LikelyTokensDropped(0.5)}
EXAMPLES = world_examples(3, 3, seed=5, kinds=(QuestionKind.SINGLE,))
EXAMPLE = EXAMPLES[0]
MOST = 10


@pytest.fixture(scope="module")
def engine():
    with Engine.load("reader", dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt(engine):
    return engine.builder.build(EXAMPLE.question, EXAMPLE.chunks)


@pytest.fixture
def calls(engine, monkeypatch):
    """The prompts that are prefilled, in order."""
    seen: list[Prompt] = []
    start = engine.runner.start

    def noted(prompt, *options):
        seen.append(prompt)
        return start(prompt, *options)

    monkeypatch.setattr(engine.runner, "start", noted)
    return seen


def texts_of(engine, prompt):
    return [engine.loaded.tokenizer.decode(part.token_ids) for part in prompt.parts if part.kind is PartKind.CHUNK]


def asked(engine, chunks, **options):
    return engine.generate(EXAMPLE.question, chunks, method="full", max_new_tokens=MOST, **options).text.strip()


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("warm", [False, True])
def test_what_was_done_ahead_changes_no_answer(engine, prompt, name, warm):
    if warm:
        BASELINES[name].warm(engine, prompt)
    one, other = (BASELINES[name].answer(engine, prompt, MOST) for _ in range(2))
    assert one.text == other.text == answer_text(engine, one.token_ids)
    assert one.token_ids == other.token_ids
    assert one.final_prompt == other.final_prompt
    assert 0 < one.report.new_tokens <= MOST


def test_map_calls_see_their_own_chunk_and_reduce_sees_what_they_wrote(engine, prompt, calls):
    answer = MapReduce(12).answer(engine, prompt, MOST)
    *mapped, reduced = calls
    assert [texts_of(engine, call) for call in mapped] == [[text] for text in texts_of(engine, prompt)]
    assert all(call.parts[-1] == prompt.parts[-1] for call in calls)
    written = [
        engine.generate(
            EXAMPLE.question, [chunk], system=MAP_INSTRUCTION, method="full", max_new_tokens=12
        ).text.strip()
        for chunk in EXAMPLE.chunks
    ]
    assert any(written)
    assert reduced == answer.final_prompt
    assert [text.strip() for text in texts_of(engine, reduced)] == [text for text in written if text]
    assert answer.text == asked(engine, [text for text in written if text])


def test_map_calls_are_one_batch(engine, prompt, monkeypatch):
    steps = []
    step = engine.runner.step

    def noted(decoding, prefilling, **options):
        steps.append((len(decoding), len(prefilling)))
        return step(decoding, prefilling, **options)

    monkeypatch.setattr(engine.runner, "step", noted)
    MapReduce(3).answer(engine, prompt, 1)
    assert steps[0] == (0, len(EXAMPLE.chunks))
    assert steps[-1] == (0, 1)
    assert len(steps) <= 1 + 2 + 1


def test_rerank_gives_the_answer_that_the_model_is_surest_of(engine, prompt):
    answer = MapRerank().answer(engine, prompt, MOST)
    candidates = {}
    for chunk in EXAMPLE.chunks:
        one = engine.generate(EXAMPLE.question, [chunk], method="full", max_new_tokens=MOST)
        alone = engine.builder.build(EXAMPLE.question, [chunk]).token_ids
        stop = (answer.token_ids[-1],) if one.finish_reason == "stop" else ()
        ids = torch.tensor([[*alone, *one.token_ids, *stop]])
        with torch.inference_mode():
            logits = engine.loaded.model.model(input_ids=ids).logits[0, len(alone) - 1 : -1]
        likely = torch.log_softmax(logits, -1).gather(1, ids[0, len(alone) :, None]).mean().item()
        text = one.text.strip()
        candidates[text] = ("not stated" not in text, likely)
    assert len(candidates) > 1
    assert answer.text == max(candidates, key=candidates.get)
    assert len(texts_of(engine, answer.final_prompt)) == 1


def test_an_answer_that_is_not_stated_loses_however_sure_it_is(engine):
    answers = []
    for example in world_examples(12, 3, seed=8, kinds=(QuestionKind.SINGLE,)):
        given = engine.builder.build(example.question, example.chunks)
        alone = [MapRerank().answer(engine, _only(given, n), MOST).text for n in range(3)]
        answers.append((MapRerank().answer(engine, given, MOST).text, alone))
    assert any("not stated" in text for _, alone in answers for text in alone)
    assert all("not stated" not in text or all("not stated" in one for one in alone) for text, alone in answers)


def _only(prompt, number):
    chunks = [part for part in prompt.parts if part.kind is PartKind.CHUNK]
    return Prompt(tuple(part for part in prompt.parts if part not in chunks or part is chunks[number]))


def test_compression_leaves_the_tokens_that_were_expected_least(engine, prompt):
    answer = LikelyTokensDropped(0.4).answer(engine, prompt, MOST)
    *opening, _, chunk, _, question = prompt.parts
    left = [part.token_ids for part in answer.final_prompt.parts]
    assert left[: len(opening)] == [part.token_ids for part in opening]
    assert left[-1] == question.token_ids
    chunks = [part for part in prompt.parts if part.kind is PartKind.CHUNK]
    assert [len(kept) for kept in left[len(opening) : -1]] == [ceil(0.4 * len(part)) for part in chunks]
    expected = []
    for place in range(len(chunk)):  # our own layer loop, one token further each time
        so_far = (replace(chunk, token_ids=chunk.token_ids[:place]),) if place else ()
        logits = engine.runner.prefill(Prompt((*opening, *so_far)), make_method("full"), capture=False).logits
        expected.append(torch.log_softmax(logits, -1)[chunk.token_ids[place]].item())
    limit = sorted(expected[:-1])[ceil(0.4 * len(chunk)) - 2]
    least = [token for token, e in zip(chunk.token_ids[:-1], expected, strict=False) if e <= limit]
    assert left[-3] == (*least, chunk.token_ids[-1])
    found = log_probs_of_last_part(engine, Prompt((*opening, chunk)))
    assert found == pytest.approx(expected, abs=1e-3)
    assert answer.report.computed_tokens == len(answer.final_prompt)


def test_the_first_token_of_all_is_never_expected(engine):
    _, _, chunk, *_ = engine.builder.build("Who?", EXAMPLE.chunks).parts
    found = log_probs_of_last_part(engine, Prompt((chunk,)))
    assert len(found) == len(chunk)
    assert found[0] == -float("inf")
    assert max(found) <= 0.0


def test_nothing_dropped_is_full_prefill(engine, prompt):
    answer = LikelyTokensDropped(1.0).answer(engine, prompt, MOST)
    assert answer.final_prompt.token_ids == prompt.token_ids
    assert answer.text == asked(engine, EXAMPLE.chunks)
    assert answer.report.flops_limit == pytest.approx(1.0)


@pytest.mark.parametrize("name", BASELINES)
def test_everything_before_the_first_token_counts(engine, prompt, monkeypatch, name):
    """On a clock that goes by a second a run through the model, the times are numbers of runs."""
    now = 0.0
    forward = engine.loaded.model.model.forward
    step = engine.runner.step

    def one_second(run):
        def ticking(*arguments, **options):
            nonlocal now
            now += 1.0
            return run(*arguments, **options)

        return ticking

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(engine.runner, "step", one_second(step))
    monkeypatch.setattr(engine.loaded.model.model, "forward", one_second(forward))
    cold = {"map-reduce": MapReduce(4), "map-rerank": MapRerank(), "compress": LikelyTokensDropped(0.5)}[name]
    report = cold.answer(engine, prompt, MOST).report
    last = report.new_tokens - 1
    if name == "compress":
        assert report.ttft_s == len(EXAMPLE.chunks) + 1
        assert report.decode_s == last
        assert cold.answer(engine, prompt, MOST).report.ttft_s == 1
    elif name == "map-reduce":
        assert report.ttft_s == now - last
        assert report.decode_s == last
        assert report.ttft_s > 2
    else:
        assert report.ttft_s == now
        assert report.ttft_s > last


def test_the_tokens_of_every_call_count(engine, prompt):
    fresh = Engine(engine.loaded)
    *opening, one, two, three, question = map(len, prompt.parts)
    cold = MapRerank().answer(fresh, prompt, 1).report
    assert cold.computed_tokens == cold.prompt_tokens == 3 * (sum(opening) + question) + one + two + three
    MapRerank().warm(fresh, prompt)
    warm = MapRerank().answer(fresh, prompt, 1).report
    assert warm.computed_tokens == 3 * (opening[0] + question)  # BOS is never stored
    assert warm.prompt_tokens == cold.prompt_tokens
    assert warm.flops_limit > cold.flops_limit > 0.5
    longer = MapRerank().answer(fresh, prompt, MOST).report
    assert longer.computed_tokens > warm.computed_tokens
    MapReduce(1).warm(fresh, prompt)
    reduced = MapReduce(1).answer(fresh, prompt, 1)
    summaries = sum(len(part) for part in reduced.final_prompt.parts if part.kind is PartKind.CHUNK)
    assert reduced.report.computed_tokens == 4 * (opening[0] + question) + summaries


def test_no_reuse_method_finds_what_they_store(engine):
    given = engine.builder.build(EXAMPLES[2].question, EXAMPLES[2].chunks)
    for baseline in BASELINES.values():
        baseline.warm(engine, given)
    assert not any(entry.variants for entry in engine.store.lookup(given).parts if entry.part.kind is PartKind.CHUNK)


def test_what_is_no_question_over_chunks_is_refused(engine, prompt):
    for parts in (prompt.parts[:-1], (*prompt.parts[:2], prompt.parts[-1])):
        for baseline in BASELINES.values():
            with pytest.raises(UsageError, match="one question over chunks"):
                baseline.answer(engine, Prompt(tuple(parts)), MOST)


def test_they_stand_beside_the_methods_of_a_benchmark(engine):
    config = QualityConfig(("epic", "map-reduce", "map-rerank", "compress@0.5"), max_new_tokens=MOST)
    samples = list(measure_quality(engine, EXAMPLES[:2], config))
    rows = {row.method: row for row in summarize_quality(samples)}
    assert list(rows) == ["full", "full-reuse", "epic@0.15", "map-reduce", "map-rerank", "compress@0.5"]
    for label in ("map-reduce", "map-rerank", "compress@0.5"):
        assert rows[label].recompute_fraction is None
        assert rows[label].ttft_s > 0.0
        own = [sample for sample in samples if sample.contender == label]
        assert rows[label].f1 == pytest.approx(fmean(sample.scores["f1"] for sample in own))
    earlier = list(measure_quality(engine, EXAMPLES, replace(config, warm=Warmth.parse("queries:2"))))
    assert {sample.question for sample in earlier} == {0}
    assert len(earlier) == 6


def test_names_and_values():
    methods, baselines = split_baselines(
        ("full", "map-reduce", "map-reduce@8", "map-rerank", "compress", "compress@0.5", "query:last@0.1"), (0.05, 0.3)
    )
    assert methods == ("full", "query:last@0.1")
    assert list(baselines) == [
        "map-reduce",
        "map-reduce@8",
        "map-rerank",
        "compress@0.05",
        "compress@0.3",
        "compress@0.5",
    ]
    assert baselines["map-reduce@8"] == MapReduce(8)
    assert baselines["compress@0.3"].share == 0.3
    assert [name for name, one in baselines.items() if one.follows_full] == list(baselines)[3:]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("map-rerank@2", "write map-rerank instead"),
        ("map-reduce@1.5", "not a number of tokens"),
        ("map-reduce@nan", "not a number of tokens"),
        ("map-reduce@0", "must be at least 1"),
        ("compress@0", "above 0"),
        ("compress@1.2", "at most 1"),
        ("compress@nan", "above 0"),
        ("compress@", "not a number"),
    ],
)
def test_values_that_mean_nothing_are_refused(spec, said):
    with pytest.raises(UsageError, match=said):
        split_baselines((spec,))
