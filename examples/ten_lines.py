"""Weave cached chunks with the bundled model.

Run: python examples/ten_lines.py
"""

from chunkweave import Chunk, Engine

engine = Engine.load("reader", method="cacheblend")
tower = Chunk("The Gerfern Tower has 230 steps. The tower is in Halvik. It is led by Paul Tirwright.", source="tower")
choir = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
engine.precompute([tower, choir])
answer = engine.generate("Who leads the Selmond Choir?", [choir, tower], max_new_tokens=32)
print(answer.text)
print(f"{answer.report.reused_tokens} tokens reused, first token after {answer.report.ttft_s:.3f} s")
