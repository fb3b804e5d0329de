"""Ask a running server from LangChain: the documents go along in `extra_body`.

Run: chunkweave serve --model reader, then python examples/langchain_client.py [URL [API_KEY]]
"""

import sys

from langchain_core.documents import Document
from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
retrieved = [
    Document("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", metadata={"source": "choir"}),
    Document("The Gerfern Tower has 230 steps. It is led by Paul Tirwright.", metadata={"source": "tower"}),
]
documents = [{"text": one.page_content, "id": one.metadata["source"]} for one in retrieved]
llm = ChatOpenAI(base_url=url, api_key=key, model="reader", temperature=0, max_tokens=16)
reusing = llm.bind(extra_body={"documents": documents, "chunkweave": {"method": "cacheblend"}})

answer = reusing.invoke("Who leads the Selmond Choir?")
print(answer.content)
print(f"  {answer.usage_metadata['input_tokens']} prompt tokens")
for piece in reusing.stream("How many steps has the Gerfern Tower?"):
    print(piece.content, end="", flush=True)
print()
