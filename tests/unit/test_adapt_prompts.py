"""Training prompts: drawn alike each time, within bounds, and never from what is held out."""

from random import Random

import pytest

from chunkweave.calibration.questions import Example
from chunkweave.errors import UsageError
from chunkweave.prompt.documents import Document
from chunkweave.types import Chunk
from chunkweave_lab.adapt.prompts import (
    Group,
    PromptSizes,
    PromptSource,
    digest_of_groups,
    groups_of_documents,
    groups_of_examples,
    held_out,
)

WORDS = "the old mill stands behind the bridge that Ada Lorne of Aldwick built for the town in spring"


class _Words:
    """A tokenizer whose tokens are words."""

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        return list(range(len(text.split())))


def _text(place: int, sentences: int = 3) -> str:
    return " ".join(f"Number {place} {i} says that {WORDS}." for i in range(sentences))


GROUPS = [Group(tuple(Chunk(_text(10 * g + c), f"{g}/{c}") for c in range(4)), (f"Question {g}?",)) for g in range(20)]


def _count(text: str) -> int:
    return len(text.split())


def _source(seed: str = "a", **sizes: int) -> PromptSource:
    return PromptSource(GROUPS, _count, PromptSizes(**sizes), seed=seed)


def test_the_same_prompt_comes_again_and_others_differ() -> None:
    assert _source().prompt(7) == _source().prompt(7)
    assert len({_source().prompt(index).chunks for index in range(20)}) == 20
    assert _source("a").prompt(7) != _source("b").prompt(7)


def test_prompts_keep_to_their_bounds() -> None:
    source = _source(least_chunks=2, most_chunks=5, most_tokens=300, questions=3)
    prompts = [source.prompt(index) for index in range(60)]
    assert {len(one.chunks) for one in prompts} >= {2, 3}
    assert all(1 <= len(one.chunks) <= 5 for one in prompts)
    assert all(sum(_count(chunk.text) for chunk in one.chunks) <= 300 for one in prompts)
    assert all(len(set(one.chunks)) == len(one.chunks) for one in prompts)
    assert all(len(one.questions) == 3 for one in prompts)


def test_questions_are_the_given_ones_then_names_and_sentences_of_the_chunks() -> None:
    asked = [question for index in range(30) for question in _source(questions=5).prompt(index).questions]
    assert all(_source(questions=5).prompt(index).questions[0].startswith("Question ") for index in range(30))
    assert any("Ada Lorne" in question for question in asked)
    assert any("go on" in question for question in asked)


def test_a_text_without_names_and_sentences_is_asked_about_all_the_same() -> None:
    group = Group((Chunk("word word", "one"),))
    assert PromptSource([group], _count, PromptSizes(), seed="a").prompt(0).questions


def test_a_chunk_longer_than_a_prompt_comes_alone() -> None:
    prompt = PromptSource(GROUPS, _count, PromptSizes(most_tokens=5), seed="a").prompt(0)
    assert len(prompt.chunks) == 1


def test_what_is_held_out_is_not_learnt_from() -> None:
    shared = GROUPS[0].chunks[0]
    groups = [*GROUPS, *(Group((shared, Chunk(_text(900 + i), f"x{i}"))) for i in range(20))]
    for seed in range(10):
        learnt, kept = held_out(groups, 0.2, Random(seed))
        texts = {chunk.text for group in kept for chunk in group.chunks}
        assert not texts & {chunk.text for group in learnt for chunk in group.chunks}
        assert learnt


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 8"):
        held_out(GROUPS[:5], 0.1, Random(0))
    with pytest.raises(UsageError, match="shares passages"):
        held_out([Group(GROUPS[0].chunks)] * 10, 0.1, Random(0))


def test_documents_and_data_sets_are_cut_into_chunks_of_several_lengths() -> None:
    documents = [Document(f"d{i}", _text(i, 40)) for i in range(12)]
    groups = groups_of_documents(documents, _Words(), Random(0))
    longest = {max(_count(chunk.text) for chunk in group.chunks) for group in groups}
    assert all(length <= 256 for length in longest)
    assert min(longest) <= 64 < 128 < max(longest)
    examples = [Example("Who?", tuple(Chunk(one.text, one.name) for one in documents[:2]), ("Ada",))]
    (group,) = groups_of_examples(examples, _Words(), Random(0))
    assert group.questions == ("Who?",)
    assert len(group.chunks) > 2


def test_the_digest_tells_data_apart() -> None:
    other = [*GROUPS[:-1], Group(GROUPS[-1].chunks, ("Another?",))]
    assert digest_of_groups(GROUPS) == digest_of_groups(list(GROUPS)) != digest_of_groups(other)


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="is not a range"):
        PromptSizes(least_chunks=5, most_chunks=4)
    with pytest.raises(UsageError, match="at least one question"):
        PromptSizes(questions=0)
