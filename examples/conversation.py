"""Two questions of one conversation: the second request sends the first turn again, whose KV is reused.

Run: python examples/conversation.py
"""

from chunkweave import Chunk, Engine, Request

engine = Engine.load("reader")
tower = Chunk("The Gerfern Tower has 230 steps. The tower is in Halvik. It is led by Paul Tirwright.", source="tower")
choir = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
history: list[tuple[str, str]] = []
for question in ("Who leads the Selmond Choir?", "How many steps does the Gerfern Tower have?"):
    (answer,) = engine.generate_batch([Request(question, [choir, tower], history=history)])
    history.append((question, answer.text))
    print(answer.text)
print(f"{answer.report.history_tokens} tokens of history")
