"""Two questions of one conversation: the turns so far are sent again, and their KV is found in the store.

Run: python examples/conversation.py
"""

from chunkweave import Chunk, Engine, Request

engine = Engine.load("reader")
tower = Chunk("The Gerfern Tower has 230 steps. The tower is in Halvik. It is led by Paul Tirwright.", source="tower")
choir = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
chunks = [choir, tower]
first, second = "Who leads the Selmond Choir?", "How many steps does the Gerfern Tower have?"
(answer,) = engine.generate_batch([Request(first, chunks)])
print(answer.text)
turns = [(first, answer.text)]
(answer,) = engine.generate_batch([Request(second, chunks, history=turns, history_chunks=[chunks])])
print(answer.text)
print(f"{answer.report.history_tokens} tokens of history")
