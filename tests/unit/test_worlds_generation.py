import subprocess
import sys
from itertools import pairwise

import pytest

from chunkweave_lab.worlds.records import Fact, Passage, Relation, Split, ValueType, World
from chunkweave_lab.worlds.wording import (
    ALIAS_FIRST,
    ALIAS_LAST,
    CITY_ENDS,
    CITY_STARTS,
    FILLERS,
    INSTITUTION_ENDS,
    INSTITUTION_STARTS,
    SENTENCES,
    SURNAME_ENDS,
    SURNAME_STARTS,
    belongs,
)
from chunkweave_lab.worlds.world import WorldSize, generate_world
from tests.unit.world_checks import check_passage, mentions

SPLITS = list(Split)


def names_of(world: World) -> set[str]:
    """Every invented name of a world: surnames rather than full names, institutions without their noun."""
    names = set()
    for fact in (fact for passage in world.passages for fact in passage.facts):
        if fact.value_type is ValueType.PERSON:
            names.add(fact.value.split()[-1])
        elif fact.value_type in (ValueType.CITY, ValueType.ALIAS):
            names.add(fact.value)
        if fact.relation is Relation.CITY:
            names.add(fact.subject.split()[0])
    return names


@pytest.mark.parametrize("split", SPLITS)
def test_a_seed_gives_one_world(split: Split) -> None:
    assert generate_world(7, split) == generate_world(7, split)
    assert generate_world(7, split) != generate_world(8, split)


def test_worlds_do_not_depend_on_string_hashing() -> None:
    program = (
        "from random import Random\n"
        "from chunkweave_lab.worlds.questions import sample_request\n"
        "from chunkweave_lab.worlds.records import Split\n"
        "from chunkweave_lab.worlds.world import generate_world\n"
        "world = generate_world(3, Split.TEST)\n"
        "print(world)\n"
        "print([sample_request(world, Random(n), 6) for n in range(10)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_the_package_needs_no_torch() -> None:
    program = (
        "import sys; from chunkweave_lab.worlds import world, questions; world.generate_world(0, world.Split.TRAIN)\n"
    )
    program += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


@pytest.mark.parametrize("split", SPLITS)
def test_passages_state_their_facts_and_nothing_else(split: Split) -> None:
    for seed in range(30):
        world = generate_world(seed, split)
        facts = [fact for passage in world.passages for fact in passage.facts]
        problems = [problem for passage in world.passages for problem in check_passage(passage, facts)]
        assert problems == []


def test_the_checker_notices_a_missing_and_an_unstated_value() -> None:
    passage = Passage("p", "Torcrest Museum", "The Torcrest Museum stands in Halvik, near Rosham, since 1900.", (), "")
    facts = (Fact("Torcrest Museum", Relation.CITY, "Halvik"), Fact("Torcrest Museum", Relation.COUNT, "40"))
    other = Fact("Belmint Mill", Relation.CITY, "Rosham")
    passage = Passage("p", "Torcrest Museum", passage.text, facts, "")
    assert check_passage(passage, [*facts, other]) == [
        "p: '40' is not in the text",
        "p: '1900' is in the text but no fact states it",
        "p: 'Rosham' is in the text but no fact states it",
    ]


def test_mentions_are_whole_words() -> None:
    assert mentions("It has 47 rooms.", "47")
    assert not mentions("It opened in 1947.", "47")
    assert not mentions("Halvikstad", "Halvik")


def test_no_test_name_occurs_in_a_training_text() -> None:
    training_text = "\n".join(p.text for seed in range(60) for p in generate_world(seed, Split.TRAIN).passages)
    words = set(training_text.replace(".", "").replace(",", "").split())
    pairs = {" ".join(pair) for line in training_text.split("\n") for pair in pairwise(line.replace(".", "").split())}
    test_names = {name for seed in range(60) for name in names_of(generate_world(seed, Split.TEST))}
    assert len(test_names) > 500
    assert test_names & (words | pairs) == set()


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        (CITY_STARTS, CITY_ENDS),
        (INSTITUTION_STARTS, INSTITUTION_ENDS),
        (SURNAME_STARTS, SURNAME_ENDS),
        (ALIAS_FIRST, ALIAS_LAST),
    ],
)
def test_every_part_of_a_name_is_in_both_splits(starts: tuple[str, ...], ends: tuple[str, ...]) -> None:
    for split in SPLITS:
        pairs = [(a, b) for a in range(len(starts)) for b in range(len(ends)) if belongs(a, b, split)]
        assert {a for a, _ in pairs} == set(range(len(starts)))
        assert {b for _, b in pairs} == set(range(len(ends)))


def test_starts_of_kinds_are_disjoint_and_differ_within_a_world() -> None:
    assert not set(CITY_STARTS) & set(INSTITUTION_STARTS) | set(CITY_STARTS) & set(SURNAME_STARTS)
    world = generate_world(11, Split.TRAIN)
    cities = {value for passage in world.passages for value in passage.values(ValueType.CITY)}
    assert len({city[:3] for city in cities}) == len(cities)


def test_some_wordings_are_held_out() -> None:
    training_text = " ".join(p.text for seed in range(60) for p in generate_world(seed, Split.TRAIN).passages)
    test_text = " ".join(p.text for seed in range(60) for p in generate_world(seed, Split.TEST).passages)
    for filler in FILLERS.test_only:
        assert filler not in training_text
        assert filler in test_text
    for relation, wordings in SENTENCES.items():
        assert wordings.test_only, relation


@pytest.mark.parametrize("split", SPLITS)
def test_passages_are_short_but_not_too_short(split: Split) -> None:
    for seed in range(20):
        for passage in generate_world(seed, split).passages:
            assert 34 <= len(passage.text.split()) <= 100


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="people"):
        WorldSize(people=20, values=16)
    with pytest.raises(ValueError, match="institutions"):
        WorldSize(institutions=3, aliases=4)
