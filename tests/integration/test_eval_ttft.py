import pytest

from chunkweave.calibration.prompts import Warmth
from chunkweave.calibration.questions import Example
from chunkweave.config import StoreConfig
from chunkweave.engine.engine import Engine
from chunkweave.errors import PromptTooLongError, UnknownMethodError, UsageError
from chunkweave.prompt.parts import PartKind
from chunkweave.testing import toy_model
from chunkweave.types import Chunk
from chunkweave_lab.ttft import TtftConfig, first_tokens, make_workload, measure

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS = ("prefix", "full-reuse", "cacheblend")


def examples(count: int = 6) -> list[Example]:
    passages = [Chunk(f"Passage {i} speaks of town {i * 7} and of bridge {i * 3}. " * 3, f"p{i}") for i in range(8)]
    return [Example(f"What of {i}?", tuple(passages[(i + j) % 8] for j in range(3)), ()) for i in range(count)]


def config(**changes) -> TtftConfig:
    return TtftConfig(**{"methods": METHODS, "chunks": 3, "chunk_tokens": 20, "questions": 3, **changes})


def run(engine: Engine, settings: TtftConfig):
    return list(measure(engine, make_workload(examples(), engine, settings), settings))


def test_every_contender_sees_every_question_and_takes_turns_in_going_first():
    samples = run(Engine(toy_model()), config())
    names = ["full", "hf-forward", "prefix", "full-reuse", "cacheblend@0.15"]
    by_question = [[sample.method for sample in samples if sample.question == i] for i in range(3)]
    assert by_question == [names, names[1:] + names[:1], names[2:] + names[:2]]


def test_methods_come_at_values_and_with_settings_of_their_own():
    methods = ("cacheblend:layer-2@0.5", "cacheblend", "cachecraft", "epic@0.1")
    settings = config(methods=methods, ratios=(0.2, 0.4), alphas=(0.5,), check_layers=(3,), questions=1)
    samples = {sample.method: sample for sample in run(Engine(toy_model()), settings)}
    assert list(samples) == [
        "full",
        "hf-forward",
        "cacheblend:layer-2@0.5",
        "cacheblend@0.2",
        "cacheblend@0.4",
        "cachecraft@0.5",
        "epic@0.1",
    ]
    assert samples["epic@0.1"].report.recomputed_tokens == 3 * 2
    assert samples["cacheblend@0.2"].report.recomputed_tokens == 12
    # of four layers all reused tokens are in those up to the check
    assert samples["cacheblend:layer-2@0.5"].report.recompute_fraction == pytest.approx((2 + 2 * 0.5) / 4)
    assert samples["cacheblend@0.2"].report.recompute_fraction == pytest.approx((3 + 1 * 0.2) / 4)


def test_alone_makes_every_chunk_a_hit_and_measuring_stores_nothing():
    engine = Engine(toy_model())
    samples = run(engine, config())
    for sample in samples:
        if sample.method == "full-reuse":
            assert sample.report.reused_tokens == 60
            assert sample.report.prefix_exact_tokens > 0, "the system part is warm too"
        if sample.method in ("full", "prefix"):
            assert sample.report.reused_tokens == 0
    assert all(record.alone for record in engine.store.records())
    engine.store.check()


def test_queries_warm_chunks_in_the_context_of_earlier_requests():
    engine = Engine(toy_model())
    settings = config(warm=Warmth.parse("queries:3"))
    workload = make_workload(examples(), engine, settings)
    assert len(workload.earlier) == 3
    samples = list(measure(engine, workload, settings))
    stored = {part.id for prompt in workload.earlier for part in prompt.parts if part.id is not None}
    assert {record.chunk_id for record in engine.store.records()} == stored
    reused = [sample.report.reused_tokens for sample in samples if sample.method == "full-reuse"]
    known = [
        sum(len(part) for part in prompt.parts if part.kind is PartKind.CHUNK and part.id in stored)
        for prompt in workload.measured
    ]
    exact = [sample.report.prefix_exact_tokens for sample in samples if sample.method == "full-reuse"]
    system = len(next(part for part in workload.measured[0].parts if part.kind is PartKind.SYSTEM))
    assert [r + e - system for r, e in zip(reused, exact, strict=True)] == known


def test_a_budget_of_one_prompt_is_enough_for_alone():
    engine = Engine(toy_model(), store=StoreConfig(host_budget_bytes=110 * 4 * 4 * 2 * 2 * 16))
    samples = run(engine, config(methods=("full-reuse",), hf_reference=False))
    assert {sample.report.reused_tokens for sample in samples if sample.method == "full-reuse"} == {60}
    assert engine.store.used_bytes <= engine.store.budget_bytes


def test_the_hugging_face_forward_gives_the_token_that_full_gives():
    engine = Engine(toy_model())
    settings = config()
    prompt = make_workload(examples(), engine, settings).measured[0]
    contenders = first_tokens(engine, settings)
    seen = []
    model = engine.loaded.model.model
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    contenders["hf-forward"](prompt)
    handle.remove()
    assert seen[0].shape[1] == 1, "only the last position's logits are computed"
    assert int(seen[0][0, -1].argmax()) == int(contenders["full"](prompt).logits.argmax())


def test_progress_reaches_its_total():
    engine = Engine(toy_model())
    settings = config(warm=Warmth.parse("queries:2"), questions=2)
    steps = []
    list(measure(engine, make_workload(examples(), engine, settings), settings, lambda *step: steps.append(step)))
    total = 2 + 5 + 2 * 5
    assert steps == [(i + 1, total) for i in range(total)]


def test_the_seed_draws_the_questions():
    engine = Engine(toy_model())
    first, again, other = (make_workload(examples(), engine, config(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("text", ["", "cold", "queries", "queries:", "queries:0", "queries:-1", "queries:x", "alone:3"])
def test_unknown_ways_to_warm_are_refused(text):
    with pytest.raises(
        UsageError, match="alone, instruction, neutral, corpus, contexts:N, sources:N, first:N, queries:N"
    ):
        Warmth.parse(text)


def test_what_cannot_be_measured_is_refused_first():
    engine = Engine(toy_model())
    with pytest.raises(UsageError, match="6 questions, but 7"):
        make_workload(examples(), engine, config(questions=7))
    with pytest.raises(UsageError, match="questions must be at least 1"):
        config(questions=0)
    with pytest.raises(PromptTooLongError):
        make_workload(examples(), engine, config(chunk_tokens=200))
    with pytest.raises(UnknownMethodError, match="magic"):
        run(engine, config(methods=("magic",)))
