"""Requests: which passages of a world go together into one prompt, and what is asked about them."""

from collections.abc import Sequence
from random import Random

from chunkweave.eval.worlds.questions import ask_about
from chunkweave.eval.worlds.records import (
    SHARED_TYPES,
    Passage,
    Question,
    QuestionKind,
    Relation,
    Request,
    ValueType,
    World,
)
from chunkweave.eval.worlds.wording import KIND_SHARES
from chunkweave.types import Chunk

_ATTEMPTS = 50


def sample_request(world: World, rng: Random, num_passages: int, kind: QuestionKind | None = None) -> Request:
    """A question of `kind` (else of a random one, by KIND_SHARES) over `num_passages` passages in random order.

    Raises:
        ValueError: if the world has no `num_passages` passages that allow a question of that kind.
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
    """`count` passages in random order, begun with ones that `kind` takes, of which no more than two share a value
    and no two pairs share one of the same type, as far as the world allows: so that what is shared can be asked for.

    Raises:
        ValueError: if the world has fewer passages than that.
    """
    if not 1 <= count <= len(world.passages):
        raise ValueError(f"{count} passages asked of a world of {len(world.passages)}")
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
    """Which values are taken, and which types already have their one shared value."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._seen: dict[ValueType, set[str]] = {value_type: set() for value_type in SHARED_TYPES}
        self._spent: set[ValueType] = set()
        for passage in passages:
            self.add(passage)

    def admits(self, passage: Passage) -> bool:
        """Whether every type keeps at most one shared value, held by two passages."""
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
    """The passages that a question of `kind` turns on, from a shuffled pool."""
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
    """One question for each relation and shared type, so that numerous subkinds do not crowd out the others."""
    by_subkind: dict[tuple[str, str], list[Question]] = {}
    for question in questions:
        by_subkind.setdefault((str(question.relation), str(question.shared)), []).append(question)
    return [rng.choice(group) for group in by_subkind.values()]
