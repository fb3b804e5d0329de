"""Questions about worlds, and requests: a question with its passages and others, shuffled."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

from chunkweave.types import Chunk
from worlds.records import (
    NOT_STATED,
    SHARED_TYPES,
    Fact,
    Passage,
    Question,
    QuestionKind,
    Relation,
    Request,
    Split,
    ValueType,
    World,
)
from worlds.wording import (
    BRIDGE_QUESTIONS,
    COMMON_QUESTIONS,
    COMPARISON_QUESTIONS,
    CORRECTION_QUESTIONS,
    KIND_SHARES,
    SINGLE_QUESTIONS,
    TYPE_WORDS,
    WHICH_TWO_QUESTIONS,
    noun_phrase,
)


def ask_about(
    passages: Sequence[Passage], rng: Random, split: Split, *, absent: Sequence[Passage] = ()
) -> list[Question]:
    """All questions about `passages`; the answer to those about `absent` passages (of the same world) is "not stated".

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
    """The value that exactly two passages share, with these, if no other value of the type is shared."""
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
            for second, wordings in BRIDGE_QUESTIONS.items():
                found = self._stated.get((fact.value, second), [])
                if len(found) == 1:
                    text = self._word(wordings.choose(self._rng, self._split), subject, "")
                    needed = (passage.id, found[0][1].id)
                    yield Question(QuestionKind.BRIDGE, text, (found[0][0].value,), needed, (subject,), second)

    def comparison(self) -> Iterator[Question]:
        for relation, wordings in COMPARISON_QUESTIONS.items():
            dated = [found[0] for (_, stated), found in self._stated.items() if stated is relation and len(found) == 1]
            for (one, its), (two, other) in combinations(dated, 2):
                if one.value == two.value:
                    continue
                first = one if int(one.value) < int(two.value) else two
                subjects = self._rng.sample((one.subject, two.subject), 2)
                s, t = map(noun_phrase, subjects)
                text = wordings.choose(self._rng, self._split).format(s=s, t=t)
                needed = (its.id, other.id)
                yield Question(QuestionKind.COMPARISON, text, (first.subject,), needed, tuple(subjects), relation)

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


_ATTEMPTS = 50


def sample_request(world: World, rng: Random, num_passages: int, kind: QuestionKind | None = None) -> Request:
    """A question of `kind` (default: random, by KIND_SHARES) over `num_passages` passages in random order.

    Raises:
        ValueError: the world has no `num_passages` passages that allow a question of that kind.
    """
    if kind is None:
        possible = [k for k in KIND_SHARES if num_passages > 1 or k in (QuestionKind.SINGLE, QuestionKind.NOT_STATED)]
        kind = rng.choices(possible, [KIND_SHARES[k] for k in possible])[0]
    for _ in range(_ATTEMPTS):
        passages = pick_passages(world, rng, num_passages, kind)
        absent = [passage for passage in world.passages if passage not in passages]
        fitting = [q for q in ask_about(passages, rng, world.split, absent=absent) if q.kind is kind]
        if fitting:
            return as_request(rng.choice(_one_per_subkind(fitting, rng)), passages)
    raise ValueError(f"world {world.seed} has no {kind} question over {num_passages} passages")


def as_request(question: Question, passages: Sequence[Passage]) -> Request:
    """`question` over `passages` in their order."""
    places = {passage.id: place for place, passage in enumerate(passages)}
    return Request(
        question=question.text,
        chunks=tuple(Chunk(passage.text, passage.source) for passage in passages),
        answers=question.answers,
        kind=question.kind,
        needed=tuple(sorted(places[passage_id] for passage_id in question.needed)),
    )


def pick_passages(world: World, rng: Random, count: int, kind: QuestionKind = QuestionKind.COMMON) -> list[Passage]:
    """`count` passages in random order, including those that `kind` needs.

    As far as the world allows, at most two passages share a value, and at most one pair per type: questions about a
    shared value then have one answer.

    Raises:
        ValueError: the world has fewer passages.
    """
    if not 1 <= count <= len(world.passages):
        raise ValueError(f"the world has {len(world.passages)} passages, but {count} are needed")
    pool = list(world.passages)
    rng.shuffle(pool)
    chosen = _beginning(pool, rng, kind)[:count]
    taken = _Shared(chosen)
    later = []
    for passage in pool:
        if passage in chosen or len(chosen) == count:
            continue
        if taken.admits(passage):
            chosen.append(passage)
            taken.add(passage)
        else:
            later.append(passage)
    chosen += later[: count - len(chosen)]
    rng.shuffle(chosen)
    return chosen


class _Shared:
    """Values in use, and types that already have a shared value."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._seen: dict[ValueType, set[str]] = {value_type: set() for value_type in SHARED_TYPES}
        self._spent: set[ValueType] = set()
        for passage in passages:
            self.add(passage)

    def admits(self, passage: Passage) -> bool:
        """Whether every type would still have at most one shared value, of two passages."""
        for value_type in SHARED_TYPES:
            overlap = passage.values(value_type) & self._seen[value_type]
            if overlap and (value_type in self._spent or len(overlap) > 1):
                return False
        return True

    def add(self, passage: Passage) -> None:
        for value_type in SHARED_TYPES:
            values = passage.values(value_type)
            if values & self._seen[value_type]:
                self._spent.add(value_type)
            self._seen[value_type] |= values


def _beginning(pool: Sequence[Passage], rng: Random, kind: QuestionKind) -> list[Passage]:
    """The passages that a question of `kind` needs, from a shuffled pool."""
    pairs = {
        QuestionKind.BRIDGE: _is_bridge,
        QuestionKind.ALIAS: _is_alias,
        QuestionKind.CORRECTION: _is_correction,
        QuestionKind.COMPARISON: _is_comparable,
    }
    if kind in pairs:
        fits = pairs[kind]
    elif kind in (QuestionKind.COMMON, QuestionKind.WHICH_TWO):
        value_type = rng.choice(SHARED_TYPES)
        fits = lambda one, two: bool(one.values(value_type) & two.values(value_type))  # noqa: E731
    else:
        return [next(passage for passage in pool if not _is_note(passage))]
    return next(([one, two] for one in pool for two in pool if one is not two and fits(one, two)), [])


def _value(passage: Passage, relation: Relation) -> str | None:
    return next((fact.value for fact in passage.facts if fact.relation is relation), None)


def _is_note(passage: Passage) -> bool:
    return passage.facts[0].relation in (Relation.ALIAS, Relation.REPORTED_COUNT)


def _is_bridge(one: Passage, two: Passage) -> bool:
    return _value(one, Relation.LEADER) == two.subject


def _is_alias(one: Passage, two: Passage) -> bool:
    return one.subject == two.subject and bool(_value(one, Relation.ALIAS) and _value(two, Relation.CITY))


def _is_correction(one: Passage, two: Passage) -> bool:
    reported = _value(one, Relation.REPORTED_COUNT), _value(two, Relation.REPORTED_COUNT)
    return one.subject == two.subject and None not in reported


def _is_comparable(one: Passage, two: Passage) -> bool:
    opened = _value(one, Relation.OPENED) and _value(two, Relation.OPENED)
    return bool(opened or (_value(one, Relation.BORN) and _value(two, Relation.BORN)))


def _one_per_subkind(questions: Sequence[Question], rng: Random) -> list[Question]:
    """One question per relation and shared type, so that frequent subkinds do not dominate."""
    by_subkind: dict[tuple[str, str], list[Question]] = {}
    for question in questions:
        by_subkind.setdefault((str(question.relation), str(question.shared)), []).append(question)
    return [rng.choice(group) for group in by_subkind.values()]
