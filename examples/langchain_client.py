"""Ask a running server from LangChain: what was retrieved is sent as documents.

Server: chunkweave serve --model smollm2
Client: pip install langchain-openai, then python examples/langchain_client.py [URL [API_KEY]]
"""

import sys

from langchain_core.documents import Document
from langchain_openai import ChatOpenAI
from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
model = OpenAI(base_url=url, api_key=key).models.list().data[0].id
retrieved = [
    Document("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", metadata={"source": "choir"}),
    Document("The Gerfern Tower has 230 steps. It is led by Paul Tirwright.", metadata={"source": "tower"}),
]
documents = [{"text": document.page_content, "id": document.metadata["source"]} for document in retrieved]
body = {"documents": documents, "chunkweave": {"method": "cacheblend"}}
llm = ChatOpenAI(base_url=url, api_key=key, model=model, temperature=0, max_tokens=16, extra_body=body)

answer = llm.invoke("Who leads the Selmond Choir?")
print(answer.content)
tokens = answer.usage_metadata
print(f"  {tokens['input_token_details']['cache_read']} of {tokens['input_tokens']} tokens reused")
for piece in llm.stream("How many steps has the Gerfern Tower?"):
    print(piece.content, end="", flush=True)
print()
