"""A second opinion: gold answers derived again, from what the texts say, by other code than the one that asks."""

import re
from collections.abc import Callable, Sequence

from chunkweave_lab.worlds.records import NOT_STATED, Fact, Passage, Question, QuestionKind, Relation, ValueType


def mentions(text: str, value: str) -> bool:
    """Whether `value` stands in `text` as whole words."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def check_passage(passage: Passage, vocabulary: Sequence[Fact]) -> list[str]:
    """What is wrong with a passage: facts that its text does not state, and values in it that no fact covers.

    `vocabulary` is every fact of its world: the values that could be named.
    """
    problems = [
        f"{passage.id}: {f.value!r} is not in the text" for f in passage.facts if not mentions(passage.text, f.value)
    ]
    if not mentions(passage.text, passage.subject):
        problems.append(f"{passage.id}: the subject {passage.subject!r} is not in the text")
    stated = {fact.value for fact in passage.facts} | {passage.subject}
    numbers = set(re.findall(r"\d+", passage.text))
    names = {f.value for f in vocabulary if f.value_type in (ValueType.CITY, ValueType.PERSON, ValueType.ALIAS)}
    subjects = {fact.subject for fact in vocabulary}
    unstated = {name for name in (names | subjects) - stated if mentions(passage.text, name)} | (numbers - stated)
    problems += [f"{passage.id}: {value!r} is in the text but no fact states it" for value in sorted(unstated)]
    return problems


def check_question(question: Question, passages: Sequence[Passage]) -> list[str]:
    """What is wrong with a question's gold answers, given the passages of its prompt: empty if nothing is."""
    derived = _DERIVE[question.kind](question, passages)
    problems = [] if derived == set(question.answers) else [f"{question.text} {question.answers} but derived {derived}"]
    if question.kind is QuestionKind.NOT_STATED:
        return problems
    for needed in question.needed:
        rest = [passage for passage in passages if passage.id != needed]
        if _DERIVE[question.kind](question, rest) == set(question.answers):
            problems.append(f"{question.text} is answered without {needed}")
    return problems


def _said(passages: Sequence[Passage]) -> list[Fact]:
    return [fact for passage in passages for fact in passage.facts if mentions(passage.text, fact.value)]


def _look_up(passages: Sequence[Passage], subject: str, relation: Relation | None) -> set[str]:
    return {fact.value for fact in _said(passages) if fact.subject == subject and fact.relation is relation}


def _single(question: Question, passages: Sequence[Passage]) -> set[str]:
    return _look_up(passages, question.subjects[0], question.relation) or {NOT_STATED}


def _holders(question: Question, passages: Sequence[Passage]) -> dict[str, list[Passage]]:
    """The values of the asked type that more than one text mentions, with the passages that do."""
    values = {fact.value for fact in _said(passages) if fact.value_type is question.shared}
    found = {value: [passage for passage in passages if mentions(passage.text, value)] for value in values}
    return {value: holders for value, holders in found.items() if len(holders) > 1}


def _common(question: Question, passages: Sequence[Passage]) -> set[str]:
    return set(_holders(question, passages))


def _which_two(question: Question, passages: Sequence[Passage]) -> set[str]:
    answers = set()
    for holders in _holders(question, passages).values():
        names = [passage.subject for passage in holders]
        answers |= {" and ".join(names), " and ".join(reversed(names))}
    return answers


def _bridge(question: Question, passages: Sequence[Passage]) -> set[str]:
    heads = _look_up(passages, question.subjects[0], Relation.LEADER)
    return {value for head in heads for value in _look_up(passages, head, question.relation)}


def _comparison(question: Question, passages: Sequence[Passage]) -> set[str]:
    years = {name: _look_up(passages, name, question.relation) for name in question.subjects}
    if any(len(found) != 1 for found in years.values()):
        return set()
    return {min(years, key=lambda name: int(next(iter(years[name]))))}


def _alias(question: Question, passages: Sequence[Passage]) -> set[str]:
    renamed = [f.subject for f in _said(passages) if f.relation is Relation.ALIAS and f.value == question.subjects[0]]
    return {value for subject in renamed for value in _look_up(passages, subject, question.relation)}


def _correction(question: Question, passages: Sequence[Passage]) -> set[str]:
    reports = [
        fact
        for fact in _said(passages)
        if fact.subject == question.subjects[0] and fact.relation is Relation.REPORTED_COUNT
    ]
    if len(reports) < 2:
        return set()
    return {sorted(reports, key=lambda fact: fact.as_of or 0)[-1].value}


_DERIVE: dict[QuestionKind, Callable[[Question, Sequence[Passage]], set[str]]] = {
    QuestionKind.SINGLE: _single,
    QuestionKind.NOT_STATED: _single,
    QuestionKind.COMMON: _common,
    QuestionKind.WHICH_TWO: _which_two,
    QuestionKind.BRIDGE: _bridge,
    QuestionKind.COMPARISON: _comparison,
    QuestionKind.ALIAS: _alias,
    QuestionKind.CORRECTION: _correction,
}
