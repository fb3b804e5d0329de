"""Ask a running server from LlamaIndex: what was retrieved goes along as documents.

Run: chunkweave serve --model smollm2, then python examples/llama_index_client.py [URL [API_KEY]]
"""

import sys

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI

from chunkweave.integrations.llama_index import WeavingSynthesizer

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
model = OpenAI(base_url=url, api_key=key).models.list().data[0].id
texts = [
    "The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.",
    "The Gerfern Tower has 230 steps. It is led by Paul Tirwright.",
]
nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]
llm = OpenAILike(model=model, api_base=url, api_key=key, is_chat_model=True, temperature=0, max_tokens=16)

print(WeavingSynthesizer(llm, reuse={"method": "cacheblend"}).synthesize("Who leads the Selmond Choir?", nodes))
streamed = WeavingSynthesizer(llm, streaming=True).synthesize("How many steps has the Gerfern Tower?", nodes)
for piece in streamed.response_gen:
    print(piece, end="", flush=True)
print()
