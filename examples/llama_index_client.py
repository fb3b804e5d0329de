"""Ask a running server from LlamaIndex: the documents go along in `extra_body`.

Run: chunkweave serve --model reader, then python examples/llama_index_client.py [URL [API_KEY]]
"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
documents = [
    {"text": "The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", "id": "choir"},
    {"text": "The Gerfern Tower has 230 steps. It is led by Paul Tirwright.", "id": "tower"},
]
llm = OpenAILike(
    model="reader",
    api_base=url,
    api_key=key,
    is_chat_model=True,
    temperature=0,
    max_tokens=16,
    additional_kwargs={"extra_body": {"documents": documents, "chunkweave": {"method": "cacheblend"}}},
)

answer = llm.chat([ChatMessage(role="user", content="Who leads the Selmond Choir?")])
print(answer.message.content)
for piece in llm.stream_chat([ChatMessage(role="user", content="How many steps has the Gerfern Tower?")]):
    print(piece.delta, end="", flush=True)
print()
