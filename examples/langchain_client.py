"""Ask a running server from LangChain: what was retrieved goes along as documents.

Run: chunkweave serve --model smollm2, then python examples/langchain_client.py [URL [API_KEY]]
"""

import sys

from langchain_core.documents import Document
from openai import OpenAI

from chunkweave.integrations.langchain import ChatChunkweave

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
model = OpenAI(base_url=url, api_key=key).models.list().data[0].id
retrieved = [
    Document("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", metadata={"source": "choir"}),
    Document("The Gerfern Tower has 230 steps. It is led by Paul Tirwright.", metadata={"source": "tower"}),
]
llm = ChatChunkweave(base_url=url, api_key=key, model=model, temperature=0, max_tokens=16)

answer = llm.invoke("Who leads the Selmond Choir?", documents=retrieved, reuse={"method": "cacheblend"})
print(answer.content)
print(f"  {answer.response_metadata['chunkweave']['prompt_tokens']} prompt tokens")
for piece in llm.stream("How many steps has the Gerfern Tower?", documents=retrieved):
    print(piece.content, end="", flush=True)
print()
