"""LangChain's stuff chain over texts that its own splitter cuts, asked in two orders."""

import random
from importlib.resources import files
from typing import Any

from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_text_splitters import RecursiveCharacterTextSplitter

QUESTION = "Who was the first harbour master?"


def passages(count: int, names: tuple[str, ...] = ("1-history", "4-staff", "5-storms")) -> list[Document]:
    """Passages of at most 1,000 characters, about 200 tokens, of the bundled notes on a harbour."""
    folder = files("chunkweave") / "assets" / "documents"
    notes = [(folder / f"{name}.md").read_text(encoding="utf-8") for name in names]
    return RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0).create_documents(notes)[:count]


def reused_shares(chain: Any, documents: list[Document]) -> list[float]:
    """The shares of the prompt's tokens that are reused in two requests, the second with the documents shuffled."""
    shares = []
    for order in (documents, random.Random(0).sample(documents, len(documents))):
        with get_usage_metadata_callback() as used:
            assert chain.invoke({"context": order, "input": QUESTION})
        ((_, tokens),) = used.usage_metadata.items()
        shares.append(tokens["input_token_details"]["cache_read"] / tokens["input_tokens"])
    return shares
