"""Which turns and chunks go into the next prompt, against a model that works it out from a list of turns."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.config import ConversationConfig
from chunkweave.conversation.registry import Conversations, ConversationState, HistoryPart, PastTurn
from chunkweave.conversation.turns import next_turn
from chunkweave.errors import (
    ConversationBusyError,
    ConversationEndedError,
    ConversationTurnError,
    QueueFullError,
    UsageError,
)
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.types import ChunkId, SegmentId


def chunk(name: str, tokens: int = 4, source: str = "") -> PromptPart:
    return PromptPart(PartKind.CHUNK, (ord(name[0]),) * tokens, ChunkId(name), source)


def turn(names: str, tokens: int = 4, said: int = 3, number: int = 0) -> PastTurn:
    answer = PromptPart(PartKind.TURN, (9,) * said, ChunkId(f"turn {number}"))
    parts = [*(chunk(name, tokens) for name in names), answer]
    return PastTurn(tuple(HistoryPart(part, SegmentId(f"s {part.id}"), own=True) for part in parts))


def names(parts) -> str:
    return "".join(part.id for part in parts)


def content_of(turns, chunks, **options):
    return next_turn(turns, [chunk(name) for name in chunks], **{"room": 1000, "keep_tokens": 500} | options)


def test_the_papers_example():
    """CRAFT §4.3: C1 C2 C3 in the first turn, C2 C3 C4 in the second: only C4 is processed."""
    content = content_of([turn("123")], "234")
    assert (names(content.new), names(content.not_sent), content.cut) == ("4", "23", 0)
    assert (content.history_tokens, content.tokens) == (3 * 4 + 3, 3 * 4 + 3 + 4)


def test_a_chunk_whose_turn_was_cut_is_sent_again():
    """CRAFT §4.3's longer example: turn 5 saw C2 and C3 in turn 1; once that is cut, they are new again."""
    turns = [turn("123", number=1), turn("5", number=5), turn("789", number=9)]
    assert names(content_of(turns, "23").new) == ""
    later = content_of(turns, "23", room=35)
    assert (later.cut, names(later.new)) == (1, "23")
    assert [part.part.id for part in later.history][-1] == "turn 9"


def test_one_given_twice_is_sent_once_at_its_first_rank():
    content = content_of([], "cacb")
    assert (names(content.new), names(content.not_sent)) == ("cab", "c")
    same = next_turn([], [chunk("a", source="x"), chunk("a", source="y")], room=99, keep_tokens=99)
    assert [part.source for part in same.new] == ["x"]


def test_without_deduplication_all_are_sent():
    content = content_of([turn("ab")], "aba", deduplicate=False)
    assert (names(content.new), content.not_sent) == ("aba", ())


def test_a_cut_keeps_the_latest_turns_that_fit_and_no_more_than_the_share():
    turns = [turn("a", number=n) for n in range(10)]  # 7 tokens each
    assert content_of(turns, "b", room=74).cut == 0
    assert content_of(turns, "b", room=73).cut == 1
    assert content_of(turns, "b", room=73, keep_tokens=35).cut == 5
    assert content_of(turns, "b", room=3).cut == 10


def naive(turns, chunks, room, keep_tokens):
    """What `next_turn` is to do, from scratch for every number of turns that might stay."""
    for cut in range(len(turns) + 1):
        kept = turns[cut:]
        there = {part.id for one in kept for part in one.chunks}
        new = []
        for one in chunks:
            if one.id not in there and one.id not in [other.id for other in new]:
                new.append(one)
        history = sum(len(part.part) for one in kept for part in one.parts)
        if history + sum(map(len, new)) <= room and (cut == 0 or history <= keep_tokens):
            break
    return tuple(kept), cut, tuple(new)


@given(
    asked=st.lists(st.tuples(st.text("abcdefgh", max_size=5), st.integers(1, 9)), max_size=25),
    room=st.integers(0, 80),
    share=st.floats(0, 1),
    size=st.integers(1, 6),
)
def test_a_whole_conversation_equals_the_naive_model(asked, room, share, size):
    turns: tuple[PastTurn, ...] = ()
    for number, (given_names, said) in enumerate(asked):
        chunks = [chunk(name, size) for name in given_names]
        content = next_turn(turns, chunks, room=room, keep_tokens=int(share * room))
        assert (content.kept, content.cut, content.new) == naive(turns, chunks, room, int(share * room))
        assert sorted(names(content.new) + names(content.not_sent)) == sorted(given_names)
        if content.kept:
            assert content.tokens <= room
        in_context = [part.id for one in content.kept for part in one.chunks] + [part.id for part in content.new]
        assert len(in_context) == len(set(in_context))
        assert set(given_names) <= set(in_context)
        turns = (*content.kept, turn(names(content.new), size, said, number))
        Prompt(tuple(part.part for one in turns for part in one.parts))


class Held:
    """What the store would be told, and a clock."""

    def __init__(self, **config) -> None:
        self.now_s = 0.0
        self.kept: set[SegmentId] = set()
        self.conversations = Conversations(
            ConversationConfig(**config), clock=lambda: self.now_s, kept=self.kept.update, released=self._released
        )

    def _released(self, segments) -> None:
        assert set(segments) <= self.kept
        self.kept -= set(segments)

    def say(self, key, turns=(), **said) -> ConversationState:
        before = self.conversations.begin(key, **said)
        after = ConversationState(tuple(turns), before.system, before.turn_count + 1)
        self.conversations.commit(key, before, after)
        return after


A, B = ("", "a"), ("", "b")


def test_ids_of_different_tenants_never_meet():
    held = Held()
    held.say(("salt one", "id"), [turn("a")])
    assert held.conversations.begin(("salt two", "id")) == ConversationState()
    assert held.conversations.state(("salt one", "id")).turn_count == 1


def test_only_one_turn_at_a_time():
    held = Held()
    before = held.conversations.begin(A)
    with pytest.raises(ConversationBusyError, match="'a'"):
        held.conversations.begin(A)
    held.conversations.begin(B)
    held.conversations.abandon(A, before)
    held.conversations.abandon(A, before)
    assert held.conversations.begin(A) is before


def test_a_turn_of_a_closed_conversation_changes_nothing():
    held = Held()
    old = held.conversations.begin(A)
    assert held.conversations.close(A)
    assert not held.conversations.close(A)
    new = held.conversations.begin(A)
    held.conversations.commit(A, old, ConversationState((turn("a"),), None, 1))
    held.conversations.abandon(A, old)
    with pytest.raises(ConversationBusyError):
        held.conversations.begin(A)
    held.conversations.abandon(A, new)
    assert held.conversations.state(A) is new
    assert not held.kept


def test_idle_ones_expire_and_what_they_alone_held_is_released():
    held = Held(idle_s=10)
    held.say(A, [turn("a", number=1)])
    held.say(B, [turn("a", number=1), turn("b", number=2)])
    held.now_s = 6
    held.conversations.abandon(B, held.conversations.begin(B))
    held.now_s = 12
    assert held.conversations.expire() == 1
    assert held.conversations.state(A) is None
    assert held.kept == {"s a", "s turn 1", "s b", "s turn 2"}
    busy = held.conversations.begin(B)
    held.now_s = 1000
    assert held.conversations.expire() == 0
    held.conversations.abandon(B, busy)
    held.now_s = 2000
    assert held.conversations.state(B) is None
    assert not held.kept


def test_a_cut_releases_what_is_no_more_in_the_context():
    held = Held()
    held.say(A, [turn("a", number=1), turn("b", number=2)])
    held.say(A, [turn("b", number=2), turn("c", number=3)])
    assert held.kept == {"s b", "s turn 2", "s c", "s turn 3"}


def test_of_too_many_the_one_idle_longest_goes():
    held = Held(max_conversations=2)
    held.say(A, [turn("a")])
    held.say(B, [turn("b")])
    held.say(A, [turn("a")])
    held.conversations.open(("", "c"), "Be brief.")
    assert held.conversations.state(B) is None
    assert held.conversations.state(("", "c")).system == "Be brief."
    with pytest.raises(UsageError, match="already"):
        held.conversations.open(A)
    held.conversations.begin(A)
    held.conversations.begin(("", "c"))
    with pytest.raises(QueueFullError, match="2 conversations"):
        held.conversations.begin(B, turn=1)


@given(
    capacity=st.integers(1, 8),
    share=st.none() | st.integers(1, 8),
    turns=st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 9), st.booleans()), max_size=60),
)
def test_no_tenant_loses_one_of_its_share_to_another(capacity, share, turns):
    conversations = Conversations(ConversationConfig(max_conversations=capacity, share=share))
    there: dict[tuple[str, str], str] = {}
    for tenant, number, stays_busy in turns:
        key = (tenant, str(number))
        try:
            before = conversations.begin(key, tenant=tenant)
        except (QueueFullError, ConversationBusyError):
            assert set(there) == {other for other in there if conversations.state(other) is not None}
            continue
        if not stays_busy:
            conversations.abandon(key, before)
        there[key] = tenant
        held = Counter(there.values())
        for lost in [other for other in there if conversations.state(other) is None]:
            equal = capacity // len(held)
            assert held[there.pop(lost)] > min(equal, share or equal)
        assert len(conversations) == len(there) <= capacity


def test_a_forgotten_one_is_not_begun_anew_unless_that_is_said():
    held = Held(idle_s=10, max_conversations=1)
    held.say(A, [turn("a")])
    held.now_s = 20
    with pytest.raises(ConversationEndedError, match="'a'"):
        held.conversations.begin(A)
    assert held.say(A, turn=1).turn_count == 1
    held.say(B)
    with pytest.raises(ConversationEndedError, match="'a'"):
        held.conversations.begin(A)
    assert held.conversations.close(B)
    assert held.say(B).turn_count == 1


def test_one_that_never_had_an_answer_is_not_missed():
    held = Held(idle_s=10)
    held.conversations.abandon(A, held.conversations.begin(A))
    held.now_s = 20
    assert held.conversations.begin(A) == ConversationState()


def test_forgotten_names_of_a_tenant_are_bounded_and_its_own(monkeypatch):
    monkeypatch.setattr("chunkweave.conversation.registry._MOST_FORGOTTEN", 2)
    held = Held(max_conversations=1)
    held.say(("x", "mine"), tenant="x")
    for number in range(4):
        held.say(("y", str(number)), tenant="y")
    for key, tenant in [(("x", "mine"), "x"), (("y", "2"), "y"), (("y", "1"), "y")]:
        with pytest.raises(ConversationEndedError):
            held.conversations.begin(key, tenant=tenant)
    assert held.conversations.begin(("y", "0"), tenant="y") == ConversationState()


def test_a_turn_has_the_number_that_comes_next():
    held = Held()
    with pytest.raises(ConversationEndedError):
        held.conversations.begin(A, turn=2)
    held.say(A, turn=1)
    with pytest.raises(ConversationTurnError, match="turn 2"):
        held.conversations.begin(A, turn=1)
    assert held.say(A, turn=2).turn_count == 2


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"keep": 1.5}, {"keep": -0.1}, {"max_conversations": 0}, {"share": 0}, {"idle_s": 0}]
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(UsageError):
        ConversationConfig(**wrong)


def test_parts_of_a_conversation_stand_in_order():
    said = PromptPart(PartKind.TURN, (1,), ChunkId("t"))
    question = PromptPart(PartKind.QUESTION, (2,))
    Prompt((chunk("a"), said, chunk("b"), said, question))
    with pytest.raises(ValueError, match="order"):
        Prompt((chunk("a"), question, said))
    with pytest.raises(ValueError, match="id"):
        PromptPart(PartKind.TURN, (1,))
