"""Conversations: history as a growing exact prefix, answers equal to full prefill, and what is computed, counted."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from chunkweave import Chunk, ConversationConfig, Engine, Request, SamplingParams, StoreConfig
from chunkweave.engine.runner import Runner
from chunkweave.errors import ConversationBusyError, ConversationEndedError, PromptTooLongError, UsageError
from chunkweave.kv.request_cache import RequestCache
from chunkweave.models.loading import LoadedModel
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave.prompt.template import template_for
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave.testing import toy_model
from tests.unit.chunking_tokenizers import bundled, chatml, llama, mistral, without_template

FERRY, PILOTS, HARBOUR, SCHOOL, MILL = (
    Chunk(text, source)
    for text, source in (
        ("The ferry leaves at seven, at noon and at six.", "ferry"),
        ("Pilots board ships two miles west of the lighthouse.", "pilots"),
        ("The harbour of Skerrow was founded in 1871.", "harbour"),
        ("The school on the hill has four rooms and a bell.", "school"),
        ("The mill burned down in the winter of 1855.", "mill"),
    )
)
SHORT = SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return toy_model("llama", max_position_embeddings=2048, vocab_size=4200)


@pytest.fixture
def engine(model) -> Engine:
    return Engine(model, conversations=ConversationConfig(deduplicate=True))


class Rows:
    """How many tokens the model computes, in prefills, decode steps and all."""

    def __init__(self, monkeypatch) -> None:
        self.prefilled = self.decoded = 0
        real = Runner.step

        def step(runner, decoding, prefilling, **_):
            self.decoded += sum(len(one.token_ids) for one in decoding)
            before = {id(job): job.remaining_tokens for job, _ in prefilling}
            logits = real(runner, decoding, prefilling)
            self.prefilled += sum(before[id(job)] - job.remaining_tokens for job, _ in prefilling)
            return logits

        monkeypatch.setattr(Runner, "step", step)

    def take(self) -> tuple[int, int]:
        counts = self.prefilled, self.decoded
        self.prefilled = self.decoded = 0
        return counts


@pytest.fixture
def rows(monkeypatch) -> Rows:
    return Rows(monkeypatch)


def prompts_of(engine: Engine, monkeypatch) -> list[Prompt]:
    """The prompts that are prefilled from now on."""
    prompts: list[Prompt] = []
    real = Runner.store_new

    def store_new(runner, prefilled):
        prompts.append(prefilled.prompt)
        return real(runner, prefilled)

    monkeypatch.setattr(Runner, "store_new", store_new)
    return prompts


def kinds(prompt: Prompt) -> str:
    return " ".join(str(part.kind) for part in prompt.parts)


def test_the_papers_example_step_by_step(engine, monkeypatch):
    """CRAFT §4.3: turn 1 retrieves C1 C2 C3, turn 2 retrieves C2 C3 C4, of which only C4 is sent."""
    prompts = prompts_of(engine, monkeypatch)
    conversation = engine.conversation()
    first = conversation.ask("When does the ferry leave?", [FERRY, PILOTS, HARBOUR], sampling=SHORT)
    assert (first.report.history_tokens, first.report.chunks_not_sent, conversation.turns) == (0, 0, 1)
    second = conversation.ask("And the school?", [PILOTS, HARBOUR, SCHOOL], sampling=SHORT)
    assert kinds(prompts[1]) == "start system chunk chunk chunk turn chunk question"
    assert [part.source for part in prompts[1].parts if part.kind is PartKind.CHUNK] == [
        "ferry",
        "pilots",
        "harbour",
        "school",
    ]
    assert prompts[1].parts[:5] == prompts[0].parts[:5]
    assert second.report.chunks_not_sent == 2
    assert second.report.tokens_not_sent == sum(len(part) for part in prompts[0].parts[3:5])
    assert second.report.history_tokens == sum(len(part) for part in prompts[1].parts[2:6])
    history = second.report.history_tokens + len(prompts[1].parts[1])
    assert second.report.prefix_exact_tokens == history
    assert second.report.computed_tokens == len(prompts[1]) - history


def test_a_turn_holds_the_tokens_that_were_generated(engine, monkeypatch):
    prompts = prompts_of(engine, monkeypatch)
    conversation = engine.conversation()
    answer = conversation.ask("When?", [FERRY], sampling=SHORT)
    conversation.ask("And then?", sampling=SHORT)
    said = next(part for part in prompts[1].parts if part.kind is PartKind.TURN)
    question = prompts[0].parts[-1].token_ids
    assert said.token_ids == (*question, *answer.token_ids, *engine.builder.turn_break_ids)


@pytest.mark.parametrize("method", ["full", "prefix"])
@pytest.mark.parametrize(
    "tokenizer",
    [bundled(), llama(), chatml(), mistral(), without_template()],
    ids=["bundled", "llama", "chatml", "mistral", "plain"],
)
def test_exact_conversations_equal_full_prefill_of_the_same_tokens(
    model: LoadedModel, tokenizer: HuggingFaceTokenizer, method: str, monkeypatch
):
    loaded = LoadedModel(model.model, tokenizer, model.fingerprint, model.name)
    engine = Engine(loaded, template=template_for(tokenizer))
    seen: list[tuple[Prompt, torch.Tensor]] = []
    real = Runner.store_new

    def store_new(runner, prefilled):
        seen.append((prefilled.prompt, prefilled.logits))
        return real(runner, prefilled)

    monkeypatch.setattr(Runner, "store_new", store_new)
    conversation = engine.conversation()
    turns: Sequence[Sequence[Chunk]] = ([FERRY, PILOTS], [PILOTS, HARBOUR], [], [MILL, FERRY])
    answers = [
        conversation.ask(f"Question {n}?", chunks, sampling=SHORT, method=method) for n, chunks in enumerate(turns)
    ]
    for (prompt, logits), answer in zip(seen, answers, strict=True):
        with torch.inference_mode():
            own = model.model.model(torch.tensor([prompt.token_ids])).logits[0, -1]
        difference = torch.log_softmax(own.float(), -1) - torch.log_softmax(logits.float(), -1)
        assert difference.abs().max() < 1e-4
        if answer.token_ids:
            assert answer.token_ids[0] == int(own.argmax())
    if method == "prefix":
        assert [answer.report.prefix_exact_tokens > 0 for answer in answers] == [False, True, True, True]
    engine.store.check()


def test_every_token_of_a_conversation_is_computed_once_but_for_bos(engine, rows):
    """The start token is never stored, so that each turn computes it; everything else is computed once."""
    conversation = engine.conversation()
    turns: Sequence[Sequence[Chunk]] = ([FERRY, PILOTS], [PILOTS, HARBOUR], [], [MILL, FERRY])
    for n, chunks in enumerate(turns):
        conversation.ask(f"Question {n}?", chunks, sampling=SHORT)
    start, system = engine.builder.opening()
    prefilled, decoded = rows.take()
    assert prefilled + decoded == len(system) + conversation.history_tokens + len(turns) * len(start)


def of_ratio(method: str, ratio: float) -> dict[str, float]:
    """What asks a method for a ratio, if it takes one."""
    return {} if method in ("cachecraft", "full-reuse") else {"recompute_ratio": ratio}


WOVEN = ("cacheblend", "cachecraft", "query", "epic", "random", "h2o", "full-reuse")


def sources(answer) -> dict[str, str]:
    return {part.source: part.kv_source for part in answer.report.chunks}


@pytest.mark.usefixtures("baselines")
@pytest.mark.parametrize("method", WOVEN)
def test_what_was_woven_is_reused_as_it_is_and_marked_inexact(engine, method, rows):
    engine.precompute([FERRY, PILOTS, HARBOUR, MILL])
    conversation = engine.conversation()
    rows.take()
    options = {**of_ratio(method, 0.3), **({"focus": False} if method == "cachecraft" else {})}
    first = conversation.ask("When?", [FERRY, PILOTS, HARBOUR], sampling=SHORT, method=method, **options)
    assert first.report.reused_tokens + first.report.recomputed_tokens > 0
    rows.take()
    second = conversation.ask("And the mill?", [PILOTS, MILL], sampling=SHORT, method=method, **options)
    report = second.report
    assert sources(second) == {
        "system": "prefix-exact",
        "ferry": "reused",
        "pilots": "reused",
        "harbour": "reused",
        "turn": "reused",
        "mill": "reused",
    }
    assert [part.recomputed_tokens for part in report.chunks[1:5]] == [0, 0, 0, 0]
    assert report.history_tokens == sum(part.tokens for part in report.chunks[1:5])
    if method not in ("query", "cacheblend"):  # of which some tokens run through a few layers or passes only
        assert rows.take()[0] == report.computed_tokens + report.recomputed_tokens
    engine.store.check()


@pytest.mark.parametrize("method", ["cacheblend", "cachecraft", "query", "epic"])
def test_history_is_the_kv_that_its_answers_were_decoded_over(engine, method, monkeypatch):
    """The next turn's cache has, for every token of the history, what this turn's cache had when it ended."""
    caches = []
    real = Runner.store_new

    def store_new(runner, prefilled):
        caches.append((prefilled.prompt, prefilled))
        return real(runner, prefilled)

    monkeypatch.setattr(Runner, "store_new", store_new)
    monkeypatch.setattr(RequestCache, "free", lambda cache: None)
    engine.precompute([FERRY, PILOTS, MILL])
    caches.clear()
    conversation = engine.conversation()
    for n, chunks in enumerate(([FERRY, PILOTS], [MILL], [HARBOUR])):
        conversation.ask(f"Question {n}?", chunks, sampling=SHORT, method=method, **of_ratio(method, 0.4))
    for (_, before), (prompt, after) in pairwise(caches):
        new = next(place for place in range(len(prompt.parts) - 1, -1, -1) if prompt.parts[place].kind == "turn")
        stop = prompt.spans()[new].stop
        for layer in range(4):
            for one, other in zip(before.cache.view(layer, stop), after.cache.view(layer, stop), strict=True):
                assert (one - other).abs().max() < 1e-5


def test_exact_mode_recomputes_what_was_woven(engine):
    engine.precompute([FERRY, PILOTS])
    conversation = engine.conversation()
    conversation.ask("When?", [FERRY, PILOTS], sampling=SHORT, method="cacheblend")
    exact = conversation.ask("And?", sampling=SHORT, quality="exact")
    assert exact.report.reused_tokens == exact.report.recomputed_tokens == 0
    assert sources(exact)["turn"] == "computed"
    again = conversation.ask("And then?", sampling=SHORT, method="cacheblend")
    assert again.report.prefix_exact_tokens == again.report.history_tokens + again.report.chunks[0].tokens
    engine.store.check()


def test_many_conversations_over_one_chunk_keep_what_each_wove(model):
    """What a conversation goes on from is no variant of its chunks: their number does not bound conversations."""
    engine = Engine(model, store=StoreConfig(max_variants=2))
    engine.precompute([FERRY, PILOTS])
    talks = [engine.conversation(system=f"You are number {n}.") for n in range(5)]
    for talk in talks:
        talk.ask("When?", [FERRY, PILOTS], sampling=SHORT, method="cacheblend", recompute_ratio=0.5)
    for talk in talks:
        later = talk.ask("And?", sampling=SHORT, method="cacheblend", recompute_ratio=0.5)
        assert later.report.recomputed_tokens == 0
        assert "computed" not in (sources(later)["turn"], sources(later)["ferry"])
    variants = len(engine.store)
    for talk in talks:
        talk.close()
    assert len(engine.store) < variants - 5
    engine.store.check()


@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_after_a_cut_exact_mode_recomputes_and_weaving_reuses(model, method):
    engine = Engine(model, conversations=ConversationConfig(max_tokens=220, deduplicate=True))
    engine.precompute([FERRY, PILOTS, HARBOUR, SCHOOL, MILL])
    conversation = engine.conversation()
    asked, answer = 0, None
    while answer is None or not answer.report.turns_cut:
        chunk = (FERRY, PILOTS, HARBOUR, SCHOOL, MILL)[asked % 5]
        answer = conversation.ask(f"Question {asked}?", [chunk], sampling=SHORT, method=method)
        asked += 1
    report = answer.report
    assert report.prompt_tokens <= 220
    assert 0 < report.history_tokens <= 110
    history = [part for part in report.chunks[1:] if part.source == "turn"]
    if method == "prefix":
        assert report.prefix_exact_tokens == report.chunks[0].tokens
        assert {part.kv_source for part in history} == {"computed"}
    else:
        assert {part.kv_source for part in history} == {"reused"}
        assert sum(part.recomputed_tokens for part in history) == 0
    cut_off = answer.report.chunks[1:]
    again = conversation.ask("Once more?", [FERRY, PILOTS, HARBOUR, SCHOOL, MILL], sampling=SHORT, method=method)
    if not again.report.turns_cut:
        there = {part.source for part in cut_off}
        assert again.report.chunks_not_sent == len(there - {"turn"})
    engine.store.check()


def test_logits_after_a_cut_are_exact(model, monkeypatch):
    engine = Engine(model, conversations=ConversationConfig(max_tokens=200, deduplicate=True))
    seen = []
    real = Runner.store_new

    def store_new(runner, prefilled):
        seen.append((prefilled.prompt, prefilled.logits))
        return real(runner, prefilled)

    monkeypatch.setattr(Runner, "store_new", store_new)
    conversation = engine.conversation()
    cuts = [conversation.ask(f"Question {n}?", [MILL], sampling=SHORT).report.turns_cut for n in range(12)]
    assert sum(map(bool, cuts)) >= 2
    for prompt, logits in seen:
        with torch.inference_mode():
            own = model.model.model(torch.tensor([prompt.token_ids])).logits[0, -1]
        assert (torch.log_softmax(own.float(), -1) - torch.log_softmax(logits.float(), -1)).abs().max() < 1e-4


def test_a_new_turn_that_does_not_fit_is_refused_and_changes_nothing(model):
    engine = Engine(model, conversations=ConversationConfig(max_tokens=120, deduplicate=True))
    conversation = engine.conversation()
    conversation.ask("When?", [FERRY], sampling=SHORT)
    with pytest.raises(PromptTooLongError, match="new turn alone"):
        conversation.ask("And?", ["word " * 200], sampling=SHORT)
    with pytest.raises(UsageError, match="question is empty"):
        conversation.ask(" ")
    assert conversation.turns == 1
    assert conversation.ask("And?", sampling=SHORT).report.history_tokens > 0


def test_requests_with_an_id_go_on_with_the_same_conversation(engine):
    conversation = engine.conversation("support", system="Be brief.", cache_salt="tenant")
    conversation.ask("When?", [FERRY], sampling=SHORT)
    request = Request("And?", [FERRY, MILL], sampling=SHORT, cache_salt="tenant", conversation_id="support")
    (answer,) = engine.generate_batch([request])
    assert answer.report.chunks_not_sent == 1
    assert answer.report.prefix_exact_tokens > answer.report.history_tokens
    assert engine.conversation("support", cache_salt="tenant").turns == conversation.turns == 2
    assert engine.conversation("support", cache_salt="other").turns == 0
    *_, last = engine.stream(Request("So?", sampling=SHORT, cache_salt="tenant", conversation_id="support"))
    assert last.answer.report.history_tokens > answer.report.history_tokens


def test_two_requests_at_once_in_one_conversation_are_refused(engine):
    request = Request("When?", [FERRY], sampling=SHORT, conversation_id="x")
    with pytest.raises(ConversationBusyError, match="'x'"):
        engine.generate_batch([request, request])
    (answer,) = engine.generate_batch([request])
    assert answer.report.history_tokens == 0
    stream = engine.stream(request)
    next(stream)
    with pytest.raises(ConversationBusyError):
        engine.generate_batch([request])
    stream.close()
    assert engine.conversation("x").turns == 1
    engine.generate_batch([request])
    assert engine.conversation("x").turns == 2


def test_a_conversation_that_ended_says_so(engine):
    conversation = engine.conversation()
    conversation.ask("When?", [FERRY], sampling=SHORT)
    held = len(engine.store)
    conversation.close()
    conversation.close()
    assert len(engine.store) == held - 1
    with pytest.raises(ConversationEndedError, match="closed"):
        conversation.ask("And?")


def test_a_template_without_a_second_turn_holds_no_conversation(model):
    tokenizer = without_template()
    loaded = LoadedModel(model.model, tokenizer, model.fingerprint, model.name)
    template = template_for(tokenizer)
    engine = Engine(loaded, template=type(template)(turn_break=""))
    engine.generate("When?", [FERRY], max_new_tokens=1)
    with pytest.raises(UsageError, match="second turn"):
        engine.conversation().ask("When?")


@pytest.mark.parametrize("stop", [True, False])
def test_an_answer_that_ends_early_is_kept_whole(engine, stop, rows):
    """Ended by length or by a stop text, the last token was chosen but never computed: the turn's end computes it."""
    free = engine.generate("When?", [FERRY], max_new_tokens=8)
    sampling = SamplingParams(max_new_tokens=20, stop=(free.text[3:6],)) if stop else SamplingParams(max_new_tokens=3)
    conversation = engine.conversation()
    rows.take()
    answer = conversation.ask("When?", [FERRY], sampling=sampling)
    assert answer.finish_reason == ("stop" if stop else "length")
    assert rows.take()[1] == len(answer.token_ids) + len(engine.builder.turn_break_ids)
    later = conversation.ask("And?", sampling=sampling)
    assert later.report.prefix_exact_tokens == later.report.history_tokens + later.report.chunks[0].tokens


def test_a_free_order_costs_a_conversation_none_of_its_history(model):
    """What is not worth keeping for others, by CRAFT's threshold, is kept for the conversation's next turn."""
    engine = Engine(model, method="prefix", order="free", conversations=ConversationConfig(deduplicate=True))
    conversation = engine.conversation()
    conversation.ask("When does the ferry leave?", [FERRY, PILOTS], sampling=SHORT)
    report = conversation.ask("And who boards ships?", [PILOTS, HARBOUR], sampling=SHORT).report
    assert report.history_tokens
    assert report.prefix_exact_tokens >= report.history_tokens
