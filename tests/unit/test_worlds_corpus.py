import sys
from pathlib import Path

import chunkweave
from chunkweave.calibration.questions import bundled_corpus

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "training"))

from world_corpus import make_corpus, write_corpus


def test_the_bundled_corpus_is_what_the_generator_makes(tmp_path):
    write_corpus(make_corpus(), tmp_path)
    bundled = Path(chunkweave.__file__).parent / "assets" / "corpus"
    for name in ("passages.jsonl", "questions.jsonl"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (bundled / name).read_text(encoding="utf-8")


def test_the_corpus_reads_back_as_it_was_made():
    corpus = bundled_corpus()
    assert corpus == make_corpus()
    assert 200 <= len(corpus.passages) <= 500
    assert all(len(set(question.chunks)) == 6 and question.answers for question in corpus.questions)
