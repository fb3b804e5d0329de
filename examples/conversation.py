"""Two questions of one conversation: what is there already is not sent again.

Run: python examples/conversation.py
"""

from chunkweave import Chunk, ConversationConfig, Engine

engine = Engine.load("reader", conversations=ConversationConfig(deduplicate=True))
tower = Chunk("The Gerfern Tower has 230 steps. The tower is in Halvik. It is led by Paul Tirwright.", source="tower")
choir = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
conversation = engine.conversation()
print(conversation.ask("Who leads the Selmond Choir?", [choir, tower]).text)
answer = conversation.ask("How many steps does the Gerfern Tower have?", [tower])
print(answer.text)
print(f"{answer.report.chunks_not_sent} chunk not sent again, {answer.report.history_tokens} tokens of history")
