"""`bench fidelity`: the instrument against plain transformers, its rows, and a run that is put together of two."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

from chunkweave import Chunk, Engine
from chunkweave.calibration import prompts
from chunkweave.calibration.fidelity import (
    REFERENCE,
    SLICED,
    Comparison,
    Task,
    compare,
    decode_greedily,
    log_probabilities,
    make_tasks,
    negative_log_likelihood,
    prepare,
    way_of,
)
from chunkweave.calibration.prompts import Warmth
from chunkweave.calibration.questions import Example, document_examples
from chunkweave.calibration.results import QuestionLog
from chunkweave.calibration.summaries import FidelitySample, summarize_fidelity
from chunkweave.errors import UsageError
from chunkweave.models.gguf import SMOLLM2_PIP, smollm2_file
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt
from tests.integration.command_line import json_of, refusal, text_files
from tests.toys import toy_model

NAMES = ("Ada", "Bo", "Cy", "Dee")
EXAMPLES = [
    Example(
        f"Where is {name}?",
        tuple(
            Chunk(f"{one} lives at number {i}, behind the old mill on the road to Aldwick.", one)
            for i, one in enumerate(NAMES)
        ),
        (f"number {place}",),
    )
    for place, name in enumerate(NAMES)
]


OTHER = Example("Where?", tuple(Chunk(f"The {name} ran dry in June.", name) for name in ("well", "mill", "pond")), ())


def _beside_another(warm: str, *methods: str, free: int = 0) -> tuple[Engine, list[Task], Comparison]:
    """The first question and another one, whose chunks are computed among those of all questions."""
    engine, config = Engine(toy_model()), _config(*methods, warm=Warmth.parse(warm), free=free)
    return engine, make_tasks(engine, [*EXAMPLES, OTHER], [EXAMPLES[0], OTHER], config), config


def _config(*methods: str, **changes: object) -> Comparison:
    return Comparison(methods=methods, chunks=4, new_tokens=5, **changes)  # type: ignore[arg-type]


def _measured(engine: Engine, tasks: list[Task], config: Comparison) -> list[dict[str, FidelitySample]]:
    return list(compare([way_of(engine, tasks, config.contenders(), config)], config))


# --- the independent reference -----------------------------------------------------------------------------------


def _own_rope(model: torch.nn.Module, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[tokens, head_dim]`, from the definition of RoPE (RoFormer eq. 34)."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = (positions.double()[:, None] * frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def _shifted(model: torch.nn.Module, keys: torch.Tensor, by: int) -> torch.Tensor:
    """Rotated keys `[heads, tokens, head_dim]` as they would be `by` positions later."""
    cos, sin = _own_rope(model, torch.tensor([by]))
    return keys * cos + rotate_half(keys) * sin


def _cache_of(model: torch.nn.Module, token_ids: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cache = DynamicCache()
    model(torch.tensor([token_ids]), past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@torch.inference_mode()
def _fully_reused(model: torch.nn.Module, prompt: Prompt) -> DynamicCache:
    """Every stored part computed by itself behind START and moved to its place; all but the question is there."""
    start = tuple(token for part in prompt.parts if part.kind == "start" for token in part.token_ids)
    pieces = [_cache_of(model, start)] if start else []
    for part, span in zip(prompt.parts, prompt.spans(), strict=True):
        if part.id is None:
            continue
        alone = [(k[:, len(start) :], v[:, len(start) :]) for k, v in _cache_of(model, (*start, *part.token_ids))]
        pieces.append([(_shifted(model, k, span.start - len(start)), v) for k, v in alone])
    cache = DynamicCache()
    for layer, states in enumerate(zip(*pieces, strict=True)):
        cache.update(torch.cat([k for k, _ in states], 1)[None], torch.cat([v for _, v in states], 1)[None], layer)
    return cache


@torch.inference_mode()
def _expected(model: torch.nn.Module, prompt: Prompt, cache: DynamicCache, behind: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities at each of `behind`, from plain transformers over what `cache` holds of the prompt."""
    rest = [*prompt.token_ids[cache.get_seq_length() :], *behind[:-1]]
    logits = model(torch.tensor([rest]), past_key_values=cache).logits[0, -len(behind) :]
    return logits.double().log_softmax(-1)


def _agrees_with_transformers(engine: Engine, tasks: list, tokens: int) -> None:
    model = engine.loaded.model.model
    for task in tasks:
        prompt = task.prompt
        Warmth().prepare(engine, prompt)
        full = engine.runner.prefill(prompt, make_method("full"), new_tokens=tokens, capture=False)
        answer = decode_greedily(engine, [full], tokens)[0].token_ids
        reused = engine.runner.prefill(prompt, make_method("full-reuse"), new_tokens=tokens, capture=False)
        gold = task.answer_ids
        (ours, _), (woven, golden) = [
            log_probabilities(engine.loaded.model, one, answer, gold) for one in (full, reused)
        ]
        theirs = [_expected(model, prompt, cache, answer) for cache in (DynamicCache(), _fully_reused(model, prompt))]
        assert tuple(row.argmax().item() for row in theirs[0]) == answer
        expected = _expected(model, prompt, _fully_reused(model, prompt), gold)[range(len(gold)), gold].mean().item()
        assert negative_log_likelihood(golden, gold) == pytest.approx(-expected, abs=1e-4)
        kl_ours, kl_theirs = ((p.exp() * (p - q)).sum(-1) for p, q in ((ours, woven), theirs))
        assert kl_theirs.max() > 1e-3, "full reuse is another thing than full prefill"
        torch.testing.assert_close(kl_ours, kl_theirs, atol=1e-4, rtol=0)


needs_smollm2 = pytest.mark.skipif(smollm2_file() is None, reason=f"SmolLM2 is not installed: {SMOLLM2_PIP}")


@pytest.mark.parametrize("name", ["reader", pytest.param("smollm2", marks=needs_smollm2)])
def test_divergence_of_full_reuse_is_that_of_plain_transformers(name):
    engine = Engine.load(name, dtype="float32")
    _agrees_with_transformers(engine, make_tasks(engine, EXAMPLES, EXAMPLES[:2], _config()), 8)


# --- what is measured --------------------------------------------------------------------------------------------


def test_what_follows_a_prompt_sees_no_further_than_its_window():
    engine = Engine(toy_model("mistral", sliding_window=16))
    task = make_tasks(engine, EXAMPLES, EXAMPLES[:1], _config())[0]
    full = engine.runner.prefill(task.prompt, make_method("full"), new_tokens=9, capture=False)
    behind = tuple(range(30, 38))
    theirs = _expected(engine.loaded.model.model, task.prompt, DynamicCache(), behind)
    torch.testing.assert_close(log_probabilities(engine.loaded.model, full, behind)[0], theirs, atol=1e-4, rtol=0)


def test_every_contender_is_compared_with_full_prefill_and_nothing_is_stored():
    engine = Engine(toy_model())
    config = _config("cacheblend@1", "prefix", "epic@0.2", free=2)
    tasks = make_tasks(engine, EXAMPLES, EXAMPLES, config)
    samples = _measured(engine, tasks, config)
    assert len(samples) == len(EXAMPLES)
    assert list(samples[0]) == [REFERENCE, SLICED, "full-reuse", "cacheblend@1", "prefix", "epic@0.2"]
    assert list(samples[3]) == [REFERENCE, "full-reuse", "cacheblend@1", "epic@0.2"], "exact ones where all decode"
    assert all(record.alone for record in engine.store.records())
    for number, one in enumerate(samples):
        assert one[REFERENCE].kl == (0.0,) * len(one[REFERENCE].kl)
        for exact in (REFERENCE, "cacheblend@1", *((SLICED, "prefix") if number < 2 else ())):
            assert max(one[exact].kl) < 1e-5
            assert all(one[exact].agrees)
            assert one[exact].identical is True
        assert max(one["full-reuse"].kl) > 1e-4
        assert one["full-reuse"].flops_limit > one["epic@0.2"].flops_limit > one[REFERENCE].flops_limit == 1.0
    rows = {row.method: row for row in summarize_fidelity(samples)}
    assert rows["full-reuse"].kl_of_full_reuse == 1.0
    assert rows["prefix"].decoded == 2
    assert rows["prefix"].identical == 1.0
    assert rows["full-reuse"].decoded == len(EXAMPLES)
    assert rows[REFERENCE].speedup == 1.0
    assert rows["epic@0.2"].answer_nll is not None


def test_chunks_behind_the_instruction_or_from_earlier_requests_are_what_is_reused():
    for warm, context in ((Warmth.parse("instruction"), 1), (Warmth(), 0)):
        engine = Engine(toy_model())
        config = _config(warm=warm, free=0)
        tasks = make_tasks(engine, EXAMPLES, EXAMPLES[:1], config)
        _measured(engine, tasks, config)
        chunks = [record for record in engine.store.records() if record.source != "system"]
        assert {len(record.context) for record in chunks} == {context}
        assert len(chunks) == len(NAMES)


def test_chunks_are_computed_in_so_many_contexts_with_others():
    engine, tasks, config = _beside_another("contexts:2")
    assert prepare(engine, tasks, 0, config.warm) is None
    stored = [record for record in engine.store.records() if record.source in NAMES]
    assert sorted(record.source for record in stored) == sorted((*NAMES, *NAMES))
    before = len(engine.store.records())
    prepare(engine, tasks, 0, config.warm)
    assert len(engine.store.records()) == before, "what is there is not computed again"
    lookup = engine.store.lookup(tasks[0].prompt)
    assert all(part.variants for part in lookup.parts if part.part.id is not None)


@pytest.mark.parametrize(("count", "shares"), [(1, [4]), (2, [2, 2]), (3, [1, 1, 2]), (4, [1] * 4), (9, [1] * 4)])
def test_chunks_come_from_so_many_requests_with_others(count, shares, monkeypatch):
    engine, tasks, config = _beside_another(f"sources:{count}")
    prefilled = []
    monkeypatch.setattr(prompts, "prefill_and_store", lambda _, prompt: prefilled.append(prompt))
    prepare(engine, tasks, 0, config.warm)
    requests = [[part.source for part in prompt.parts if part.kind is PartKind.CHUNK] for prompt in prefilled]
    assert all(len(request) == len(set(request)) == len(NAMES) for request in requests), "filled up with others"
    own = [[name for name in request if name in NAMES] for request in requests]
    assert sorted(map(len, own)) == shares
    assert sorted(name for some in own for name in some) == sorted(NAMES)


def test_prefix_caching_works_where_earlier_requests_began_alike():
    engine, tasks, config = _beside_another("first:2", "prefix", free=1)
    prepare(engine, tasks, 0, config.warm)
    lookup = engine.store.lookup(tasks[0].prompt)
    chunks = [part for part in lookup.parts if part.part.kind == "chunk"]
    assert [part.exact is not None for part in chunks] == [True, True, False, False]
    assert all(part.variants for part in chunks[2:])
    [first, _] = _measured(engine, tasks, config)
    assert first["prefix"].flops_limit > 1.5
    assert max(first["prefix"].kl) < 1e-5


def test_answers_that_are_not_decoded_are_identical_exactly_if_decoded_ones_are():
    found: dict[int, list[bool | None]] = {0: [], len(EXAMPLES): []}
    for free, marks in found.items():
        for new_tokens in (1, 4):
            engine = Engine(toy_model())
            config = replace(_config("epic@0.2", "cacheblend@0.9", free=free), new_tokens=new_tokens)
            tasks = make_tasks(engine, EXAMPLES, EXAMPLES, config)
            for one in _measured(engine, tasks, config):
                marks += [one["epic@0.2"].identical, one["cacheblend@0.9"].identical]
                assert (one["epic@0.2"].text is not None) == bool(free)
    undecoded, decoded = found.values()
    assert undecoded == decoded
    assert {*decoded} == {True, False}


def test_questions_are_made_of_the_documents_own_sentences():
    text = "The lighthouse of {0} was built by the council of {0} in the year of the great storm."
    chunks = [Chunk(text.format(name), name) for name in ("Skerrow", "Aldwick", "Mire", "Tarn")]
    examples = document_examples(chunks, chunks_each=2, count=3, seed=1)
    assert len(examples) == 3
    for example in examples:
        begun = example.question.split('"')[1].removesuffix(" ...")
        assert any(chunk.text == f"{begun} {example.answers[0]}" for chunk in example.chunks)
        assert len(example.chunks) == 2
    with pytest.raises(UsageError, match="4 sentences"):
        document_examples(chunks, chunks_each=2, count=5, seed=1)
    asked = document_examples(chunks, chunks_each=1, count=9, seed=1, questions=["Who built the lighthouse of Mire?"])
    assert [(one.chunks[0].source, one.answers) for one in asked] == [("Mire", ())]


# --- a run that is put together ----------------------------------------------------------------------------------


def test_a_log_goes_on_and_refuses_other_settings(tmp_path):
    path = tmp_path / "samples.jsonl"
    log = QuestionLog(path, {"model": "toy"})
    log.begin({"epic@5%": 0.05})
    log.add(1, {"contenders": {}})
    with path.open("a") as file:
        file.write('{"question": 2, "cut')
    again = QuestionLog(path, {"model": "toy"})
    assert again.found == {"epic@5%": 0.05}
    assert 1 in again
    assert 2 not in again
    again.add(0, {"contenders": {"a": 1}})
    assert QuestionLog(path, {"model": "toy"}).of("contenders") == [{"a": 1}, {}]
    with pytest.raises(UsageError, match=r"other settings \(model\)"):
        QuestionLog(path, {"model": "reader"})
    path.write_text("what is this\n")
    with pytest.raises(UsageError, match="is not a file of finished questions"):
        QuestionLog(path, {"model": "toy"})


def test_samples_survive_their_file():
    sample = FidelitySample((0.125, 0.0), (True, False), None, None, 0.5, 0.25, 3.0, 0.15, 100)
    assert FidelitySample.from_dict(json.loads(json.dumps(sample.as_dict()))) == sample


def test_the_command_measures_documents_and_goes_on_where_it_was(tmp_path: Path):
    line = "{} keeps the {} of the town in the house behind the mill."
    texts = {f"{name}.txt": f"{line.format(name, 'keys')} {line.format(name, 'maps')}" for name in NAMES}
    docs = text_files(tmp_path / "docs", texts)
    samples = tmp_path / "samples.jsonl"
    command = ["bench", "fidelity", "--model", "reader", "--docs", docs, "--chunks", "3"]
    command += ["--methods", "epic", "--new-tokens", "3", "--free", "1", "--samples", samples]
    first = json_of(*command, "--questions", 2)
    assert [row["method"] for row in first["rows"]] == ["full", "full-in-slices", "full-reuse", "epic@0.15"]
    lines = samples.read_text().splitlines()
    samples.write_text("\n".join(lines[:2]) + "\n")
    again = json_of(*command, "--questions", 2)
    assert [row["kl"] for row in again["rows"]] == pytest.approx([row["kl"] for row in first["rows"]], rel=1e-3)
    assert samples.read_text().splitlines()[1] == lines[1]
    assert "other settings (examples, questions)" in refusal(*command, "--questions", 3)


SMALL = ("--questions", 1, "--methods", "epic", "--new-tokens", 1, "--free", 0)


def test_without_documents_it_runs_as_it_is_for_the_bundled_reader():
    assert json_of("bench", "fidelity", "--model", "reader", *SMALL)["config"]["chunk_tokens"] == 512


def test_the_command_asks_behind_another_instruction():
    command = ("bench", "fidelity", "--shape", "demo", *SMALL, "--chunk-tokens", 24)
    own = json_of(*command)
    longer = json_of(*command, "--instruction", "Answer in one word. " * 40)
    assert longer["config"]["instruction"].startswith("Answer in one word.")
    assert longer["rows"][0]["prompt_tokens"] > own["rows"][0]["prompt_tokens"] + 80
    assert "instruction" not in own["config"]


@pytest.mark.parametrize("text", ["", "cold", "queries", "queries:", "queries:0", "queries:-1", "queries:x", "alone:3"])
def test_unknown_ways_to_warm_are_refused(text):
    with pytest.raises(
        UsageError, match="alone, instruction, neutral, corpus, contexts:N, sources:N, first:N, queries:N"
    ):
        Warmth.parse(text)
