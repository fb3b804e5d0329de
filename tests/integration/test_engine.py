"""The public engine on a toy model: answers, streams, batches, precomputation, and refusals."""

import pytest
import torch

from chunkweave import Chunk, Engine, Request, ReuseConfig, SamplingParams, StoreConfig
from chunkweave.errors import PromptTooLongError, UnknownMethodError, UsageError
from chunkweave.testing.toys import toy_model

CHUNKS = [
    Chunk("The harbour of Skerrow was founded in 1871.", "history"),
    Chunk("Pilots board ships two miles west of the lighthouse.", "pilots"),
    Chunk("The ferry leaves at seven, at noon and at six.", "ferry"),
]
QUESTION = "When does the ferry leave?"


@pytest.fixture(scope="module")
def model():
    return toy_model("llama")


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


def test_every_method_answers_and_full_is_the_reference_at_ratio_one(engine):
    engine.precompute(CHUNKS)
    full = engine.generate(QUESTION, CHUNKS[::-1], method="full", max_new_tokens=8)
    for method in ("cacheblend", "epic", "random"):
        woven = engine.generate(QUESTION, CHUNKS[::-1], method=method, recompute_ratio=1.0, max_new_tokens=8)
        assert woven.token_ids == full.token_ids


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


def test_a_batch_gives_each_request_what_it_gets_alone(model):
    requests = [
        Request(QUESTION, CHUNKS, sampling=SamplingParams(max_new_tokens=9)),
        Request("Where do pilots board?", CHUNKS[::-1], sampling=SamplingParams(max_new_tokens=4)),
        Request("Who?", (), sampling=SamplingParams(max_new_tokens=7)),
    ]
    together = Engine(model).generate_batch(requests, method="full")
    for request, answer in zip(requests, together, strict=True):
        (single,) = Engine(model).generate_batch([request], method="full")
        assert answer.token_ids == single.token_ids
    assert Engine(model).generate_batch([]) == []


def test_a_later_request_of_a_batch_reuses_what_an_earlier_one_computed(engine):
    request = Request(QUESTION, CHUNKS, sampling=SamplingParams(max_new_tokens=1))
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
    engine = Engine(model, store=StoreConfig(budget_bytes=50_000))
    for i in range(12):
        engine.generate(QUESTION, [f"Note {i}: {text.text}" for i, text in enumerate(CHUNKS, i)], max_new_tokens=1)
        assert engine.store.used_bytes <= 50_000
    assert engine.store.stats.evictions > 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"question": "  "}, UsageError, "question"),
        ({"chunks": ["fine", " "]}, UsageError, "chunk"),
        ({"method": "magic"}, UnknownMethodError, "magic.*there are: full, prefix"),
        ({"recompute_ratio": 1.5}, UsageError, "between 0 and 1, not 1.5"),
        ({"recompute_ratio": float("nan")}, UsageError, "between 0 and 1"),
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
