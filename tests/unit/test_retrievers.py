"""Retrievers of LangChain and LlamaIndex as a corpus: stand-ins that have what theirs have."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from chunkweave.errors import UsageError
from chunkweave.retrieval.retrievers import RetrieverCorpus


@dataclass
class Document:
    """As `langchain_core.documents.Document`."""

    page_content: str
    metadata: dict[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass
class LangChainRetriever:
    """As `langchain_core.retrievers.BaseRetriever`."""

    found: list[Any]
    asked: list[str] = field(default_factory=list)

    def invoke(self, query: str, config: Any = None, **_: Any) -> list[Any]:
        self.asked.append(query)
        return self.found


@dataclass
class TextNode:
    """As `llama_index.core.schema.TextNode`."""

    text: str
    node_id: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def get_content(self, metadata_mode: str = "none") -> str:
        return self.text


@dataclass
class NodeWithScore:
    """As `llama_index.core.schema.NodeWithScore`."""

    node: TextNode
    score: float | None = None


@dataclass
class LlamaIndexRetriever:
    """As `llama_index.core.retrievers.BaseRetriever`."""

    found: list[Any]

    def retrieve(self, query: str) -> list[Any]:
        return self.found


def test_langchains_documents_become_chunks_in_their_order():
    documents = [
        Document("Otto leads the choir.", {"source": "choir.md", "title": "Choir", "score": 0.5}, "a"),
        Document("It has 230 steps.", {}, "tower"),
        Document("  "),
        Document("The ferry sails."),
    ]
    retriever = LangChainRetriever(documents)
    corpus = RetrieverCorpus(retriever)
    found = corpus.search(corpus.embed_query("Who?"), 10)
    assert retriever.asked == ["Who?"]
    assert [one.chunk.text for one in found] == [
        documents[0].page_content,
        documents[1].page_content,
        "The ferry sails.",
    ]
    assert [one.rank for one in found] == [1, 2, 3]
    assert [one.document for one in found[:2]] == ["choir.md", "tower"]
    assert [one.chunk.source for one in found[:2]] == ["choir.md", "tower"]
    assert found[2].document
    assert (found[0].title, found[0].score, found[1].score) == ("Choir", 0.5, 0.0)
    assert found[0].metadata["title"] == "Choir"
    assert len(corpus.search("Who?", 2)) == 2


def test_llama_indexs_nodes_become_chunks_with_their_scores():
    nodes = [
        NodeWithScore(TextNode("Otto leads the choir.", "n1", {"file_name": "choir.md"}), 0.9),
        NodeWithScore(TextNode("It has 230 steps.", "n2")),
    ]
    found = RetrieverCorpus(LlamaIndexRetriever(nodes)).search("Who?", 10)
    assert [(one.chunk.text, one.document, one.score) for one in found] == [
        ("Otto leads the choir.", "choir.md", 0.9),
        ("It has 230 steps.", "n2", 0.0),
    ]


def test_chunks_of_one_source_have_names_of_their_own_that_last():
    def names(*texts: str, **metadata: Any) -> list[Any]:
        documents = [Document(text, {"source": "a.md", **metadata}) for text in texts]
        return [one.name for one in RetrieverCorpus(LangChainRetriever(documents)).search("?", 9)]

    first, second = names("one", "two")
    assert first != second
    assert names("two", "one") == [second, first]
    assert names("one", start_index=7) == [("a.md", 7)]


def test_a_search_has_one_stage():
    corpus = RetrieverCorpus(LangChainRetriever([Document("one"), Document("two")]))
    (stage,) = corpus.search_stages("?", 1)
    assert stage.last
    assert stage.chunks == corpus.search("?", 1)


@pytest.mark.parametrize("other", [object(), [], "corpus", None])
def test_what_is_no_retriever_is_refused_by_its_type(other):
    with pytest.raises(UsageError, match=f"{type(other).__name__} is neither a corpus nor a retriever"):
        RetrieverCorpus(other)


def test_what_is_found_has_to_be_documents():
    with pytest.raises(UsageError, match="a retriever found a dict"):
        RetrieverCorpus(LangChainRetriever([{"text": "one"}])).search("?", 1)
