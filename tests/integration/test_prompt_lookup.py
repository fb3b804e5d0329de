"""Answers with prompt lookup decoding are those without it: batches, streams, stops, small memory."""

from collections import Counter

import pytest
import torch

from chunkweave import Answer, Chunk, Engine, Request, SamplingParams
from chunkweave.config import ComputeConfig
from chunkweave.engine.core import BatchingCore
from chunkweave.engine.decode import Sampler
from chunkweave.engine.engine import Events, _submit
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.scheduling.budget import BatchingConfig

CHOIR = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
BAKERY = Chunk("The Loom Bakery was opened by Ada Ferris in 1902. It sells rye bread and rye bread.", source="bakery")
FERRY = Chunk("The ferry to Skerrow leaves at seven, at noon and at six. The ferry is blue.", source="ferry")
QUESTIONS = (
    "Who leads the Selmond Choir?",
    "Who opened the Loom Bakery?",
    "How many singers are there in the Selmond Choir?",
    "When does the ferry to Skerrow leave?",
    "What does the Loom Bakery sell?",
    "What colour is the ferry?",
)
STOPS = ((), ("ark",), (" G",), ("in ", "e"))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("reader", dtype="float32")


def requests(sampling: SamplingParams) -> list[Request]:
    return [Request(question, (CHOIR, BAKERY, FERRY), sampling=sampling) for question in QUESTIONS]


def with_drafts(engine: Engine, most: int) -> Engine:
    engine.runner.compute = ComputeConfig(draft_tokens=most)
    return engine


def same(one: Answer, other: Answer) -> bool:
    return (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)


@pytest.mark.parametrize("stop", STOPS)
def test_answers_are_equal_alone_and_in_batches(engine: Engine, stop: tuple[str, ...]):
    accepted = 0
    for most_new in (1, 2, 24):
        asked = requests(SamplingParams(most_new, stop=stop))
        plain = with_drafts(engine, 0).generate_batch(asked)
        assert all(one.report.draft_tokens == 0 for one in plain)
        batch = with_drafts(engine, 8).generate_batch(asked)
        alone = [engine.generate_batch([one])[0] for one in asked]
        for without, together, single in zip(plain, batch, alone, strict=True):
            assert same(without, together)
            assert same(without, single)
            assert single.report.accepted_tokens <= min(single.report.draft_tokens, single.report.new_tokens)
            accepted += together.report.accepted_tokens + single.report.accepted_tokens
    assert accepted > 0, "the answers quote the chunks"


def test_answers_are_equal_if_memory_is_short_and_requests_are_preempted(engine: Engine):
    asked = requests(SamplingParams(24))
    plain = with_drafts(engine, 0).generate_batch(asked)
    with_drafts(engine, 8)
    longest = max(one.report.prompt_tokens for one in plain)
    config = BatchingConfig(kv_tokens=3 * longest, block_tokens=4, max_running=6, step_tokens=64)
    core = BatchingCore(engine.parts, config)
    inboxes: list[Events] = []
    for number, request in enumerate(asked):
        prepared = core.fitting(engine.preparer.prepare(request, MethodRequest.of()))
        inboxes.append(_submit(core, number, prepared, 0.0))
    while core.busy:
        core.step()
        core.check()
    assert all(same(events[-1].answer, one) for events, one in zip(inboxes, plain, strict=True))
    stats = core.stats
    assert 0 < stats.accepted_tokens <= stats.draft_tokens
    core.close()


def test_a_seed_gives_the_same_text_again(engine: Engine):
    sampling = SamplingParams(24, temperature=0.8, top_p=0.9, seed=3)
    once, again = (with_drafts(engine, 8).generate_batch(requests(sampling)[:1])[0] for _ in range(2))
    assert once.token_ids == again.token_ids


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sampled_pairs_keep_their_distribution(engine: Engine, top_p: float, monkeypatch: pytest.MonkeyPatch):
    """Two tokens over a vocabulary of four, the first one drafted: frequencies within five standard errors."""
    first = torch.tensor([1.0, 0.5, 0.0, -1.0])
    second = {token: torch.roll(first, token + 1) for token in range(4)}
    draft, n = 1, 4000
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=top_p, seed=0))
    seen: Counter[tuple[int, int]] = Counter()
    for _ in range(n):
        tokens: list[int] = []
        state = _state(engine, sampler, tokens, monkeypatch)
        accepted = state.verify(torch.stack((first, second[draft])), (draft,))
        if not accepted:
            state.verify(second[tokens[0]][None], ())
        seen[tokens[0], tokens[1]] += 1
    for one in range(4):
        for other in range(4):
            p = _chances(first, top_p)[one] * _chances(second[one], top_p)[other]
            assert abs(seen[one, other] / n - p) <= 5 * (p * (1 - p) / n) ** 0.5 + 1e-9


def _chances(logits: torch.Tensor, top_p: float) -> list[float]:
    chances = torch.softmax(logits.double(), 0)
    ranked, order = chances.sort(descending=True)
    chances[order[ranked.cumsum(0) - ranked >= top_p]] = 0.0
    return (chances / chances.sum()).tolist()


def _state(engine: Engine, sampler: Sampler, tokens: list[int], monkeypatch: pytest.MonkeyPatch):
    """A decoding state without a prompt, whose tokens are chosen by `sampler`."""
    from chunkweave.engine.decode import DecodeState

    state = object.__new__(DecodeState)
    state.token_ids, state.finish_reason = tokens, None
    state._drafts, state._drafted, state._accepted = None, 0, 0
    monkeypatch.setattr(state, "advance", lambda logits: tokens.append(sampler.choose(logits)), raising=False)
    return state
