"""Conversations in the engine for many requests: the same answers, one turn at a time, preemption, aborts."""

import asyncio

import pytest

from chunkweave import AsyncEngine, BatchingConfig, ConversationConfig, Engine, Request, ReuseConfig, SamplingParams
from chunkweave.errors import ChunkweaveError, ConversationBusyError, PromptTooLongError
from chunkweave.testing import toy_model
from tests.integration.test_conversations import FERRY, HARBOUR, MILL, PILOTS, SCHOOL

SHORT = SamplingParams(max_new_tokens=6)
TURNS = ([FERRY, PILOTS], [PILOTS, HARBOUR], [], [MILL, FERRY, SCHOOL])


@pytest.fixture(scope="module")
def model():
    return toy_model("llama", max_position_embeddings=1024)


def new_engine(model) -> Engine:
    engine = Engine(model, reuse=ReuseConfig(recompute_ratio=0.3), conversations=ConversationConfig(deduplicate=True))
    engine.precompute([FERRY, PILOTS, HARBOUR, SCHOOL, MILL])
    return engine


async def talk(batching: AsyncEngine, conversation, method: str, tokens: int = 6):
    sampling = SamplingParams(max_new_tokens=tokens)
    return [
        await batching.submit(conversation.request(f"Question {n}?", chunks, sampling=sampling), method=method).answer()
        for n, chunks in enumerate(TURNS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("config", [BatchingConfig(), BatchingConfig(kv_tokens=480, block_tokens=8, step_tokens=24)])
@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_conversations_side_by_side_equal_each_by_itself(model, method, config):
    """The second memory is too small for all: requests are preempted, also while their turn is being ended."""
    systems = ["Be brief.", "Be kind.", "Be exact."]
    single = []
    for system in systems:
        talking = new_engine(model).conversation(system=system)
        turns = [
            talking.ask(f"Question {n}?", c, sampling=SamplingParams(40), method=method) for n, c in enumerate(TURNS)
        ]
        single.append([answer.token_ids for answer in turns])
    engine = new_engine(model)

    async def main():
        async with AsyncEngine(engine, config) as batching:
            talks = [talk(batching, engine.conversation(system=system), method, 40) for system in systems]
            answers = await asyncio.gather(*talks)
            return answers, batching.stats.preempted

    answers, preempted = asyncio.run(main())
    assert (preempted > 0) == (config.kv_tokens == 480)
    if config.kv_tokens != 480:  # less memory also cuts conversations sooner
        assert [[answer.token_ids for answer in turns] for turns in answers] == single
    assert all(turns[1].report.chunks_not_sent == 1 for turns in answers)
    engine.store.check()


def test_an_aborted_turn_was_never_said_and_the_conversation_goes_on(model):
    engine = new_engine(model)
    conversation = engine.conversation()

    async def main():
        async with AsyncEngine(engine) as batching:
            stream = batching.submit(conversation.request("When?", [FERRY], sampling=SamplingParams(400)))
            with pytest.raises(ConversationBusyError):
                batching.submit(conversation.request("And?", sampling=SHORT))
            await stream.aclose()
            while True:
                try:
                    answer = await batching.submit(conversation.request("And?", sampling=SHORT)).answer()
                    break
                except ConversationBusyError:
                    await asyncio.sleep(0.001)
            assert answer.report.history_tokens == 0
            assert conversation.turns == 1

    asyncio.run(main())


def test_what_is_refused_or_never_begun_leaves_the_conversation_free(model):
    engine = new_engine(model)
    conversation = engine.conversation()

    async def main():
        batching = AsyncEngine(engine, BatchingConfig(kv_tokens=128, block_tokens=16))
        with pytest.raises(PromptTooLongError):
            batching.submit(conversation.request("When?", ["word " * 150], sampling=SHORT))
        answer = await batching.submit(conversation.request("When?", [FERRY], sampling=SHORT)).answer()
        assert answer.report.prompt_tokens < 128
        stream = batching.submit(conversation.request("And?", sampling=SamplingParams(50)))
        batching.close()
        with pytest.raises(ChunkweaveError):
            await stream.answer()

    asyncio.run(main())
    assert conversation.turns == 1
    assert conversation.ask("And?", sampling=SHORT).report.history_tokens > 0


def test_a_conversation_is_cut_to_the_engines_memory(model):
    engine = new_engine(model)
    conversation = engine.conversation()

    async def main():
        async with AsyncEngine(engine, BatchingConfig(kv_tokens=256, block_tokens=16)) as batching:
            cut = 0
            for n in range(12):
                request = conversation.request(f"Question {n}?", [MILL], sampling=SHORT)
                answer = await batching.submit(request).answer()
                cut += answer.report.turns_cut
                assert answer.report.prompt_tokens + answer.report.new_tokens < 256
            assert cut > 0

    asyncio.run(main())


def test_a_conversation_is_cut_to_the_longest_prompt_that_is_allowed(model):
    """Else it would be refused from there on, for ever."""

    async def work():
        limit = 160
        async with AsyncEngine(Engine(model), BatchingConfig(max_prompt_tokens=limit)) as engine:
            cut = 0
            for turn in range(8):
                request = Request(
                    f"What about the ferry, turn {turn}?", [], sampling=SamplingParams(6), conversation_id="c"
                )
                report = (await engine.submit(request).answer()).report
                assert report.prompt_tokens <= limit
                cut += report.turns_cut
            return cut

    assert asyncio.run(work()) > 0
