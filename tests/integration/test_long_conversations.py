"""Conversations that outgrow the context a thousand turns long, and one that outlives its process's engine."""

from collections.abc import Iterator
from random import Random

import pytest

from chunkweave import Chunk, ConversationConfig, Engine, SamplingParams, StoreConfig
from chunkweave.config import CaptureConfig, ReuseConfig
from chunkweave.metrics import ReuseReport
from chunkweave.testing import toy_model

ALONE = ReuseConfig(capture=CaptureConfig(neutral_tokens=0))

SHORT = SamplingParams(max_new_tokens=2)
CHUNKS = [Chunk(f"Note {n}: {word}.", f"note {n}") for n, word in enumerate(("tide", "rope", "mast", "keel", "sail"))]
MOST = 220


@pytest.fixture(scope="module")
def model():
    return toy_model("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=32, max_position_embeddings=512)


def talk(engine: Engine, turns: int, method: str) -> Iterator[tuple[list[Chunk], ReuseReport]]:
    conversation, rng = engine.conversation(), Random(7)
    for _ in range(turns):
        chunks = rng.sample(CHUNKS, rng.randrange(3))
        yield chunks, conversation.ask("And now?", chunks, sampling=SHORT, method=method).report


def new_engine(model, **store) -> Engine:
    config = ConversationConfig(max_tokens=MOST, deduplicate=True)
    engine = Engine(model, store=StoreConfig(**store) if store else None, conversations=config, reuse=ALONE)
    engine.precompute(CHUNKS)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_a_thousand_turns(model, method):
    """Between cuts nothing of the history is computed; a cut computes it again in exact mode only."""
    engine = new_engine(model)
    cuts, most_segments, most_bytes = 0, 0, 0
    in_context: list[set[str]] = []
    for number, (chunks, report) in enumerate(talk(engine, 1000, method)):
        cuts += bool(report.turns_cut)
        del in_context[: report.turns_cut]
        there = set().union(*in_context) if in_context else set()
        assert report.chunks_not_sent == sum(chunk.source in there for chunk in chunks)
        in_context.append({chunk.source for chunk in chunks} - there)
        assert report.prompt_tokens <= MOST
        history = [part for part in report.chunks[1:] if part.source == "turn" or part.source in there]
        assert sum(part.tokens for part in history) == report.history_tokens
        if method == "prefix":
            first = report.chunks[0].tokens if number else 0
            assert report.prefix_exact_tokens >= first + (0 if report.turns_cut else report.history_tokens)
            assert report.reused_tokens == report.recomputed_tokens == 0
        else:
            assert not any(part.kv_source == "computed" or part.recomputed_tokens for part in history)
            reused = sum(part.tokens for part in history if part.kv_source == "reused")
            assert report.reused_tokens >= reused
            if report.turns_cut:
                assert {part.kv_source for part in history if part.source == "turn"} == {"reused"}
        if number >= 100:
            assert len(engine.store) <= most_segments + 20
            assert engine.store.used_bytes <= most_bytes * 1.5
        else:
            most_segments = max(most_segments, len(engine.store))
            most_bytes = max(most_bytes, engine.store.used_bytes)
    assert cuts > 50
    engine.store.check()


def test_a_cut_every_turn_would_cost_what_a_rarer_cut_saves(model):
    """Why half is kept: computed tokens of exact mode, over the same questions."""
    computed = {}
    for keep in (0.5, 1.0):
        engine = Engine(model, conversations=ConversationConfig(max_tokens=MOST, keep=keep, deduplicate=True))
        computed[keep] = sum(report.computed_tokens for _, report in talk(engine, 60, "prefix"))
    assert computed[0.5] < 0.6 * computed[1.0]


@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_kv_of_an_idle_conversation_moves_down_the_tiers_and_is_found_there(model, tmp_path, method):
    engine = new_engine(model, cache_dir=tmp_path / "kv", host_budget_bytes=60_000)
    with engine:
        conversation = engine.conversation()
        for number in range(3):
            conversation.ask(f"Question {number}?", CHUNKS[number : number + 2], sampling=SHORT, method=method)
        engine.store.flush()
        for number in range(12):
            engine.generate("What else?", [f"Another {number}. " * 10], max_new_tokens=1)
        later = conversation.ask("And so?", sampling=SHORT, method=method).report
        tiers = {part.tier for part in later.chunks[1:]}
        assert "disk" in tiers
        assert {part.kv_source for part in later.chunks} <= {"prefix-exact", "reused"}
        engine.store.check()


@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_after_a_restart_the_kv_is_there_for_a_conversation_that_is_restored(model, tmp_path, method):
    """Conversations live in the process, their KV does not: who keeps its state finds it again."""
    key = ("", "kept")
    with new_engine(model, cache_dir=tmp_path / "kv") as engine:
        conversation = engine.conversation("kept")
        for number in range(3):
            conversation.ask(f"Question {number}?", CHUNKS[number : number + 2], sampling=SHORT, method=method)
        state = engine.conversations.state(key)
        expected = conversation.ask("And so?", sampling=SHORT, method=method)
        history = expected.report.history_tokens
    with Engine(model, store=StoreConfig(cache_dir=tmp_path / "kv")) as engine:
        assert engine.conversations.state(key) is None
        engine.conversations.commit(key, engine.conversations.begin(key), state)
        answer = engine.conversation("kept").ask("And so?", sampling=SHORT, method=method)
        assert answer.token_ids == expected.token_ids
        assert answer.report.history_tokens == history
        assert {part.tier for part in answer.report.chunks} == {"disk"}
        assert (
            answer.report.prefix_exact_tokens + answer.report.reused_tokens == history + answer.report.chunks[0].tokens
        )


def test_what_expires_leaves_the_store(model):
    engine = new_engine(model)
    before = len(engine.store)
    talking = engine.conversation()
    for number in range(3):
        talking.ask(f"Question {number}?", CHUNKS[number : number + 2], sampling=SHORT, method="cacheblend")
    assert len(engine.store) > before + 3
    talking.close()
    left = [record for record in engine.store.records() if not record.alone]
    assert all(len(record.context) <= 2 for record in left)
    engine.store.check()
