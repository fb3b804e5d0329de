"""Retrieve from a corpus on disk and answer from what was found, with the bundled model and passages.

Run: python examples/rag_pipeline.py [CORPUS_FOLDER]
"""

import sys
from tempfile import mkdtemp

from chunkweave import Corpus, CorpusDocument, Engine, RagPipeline, SamplingParams
from chunkweave.calibration.questions import bundled_corpus

folder = sys.argv[1] if len(sys.argv) > 1 else mkdtemp()
engine = Engine.load("reader")
if Corpus.exists(folder):
    corpus = Corpus.open(folder)
else:
    corpus = Corpus.create(folder, tokenizer=engine.loaded.tokenizer)
    passages = enumerate(bundled_corpus().passages, start=1)
    corpus.add([CorpusDocument(f"passage-{number}", one.text, title=one.source) for number, one in passages])
pipeline = RagPipeline(engine, corpus, top_k=3)
questions = "What did Greta Wisley work as?", "What trade did Frank Lervold have?", "What job did Greta Wisley do?"
for question in questions:
    print(f"> {question}")
    for event in pipeline.stream(question, sampling=SamplingParams(max_new_tokens=16)):
        print(event.text, end="", flush=True)
        if event.answer is not None:
            print()
            for found in event.answer.retrieved:
                print(f"  {found.rank}. {found.title} ({found.document}), score {found.score:.2f}")
            report = event.answer.report
            stored = report.prefix_exact_tokens + report.reused_tokens
            print(f"  {stored} of {report.prompt_tokens} tokens from the store")
