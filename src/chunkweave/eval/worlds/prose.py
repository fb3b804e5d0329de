"""Facts into encyclopaedia-like passages: one sentence a fact, in any order, with fillers between."""

from random import Random

from chunkweave.eval.worlds.names import MEN, WOMEN
from chunkweave.eval.worlds.records import Fact, Passage, Relation, Split
from chunkweave.eval.worlds.wording import FILLERS, SENTENCES

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
