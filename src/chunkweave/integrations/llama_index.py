"""LlamaIndex: a response synthesizer that sends retrieved nodes as documents. Needs the extra `llama-index`."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer

from chunkweave.planning.method_choice import FIELD


class WeavingSynthesizer(BaseSynthesizer):
    """Answers a question over retrieved nodes with one request to a chunkweave server, the nodes as its documents.

    `llm` is an `OpenAILike` chat model of that server. `system` is the instruction (None: the server's default),
    `reuse` are the fields of `chunkweave` in a request, such as `{"method": "query"}`. With `streaming` the answer is
    an iterator of texts.

        index.as_query_engine(response_synthesizer=WeavingSynthesizer(llm))
    """

    def __init__(
        self, llm: LLM, *, system: str | None = None, reuse: Mapping[str, Any] | None = None, streaming: bool = False
    ) -> None:
        super().__init__(llm=llm, streaming=streaming)
        self._system, self._reuse = system, dict(reuse or {})

    def get_response(self, query_str: str, text_chunks: Sequence[str], **_: Any) -> str | Iterator[str]:
        """The answer to a question over chunks."""
        asked = self._asked(query_str, text_chunks)
        if self._streaming:
            return (piece.delta or "" for piece in self._llm.stream_chat(**asked))
        return self._llm.chat(**asked).message.content or ""

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **_: Any) -> str | AsyncIterator[str]:
        """`get_response`, asynchronous."""
        asked = self._asked(query_str, text_chunks)
        if self._streaming:
            pieces = await self._llm.astream_chat(**asked)
            return (piece.delta or "" async for piece in pieces)
        return (await self._llm.achat(**asked)).message.content or ""

    def _get_prompts(self) -> PromptDictType:
        return {}  # the server's template makes the prompt

    def _update_prompts(self, prompts_dict: PromptDictType) -> None:
        """Does nothing: there are no prompts."""

    def _asked(self, question: str, chunks: Sequence[str]) -> dict[str, Any]:
        messages = [ChatMessage(role="user", content=question)]
        if self._system is not None:
            messages.insert(0, ChatMessage(role="system", content=self._system))
        body = {"documents": list(chunks), **({FIELD: self._reuse} if self._reuse else {})}
        return {"messages": messages, "extra_body": body}
