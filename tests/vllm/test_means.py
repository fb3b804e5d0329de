"""Means over several contexts inside vLLM, against the KV that follows by hand from a checkpoint's weights."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from chunkweave.vllm.removal import removal_params
from tests.vllm.checkpoints import BOS
from tests.vllm.conftest import SLICED
from tests.vllm.prompts import Given, tokens
from tests.vllm.reference import Piece, Reference, Stored
from tests.vllm.reference_families import reference_of
from tests.vllm.serving import TWO_RANKS, Ask, Got, Served, serving

TOLERANCE = 5e-4
WAYS = {
    "llama-sliced": ("llama", {}),
    "qwen3-uncached": ("qwen3", {"enable_prefix_caching": False}),
    "two-ranks": ("llama", {**SLICED, **TWO_RANKS}),
    "windows": ("gemma3_text", SLICED),
    "profiles": ("llama", {**SLICED, "extra": {"capture": True}}),
}
Chunk = tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """Chunks, each with the contexts that it is computed behind, and the neutral passages of the first pass."""

    passages: Sequence[Chunk] = field(default_factory=lambda: [tokens(21), tokens(17)])
    contexts: Mapping[Chunk, Sequence[Sequence[Chunk]]] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Sequence[int] = (43, 38, 61, 33), count: int = 2) -> "Corpus":
        """Context k of a chunk has every `count`-th of the others, from the k-th on."""
        chunks = [tokens(size) for size in sizes]
        others = {chunk: [other for other in chunks if other != chunk] for chunk in chunks}
        return cls(contexts={chunk: [others[chunk][k::count] for k in range(count)] for chunk in chunks})

    @property
    def chunks(self) -> list[Chunk]:
        return list(self.contexts)

    def first_pass(self, chunk: Chunk) -> Ask:
        prompt = Given([*self.passages, chunk], question=())
        return replace(prompt.ask("prefix", neutral=len(self.passages), counts_as_request=False), top=None)

    def shares(self, chunk: Chunk) -> list[Ask]:
        mean = {"group": f"mean of {chunk[:3]}", "of": len(self.contexts[chunk])}
        prompts = [Given([*context, chunk], question=()) for context in self.contexts[chunk]]
        return [replace(prompt.ask("full-reuse", mean=mean, counts_as_request=False), top=None) for prompt in prompts]

    def first_passes(self, served: Served) -> None:
        for chunk in self.chunks:
            served.answer(self.first_pass(chunk))

    def warm(self, served: Served) -> None:
        self.first_passes(served)
        for chunk in self.chunks:
            for share in self.shares(chunk):
                served.answer(share)

    def means(self, reference: Reference) -> dict[Chunk, Stored]:
        """The same by hand."""
        first = {}
        for chunk in self.chunks:
            prompt = Given([*self.passages, chunk], question=())
            first[chunk] = reference.stored(prompt.ids, *prompt.spans[-1])
        found = {}
        for chunk, contexts in self.contexts.items():
            behind = [[Piece((BOS,)), *(Piece(one, first[one]) for one in context)] for context in contexts]
            found[chunk] = reference.mean([reference.stored_behind([*pieces, Piece(chunk)]) for pieces in behind])
        return found


@pytest.fixture(scope="module", params=WAYS)
def way(request, checkpoint):
    """A server, the shared one if it has no options, and what its model computes by hand."""
    family, options = WAYS[request.param]
    folder = checkpoint(family)
    server = serving(folder, **options) if options else nullcontext(request.getfixturevalue("sliced"))
    with server as served:
        assert all(state["weaves"] for state in served.worker("chunkweave_state"))
        yield served, reference_of(folder)
        assert all(served.worker("chunkweave_check"))


@pytest.fixture(scope="module")
def served(sliced):
    return sliced


def stored(served: Served, chunk: Chunk) -> list[dict]:
    """What each worker holds of a chunk; all hold the same."""
    held = served.worker("chunkweave_sources")
    found = [sorted((one for one in every if one["tokens"] == list(chunk)), key=str) for every in held]
    assert all(one == found[0] for one in found)
    return found[0]


def means(served: Served, chunk: Chunk) -> list[dict]:
    return [one for one in stored(served, chunk) if one["contexts"]]


def asked(served: Served, chunks: Sequence[Chunk], method: str = "full-reuse", ratio: float | None = None) -> Got:
    return served.answer(Given(chunks).ask(method, ratio))[0]


@pytest.mark.parametrize(("method", "ratio"), [("full-reuse", 0.0), ("epic", 0.2), ("cacheblend", 0.15)])
def test_an_answer_over_means_is_what_follows_by_hand(way, method, ratio):
    served, reference = way
    corpus = Corpus.of()
    corpus.warm(served)
    prompt = Given(Random(3).sample(corpus.chunks, len(corpus.chunks)))
    got = served.answer(prompt.ask(method, ratio))[0]
    by_hand = corpus.means(reference)
    pieces = [Piece((BOS,)), *(Piece(chunk, by_hand[chunk]) for chunk in prompt.chunks), Piece(prompt.question)]
    woven = reference.weave(pieces, method, ratio)
    assert (got.log_probs[0] - woven.log_probs).abs().max().item() <= TOLERANCE
    assert (got.log_probs[0] - reference.log_probs(prompt.ids)).abs().max().item() > 20 * TOLERANCE, "it is no prefill"
    assert got.report["recomputed"] == woven.recomputed
    assert got.report["reused_tokens"] + got.report["recomputed_tokens"] == sum(map(len, prompt.chunks))


def test_of_each_chunk_one_mean_is_stored_that_is_not_exact_and_once(way, request):
    served, _ = way
    profiles = "profiles" in request.node.callspec.id
    corpus = Corpus.of()
    corpus.warm(served)
    before = {chunk: stored(served, chunk) for chunk in corpus.chunks}
    for chunk, found in before.items():
        assert [(one["contexts"], one["exact"]) for one in found if not one["neutral"]] == [(2, False)], found
        (mean,) = means(served, chunk)
        assert mean["profile"] == profiles
        assert len(mean["sources"]) >= len(corpus.chunks) - 1 + len(corpus.passages), "with what the first passes read"
    corpus.warm(served)
    assert {chunk: stored(served, chunk) for chunk in corpus.chunks} == before
    for chunk in corpus.chunks:
        for share in corpus.shares(chunk):
            assert served.answer(share)[0].report["computed_tokens"] <= len(chunk) + 1, "BOS, and itself"
    assert asked(served, corpus.chunks, "prefix").report["reused_tokens"] == 0, "a mean is no exact prefix"


def test_chunks_without_a_first_pass_are_computed_as_they_stand(way):
    """And are not stored: one context's share is all that the prompt is for."""
    served, reference = way
    chunk, other = tokens(40), tokens(50)
    corpus = Corpus(contexts={chunk: [[other]]})
    (share,) = corpus.shares(chunk)
    served.answer(share)
    assert (stored(served, other), len(means(served, chunk))) == ([], 1)
    context = Given([other, chunk], question=())
    own = reference.mean([reference.stored(context.ids, *context.spans[-1])])
    prompt = Given([tokens(30), chunk])
    pieces = [Piece((BOS,)), Piece(prompt.chunks[0]), Piece(chunk, own), Piece(prompt.question)]
    wanted = reference.weave(pieces, "full-reuse", 0.0).log_probs
    assert (served.answer(prompt.ask("full-reuse"))[0].log_probs[0] - wanted).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("before", ["a mean that the store has lost", "an exact path"])
def test_though_vllm_has_the_blocks_shares_are_captured(served, before):
    corpus = Corpus.of((64, 70, 66))
    if before == "an exact path":
        for chunk, contexts in corpus.contexts.items():
            for context in contexts:
                served.answer(Given([*context, chunk], question=()).ask("prefix"))
    else:
        corpus.warm(served)
        served.worker("chunkweave_forget_memory")
        assert not stored(served, corpus.chunks[0])
    corpus.warm(served)
    assert [len(means(served, chunk)) for chunk in corpus.chunks] == [1, 1, 1]


@pytest.fixture
def shared(served) -> tuple[Corpus, Chunk, Ask, Ask]:
    """A corpus with its first passes, a chunk of it, and the two shares of that one's mean."""
    corpus = Corpus.of()
    corpus.first_passes(served)
    chunk = corpus.chunks[0]
    return corpus, chunk, *corpus.shares(chunk)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_share_whose_weave_fails_may_be_sent_again(served, shared, layer):
    corpus, chunk, first, second = shared
    served.answer(first)
    with served.broken_layer(layer):
        served.answer(second)
    assert not means(served, chunk)
    corpus.first_passes(served)
    served.answer(second)
    assert len(means(served, chunk)) == 1


def test_a_share_that_is_cancelled_may_be_sent_again(served, shared):
    _, chunk, first, second = shared
    busy = served.send(Ask(Given([tokens(40)]).ids, None, 30))  # else a weave is done in one step
    served.step()
    cancelled = served.send(first)
    for _ in range(3):
        served.step()
    served.abort(cancelled, busy)
    served.finish()
    served.answer(second)
    served.answer(first)
    assert len(means(served, chunk)) == 1
    served.one(tokens(4))
    assert served.blocks_are_free()


def test_two_clients_that_warm_at_once_with_others_beside_them_leave_one_mean_each(served):
    corpus = Corpus.of((90, 80, 110))
    beside = [Given(Random(seed).sample(corpus.chunks, 3)).ask("cacheblend", 0.15) for seed in range(3)]
    twice = [corpus.first_pass(chunk) for chunk in corpus.chunks for _ in range(2)]
    served.answer(*twice, *beside)
    shares = [share for chunk in corpus.chunks for share in corpus.shares(chunk) for _ in range(2)]
    served.answer(*shares, *beside)
    assert [len(means(served, chunk)) for chunk in corpus.chunks] == [1, 1, 1]
    assert asked(served, corpus.chunks[::-1]).report["reused_tokens"] > 200
    served.one(tokens(4))
    assert served.blocks_are_free()


def forget(served: Served, *chunks: Chunk) -> dict:
    (got,) = served.answer(Ask([BOS], removal_params(chunks or None, [BOS]), top=None))
    return got.report


@pytest.mark.parametrize("way", ["llama-sliced", "two-ranks"], indirect=True)
def test_nothing_that_has_read_a_removed_chunk_is_left_or_comes_back(way):
    served, _ = way
    corpus = Corpus.of()
    corpus.warm(served)
    gone, *others = corpus.chunks
    answered = asked(served, [others[0], tokens(45), gone])
    assert answered.report["reused_tokens"] > 0, "what is computed behind a mean has read what that has"
    assert stored(served, gone)
    assert forget(served, gone)["removed"] >= 4
    assert not stored(served, gone)
    assert not any(means(served, chunk) for chunk in others), "each has it among its contexts"
    assert all(stored(served, chunk) for chunk in others), "the first passes have not read it"
    assert asked(served, [gone]).report["reused_tokens"] == 0
    assert forget(served, gone)["left"] == 0


def test_between_two_shares_a_removal_drops_the_first_one(served, shared):
    corpus, chunk, first, second = shared
    served.answer(first)
    forget(served, corpus.contexts[chunk][0][0])
    served.answer(second)
    assert not means(served, chunk)
    served.answer(first)
    assert len(means(served, chunk)) == 1


def test_what_runs_during_a_removal_of_what_its_mean_has_read_leaves_nothing(served):
    """The removed chunk is none of its own: it was read for the mean of another one."""
    corpus = Corpus.of()
    corpus.warm(served)
    gone, chunk, *_ = corpus.chunks
    last = tokens(90)
    running = replace(Given([chunk, last]).ask("full-reuse", new_tokens=24), top=None)
    served.send(running)
    for _ in range(2):  # of several: a step has 64 tokens
        served.step()
    served.send(Ask([BOS], removal_params([gone], [BOS]), top=None))
    served.finish()
    assert not stored(served, last)
    assert not means(served, chunk)


def test_shares_that_vllm_throws_out_and_takes_up_again_come_to_the_same_mean(checkpoint, served):
    options = {**SLICED, "num_gpu_blocks_override": 20, "max_model_len": 320}
    corpus = Corpus.of()
    with serving(checkpoint("llama"), **options) as cramped:
        long = [replace(Given([tokens(150)]).plain(90), top=None) for _ in range(3)]
        before = cramped.metric("vllm:num_preemptions")
        corpus.first_passes(cramped)
        cramped.answer(*long, *(share for chunk in corpus.chunks for share in corpus.shares(chunk)), *long)
        assert cramped.metric("vllm:num_preemptions") > before
        assert [len(means(cramped, chunk)) for chunk in corpus.chunks] == [1] * 4
        disturbed = asked(cramped, corpus.chunks[::-1])
    corpus.warm(served)
    prompt = Given(corpus.chunks[::-1])
    assert disturbed.report["reused_tokens"] == served.answer(prompt.ask("full-reuse"))[0].report["reused_tokens"]
