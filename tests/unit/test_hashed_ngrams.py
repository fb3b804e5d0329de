"""The built-in embedder: the same everywhere, of length 1, and near what shares words."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import chunkweave
from chunkweave.calibration.questions import bundled_corpus
from chunkweave.errors import UsageError
from chunkweave.retrieval.embedders import HashedNgramEmbedder, make_embedder

TEXT = "The Gulzell Factory has 89 machines; café № 3 \U0001f642 灯台"


@settings(max_examples=50)
@given(st.text(max_size=40))
@example("T")  # its features cancel out in 256 columns
def test_vectors_have_length_one_unless_there_is_nothing_to_count(text):
    embedder = HashedNgramEmbedder(256)
    vector = embedder.embed_documents([text])[0]
    assert vector.dtype == np.float32
    assert np.isfinite(vector).all()
    assert np.linalg.norm(vector) == pytest.approx(1.0 if text.strip() else 0.0, abs=1e-5)
    np.testing.assert_array_equal(vector, embedder.embed_query(text))


def test_a_text_has_the_same_vector_in_every_process_and_company():
    vector = HashedNgramEmbedder().embed_query(TEXT)
    code = (
        "import sys; from chunkweave.retrieval.embedders import HashedNgramEmbedder as E\n"
        f"sys.stdout.buffer.write(E().embed_documents(['other', {TEXT!r}])[1].tobytes())"
    )
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(chunkweave.__file__).parents[1])}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env)
        assert done.stdout == vector.tobytes()


def test_the_vectors_are_those_of_the_fingerprint():
    """Corpora on disk hold them: who changes a vector has to change the version."""
    embedder = HashedNgramEmbedder(64)
    assert embedder.fingerprint == "hashed-ngrams-v1-d64"
    vector = embedder.embed_query("The lighthouse, the storm")
    np.testing.assert_allclose(vector[:8], [0.0, 0.0, 0.0911, -0.1822, 0.0, 0.4732, 0.0, 0.0], atol=1e-4)


def test_forms_of_a_word_are_near_and_other_words_are_not():
    embedder = make_embedder()
    query = embedder.embed_query("Who kept the lighthouse?")
    texts = [
        "Lighthouses were kept by families.",
        "The who and the what of it.",
        "A ferry sails at nine.",
        "LIGHTHOUSE KEEPERS",
    ]
    scores = embedder.embed_documents(texts) @ query
    assert min(scores[0], scores[3]) > 2 * max(abs(scores[1]), abs(scores[2]))


def test_it_finds_the_passage_that_a_question_names():
    corpus = bundled_corpus()
    embedder = make_embedder()
    vectors = embedder.embed_documents([passage.text for passage in corpus.passages])
    asked = [question for question in corpus.questions if question.kind == "single"]
    assert len(asked) == 8
    for question in asked:
        best = np.argsort(-(vectors @ embedder.embed_query(question.question)))[:6]
        found = [corpus.passages[row] for row in best]
        assert any(question.answers[0] in one.text for one in found if one in question.chunks), question.question


def test_a_query_leaves_nothing_behind_that_the_next_one_could_be_timed_by():
    embedder = HashedNgramEmbedder()
    embedder.embed_documents(["The lighthouse keeper writes."])
    remembered = embedder._features.cache_info()
    first = embedder.embed_query("Where is the zeppelin's lighthouse?")
    assert embedder._features.cache_info() == remembered
    assert np.array_equal(first, embedder.embed_documents(["Where is the zeppelin's lighthouse?"])[0])


def test_huge_words_are_not_remembered():
    embedder = HashedNgramEmbedder()
    embedder.embed_documents([f"{number}{'x' * 1000}" for number in range(10)])
    assert embedder._features.cache_info().currsize == 0


def test_too_few_dimensions_are_refused():
    with pytest.raises(UsageError, match="at least 64"):
        HashedNgramEmbedder(32)
