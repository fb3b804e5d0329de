"""Splitting documents into chunks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.errors import UsageError
from chunkweave.prompt.documents import SplitConfig, split_text
from chunkweave.types import Chunk
from tests.unit.chunking_tokenizers import bundled
from tests.unit.retrieval_fakes import CountingTokenizer, LetterTokenizer

PIECES = st.sampled_from(["word ", "A sentence. ", "\n\n", "\n", "\t", " ", "unbrokenword", "é", "漢字", "🙂", "</s>"])
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=120).map("".join))


def without_white_space(text: str) -> str:
    return "".join(text.split())


@settings(deadline=None, max_examples=40)
@given(TEXTS, st.integers(16, 40))
def test_chunks_fit_and_lose_only_white_space(text: str, max_tokens: int) -> None:
    chunks = split_text(text, bundled(), SplitConfig(max_tokens))
    assert all(1 <= len(bundled().encode(chunk.text)) <= max_tokens for chunk in chunks)
    assert without_white_space("".join(chunk.text for chunk in chunks)) == without_white_space(text)


@settings(deadline=None, max_examples=40)
@given(TEXTS)
def test_overlapping_chunks_fit(text: str) -> None:
    chunks = split_text(text, bundled(), SplitConfig(24, overlap_tokens=8))
    assert all(len(bundled().encode(chunk.text)) <= 24 for chunk in chunks)


def test_overlap_repeats_the_end_of_a_chunk() -> None:
    text = " ".join(f"Sentence number {i} is here." for i in range(40))
    chunks = split_text(text, bundled(), SplitConfig(40, overlap_tokens=12))
    first_sentence = chunks[1].text.split(".")[0]
    assert first_sentence in chunks[0].text


def test_cuts_fall_between_sentences() -> None:
    text = " ".join(f"The ferry left the harbour at {hour} in the morning." for hour in range(40))
    chunks = split_text(text, bundled(), SplitConfig(60))
    assert len(chunks) > 3
    assert all(chunk.text.startswith("The ferry") and chunk.text.endswith("morning.") for chunk in chunks)


def test_paragraphs_are_kept_together() -> None:
    paragraph = "One short sentence stands here. And one more of them follows after it."
    chunks = split_text("\n\n".join([paragraph] * 4), bundled(), SplitConfig(len(bundled().encode(paragraph)) + 4))
    assert [chunk.text for chunk in chunks] == [paragraph] * 4


def test_sources_are_numbered_when_there_are_several() -> None:
    many = split_text("word " * 100, bundled(), SplitConfig(20), source="notes.md")
    assert [chunk.source for chunk in many] == [f"notes.md#{i}" for i in range(len(many))]
    assert split_text("short", bundled(), source="notes.md") == [Chunk("short", "notes.md")]
    assert {chunk.source for chunk in split_text("word " * 100, bundled(), SplitConfig(20))} == {""}


def test_white_space_has_no_chunks() -> None:
    assert split_text(" \n\t ", bundled()) == []


@pytest.mark.parametrize(("max_tokens", "overlap_tokens"), [(64, 64), (64, -1), (16, 9), (17, 9), (512, 257)])
def test_chunks_overlap_by_half_at_most(max_tokens: int, overlap_tokens: int) -> None:
    with pytest.raises(UsageError, match="half"):
        SplitConfig(max_tokens, overlap_tokens)
    SplitConfig(max_tokens, max_tokens // 2)
    with pytest.raises(UsageError, match="at least"):
        SplitConfig(15)


def test_the_bound_holds_where_more_text_is_fewer_tokens() -> None:
    rng = random.Random(0)
    for _ in range(40):
        text = " ".join("w" * rng.randint(1, 9) for _ in range(100))
        chunks = split_text(text, ErraticTokenizer(), SplitConfig(30))
        assert all(len(ErraticTokenizer().encode(chunk.text)) <= 30 for chunk in chunks)
        assert without_white_space("".join(chunk.text for chunk in chunks)) == without_white_space(text)


@pytest.mark.parametrize("seam", [" ", ""], ids=["sentences", "unbroken"])
def test_the_tokenizer_sees_each_character_a_few_times_only(seam: str) -> None:
    """Linear in the text: a splitter that measured all that is left would read this one over 100 times."""
    text = seam.join(f"Thepilotofboat{i}wrotethisline" for i in range(3000))
    tokenizer = CountingTokenizer()
    split_text(text, tokenizer, SplitConfig(128))
    assert tokenizer.characters < 25 * len(text)


class ErraticTokenizer(LetterTokenizer):
    """Some texts have more tokens than longer ones that hold them, as can happen with BPE, here often."""

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        return [0] * (40 if len(text) > 10 and len(text) % 7 == 3 else len(text) // 2)
