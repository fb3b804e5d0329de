"""Records of worlds: facts, passages that state them, questions, requests."""

from dataclasses import dataclass
from enum import StrEnum

from chunkweave.types import Chunk

NOT_STATED = "not stated"
"""The gold answer to a question that the given passages do not answer."""


class Split(StrEnum):
    """Which names and wordings a world may use. No name and no combination of names is in both."""

    TRAIN = "train"
    TEST = "test"


class ValueType(StrEnum):
    """Types of a fact's value. Passages can share values of the first four types."""

    CITY = "city"
    PERSON = "person"
    YEAR = "year"
    NUMBER = "number"
    TRADE = "trade"
    ALIAS = "alias"


SHARED_TYPES = (ValueType.CITY, ValueType.PERSON, ValueType.YEAR, ValueType.NUMBER)


class Relation(StrEnum):
    """How a fact's value relates to its subject."""

    CITY = "city"
    LEADER = "leader"
    OPENED = "opened"
    COUNT = "count"
    BIRTHPLACE = "birthplace"
    BORN = "born"
    WORKS = "works"
    TRADE = "trade"
    ALIAS = "alias"
    REPORTED_COUNT = "reported count"
    IS = "is"
    """The subject is itself the value: a person's own passage names that person."""
    ASIDE_CITY = "aside: city"
    ASIDE_PERSON = "aside: person"
    ASIDE_YEAR = "aside: year"
    ASIDE_NUMBER = "aside: number"


VALUE_TYPES: dict[Relation, ValueType] = {
    Relation.CITY: ValueType.CITY,
    Relation.LEADER: ValueType.PERSON,
    Relation.OPENED: ValueType.YEAR,
    Relation.COUNT: ValueType.NUMBER,
    Relation.BIRTHPLACE: ValueType.CITY,
    Relation.BORN: ValueType.YEAR,
    Relation.WORKS: ValueType.NUMBER,
    Relation.TRADE: ValueType.TRADE,
    Relation.ALIAS: ValueType.ALIAS,
    Relation.REPORTED_COUNT: ValueType.NUMBER,
    Relation.IS: ValueType.PERSON,
    Relation.ASIDE_CITY: ValueType.CITY,
    Relation.ASIDE_PERSON: ValueType.PERSON,
    Relation.ASIDE_YEAR: ValueType.YEAR,
    Relation.ASIDE_NUMBER: ValueType.NUMBER,
}


class QuestionKind(StrEnum):
    """Kinds of question, by the passages that the answer needs."""

    SINGLE = "single"
    """One passage holds the answer."""
    COMMON = "common"
    """The one city, person, year or number that two passages share. The question's words do not lead to it."""
    WHICH_TWO = "which-two"
    """The two subjects whose passages share a value."""
    BRIDGE = "bridge"
    """One passage names a person, that person's passage holds the answer."""
    COMPARISON = "comparison"
    ALIAS = "alias"
    """One passage renames what another describes."""
    CORRECTION = "correction"
    """Two dated reports differ; the later one is right, regardless of its position in the prompt."""
    NOT_STATED = "not-stated"


@dataclass(frozen=True, slots=True)
class Fact:
    """`subject` has `value` by `relation`; `as_of` is the year of a dated statement."""

    subject: str
    relation: Relation
    value: str
    as_of: int | None = None

    @property
    def value_type(self) -> ValueType:
        """The type of `value`."""
        return VALUE_TYPES[self.relation]


@dataclass(frozen=True, slots=True)
class Passage:
    """A text and every fact that it states. `unit` is the unit of the subject's count ("rooms"), if any."""

    id: str
    subject: str
    text: str
    facts: tuple[Fact, ...]
    source: str
    unit: str = ""

    def values(self, value_type: ValueType) -> frozenset[str]:
        """The values of one type that the passage names."""
        return frozenset(fact.value for fact in self.facts if fact.value_type is value_type)


@dataclass(frozen=True, slots=True)
class Question:
    """A question. All `answers` are right; the first is used for training. `needed` are ids of the needed passages.

    `subjects`, `relation` and `shared` define the question; the checker derives the answer again from them.
    """

    kind: QuestionKind
    text: str
    answers: tuple[str, ...]
    needed: tuple[str, ...]
    subjects: tuple[str, ...] = ()
    relation: Relation | None = None
    shared: ValueType | None = None


@dataclass(frozen=True, slots=True)
class World:
    """Passages that contradict each other only where a later report corrects an earlier one."""

    seed: int
    split: Split
    passages: tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A question and the chunks to answer it from, in the order of the prompt."""

    question: str
    chunks: tuple[Chunk, ...]
    answers: tuple[str, ...]
    kind: QuestionKind
    needed: tuple[int, ...]
    """Indices in `chunks` of the passages that the answer needs, ascending."""
