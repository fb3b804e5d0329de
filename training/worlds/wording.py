"""The text of worlds: names, sentences, questions' wording, and how facts are written out in prose."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from worlds.records import Fact, Passage, QuestionKind, Relation, Split, ValueType


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_STARTS = tuple(onset + vowel + coda for onset in "BDFGHJKLMNPRSTVW" for vowel in "aeiou" for coda in "lnrs")
CITY_STARTS, INSTITUTION_STARTS, SURNAME_STARTS = _STARTS[0::3], _STARTS[1::3], _STARTS[2::3]

CITY_ENDS = _words("vik ford ham stad burg wick wold port moor fell haven mouth brook field holm beck cliff bury")
INSTITUTION_ENDS = _words("mond mint ven bower barrow crest bell mere weir vane fall pell ridge fern wyn zell")
SURNAME_ENDS = _words("well man berg ley worth bridge quist mark vold mont brand combe wright vey mour pool")

WOMEN = _words(
    "Anna Clara Edith Elsa Emma Frida Grace Greta Helen Ida Ingrid Irma Julia Laura Lena Lucy Maria Marta "
    "Mary Nora Olga Paula Rosa Ruth Sara Sofia Vera Wilma"
)
MEN = _words(
    "Adam Albert Anton Arthur Carl Daniel David Edgar Emil Erik Felix Frank George Henry Hugo Ivan Jacob "
    "James John Karl Leon Lucas Martin Oscar Otto Paul Peter Simon Thomas Victor"
)

ALIAS_FIRST = _words(
    "Grey Golden Silent Old Crooked Broken Lucky White Black Red Green Blue Silver Iron Wooden Stone "
    "Painted Little Great Merry Lonely Quiet Proud Humble"
)
ALIAS_LAST = _words(
    "Lantern Anchor Kettle Feather Candle Saddle Hammer Barrel Ladder Window Basket Mirror Needle Button "
    "Pillow Whistle Ribbon Bucket Spoon Crown Boot Wheel Drum Horn"
)

YEARS = range(1801, 1961)
NUMBERS = range(11, 251)

_HELD_OUT = 5
"""One pair of parts in this many is for testing."""


def belongs(first: int, last: int, split: Split) -> bool:
    """Whether the pair of part numbers is of `split`. Every start and every end occurs in both."""
    return ((first * 7 + last * 3) % _HELD_OUT == 0) == (split is Split.TEST)


def draw_names(
    starts: Sequence[str], ends: Sequence[str], count: int, rng: Random, split: Split, gap: str = ""
) -> list[str]:
    """`count` names of `split`, no two with the same start (`gap` goes between the parts)."""
    names = []
    for first in rng.sample(range(len(starts)), count):
        allowed = [last for last in range(len(ends)) if belongs(first, last, split)]
        names.append(starts[first] + gap + ends[rng.choice(allowed)])
    return names


def draw_cities(count: int, rng: Random, split: Split) -> list[str]:
    """City names, such as "Halvik"."""
    return draw_names(CITY_STARTS, CITY_ENDS, count, rng, split)


def draw_persons(count: int, rng: Random, split: Split) -> list[str]:
    """Full names. First names are in both splits, surnames are not; no first name comes twice."""
    surnames = draw_names(SURNAME_STARTS, SURNAME_ENDS, count, rng, split)
    return [f"{first} {last}" for first, last in zip(rng.sample(WOMEN + MEN, count), surnames, strict=True)]


def draw_institutions(nouns: Sequence[str], count: int, rng: Random, split: Split) -> list[str]:
    """Names such as "Torcrest Museum", each with a random one of `nouns` (lower case)."""
    heads = draw_names(INSTITUTION_STARTS, INSTITUTION_ENDS, count, rng, split)
    return [f"{head} {rng.choice(nouns).capitalize()}" for head in heads]


def draw_aliases(count: int, rng: Random, split: Split) -> list[str]:
    """Nicknames such as "Grey Lantern"."""
    return draw_names(ALIAS_FIRST, ALIAS_LAST, count, rng, split, gap=" ")


@dataclass(frozen=True, slots=True)
class Wordings:
    """Ways to say one thing; those in `test_only` are never trained on."""

    both: tuple[str, ...]
    test_only: tuple[str, ...] = ()

    def choose(self, rng: Random, split: Split) -> str:
        """A wording that `split` may use."""
        return rng.choice(self.both + (self.test_only if split is Split.TEST else ()))


COUNTED = {
    "museum": "rooms",
    "school": "pupils",
    "library": "desks",
    "bridge": "arches",
    "mill": "wheels",
    "theatre": "seats",
    "hospital": "beds",
    "tower": "steps",
    "market": "stalls",
    "garden": "trees",
    "factory": "machines",
    "society": "members",
    "choir": "singers",
    "hotel": "guests",
}
"""What an institution's count counts."""

TRADES = (
    "painter",
    "baker",
    "doctor",
    "teacher",
    "singer",
    "sailor",
    "farmer",
    "lawyer",
    "printer",
    "tailor",
    "miner",
    "poet",
    "actor",
    "judge",
    "miller",
)

SENTENCES: dict[Relation, Wordings] = {
    Relation.CITY: Wordings(
        ("{S} stands in {v}.", "{S} is in the city of {v}.", "Visitors find {s} in {v}.", "{S} has its home in {v}."),
        ("{S} can be seen in {v}.",),
    ),
    Relation.LEADER: Wordings(
        ("{S} is led by {v}.", "The head of {s} is {v}.", "{S} is run by {v}.", "Its work is led by {v}."),
        ("{S} has {v} as its head.",),
    ),
    Relation.OPENED: Wordings(
        ("{S} opened in {v}.", "The opening of {s} came in {v}.", "{S} was opened to all in {v}."),
        ("{S} first opened in {v}.",),
    ),
    Relation.COUNT: Wordings(
        ("{S} has {v} {unit}.", "There are {v} {unit} in all.", "It is known for its {v} {unit}."),
        ("One can count {v} {unit}.",),
    ),
    Relation.BIRTHPLACE: Wordings(
        ("{S} was born in {v}.", "{S} came from {v}.", "The birthplace of {s} is {v}."),
        ("{S} was a child of {v}.",),
    ),
    Relation.BORN: Wordings(
        ("The year of birth is {v}.", "{S} came into the world in {v}.", "The birth of {s} was in {v}."),
        ("The birth took place in {v}.",),
    ),
    Relation.WORKS: Wordings(
        ("{S} wrote {v} letters.", "We know of {v} letters by {s}.", "{S} left {v} letters behind."),
        ("In all, {s} wrote {v} letters.",),
    ),
    Relation.TRADE: Wordings(("{S} worked as a {v}.", "{S} lived as a {v}."), ("The trade of {s} was that of a {v}.",)),
    Relation.ALIAS: Wordings(
        ("{S} is also called the {v}.", "Local people call {s} the {v}.", "Another name for {s} is the {v}."),
        ("Many people call {s} the {v}.",),
    ),
    Relation.REPORTED_COUNT: Wordings(
        (
            "A report of {y} counts {v} {unit} at {s}.",
            "In the report of {y}, {s} has {v} {unit}.",
            "According to a report of {y}, there are {v} {unit} at {s}.",
        ),
        ("A report of {y} gives {v} {unit} for {s}.",),
    ),
    Relation.ASIDE_CITY: Wordings(
        ("A newspaper in {v} wrote about this.", "The news came to {v} as well.", "The text was printed in {v}."),
        ("People in {v} read about this.",),
    ),
    Relation.ASIDE_PERSON: Wordings(
        ("The first to say so was {v}.", "This was written down by {v}.", "The text is signed by {v}."),
        ("We have this from {v}.",),
    ),
    Relation.ASIDE_YEAR: Wordings(
        ("The name was first heard in {v}.", "This has been so since {v}."),
        ("It all began in {v}.",),
    ),
    Relation.ASIDE_NUMBER: Wordings(
        ("There were {v} copies of it.", "It was read by {v} people.", "Some {v} people talked about it."),
        ("It was sold to {v} people.",),
    ),
}

FILLERS = Wordings(
    (
        "On warm days many people come by to look around.",
        "The winters here are long and the roads are often closed.",
        "A small book about this can be bought near the door.",
        "Little else is known, since most of the papers were lost in a fire.",
        "The story has been told many times, and not always in the same way.",
        "Some say that the old days were better, but few believe it.",
        "There is a song about it that children still learn.",
        "For a long time nobody paid much attention to it.",
        "It has often been drawn by artists who passed through.",
        "Guests are asked to be quiet and to leave their dogs at home.",
        "Money was short in the early days, and friends had to help.",
        "The river is not far away, and boats go by all day.",
    ),
    (
        "A bell is rung every evening before the doors are closed.",
        "Travellers have left many kind words about it.",
        "In hard years there was hardly enough wood for the fire.",
    ),
)

SINGLE_QUESTIONS: dict[Relation, Wordings] = {
    Relation.CITY: Wordings(
        ("In which city is {s}?", "In which city does {s} stand?"), ("In what city can one find {s}?",)
    ),
    Relation.LEADER: Wordings(("Who leads {s}?", "Who is the head of {s}?"), ("Who runs {s}?",)),
    Relation.OPENED: Wordings(("In which year did {s} open?", "When did {s} open?"), ("In what year was {s} opened?",)),
    Relation.COUNT: Wordings(
        ("How many {unit} does {s} have?", "How many {unit} are there at {s}?"),
        ("What number of {unit} does {s} have?",),
    ),
    Relation.BIRTHPLACE: Wordings(
        ("In which city was {s} born?", "From which city did {s} come?"), ("What is the birthplace of {s}?",)
    ),
    Relation.BORN: Wordings(("In which year was {s} born?", "When was {s} born?"), ("In what year was {s} born?",)),
    Relation.WORKS: Wordings(("How many letters did {s} write?",), ("What number of letters did {s} write?",)),
    Relation.TRADE: Wordings(("What did {s} work as?", "What was the trade of {s}?"), ("What trade did {s} have?",)),
}

COMMON_QUESTIONS = Wordings(
    (
        "Which {type} do two of the passages share?",
        "Which {type} is named in two of the passages?",
        "What {type} do two passages have in common?",
    ),
    ("Name the {type} that two of the passages share.",),
)

WHICH_TWO_QUESTIONS = Wordings(
    ("Which two subjects share a {type}?", "Which two have a {type} in common?"), ("Name the two that share a {type}.",)
)

BRIDGE_QUESTIONS: dict[Relation, Wordings] = {
    Relation.BIRTHPLACE: Wordings(
        ("In which city was the head of {s} born?",), ("From which city did the head of {s} come?",)
    ),
    Relation.BORN: Wordings(("In which year was the head of {s} born?",), ("When was the head of {s} born?",)),
    Relation.TRADE: Wordings(("What did the head of {s} work as?",), ("What was the trade of the head of {s}?",)),
}

COMPARISON_QUESTIONS: dict[Relation, Wordings] = {
    Relation.OPENED: Wordings(("Which opened first, {s} or {t}?",), ("Which is older, {s} or {t}?",)),
    Relation.BORN: Wordings(("Who was born first, {s} or {t}?",), ("Who was older, {s} or {t}?",)),
}

CORRECTION_QUESTIONS = Wordings(
    ("How many {unit} does {s} have in the latest report?", "By the latest report, how many {unit} does {s} have?"),
    ("What number of {unit} does the latest report give for {s}?",),
)

TYPE_WORDS = {ValueType.CITY: "city", ValueType.PERSON: "person", ValueType.YEAR: "year", ValueType.NUMBER: "number"}

KIND_SHARES: dict[QuestionKind, float] = {
    QuestionKind.COMMON: 0.34,
    QuestionKind.SINGLE: 0.26,
    QuestionKind.BRIDGE: 0.08,
    QuestionKind.ALIAS: 0.08,
    QuestionKind.NOT_STATED: 0.08,
    QuestionKind.WHICH_TWO: 0.05,
    QuestionKind.COMPARISON: 0.05,
    QuestionKind.CORRECTION: 0.06,
}
"""How often each kind is asked where the kind is not asked for."""


_LEADING = (Relation.ALIAS, Relation.REPORTED_COUNT)
"""Facts that their passage opens with: the sentences after them refer back to them."""


def write_passage(
    passage_id: str,
    facts: tuple[Fact, ...],
    rng: Random,
    split: Split,
    *,
    source: str,
    unit: str = "",
    max_fillers: int,
    min_words: int,
) -> Passage:
    """The passage that states `facts`, all about one subject, in a random order with up to `max_fillers` fillers,
    or with as many more as it takes to have `min_words` words.
    """
    subject = facts[0].subject
    spoken = [fact for fact in facts if fact.relation is not Relation.IS and not _dated_aside(fact)]
    rng.shuffle(spoken)
    spoken.sort(key=lambda fact: fact.relation not in _LEADING)
    sentences = [_sentence(fact, rng, split, unit, first=place == 0) for place, fact in enumerate(spoken)]
    words = sum(len(sentence.split()) for sentence in sentences)
    for filler in _fillers(rng, split, rng.randint(0, max_fillers), min_words - words):
        sentences.insert(rng.randint(1, len(sentences)), filler)
    return Passage(passage_id, subject, " ".join(sentences), facts, source, unit)


def _dated_aside(fact: Fact) -> bool:
    """A report's own year: the sentence with its count states it."""
    return fact.relation is Relation.ASIDE_YEAR and fact.as_of is not None


def noun_phrase(subject: str) -> str:
    """How a subject is named within a sentence: institutions ("Torcrest Museum") and nicknames take an article."""
    return subject if is_person(subject) else f"the {subject}"


def is_person(subject: str) -> bool:
    """Whether a subject is a person: people are the only ones with a first name."""
    return subject.partition(" ")[0] in WOMEN + MEN


def _fillers(rng: Random, split: Split, count: int, words: int) -> list[str]:
    """At least `count` different fillers, with at least `words` words together."""
    chosen: list[str] = []
    while len(chosen) < count or sum(len(filler.split()) for filler in chosen) < words:
        filler = FILLERS.choose(rng, split)
        if filler not in chosen:
            chosen.append(filler)
    return chosen


def _sentence(fact: Fact, rng: Random, split: Split, unit: str, *, first: bool) -> str:
    template = SENTENCES[fact.relation].choose(rng, split)
    while first and "{S}" not in template and "{s}" not in template:
        template = SENTENCES[fact.relation].choose(rng, split)
    name = noun_phrase(fact.subject) if first else _back_reference(fact.subject, rng)
    return template.format(S=name[0].upper() + name[1:], s=name, v=fact.value, unit=unit, y=fact.as_of)


def _back_reference(subject: str, rng: Random) -> str:
    """A later mention: the name again, or a shorter one ("the museum", a first name)."""
    if is_person(subject):
        return rng.choice((subject, subject.partition(" ")[0]))
    return rng.choice((noun_phrase(subject), "the " + subject.rpartition(" ")[2].lower()))
