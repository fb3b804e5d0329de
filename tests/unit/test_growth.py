"""How large a corpus may become: checked while documents are cut, for every way in which one can grow."""

import random
from itertools import islice

import pytest

from chunkweave.prompt import documents as cutting
from chunkweave.prompt.documents import SplitConfig, split_located, split_text
from chunkweave.retrieval.corpus import Corpus, GrowthLimits, document_bytes
from chunkweave.retrieval.documents import CorpusDocument
from tests.unit.retrieval_fakes import (
    CountingTokenizer,
    LetterTokenizer,
    SubjectEmbedder,
    document,
    memory_corpus,
    new_corpus,
)

LONG = "The ferry crosses the harbour in a storm. " * 2000


def counted_corpus(split: SplitConfig) -> tuple[Corpus, CountingTokenizer]:
    tokenizer = CountingTokenizer()
    return Corpus(SubjectEmbedder(), split=split, tokenizer=tokenizer), tokenizer


def audit(corpus: Corpus) -> None:
    dimension = corpus.embedder.dimension
    assert corpus.nbytes == sum(document_bytes(one, dimension) for one in corpus.documents)


@pytest.mark.parametrize("limits", [GrowthLimits(max_chunks=20), GrowthLimits(max_bytes=2000)], ids=["chunks", "bytes"])
def test_a_document_that_has_no_room_is_not_cut_to_its_end(limits: GrowthLimits):
    corpus, tokenizer = counted_corpus(SplitConfig(40, overlap_tokens=20))
    change = corpus.update([document(0), CorpusDocument("long", LONG * 100), document(1)], limits=limits)
    assert (change.added, change.left) == (("d0",), ("long", "d1"))
    assert (len(corpus), corpus.num_documents) == (1, 1)
    assert tokenizer.characters < 30 * cutting._BLOCK_CHARACTERS, "a block of it, and each character a few times"
    audit(corpus)


def test_what_fits_exactly_is_taken_and_nothing_more():
    corpus = memory_corpus()
    assert corpus.update(map(document, range(3)), limits=GrowthLimits(max_chunks=3)).left == ()
    assert corpus.update([document(3)], limits=GrowthLimits(max_chunks=3)).left == ("d3",)
    nbytes = corpus.nbytes
    assert corpus.update([document(4)], limits=GrowthLimits(max_bytes=nbytes)).left == ("d4",)
    again = corpus.update([document(2)], limits=GrowthLimits(max_chunks=3, max_bytes=nbytes))
    assert (again.unchanged, again.left) == (("d2",), ())
    audit(corpus)


def test_a_document_that_leaves_makes_room_for_the_one_in_its_place():
    corpus = memory_corpus()
    corpus.add(map(document, range(3)))
    limits = GrowthLimits(max_chunks=3, max_bytes=corpus.nbytes)
    shorter = CorpusDocument("d1", "The storm.", "Note 1", {"number": 1})
    assert corpus.update([shorter], limits=limits).replaced == ("d1",)
    longer = CorpusDocument("d1", LONG, "Note 1", {"number": 1})
    assert corpus.update([longer], limits=limits).left == ("d1",)
    assert corpus.document("d1").chunks == ("The storm.",), "it stays as it was"
    audit(corpus)


def test_random_changes_are_counted_and_never_exceed_the_limits(tmp_path):
    rng, limits = random.Random(4), GrowthLimits(max_chunks=30, max_bytes=4000)
    corpus = new_corpus(tmp_path / "corpus")
    for step in range(60):
        ids = rng.sample(range(12), 3)
        text = [document(one, text=f"The storm of {step}. " * rng.randint(1, 12)) for one in ids]
        corpus.update(text, limits=limits)
        if rng.random() < 0.3 and corpus.num_documents:
            corpus.remove([rng.choice(corpus.documents).id])
        audit(corpus)
        assert len(corpus) <= 30
        assert corpus.nbytes <= 4000
        if step % 20 == 0:
            corpus = Corpus.open(tmp_path / "corpus", SubjectEmbedder(), tokenizer=LetterTokenizer())


def test_a_change_that_is_stopped_keeps_what_was_committed():
    corpus, asked = memory_corpus(), 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked > 6000

    change = corpus.update([CorpusDocument(f"d{number}", LONG + str(number)) for number in range(9)],
                           limits=GrowthLimits(stopped=stopped))  # fmt: skip
    assert 0 < len(change.added) < 9
    assert change.left == tuple(f"d{number}" for number in range(len(change.added), 9))
    assert [one.id for one in corpus.documents] == list(change.added)
    audit(corpus)


@pytest.mark.parametrize("overlap_tokens", [0, 8])
def test_a_long_text_is_cut_as_if_it_were_not_cut_by_blocks(monkeypatch, overlap_tokens: int):
    rng = random.Random(7)
    words = ["ferry", "harbour", "leaves", "at", "nine", "漢字", "🙂"]
    text = "\n\n".join(" ".join(rng.choices(words, k=rng.randint(3, 60))) + "." for _ in range(200))
    config = SplitConfig(64, overlap_tokens)
    whole = [chunk.text for chunk in split_text(text, LetterTokenizer(), config)]
    monkeypatch.setattr(cutting, "_BLOCK_CHARACTERS", 1 << 10)
    assert [chunk.text for chunk in split_text(text, LetterTokenizer(), config)] == whole


@pytest.mark.parametrize("text", ["a" * 5000, " " * 5000 + "b", "word " * 1000, "\n\n" * 2000], ids=len)
def test_texts_without_places_to_cut_come_to_their_end(monkeypatch, text: str):
    monkeypatch.setattr(cutting, "_BLOCK_CHARACTERS", 16)
    pieces = [piece for _, piece in split_located(text, LetterTokenizer(), SplitConfig(40))]
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_pieces_are_cut_as_they_are_asked_for():
    tokenizer = CountingTokenizer()
    assert len(list(islice(split_located(LONG * 50, tokenizer, SplitConfig(40)), 3))) == 3
    assert tokenizer.characters < 30 * cutting._BLOCK_CHARACTERS
