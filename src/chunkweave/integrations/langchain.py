"""LangChain: a chat model whose requests name their documents, and a retriever over a server's corpus.

Needs the extra `langchain`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_openai import ChatOpenAI
from pydantic import Field, SecretStr

from chunkweave.planning.method_choice import FIELD


class ChatChunkweave(ChatOpenAI):
    """A chat model of a chunkweave server. `documents` are sent as chunks, whose KV is reused, not as text.

    The reuse report is in `response_metadata["chunkweave"]` of an answer, or of the last piece of a stream. Everything
    else is as in `ChatOpenAI`. `reuse` are the fields of `chunkweave` in all requests, such as `{"method": "query"}` or
    `{"quality": "balanced"}`; a call can override them.

        llm = ChatChunkweave(base_url="http://127.0.0.1:8000/v1", api_key="none", model="reader")
        llm.invoke("Who leads the choir?", documents=retriever.invoke("choir"))
    """

    reuse: dict[str, Any] = Field(default_factory=dict)

    def _get_request_payload(
        self,
        input_: Any,
        *,
        stop: list[str] | None = None,
        documents: Sequence[Document | str] = (),
        reuse: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        more = dict(payload.get("extra_body") or {})
        if documents:
            more["documents"] = [one if isinstance(one, str) else _as_sent(one) for one in documents]
        if wanted := {**self.reuse, **(reuse or {})}:
            more[FIELD] = {**more.get(FIELD, {}), **wanted}
        return {**payload, "extra_body": more} if more else payload

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        whole = response if isinstance(response, dict) else response.model_dump(warnings=False)
        for generation in result.generations:
            _add_report(generation.message, whole)
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        piece = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if piece is not None:
            _add_report(piece.message, chunk)
        return piece


class CorpusRetriever(BaseRetriever):
    """The chunks of a server's corpus that are nearest to a question, best first.

    `base_url` is the server's, with `/v1`. `top_k=None` means the server's default. A document's metadata has `source`
    (the document's name), `place`, `score`, `title`, and the metadata that it was ingested with.

    Raises:
        httpx.HTTPError: the server cannot be reached or refuses the request; raised by `invoke`.
    """

    base_url: str
    corpus: str
    api_key: SecretStr | None = None
    top_k: int | None = None
    timeout_s: float = 60.0

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:  # noqa: ARG002
        with httpx.Client(timeout=self.timeout_s) as client:
            return _found(client.post(**self._asked(query)))

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,  # noqa: ARG002
    ) -> list[Document]:
        async with httpx.AsyncClient(timeout=self.timeout_s) as client:
            return _found(await client.post(**self._asked(query)))

    def _asked(self, query: str) -> dict[str, Any]:
        url = f"{self.base_url.rstrip('/')}/corpora/{self.corpus}/search"
        key = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key.get_secret_value()}"}
        return {"url": url, "json": {"query": query, "top_k": self.top_k}, "headers": key}


def _as_sent(document: Document) -> dict[str, Any]:
    """The fields of a document that the server reads. Other metadata may not be valid JSON."""
    metadata = {name: document.metadata[name] for name in ("title", "source") if name in document.metadata}
    strings = {name: value for name, value in metadata.items() if isinstance(value, str)}
    return {"page_content": document.page_content, "metadata": strings, **({"id": document.id} if document.id else {})}


def _add_report(message: Any, whole: Mapping[str, Any]) -> None:
    if whole.get(FIELD) is not None:
        message.response_metadata = {**message.response_metadata, FIELD: whole[FIELD]}


def _found(response: httpx.Response) -> list[Document]:
    response.raise_for_status()
    return [
        Document(
            one["text"],
            metadata={
                **one["metadata"],
                "source": one["document"],
                "place": one["place"],
                "score": one["score"],
                "title": one["title"],
            },
        )
        for one in response.json()["data"]
    ]
