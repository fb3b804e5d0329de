"""Ask a running server from LlamaIndex: a query engine's nodes are sent as documents.

Server: chunkweave serve --model smollm2
Client: pip install llama-index-llms-openai-like, then python examples/llama_index_client.py [URL [API_KEY]]
"""

import sys

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI


class DocumentsSynthesizer(BaseSynthesizer):
    """Answers over retrieved nodes in one request; `index.as_query_engine(response_synthesizer=...)` takes it."""

    def get_response(self, query_str, text_chunks, **_):
        request = self._request(query_str, text_chunks)
        if self._streaming:
            return (piece.delta or "" for piece in self._llm.stream_chat(**request))
        return self._llm.chat(**request).message.content or ""

    async def aget_response(self, query_str, text_chunks, **_):
        request = self._request(query_str, text_chunks)
        if self._streaming:
            pieces = await self._llm.astream_chat(**request)
            return (piece.delta or "" async for piece in pieces)
        return (await self._llm.achat(**request)).message.content or ""

    def _request(self, question, texts):
        body = {"documents": list(texts), "chunkweave": {"method": "cacheblend"}}
        return {"messages": [ChatMessage(role="user", content=question)], "extra_body": body}

    def _get_prompts(self):
        return {}  # the server's template makes the prompt

    def _update_prompts(self, prompts_dict):
        """Does nothing: there are no prompts."""


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
model = OpenAI(base_url=url, api_key=key).models.list().data[0].id
texts = [
    "The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.",
    "The Gerfern Tower has 230 steps. It is led by Paul Tirwright.",
]
nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]
llm = OpenAILike(model=model, api_base=url, api_key=key, is_chat_model=True, temperature=0, max_tokens=16)

print(DocumentsSynthesizer(llm).synthesize("Who leads the Selmond Choir?", nodes))
streamed = DocumentsSynthesizer(llm, streaming=True).synthesize("How many steps has the Gerfern Tower?", nodes)
for piece in streamed.response_gen:
    print(piece, end="", flush=True)
print()
