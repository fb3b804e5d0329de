"""The cache-aware queue against a list that is sorted anew for every request."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chunkweave.errors import QueueFullError, UsageError
from chunkweave.scheduling.queue import CacheAwareQueue, Waiting
from chunkweave.store.prefix_trie import KnowledgeTree

PROMPT_TOKENS = 10
paths = st.text("ab", min_size=1, max_size=4)


@dataclass
class Asked:
    """What the list knows of a waiting request."""

    number: int
    path: str
    passed_over: int = 0
    waited: list[int] = field(default_factory=list)


class QueueMachine(RuleBasedStateMachine):
    @initialize(window=st.integers(0, 3))
    def begin(self, window: int) -> None:
        self.window = window
        self.tree: KnowledgeTree[str] = KnowledgeTree(["device", "host"])
        self.queue: CacheAwareQueue[str] = CacheAwareQueue(self.tree, window=window)
        self.waiting: dict[str, Asked] = {}
        self.arrived = 0
        self.out: list[tuple[Asked, Waiting[str]]] = []

    @rule(path=paths)
    def submit(self, path: str) -> None:
        name = f"r{self.arrived}"
        self.queue.submit(name, tuple(path), PROMPT_TOKENS)
        self.waiting[name] = Asked(self.arrived, path)
        self.arrived += 1

    @rule(path=paths, tier=st.sampled_from(["device", "host"]), held=st.booleans())
    def move(self, path: str, tier: str, held: bool) -> None:
        if held:
            self.tree.placed(tuple(path), tier, 2)
        else:
            self.tree.displaced(tuple(path), tier)

    def expected(self, refused: str = "") -> str | None:
        """By definition: the oldest if its window is used up, else the greatest quotient, of equal ones the oldest."""
        oldest = min(self.waiting, key=lambda name: self.waiting[name].number)
        if self.waiting[oldest].passed_over >= self.window:
            return oldest if oldest != refused else None
        fitting = [name for name in self.waiting if name != refused]
        return min(fitting, key=lambda name: (-self.quotient(name), self.waiting[name].number), default=None)

    def quotient(self, name: str) -> float:
        cached = self.tree.match(self.waiting[name].path).tokens
        return cached / (PROMPT_TOKENS - cached)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        refused = data.draw(st.sampled_from(["", *self.waiting]))
        expected = self.expected(refused)
        served = self.queue.pop(lambda waiting: waiting.request != refused)
        assert (served.request if served else None) == expected
        if served is not None:
            gone = self.waiting.pop(served.request)
            for other in self.waiting.values():
                other.passed_over += other.number < gone.number
            self.out.append((gone, served))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(name)
        assert not self.queue.remove(name)
        del self.waiting[name]

    @invariant()
    def nobody_is_passed_over_more_often_than_the_window_allows(self) -> None:
        assert len(self.queue) == len(self.waiting)
        for name, asked in self.waiting.items():
            assert self.queue.passed_over(name) == asked.passed_over <= self.window
            assert name in self.queue

    @invariant()
    def the_next_are_those_that_are_served_next(self) -> None:
        served = self.queue.next(2)
        assert len(served) == min(2, len(self.waiting))
        if served:
            assert served[0].request == self.expected()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class CountingTree(KnowledgeTree[str]):
    """Counts look-ups."""

    lookups = 0

    def stored_tokens(self, keys):
        self.lookups += 1
        return super().stored_tokens(keys)


def test_only_requests_that_share_a_changed_path_are_looked_up_again():
    tree = CountingTree(["device"])
    queue: CacheAwareQueue[int] = CacheAwareQueue(tree)
    for number in range(100):
        queue.submit(number, ("s", f"d{number}"), 100)
    tree.placed(("s",), "device", 10)
    assert queue.ready() is not None
    before = tree.lookups
    tree.placed(("s", "d70"), "device", 50)
    tree.placed(("s", "other"), "device", 50)
    best = queue.ready()
    assert best is not None
    assert (best.request, best.cached_tokens) == (70, 60)
    assert tree.lookups == before + 1
    assert queue.ready() is best
    assert tree.lookups == before + 1, "nothing changed, nothing is looked up"


def test_the_longer_prefix_and_the_shorter_computation_go_first():
    tree: KnowledgeTree[str] = KnowledgeTree(["device"])
    queue: CacheAwareQueue[str] = CacheAwareQueue(tree)
    tree.placed("a", "device", 4)
    tree.placed("b", "device", 2)
    for name, path, tokens in (("one", "b", 4), ("two", "a", 6), ("three", "a", 5)):
        queue.submit(name, tuple(path), tokens)
    order = [served.request for served in iter(queue.pop, None)]
    assert order == ["three", "two", "one"], "4/1, 4/2 and 2/2"


def test_what_was_preempted_waits_in_its_old_place():
    tree: KnowledgeTree[str] = KnowledgeTree(["device"])
    queue: CacheAwareQueue[str] = CacheAwareQueue(tree, window=2)
    queue.submit("old", "a", 4)
    queue.submit("new", "a", 4)
    served = queue.pop()
    assert served is not None
    assert served.request == "old"
    queue.put_back(served)
    with pytest.raises(UsageError, match="is already pending"):
        queue.put_back(served)
    assert queue.passed_over("old") == 0
    again = queue.pop()
    assert again is not None
    assert again.request == "old"


def test_what_is_served_already_has_a_place_to_be_put_back_to():
    queue: CacheAwareQueue[str] = CacheAwareQueue(KnowledgeTree(["device"]), window=0)
    queue.submit("before", "a", 4)
    placed = queue.place("served", "a", 4)
    queue.submit("after", "a", 4)
    assert "served" not in queue
    queue.put_back(placed)
    assert [one.request for one in queue.next(5)] == ["before", "served", "after"]
    assert [served.request for served in iter(queue.pop, None)] == ["before", "served", "after"]


def test_a_full_queue_says_so():
    queue: CacheAwareQueue[str] = CacheAwareQueue(KnowledgeTree(["device"]), capacity=1)
    queue.submit("a", "a", 1)
    with pytest.raises(QueueFullError, match="1 requests are already pending"):
        queue.submit("b", "b", 1)
    with pytest.raises(UsageError, match="is already pending"):
        queue.submit("a", "a", 1)
    assert queue.remove("a")
    queue.submit("b", "b", 1)


def test_a_closed_queue_follows_its_tree_no_longer():
    tree: KnowledgeTree[str] = KnowledgeTree(["device"])
    queue: CacheAwareQueue[str] = CacheAwareQueue(tree)
    tree.placed(("a",), "device", 2)
    assert len(queue._changed) == 1
    queue.close()
    tree.placed(("a", "b"), "device", 2)
    assert len(queue._changed) == 1
    queue.close()


def test_an_empty_queue_has_nobody_ready():
    queue: CacheAwareQueue[str] = CacheAwareQueue(KnowledgeTree(["device"]))
    assert queue.ready() is None
    assert queue.pop() is None
    with pytest.raises(UsageError, match="is not pending"):
        queue.passed_over("a")
    with pytest.raises(UsageError):
        CacheAwareQueue(KnowledgeTree(["device"]), window=-1)
