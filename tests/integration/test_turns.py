"""A conversation: what one turn recomputed stays recomputed in the next, and is not chosen again."""

from math import ceil

import pytest
import torch

from chunkweave.chunking.prompt import PartKind, Prompt, PromptPart
from chunkweave.config import QueryConfig, ReuseConfig
from chunkweave.planning.method import make_method, stale_offsets
from chunkweave.planning.plan import KVSource
from chunkweave.testing import toy_model
from tests.integration.test_query_weaving import explicit_attention
from tests.integration.weaving import Bench, chunk_part, make_bench, make_prompt

SIZES = (17, 23, 9, 31)
QUERY = QueryConfig(tail=None, layers=(0, 1, 2))


@pytest.fixture
def bench() -> Bench:
    return make_bench(toy_model("llama"))


def weave(bench: Bench, prompt: Prompt, earlier=None, *, method: str = "query", ratio: float = 0.2, **query):
    config = ReuseConfig(recompute_ratio=ratio, query=QueryConfig(tail=None, layers=(0, 1, 2), **query))
    return bench.runner.prefill(
        prompt, make_method(method, config), earlier=None if earlier is None else earlier.turn, keep_turn=True
    )


def next_turn(prompt: Prompt, seed: int, *, chunk: int = 0) -> Prompt:
    """The same chunks, what was asked and answered as one part more, perhaps a new chunk, and another question."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(10, 4000, (n,), generator=generator).tolist()

    history = chunk_part([*prompt.parts[-1].token_ids, *ids(6)])
    new = [chunk_part(ids(chunk))] if chunk else []
    return Prompt((*prompt.parts[:-1], history, *new, PromptPart(PartKind.QUESTION, tuple(ids(5)))))


def recomputed(prefilled) -> set[int]:
    return {position for span in prefilled.recomputed for position in span.positions()}


def rows_at(prefilled, positions) -> torch.Tensor:
    where = torch.tensor(sorted(positions))
    cache = prefilled.cache
    return torch.stack(
        [torch.stack([kv[where] for kv in cache.view(layer, len(prefilled.prompt))]) for layer in range(4)]
    )


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_a_turn_recomputed_stays_and_the_next_question_chooses_among_the_rest(bench, rounds):
    first_prompt = make_prompt(SIZES, system=6)
    bench.precompute(first_prompt)
    first = weave(bench, first_prompt, rounds=rounds)
    before = recomputed(first)
    assert len(before) == ceil(0.2 * sum(SIZES))
    second = weave(bench, next_turn(first_prompt, 7), first, rounds=rounds)
    assert not recomputed(second) & before
    assert len(recomputed(second)) == ceil(0.2 * (sum(SIZES) - len(before)))
    assert (rows_at(second, before) - rows_at(first, before)).abs().max() < 1e-5
    untouched = {p for span in second.plan.spans(KVSource.REUSED) for p in span.positions()} - recomputed(second)
    assert (rows_at(second, untouched) - rows_at(first, untouched)).abs().max() < 1e-5


def test_without_the_earlier_turn_they_are_lost(bench):
    prompt = make_prompt(SIZES, system=6)
    bench.precompute(prompt)
    first = weave(bench, prompt)
    second = weave(bench, next_turn(prompt, 7))
    lost = recomputed(first) - recomputed(second)
    assert lost
    assert (rows_at(second, lost) - rows_at(first, lost)).abs().max() > 1e-3


def test_turns_add_up_until_nothing_is_stale(bench):
    prompt = make_prompt(SIZES, system=6)
    bench.precompute(prompt)
    turn, seen = None, set()
    for number in range(4):
        turn = weave(bench, prompt, turn, ratio=0.5)
        stale = sum(len(stale_offsets(part)) for part in turn.plan.parts)
        assert stale == sum(SIZES) - len(seen)
        assert not recomputed(turn) & seen
        seen |= recomputed(turn)
        prompt = next_turn(prompt, number)
    assert {offset for kept in turn.turn.kept.values() for offset in kept.fresh}
    assert len(seen) > 0.9 * sum(SIZES)


def test_a_later_question_chooses_among_the_stale_tokens_of_the_kept_cache(bench):
    prompt = make_prompt(SIZES, system=6)
    bench.precompute(prompt)
    first = weave(bench, prompt)
    later = next_turn(prompt, 7)
    second = weave(bench, later, first)
    history = second.plan.parts[-2]
    assert history.kv_source is KVSource.COMPUTED
    read = explicit_attention(bench, weave(bench, later, first, method="full-reuse"), history.span.positions())
    read = torch.stack([read[layer] for layer in (0, 1, 2)]).amax(1).sum((0, 1))
    stale = [part.span.start + offset for part in second.plan.parts for offset in stale_offsets(part)]
    best = sorted(stale, key=lambda position: (-float(read[position]), position))[: len(recomputed(second))]
    assert recomputed(second) == set(best)


def test_a_new_chunk_in_a_later_turn_is_woven_as_any_other(bench):
    prompt = make_prompt(SIZES, system=6)
    bench.precompute(prompt)
    first = weave(bench, prompt)
    later = next_turn(prompt, 7, chunk=40)
    bench.precompute(Prompt((later.parts[0], later.parts[-2])))
    second = weave(bench, later, first)
    new = second.plan.parts[-2]
    assert (new.kv_source, new.fresh) == (KVSource.REUSED, frozenset())
    third = weave(bench, next_turn(later, 8), second)
    kept = third.plan.parts[len(later.parts) - 2]
    assert kept.fresh == {p - new.span.start for p in recomputed(second) if p in new.span.positions()}


def test_turns_that_were_cut_off_are_not_taken_for_the_same_context(bench):
    prompt = make_prompt(SIZES, system=6)
    bench.precompute(prompt)
    first = weave(bench, prompt)
    cut = Prompt((*prompt.parts[:2], *prompt.parts[3:]))
    plan = weave(bench, cut, first).plan
    assert all(not part.fresh for part in plan.parts[2:])


@pytest.mark.parametrize("method", ["cacheblend", "cachecraft", "epic", "full-reuse", "prefix", "full"])
def test_every_method_can_go_on_from_a_turn(bench, method):
    prompt = make_prompt(SIZES, system=6)
    bench.precompute(prompt)
    first = weave(bench, prompt)
    second = weave(bench, next_turn(prompt, 7), first, method=method)
    assert second.logits.isfinite().all()
    kept = recomputed(first) - recomputed(second)
    if method in ("cacheblend", "epic", "full-reuse"):
        assert kept
        assert (rows_at(second, kept) - rows_at(first, kept)).abs().max() < 1e-5


def test_keeping_a_turn_changes_neither_the_answer_nor_what_is_stored(bench):
    prompt = make_prompt(SIZES, system=6)
    bench.precompute(make_prompt(SIZES[:3], system=6))
    method = make_method("query", ReuseConfig(recompute_ratio=0.2, query=QUERY))
    plain = bench.runner.prefill(prompt, method)
    kept = bench.runner.prefill(prompt, method, keep_turn=True)
    assert torch.equal(plain.logits, kept.logits)
    assert plain.turn is None
    assert kept.turn.nbytes > 0
    assert [c.part.span for c in plain.captures] == [c.part.span for c in kept.captures]
    for capture in plain.captures:
        one, two = (p.attention.profile(capture.part, capture.recomputed) for p in (plain, kept))
        assert one.inter == pytest.approx(two.inter)
        assert one.received == pytest.approx(two.received, abs=1e-6)
