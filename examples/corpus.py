"""Retrieve from a corpus on disk and answer from what was found, with the bundled model and passages.

Run: python examples/corpus.py [CORPUS_FOLDER]
"""

import sys
from tempfile import mkdtemp

from chunkweave import Corpus, CorpusDocument, Engine
from chunkweave.calibration.questions import bundled_corpus

folder = sys.argv[1] if len(sys.argv) > 1 else mkdtemp()
engine = Engine.load("reader")
if Corpus.exists(folder):
    corpus = Corpus.open(folder)
else:
    corpus = Corpus.create(folder, tokenizer=engine.loaded.tokenizer)
    passages = enumerate(bundled_corpus().passages, start=1)
    corpus.add([CorpusDocument(f"passage-{number}", one.text, title=one.source) for number, one in passages])
questions = "What did Greta Wisley work as?", "What trade did Frank Lervold have?", "What job did Greta Wisley do?"
for question in questions:
    retrieved = corpus.search(question, 3)
    answer = engine.generate(question, [hit.chunk for hit in retrieved], max_new_tokens=16)
    print(f"> {question}\n{answer.text}")
    for hit in retrieved:
        print(f"  {hit.rank}. {hit.title} ({hit.document}), score {hit.score:.2f}")
    stored = answer.report.prefix_exact_tokens + answer.report.reused_tokens
    print(f"  {stored} of {answer.report.prompt_tokens} tokens from the store")
