"""Requests that come at once over the same new chunks share the computation of these."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from tests.vllm.prompts import Given, tokens
from tests.vllm.serving import IN_PROCESS, TWO_RANKS, Ask, Got, Served, serving

TOLERANCE = 5e-4
RATIO = 0.1
TOGETHER = {"max_num_batched_tokens": 512, "max_num_seqs": 16}
"""A prompt fits into a step, and six of them do not."""


@pytest.fixture(scope="module")
def together(checkpoint):
    with serving(checkpoint("llama"), **TOGETHER, **IN_PROCESS) as served:
        yield served


def computed(got: Got) -> int:
    """Tokens that were computed for a request."""
    return got.report["computed_tokens"] + got.report.get("recomputed_tokens", 0)


def run(served: Served, names: Sequence[str]) -> list[Got]:
    """The answers to these requests."""
    answers: dict[str, Got] = {}
    while not answers.keys() >= set(names):
        answers.update(served.step())
    return [answers[name] for name in names]


def ask(prompt: Given, method: str) -> Ask:
    return prompt.ask(method, RATIO if method in ("cacheblend", "query", "epic") else None)


def at_once(served: Served, prompts: Sequence[Given], method: str) -> list[Got]:
    return run(served, [served.send(ask(prompt, method)) for prompt in prompts])


def one_by_one(served: Served, prompts: Sequence[Given], method: str) -> list[Got]:
    return [served.answer(ask(prompt, method))[0] for prompt in prompts]


def six_over_the_same(lengths: Sequence[int] = (120, 110, 130)) -> list[Given]:
    """Every order of three new documents, so that vLLM's own cache, apart by chunks and their order, shares none."""
    a, b, c = map(tokens, lengths)
    return [Given(one) for one in ([a, b, c], [b, a, c], [c, a, b], [a, c, b], [b, c, a], [c, b, a])]


@pytest.mark.parametrize("method", ["cacheblend", "query", "epic", "full-reuse"])
def test_at_once_they_compute_what_they_compute_one_after_the_other(together, method):
    totals = [sum(map(computed, send(together, six_over_the_same(), method))) for send in (one_by_one, at_once)]
    assert totals[1] <= 1.1 * totals[0], totals


def test_at_once_they_weave_what_one_of_them_has_captured(together):
    """One after the other they compute less: each finds the variants of those before it. A salt makes documents new."""
    same = six_over_the_same()
    alone, shared = ([replace(ask(one, "cachecraft"), salt=salt) for one in same] for salt in ("alone", "together"))
    first, *others = (computed(together.answer(one)[0]) for one in alone)
    answers = run(together, [together.send(one) for one in shared])
    assert sum(map(computed, answers)) <= first + 5 * max(others)


@pytest.mark.parametrize("first", ["prefix", "cacheblend"])
def test_requests_of_other_methods_share_too(together, first):
    """An exact request takes what one that is woven computes exactly, and the other way round."""
    a, b = tokens(180), tokens(170)
    second = "cacheblend" if first == "prefix" else "prefix"
    asks = [ask(Given([a, b]), first), ask(Given([a, b]), second)]
    answers = run(together, [together.send(ask) for ask in asks])
    assert [computed(one) for one in answers] == [360, 40 if second == "prefix" else 10], "prefix takes whole blocks"


def test_exact_answers_are_those_of_lone_requests(together, reference):
    a, b, c = tokens(150), tokens(140), tokens(100)
    prompts = [Given(one, system=a) for one in ([b], [b, c], [c], [c, b], [b, c], [b])]
    asks = [ask(prompt, method) for prompt, method in zip(prompts, ["cacheblend", *["prefix"] * 5], strict=True)]
    answers = run(together, [together.send(ask) for ask in asks])
    for prompt, got in zip(prompts, answers, strict=True):
        assert (got.log_probs[0] - reference.log_probs(prompt.ids)).abs().max().item() <= TOLERANCE
    assert sum(map(computed, answers)) <= 1 + 150 + 2 * (140 + 100) + len(prompts) * (9 + 32)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("stored", [False, True], ids=["prefilled", "woven"])
def test_if_the_first_is_cancelled_another_one_computes_for_all(together, stored, steps):
    prompts = six_over_the_same((150, 140, 230))  # longer than a step
    if stored:  # the first one is woven, up to its last part, and computes the others in its weave
        one_by_one(together, [Given([prompts[0].chunks[-1]])], "prefix")
    first, *others = [together.send(ask(prompt, "cacheblend")) for prompt in prompts]
    for _ in range(steps):
        together.step()
    together.abort(first)
    answers = run(together, others)
    new = 520 - (230 if stored else 0)
    assert sum(map(computed, answers)) <= new + 1.2 * RATIO * 520 * 5 + 10 * 5
    together.one(tokens(4))
    assert together.blocks_are_free()


def steps_of(served: Served, prompts: Sequence[Given], method: str | None) -> int:
    names = {served.send(prompt.plain() if method is None else ask(prompt, method)) for prompt in prompts}
    steps = 0
    while names:
        names -= served.step().keys()
        steps += 1
    return steps


@pytest.mark.parametrize("method", ["cacheblend", "prefix"])
def test_requests_over_other_documents_take_no_more_steps_than_without_chunks(together, method):
    def disjoint() -> list[Given]:
        return [Given([tokens(120), tokens(100)]) for _ in range(6)]

    assert steps_of(together, disjoint(), method) <= steps_of(together, disjoint(), None)


def test_with_cancels_at_random_every_other_answer_comes(together, reference):
    random = Random(7)
    chunks = [tokens(random.randrange(70, 120)) for _ in range(5)]
    sent: dict[str, Given] = {}
    cancelled: set[str] = set()
    answers: dict[str, Got] = {}
    for _ in range(60):
        prompt = Given(random.sample(chunks, 3))
        method = random.choice(["prefix", "prefix", "cacheblend", "query"])
        name = together.send(ask(prompt, method))
        if method == "prefix":
            sent[name] = prompt
        if random.random() < 0.25:
            answers.update(together.step())
        if random.random() < 0.2:
            gone = random.choice([*sent, name])
            if gone not in answers:
                cancelled.add(gone)
                together.abort(gone)
        if random.random() < 0.1:  # as if nothing of it had been seen
            chunks[random.randrange(5)] = tokens(random.randrange(70, 120))
    answers.update(together.finish())
    for name, prompt in sent.items():
        if name not in cancelled:
            difference = answers[name].log_probs[0] - reference.log_probs(prompt.ids)
            assert difference.abs().max().item() <= TOLERANCE
    together.one(tokens(4))
    assert together.blocks_are_free()


def test_vllms_priorities_hold_among_requests_that_wait_for_chunks(checkpoint):
    """The most urgent one computes what all share, though it came last; then they are answered in their order."""
    urgent_last = range(5, -1, -1)
    with serving(checkpoint("llama"), **TOGETHER, scheduling_policy="priority", **IN_PROCESS) as served:
        alone = sum(map(computed, one_by_one(served, six_over_the_same(), "cacheblend")))
        asks = [ask(prompt, "cacheblend") for prompt in six_over_the_same()]
        names = [served.send(one, priority=number) for one, number in zip(asks, urgent_last, strict=True)]
        answers = served.finish()
        assert served.blocks_are_free()
    assert max(names, key=lambda name: computed(answers[name])) == names[-1]
    assert list(answers) == names[::-1]
    assert sum(map(computed, answers.values())) <= 1.1 * alone


def test_two_ranks_share_alike(checkpoint):
    with serving(checkpoint("llama"), **TOGETHER, **TWO_RANKS) as served:
        alone = one_by_one(served, six_over_the_same(), "cacheblend")
        plain = [served.send(Given([tokens(900)]).plain()) for _ in range(3)]  # so that the six are there at once
        prompts = six_over_the_same()
        together = run(served, [*(served.send(ask(prompt, "cacheblend")) for prompt in prompts), *plain])[:6]
    assert sum(map(computed, together)) <= 1.1 * sum(map(computed, alone))
