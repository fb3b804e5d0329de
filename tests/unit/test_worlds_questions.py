from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from chunkweave_lab.worlds.questions import ask_about, pick_passages, sample_request, unique_pair
from chunkweave_lab.worlds.records import (
    NOT_STATED,
    SHARED_TYPES,
    Fact,
    Passage,
    QuestionKind,
    Relation,
    Split,
    ValueType,
    World,
)
from chunkweave_lab.worlds.wording import KIND_SHARES, SINGLE_QUESTIONS
from chunkweave_lab.worlds.world import WorldSize, generate_world
from tests.unit.world_checks import check_question

ONE_PASSAGE = (QuestionKind.SINGLE, QuestionKind.NOT_STATED)


def absent_from(world: World, passages: list[Passage]) -> list[Passage]:
    return [passage for passage in world.passages if passage not in passages]


def passage(name: str, *facts: tuple[Relation, str], as_of: int | None = None) -> Passage:
    stated = tuple(Fact(name, relation, value, as_of) for relation, value in facts)
    return Passage(
        name + str(as_of or ""), name, f"{name} " + " ".join(value for _, value in facts), stated, name, "rooms"
    )


@pytest.mark.parametrize("split", list(Split))
@pytest.mark.parametrize("count", [1, 2, 3, 6, 12])
def test_gold_answers_follow_from_the_texts(split: Split, count: int) -> None:
    rng = Random(f"{split} {count}")
    for seed in range(25):
        world = generate_world(seed, split)
        passages = pick_passages(world, rng, count, rng.choice(list(QuestionKind)))
        for question in ask_about(passages, rng, split, absent=absent_from(world, passages)):
            assert check_question(question, passages) == []


def test_the_checker_refuses_a_wrong_answer_and_a_needless_passage() -> None:
    world = generate_world(1, Split.TEST)
    passages = pick_passages(world, Random(1), 6)
    question = next(q for q in ask_about(passages, Random(1), Split.TEST) if q.kind is QuestionKind.COMMON)
    assert check_question(replace(question, answers=("Nowhere",)), passages)
    needless = next(p.id for p in passages if p.id not in question.needed)
    assert check_question(replace(question, needed=(*question.needed, needless)), passages)


@pytest.mark.parametrize("kind", list(QuestionKind))
def test_every_kind_can_be_asked_for(kind: QuestionKind) -> None:
    for seed in range(40):
        world = generate_world(seed, Split.TEST)
        request = sample_request(world, Random(seed), 6, kind)
        assert request.kind is kind
        assert len(request.chunks) == 6
        assert len({chunk.text for chunk in request.chunks}) == 6
        assert all(0 <= place < 6 for place in request.needed)
        assert (request.answers == (NOT_STATED,)) == (kind is QuestionKind.NOT_STATED)


def test_answers_are_one_to_five_words() -> None:
    for seed in range(100):
        request = sample_request(generate_world(seed, Split.TEST), Random(seed), 6)
        assert all(1 <= len(answer.split()) <= 5 for answer in request.answers)


def test_a_request_is_a_function_of_world_and_generator() -> None:
    world = generate_world(2, Split.TEST)
    assert sample_request(world, Random(9), 6) == sample_request(world, Random(9), 6)


def test_needed_passages_stand_anywhere() -> None:
    places = Counter(
        place
        for seed in range(300)
        for place in sample_request(generate_world(seed, Split.TEST), Random(seed), 6, QuestionKind.COMMON).needed
    )
    assert set(places) == set(range(6))
    assert all(65 < count < 135 for count in places.values())  # 100 are expected, with a deviation of 9


def test_common_questions_come_in_every_type() -> None:
    asked = Counter()
    for seed in range(100):
        question = sample_request(generate_world(seed, Split.TEST), Random(seed), 6, QuestionKind.COMMON).question
        asked.update(t for t in SHARED_TYPES if str(t) in question)
    assert set(asked) == set(SHARED_TYPES)
    assert min(asked.values()) > 10


def test_kinds_come_by_their_shares() -> None:
    kinds = Counter(sample_request(generate_world(seed, Split.TEST), Random(seed), 6).kind for seed in range(600))
    assert sum(KIND_SHARES.values()) == pytest.approx(1)
    for kind, share in KIND_SHARES.items():
        assert kinds[kind] / 600 == pytest.approx(share, abs=0.06)


def test_one_passage_can_only_be_asked_about_itself() -> None:
    world = generate_world(0, Split.TRAIN)
    assert {sample_request(world, Random(n), 1).kind for n in range(40)} == set(ONE_PASSAGE)
    with pytest.raises(ValueError, match="no common question over 1 passages"):
        sample_request(world, Random(0), 1, QuestionKind.COMMON)


def test_more_passages_than_the_world_has_are_refused() -> None:
    world = generate_world(0, Split.TRAIN, WorldSize(institutions=2, people=1, aliases=0, corrections=0))
    with pytest.raises(ValueError, match="the world has 3 passages, but 4 are needed"):
        pick_passages(world, Random(0), 4)


def test_a_value_shared_by_three_or_two_shared_values_are_not_asked_for() -> None:
    a, b, c = (passage(name, (Relation.CITY, "Halvik")) for name in "ABC")
    d, e = (passage(name, (Relation.CITY, "Rosham")) for name in "DE")
    assert unique_pair([a, b, d], ValueType.CITY) == ("Halvik", a, b)
    assert unique_pair([a, b, c], ValueType.CITY) is None
    assert unique_pair([a, b, d, e], ValueType.CITY) is None
    assert unique_pair([a, d], ValueType.CITY) is None


def test_the_later_report_counts_wherever_it_stands() -> None:
    early = passage("Torcrest Museum", (Relation.REPORTED_COUNT, "40"), as_of=1900)
    late = passage("Torcrest Museum", (Relation.REPORTED_COUNT, "50"), as_of=1910)
    for order in ([early, late], [late, early]):
        (question,) = [q for q in ask_about(order, Random(0), Split.TRAIN) if q.kind is QuestionKind.CORRECTION]
        assert question.answers == ("50",)
        assert set(question.needed) == {early.id, late.id}


def test_reports_silence_the_plain_question_about_a_count() -> None:
    own = passage("Torcrest Museum", (Relation.COUNT, "30"))
    report = passage("Torcrest Museum", (Relation.REPORTED_COUNT, "40"), as_of=1900)
    single = [q for q in ask_about([own, report], Random(0), Split.TRAIN) if q.kind is QuestionKind.SINGLE]
    assert single == []
    assert [q.answers for q in ask_about([own], Random(0), Split.TRAIN)] == [("30",)]


def test_training_questions_never_use_held_out_wordings() -> None:
    asked = set()
    for seed in range(60):
        world = generate_world(seed, Split.TRAIN)
        for question in ask_about(world.passages[:20], Random(seed), Split.TRAIN):
            asked.add(question.text)
    held_out = [w for wordings in SINGLE_QUESTIONS.values() for w in wordings.test_only]
    openings = {w.partition("{")[0] for w in held_out if len(w.partition("{")[0]) > 12}
    assert openings
    assert not [text for text in asked for opening in openings if text.startswith(opening)]
