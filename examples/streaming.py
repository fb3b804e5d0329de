"""Show an answer as it comes, then what was reused.

Run: python examples/streaming.py CHECKPOINT_FOLDER FILE QUESTION
"""

import sys
from pathlib import Path

from chunkweave import Engine, Request, SamplingParams
from chunkweave.prompt.documents import SplitConfig, split_text

folder, file, question = sys.argv[1:4]
engine = Engine.load(folder, method="cacheblend")
text = Path(file).read_text(encoding="utf-8")
chunks = split_text(text, engine.loaded.tokenizer, SplitConfig(max_tokens=256), source=file)
engine.precompute(chunks)
for event in engine.stream(Request(question, chunks, sampling=SamplingParams(max_new_tokens=64))):
    print(event.text, end="", flush=True)
    if event.answer is not None:
        print()
        for chunk in event.answer.report.chunks:
            print(f"{chunk.source}: {chunk.kv_source}, {chunk.recomputed_tokens} of {chunk.tokens} tokens recomputed")
