"""Weave cached chunks.

Run: python examples/ten_lines.py CHECKPOINT_FOLDER
"""

import sys

from chunkweave import Chunk, Engine

engine = Engine.load(sys.argv[1], method="cacheblend")
harbour = Chunk("The harbour office moved to Cooper's Quay in 1937.", source="history")
storm = Chunk("In February 1936 a storm took the roof off the net loft.", source="storms")
engine.precompute([harbour, storm])
answer = engine.generate("What happened to the net loft?", [storm, harbour], max_new_tokens=32)
print(answer.text)
print(f"{answer.report.reused_tokens} tokens reused, first token after {answer.report.ttft_s:.3f} s")
