"""The public engine on a toy model: answers, streams, batches, precomputation, and refusals."""

import logging
from math import ceil

import pytest
import torch

from chunkweave import Chunk, Engine, Request, ReuseConfig, SamplingParams, StoreConfig
from chunkweave.config import CaptureConfig, Choice
from chunkweave.errors import PromptTooLongError, UnknownMethodError, UsageError
from chunkweave.planning.calibration import BOUNDS, CalibrationRecord, CurvePoint, choose_target
from chunkweave.planning.cost import CostModel
from tests.integration.test_batching_core import CHUNKS as ALL_CHUNKS
from tests.toys import toy_model

CHUNKS = ALL_CHUNKS[:3]
QUESTION = "When does the ferry leave?"


@pytest.fixture
def engine(model) -> Engine:
    return Engine(model)


def test_the_default_is_exact_prefix_reuse(engine):
    first = engine.generate(QUESTION, CHUNKS, max_new_tokens=6)
    second = engine.generate(QUESTION, CHUNKS, max_new_tokens=6)
    assert second.token_ids == first.token_ids
    assert first.report.method == second.report.method == "prefix"
    assert first.report.prefix_exact_tokens == 0
    assert second.report.computed_tokens < 20
    assert [chunk.source for chunk in second.report.chunks] == ["system", "history", "pilots", "ferry"]
    engine.store.check()


def test_greedy_answers_are_deterministic_and_equal_the_models_own(engine):
    answer = engine.generate(QUESTION, CHUNKS, max_new_tokens=10, method="full")
    prompt = engine.builder.build(QUESTION, CHUNKS)
    with torch.inference_mode():
        own = engine.loaded.model.model.generate(
            torch.tensor([prompt.token_ids]), max_new_tokens=10, do_sample=False, pad_token_id=2
        )
    new = own[0, len(prompt) :].tolist()
    assert list(answer.token_ids) == [token for token in new if token not in engine.loaded.tokenizer.stop_ids]


def test_a_stream_gives_the_same_answer_in_pieces(engine):
    request = Request(QUESTION, CHUNKS, sampling=SamplingParams(max_new_tokens=12))
    events = list(engine.stream(request))
    whole = engine.generate(QUESTION, CHUNKS, max_new_tokens=12)
    assert "".join(event.text for event in events) == whole.text == events[-1].answer.text
    assert [event.answer is None for event in events] == [True] * (len(events) - 1) + [False]


def test_a_stream_left_early_keeps_what_was_computed(engine):
    stream = engine.stream(Request(QUESTION, CHUNKS))
    next(stream)
    stream.close()
    engine.store.check()
    assert engine.generate(QUESTION, CHUNKS, max_new_tokens=2).report.prefix_exact_tokens > 0


def test_a_later_request_of_a_batch_reuses_what_an_earlier_one_computed(engine):
    request = Request(QUESTION, CHUNKS, sampling=SamplingParams(max_new_tokens=1))
    assert engine.generate_batch([]) == []
    first, second = engine.generate_batch([request, request])
    assert first.report.prefix_exact_tokens == 0
    assert second.report.prefix_exact_tokens > 0
    assert second.report.ttft_s > second.report.queue_s > 0


def test_precompute_is_resumable_and_counts_what_it_did(engine):
    seen = []
    assert engine.precompute(CHUNKS[:2]) == 2
    assert engine.precompute(CHUNKS, progress=lambda done, total: seen.append((done, total))) == 1
    assert seen == [(1, 3), (2, 3), (3, 3)]
    report = engine.generate(QUESTION, CHUNKS, method="full-reuse", max_new_tokens=1).report
    assert report.reused_tokens == sum(chunk.tokens for chunk in report.chunks[1:])


def test_salts_are_apart(engine):
    engine.generate(QUESTION, CHUNKS, cache_salt="tenant-a", max_new_tokens=1)
    report = engine.generate(QUESTION, CHUNKS, cache_salt="tenant-b", method="full-reuse", max_new_tokens=1).report
    assert report.prefix_exact_tokens == report.reused_tokens == 0


def test_sampling_follows_its_seed(engine):
    def sample(seed):
        return engine.generate(QUESTION, CHUNKS, temperature=1.5, seed=seed, max_new_tokens=12).token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_stop_text_ends_the_answer_before_it(engine):
    free = engine.generate(QUESTION, CHUNKS, max_new_tokens=24)
    stop = free.text[4:7]
    stopped = engine.generate(QUESTION, CHUNKS, max_new_tokens=24, stop=[stop])
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_an_answer_ends_where_the_context_does(model):
    engine = Engine(model)
    words = " ".join(["tide"] * 220)
    answer = engine.generate(QUESTION, [words], max_new_tokens=500)
    assert answer.finish_reason == "length"
    assert answer.report.prompt_tokens + answer.report.new_tokens <= 512


def test_the_store_keeps_its_budget(model):
    engine = Engine(model, store=StoreConfig(host_budget_bytes=50_000))
    for i in range(12):
        engine.generate(QUESTION, [f"Note {i}: {text.text}" for i, text in enumerate(CHUNKS, i)], max_new_tokens=1)
        assert engine.store.used_bytes <= 50_000
    assert engine.store.stats.evictions > 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"question": "  "}, UsageError, "question"),
        ({"chunks": ["fine", " "]}, UsageError, "chunk"),
        ({"method": "magic"}, UnknownMethodError, "magic.*there are: cacheblend, cachecraft"),
        ({"quality": "best"}, UsageError, "best.*there are: exact, balanced, fast"),
        ({"quality": "fast"}, UsageError, "chunkweave calibrate --shape toy-llama"),
        ({"quality": "exact", "method": "cacheblend"}, UsageError, "both given"),
        ({"quality": "fast", "method": "cacheblend"}, UsageError, "both given"),
        (
            {"method": "cachecraft:ratio=0.5"},
            UsageError,
            "unknown setting 'ratio=0.5' of cachecraft",
        ),
        ({"method": "epic:ratio=1.5"}, UsageError, "between 0 and 1, not 1.5"),
        ({"method": "epic:ratio=nan"}, UsageError, "between 0 and 1"),
        ({"max_new_tokens": 0}, UsageError, "at least 1"),
        ({"temperature": -1.0}, UsageError, "temperature"),
        ({"top_p": 0.0}, UsageError, "top_p"),
        ({"stop": [""]}, UsageError, "stop"),
        ({"chunks": ["word " * 600]}, PromptTooLongError, "context is 512"),
    ],
)
def test_bad_input_is_refused_and_loses_nothing(engine, arguments, error, message):
    engine.precompute(CHUNKS)
    before = engine.store.stats.segments
    with pytest.raises(error, match=message):
        engine.generate(**{"question": QUESTION, "chunks": CHUNKS, **arguments})
    assert engine.store.stats.segments == before
    engine.store.check()


def test_a_chunk_that_cannot_be_precomputed_is_named(engine):
    with pytest.raises(PromptTooLongError, match="big"):
        engine.precompute([Chunk("word " * 600, "big")])


def test_an_unknown_method_or_policy_is_refused_at_once(model):
    with pytest.raises(UnknownMethodError, match="magic"):
        Engine(model, method="magic")
    with pytest.raises(UnknownMethodError, match="clairvoyant"):
        Engine(model, store=StoreConfig(policy="clairvoyant"))


def test_check_layers_come_from_the_engines_configuration(model):
    engine = Engine(model, method="cacheblend", reuse=ReuseConfig(0.4, check_layers=(1, 2)))
    engine.precompute(CHUNKS)
    report = engine.generate(QUESTION, CHUNKS, max_new_tokens=1).report
    assert report.method == "cacheblend"
    assert 0.4 < report.recompute_fraction < 0.8


def calibration(model, method: str, value: float) -> CalibrationRecord:
    """A record by which `method` at `value` is as full prefill, and at half of it close enough to be fast."""
    points = [
        CurvePoint(method, v, "alone", *[kl] * 3, *[agreement] * 3, *[2.0] * 3, v)
        for v, agreement, kl in ((value / 2, 0.92, 0.08), (value, 1.0, 0.0))
    ]
    return CalibrationRecord(
        fingerprint=model.fingerprint,
        model=model.name,
        dtype="float32",
        dataset="hand-made",
        dataset_digest="",
        questions=1,
        chunks=1,
        prompt_tokens=1.0,
        new_tokens=1,
        seed=0,
        references=(),
        points=tuple(points),
        targets={quality: choose_target(points, bounds) for quality, bounds in BOUNDS.items()},
    )


def test_reports_say_which_method_answered_how_it_was_set_and_why(model):
    reuse = ReuseConfig(choice=Choice.FIXED)
    engine = Engine(model, calibration=calibration(model, "epic", 0.5), reuse=reuse)
    engine.precompute(CHUNKS)
    request = Request(QUESTION, CHUNKS, sampling=SamplingParams(max_new_tokens=1))

    def told(report):
        return report.method, report.why, dict(report.parameters)

    method_requests = {
        (): ("epic", "calibrated", {"recompute_ratio": 0.5}),
        (("quality", "fast"),): ("epic", "calibrated", {"recompute_ratio": 0.25}),
        (("quality", "exact"),): ("prefix", "exact", {}),
        (("method", "cacheblend"),): ("cacheblend", "asked for", {"recompute_ratio": 0.15, "check_layers": [1]}),
        (("method", "full"),): ("full", "asked for", {}),
    }
    for method_request, expected in method_requests.items():
        assert told(engine.generate(QUESTION, CHUNKS, max_new_tokens=1, **dict(method_request)).report) == expected
        assert told(engine.generate_batch([request], **dict(method_request))[0].report) == expected
        assert told(list(engine.stream(request, **dict(method_request)))[-1].answer.report) == expected


def test_an_engine_keeps_the_quality_it_was_made_with(model):
    record = calibration(model, "cacheblend", 0.4)
    fast = Engine(model, quality="fast", calibration=record)
    assert fast.generate(QUESTION, CHUNKS, max_new_tokens=1).report.parameters == {
        "recompute_ratio": 0.2,
        "check_layers": [1],
    }
    exact = Engine(model, quality="exact", calibration=record)
    assert exact.generate(QUESTION, CHUNKS, max_new_tokens=1).report.method == "prefix"
    with pytest.raises(UsageError, match="needs a calibration record"):
        Engine(model, quality="balanced")
    with pytest.raises(UsageError, match="unknown quality"):
        Engine.load_shape("demo", quality="good")


@pytest.mark.parametrize(
    ("method", "parameter", "asked"), [("epic", "recompute_ratio", 0.1), ("cachecraft", "alpha", 0.2)]
)
def test_reports_say_to_what_the_loading_controller_raised_a_budget(model, method, parameter, asked):
    """A token loads in a quarter of the time that it is computed in, and what is prefix-exact is loaded too."""
    no_variants = CaptureConfig(variant_fraction=None)
    engine = Engine(model, reuse=ReuseConfig(focus=False, capture=no_variants, **{parameter: asked}))
    engine.precompute(CHUNKS)
    ask = {"question": QUESTION, "chunks": CHUNKS[::-1], "method": method, "max_new_tokens": 1}
    plain = engine.generate(**ask).report
    assert plain.parameters == {parameter: asked, **({"focus": False} if method == "cachecraft" else {})}
    engine.runner.cost = CostModel((0,), (1,), ((0.01,),), 1000, {"host": 4e5})
    raised = engine.generate(**ask).report
    assert raised.parameters[parameter] > asked
    again = raised.reused_tokens + raised.recomputed_tokens
    hidden = 0.25 * (again + raised.prefix_exact_tokens)
    assert raised.recomputed_tokens == pytest.approx(hidden, abs=len(CHUNKS))
    asked_again = Request(QUESTION, CHUNKS[::-1], sampling=SamplingParams(1, temperature=0.0))
    of_batch = engine.generate_batch([asked_again] * 3, method=method)
    assert [one.report.parameters[parameter] for one in of_batch] == [asked] * 3, "the others of a batch wait"


def test_a_calibrated_answer_is_that_of_the_method_named(model):
    calibrated, named = Engine(model, calibration=calibration(model, "cacheblend", 0.4)), Engine(model)
    for engine in (calibrated, named):
        engine.precompute(CHUNKS)
    ask = {"question": QUESTION, "chunks": CHUNKS[::-1], "max_new_tokens": 8}
    answer = calibrated.generate(**ask)
    same = named.generate(**ask, method="cacheblend:ratio=0.4")
    assert answer.token_ids == same.token_ids
    assert answer.report.recompute_fraction == same.report.recompute_fraction


def test_without_a_record_it_says_how_to_calibrate(model, caplog):
    with caplog.at_level(logging.INFO):
        Engine(model)
    assert "`chunkweave calibrate --shape toy-llama --cache-dir DIR`" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        Engine(model, method="epic")
        Engine(model, calibration=calibration(model, "epic", 0.5))
    assert "calibrate" not in caplog.text


def test_a_report_has_the_scores_and_where_unfocused_chunks_were_stopped():
    engine = Engine(toy_model("llama", num_hidden_layers=8, max_position_embeddings=2048))
    chunks = [
        Chunk(f"Passage {i} tells of harbour {i} and of the ferry at {i + 5}. " * (2 + i), f"p{i}") for i in range(5)
    ]
    engine.generate(QUESTION, chunks, max_new_tokens=1)
    again = [chunks[place] for place in (0, 2, 1, 4, 3)]
    report = engine.generate(QUESTION, again, method="cachecraft", max_new_tokens=1).report
    by_name = {chunk.source: chunk for chunk in report.chunks}
    assert (by_name["p0"].kv_source, by_name["p0"].reasons) == ("prefix-exact", {})
    reused = [chunk for chunk in report.chunks if chunk.kv_source == "reused"]
    assert [chunk.source for chunk in reused] == ["p2", "p1", "p4", "p3"]
    assert report.stopped_at_layer is not None  # five chunks over eight layers: the question settles
    assert sum(chunk.recomputed_tokens for chunk in reused) == report.recomputed_tokens
    work = 0
    for chunk in reused:
        begun = [ceil((chunk.reasons["cfo"] + rounding) * chunk.tokens) for rounding in (-0.0005, 0.0005)]
        assert chunk.recomputed_tokens in (0, *range(begun[0], begun[1] + 1)), "finished, or stopped as a whole"
        work += chunk.recomputed_tokens * 8 or begun[1] * report.stopped_at_layer
    assert report.recompute_fraction == pytest.approx(work / (8 * sum(chunk.tokens for chunk in reused)), abs=0.01)


def test_a_call_may_say_which_layers_are_checked_and_how_much_context_matters(engine):
    engine.precompute(CHUNKS)
    answer = engine.generate(QUESTION, CHUNKS, method="cachecraft:alpha=0.25", max_new_tokens=1)
    assert answer.report.parameters["alpha"] == 0.25
    request = Request(QUESTION, CHUNKS[::-1], sampling=SamplingParams(max_new_tokens=1))
    (first,), (last,) = (
        engine.generate_batch([request], method=f"cacheblend:ratio=0.2:layers={layer}") for layer in (1, 3)
    )
    assert first.report.prefill_flops < last.report.prefill_flops
    with pytest.raises(UsageError, match="layer 99"):
        engine.generate(QUESTION, CHUNKS, method="cacheblend:layers=99")
