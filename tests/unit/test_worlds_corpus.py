from world_corpus import make_corpus

from chunkweave.calibration.questions import bundled_corpus


def test_the_bundled_corpus_is_what_the_generator_makes():
    corpus = bundled_corpus()
    assert corpus == make_corpus()
    assert 200 <= len(corpus.passages) <= 500
    assert all(len(set(question.chunks)) == 6 and question.answers for question in corpus.questions)
