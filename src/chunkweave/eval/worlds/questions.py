"""Every question of every kind that a set of passages answers beyond doubt, with gold answers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

from chunkweave.eval.worlds.records import (
    NOT_STATED,
    SHARED_TYPES,
    Fact,
    Passage,
    Question,
    QuestionKind,
    Relation,
    Split,
    ValueType,
)
from chunkweave.eval.worlds.wording import (
    BRIDGE_QUESTIONS,
    COMMON_QUESTIONS,
    COMPARISON_QUESTIONS,
    CORRECTION_QUESTIONS,
    SINGLE_QUESTIONS,
    TYPE_WORDS,
    WHICH_TWO_QUESTIONS,
    noun_phrase,
)


def ask_about(
    passages: Sequence[Passage], rng: Random, split: Split, *, absent: Sequence[Passage] = ()
) -> list[Question]:
    """All questions about `passages`; those about `absent` passages (of the same world) are not stated.

    The order of `passages` changes only the order of the questions and of the two names in a which-two answer.
    """
    asker = _Asker(passages, rng, split)
    return [
        *asker.single(),
        *asker.common(),
        *asker.bridge(),
        *asker.comparison(),
        *asker.alias(),
        *asker.correction(),
        *asker.not_stated(absent),
    ]


def unique_pair(passages: Sequence[Passage], value_type: ValueType) -> tuple[str, Passage, Passage] | None:
    """The value that exactly two passages share, with them, if no other value of the type is shared at all."""
    holders: dict[str, list[Passage]] = defaultdict(list)
    for passage in passages:
        for value in sorted(passage.values(value_type)):
            holders[value].append(passage)
    shared = [(value, found) for value, found in holders.items() if len(found) > 1]
    if len(shared) != 1 or len(shared[0][1]) != 2:
        return None
    value, (one, two) = shared[0]
    return value, one, two


class _Asker:
    """Asks about one set of passages."""

    def __init__(self, passages: Sequence[Passage], rng: Random, split: Split) -> None:
        self._passages = passages
        self._rng = rng
        self._split = split
        self._stated: dict[tuple[str, Relation], list[tuple[Fact, Passage]]] = defaultdict(list)
        for passage in passages:
            for fact in passage.facts:
                self._stated[fact.subject, fact.relation].append((fact, passage))

    def single(self) -> Iterator[Question]:
        for (subject, relation), statements in list(self._stated.items()):
            if relation not in SINGLE_QUESTIONS or len(statements) != 1:
                continue
            fact, passage = statements[0]
            if relation is Relation.COUNT and self._stated.get((subject, Relation.REPORTED_COUNT)):
                continue  # the reports would contradict it
            text = self._word(SINGLE_QUESTIONS[relation].choose(self._rng, self._split), subject, passage.unit)
            yield Question(QuestionKind.SINGLE, text, (fact.value,), (passage.id,), (subject,), relation)

    def common(self) -> Iterator[Question]:
        for value_type in SHARED_TYPES:
            pair = unique_pair(self._passages, value_type)
            if pair is None:
                continue
            value, one, two = pair
            needed, word = (one.id, two.id), TYPE_WORDS[value_type]
            text = COMMON_QUESTIONS.choose(self._rng, self._split).format(type=word)
            yield Question(QuestionKind.COMMON, text, (value,), needed, shared=value_type)
            if one.subject != two.subject:
                text = WHICH_TWO_QUESTIONS.choose(self._rng, self._split).format(type=word)
                answers = (f"{one.subject} and {two.subject}", f"{two.subject} and {one.subject}")
                yield Question(QuestionKind.WHICH_TWO, text, answers, needed, shared=value_type)

    def bridge(self) -> Iterator[Question]:
        for (subject, relation), statements in list(self._stated.items()):
            if relation is not Relation.LEADER or len(statements) != 1:
                continue
            fact, passage = statements[0]
            for asked, wordings in BRIDGE_QUESTIONS.items():
                found = self._stated.get((fact.value, asked), [])
                if len(found) == 1:
                    text = self._word(wordings.choose(self._rng, self._split), subject, "")
                    needed = (passage.id, found[0][1].id)
                    yield Question(QuestionKind.BRIDGE, text, (found[0][0].value,), needed, (subject,), asked)

    def comparison(self) -> Iterator[Question]:
        for relation, wordings in COMPARISON_QUESTIONS.items():
            dated = [found[0] for (_, stated), found in self._stated.items() if stated is relation and len(found) == 1]
            for (one, its), (two, other) in combinations(dated, 2):
                if one.value == two.value:
                    continue
                first = one if int(one.value) < int(two.value) else two
                asked = self._rng.sample((one.subject, two.subject), 2)
                text = wordings.choose(self._rng, self._split).format(s=noun_phrase(asked[0]), t=noun_phrase(asked[1]))
                needed = (its.id, other.id)
                yield Question(QuestionKind.COMPARISON, text, (first.subject,), needed, tuple(asked), relation)

    def alias(self) -> Iterator[Question]:
        for passage in self._passages:
            for fact in passage.facts:
                if fact.relation is Relation.ALIAS:
                    yield from self._by_alias(fact, passage)

    def _by_alias(self, alias: Fact, note: Passage) -> Iterator[Question]:
        for relation in (Relation.CITY, Relation.LEADER, Relation.OPENED):
            found = self._stated.get((alias.subject, relation), [])
            if len(found) == 1:
                fact, passage = found[0]
                text = self._word(SINGLE_QUESTIONS[relation].choose(self._rng, self._split), alias.value, "")
                needed = (note.id, passage.id)
                yield Question(QuestionKind.ALIAS, text, (fact.value,), needed, (alias.value,), relation)

    def correction(self) -> Iterator[Question]:
        for (subject, relation), statements in list(self._stated.items()):
            if relation is not Relation.REPORTED_COUNT or len(statements) < 2:
                continue
            latest, passage = max(statements, key=lambda statement: statement[0].as_of or 0)
            text = self._word(CORRECTION_QUESTIONS.choose(self._rng, self._split), subject, passage.unit)
            needed = tuple(passage.id for _, passage in statements)
            yield Question(QuestionKind.CORRECTION, text, (latest.value,), needed, (subject,), relation)

    def not_stated(self, absent: Sequence[Passage]) -> Iterator[Question]:
        for passage in absent:
            for fact in passage.facts:
                if fact.relation in SINGLE_QUESTIONS and (fact.subject, fact.relation) not in self._stated:
                    wordings = SINGLE_QUESTIONS[fact.relation]
                    text = self._word(wordings.choose(self._rng, self._split), fact.subject, passage.unit)
                    yield Question(QuestionKind.NOT_STATED, text, (NOT_STATED,), (), (fact.subject,), fact.relation)

    @staticmethod
    def _word(template: str, subject: str, unit: str) -> str:
        return template.format(s=noun_phrase(subject), unit=unit)
