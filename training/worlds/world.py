"""Generates worlds from a seed."""

from dataclasses import dataclass
from random import Random

from worlds.records import Fact, Passage, Relation, Split, World
from worlds.wording import (
    COUNTED,
    NUMBERS,
    TRADES,
    YEARS,
    draw_aliases,
    draw_cities,
    draw_institutions,
    draw_persons,
    write_passage,
)


@dataclass(frozen=True, slots=True)
class WorldSize:
    """The size of a world.

    `values` is the number of cities, persons, years and numbers to choose from: with fewer, more values are shared.
    Passages have at most `max_fillers` fillers, or more if `min_words` needs them.
    """

    institutions: int = 14
    people: int = 10
    aliases: int = 5
    corrections: int = 4
    values: int = 16
    max_fillers: int = 3
    min_words: int = 34

    def __post_init__(self) -> None:
        if self.people > self.values:
            raise ValueError(f"{self.people} people cannot be among {self.values} persons")
        if max(self.aliases, self.corrections) > self.institutions:
            raise ValueError("more aliases or corrections than institutions")


def generate_world(seed: int, split: Split, size: WorldSize = WorldSize()) -> World:
    """The world of a seed: the same seed, split and size give the same texts on every machine."""
    maker = _Maker(Random(f"world {seed} {split}"), split, size)
    institutions = draw_institutions(tuple(COUNTED), size.institutions, maker.rng, split)
    passages = [maker.institution(name) for name in institutions]
    passages += [maker.person(name) for name in maker.persons[: size.people]]
    nicknames = draw_aliases(size.aliases, maker.rng, split)
    passages += [
        maker.alias(name, alias)
        for name, alias in zip(maker.rng.sample(institutions, size.aliases), nicknames, strict=True)
    ]
    for name in maker.rng.sample(institutions, size.corrections):
        passages += maker.reports(name)
    return World(seed, split, tuple(passages))


class _Maker:
    """Draws values passage by passage. Owns the world's random generator and pools of values."""

    def __init__(self, rng: Random, split: Split, size: WorldSize) -> None:
        self.rng = rng
        self.cities = draw_cities(size.values, rng, split)
        self.persons = draw_persons(size.values, rng, split)
        self._years = [str(year) for year in rng.sample(YEARS, size.values)]
        self._numbers = [str(number) for number in rng.sample(NUMBERS, size.values)]
        self._split = split
        self._size = size
        self._count = 0

    def institution(self, name: str) -> Passage:
        """A passage with an institution's place, leader, opening year and count."""
        facts = (
            Fact(name, Relation.CITY, self.rng.choice(self.cities)),
            Fact(name, Relation.LEADER, self.rng.choice(self.persons)),
            Fact(name, Relation.OPENED, self.rng.choice(self._years)),
            Fact(name, Relation.COUNT, self.rng.choice(self._numbers)),
        )
        return self._write(facts, name)

    def person(self, name: str) -> Passage:
        """A passage with four facts about a person."""
        facts = (
            Fact(name, Relation.IS, name),
            Fact(name, Relation.BIRTHPLACE, self.rng.choice(self.cities)),
            Fact(name, Relation.BORN, self.rng.choice(self._years)),
            Fact(name, Relation.WORKS, self.rng.choice(self._numbers)),
            Fact(name, Relation.TRADE, self.rng.choice(TRADES)),
        )
        return self._write(facts, name)

    def alias(self, name: str, alias: str) -> Passage:
        """A note with another name of an institution, and little else."""
        facts = (
            Fact(name, Relation.ALIAS, alias),
            Fact(name, Relation.ASIDE_CITY, self.rng.choice(self.cities)),
            Fact(name, Relation.ASIDE_PERSON, self.rng.choice(self.persons)),
            Fact(name, Relation.ASIDE_YEAR, self.rng.choice(self._years)),
            Fact(name, Relation.ASIDE_NUMBER, self.rng.choice(self._numbers)),
        )
        return self._write(facts, f"The name {alias}")

    def reports(self, name: str) -> list[Passage]:
        """Two reports of different years with different counts of an institution."""
        years, numbers = self.rng.sample(self._years, 2), self.rng.sample(self._numbers, 2)
        return [self._report(name, year, number) for year, number in zip(years, numbers, strict=True)]

    def _report(self, name: str, year: str, number: str) -> Passage:
        facts = (
            Fact(name, Relation.REPORTED_COUNT, number, as_of=int(year)),
            Fact(name, Relation.ASIDE_YEAR, year, as_of=int(year)),
            Fact(name, Relation.ASIDE_CITY, self.rng.choice(self.cities)),
            Fact(name, Relation.ASIDE_PERSON, self.rng.choice(self.persons)),
        )
        return self._write(facts, f"Report on {name}, {year}")

    def _write(self, facts: tuple[Fact, ...], source: str) -> Passage:
        self._count += 1
        unit = COUNTED.get(facts[0].subject.rpartition(" ")[2].lower(), "")
        return write_passage(
            f"p{self._count}",
            facts,
            self.rng,
            self._split,
            source=source,
            unit=unit,
            max_fillers=self._size.max_fillers,
            min_words=self._size.min_words,
        )


_PER_WORLD = 4
