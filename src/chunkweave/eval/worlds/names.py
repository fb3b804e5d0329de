"""Invented names, put together from syllables. A name belongs to the training split or to the test split, never both.

Every name of a kind is a start and an end; the starts of cities, institutions and surnames are disjoint, and a world
never uses a start twice, so the first syllable already tells two names of one world apart.
"""

from collections.abc import Sequence
from random import Random

from chunkweave.eval.worlds.records import Split


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
