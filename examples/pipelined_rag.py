"""Answer several questions at a time, and compute for likely chunks while their search goes on.

Run: python examples/pipelined_rag.py
"""

import asyncio

from chunkweave import AsyncEngine, AsyncRagPipeline, Corpus, CorpusDocument, Engine, SamplingParams
from chunkweave.calibration.questions import bundled_corpus


async def main() -> None:
    with Engine.load("reader") as engine:
        corpus = Corpus(tokenizer=engine.loaded.tokenizer)
        passages = enumerate(bundled_corpus().passages, start=1)
        corpus.add([CorpusDocument(f"passage-{number}", one.text, title=one.source) for number, one in passages])
        questions = "What did Greta Wisley work as?", "What trade did Frank Lervold have?"
        async with AsyncEngine(engine) as batching:
            pipeline = AsyncRagPipeline(batching, corpus, top_k=3)
            answers = (pipeline.answer(question, sampling=SamplingParams(max_new_tokens=16)) for question in questions)
            for question, answer in zip(questions, await asyncio.gather(*answers), strict=True):
                print(f"> {question}\n{answer.text}")
                print(f"  search {answer.search_s * 1e3:.1f} ms, first token after {answer.ttft_s * 1e3:.1f} ms")
        print(pipeline.counts)


asyncio.run(main())
