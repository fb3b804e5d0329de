"""An answer never reaches the scheduler before what it brought."""

from chunkweave.store.index import StoreChanges, StoreFollower
from chunkweave.types import ChunkId
from chunkweave.vllm.orders import StepResults
from chunkweave.vllm.store_events import StoreEvents

FOUND = ChunkId("found")


def sent(events: StoreEvents) -> StepResults:
    results = StepResults()
    events.add_to(results)
    return results


def test_a_lookup_that_ends_while_changes_are_taken_is_sent_with_the_next():
    answers: set[str] = set()
    follower = StoreFollower(lambda _: True)

    def answered() -> set[str]:
        taken = set(answers)
        answers.clear()
        return taken

    def taken(limit: int) -> StoreChanges:
        changes = follower.take(limit)
        if not follower_touched:  # the probe ends right behind the changes
            follower_touched.append(FOUND)
            follower.touched(FOUND)
            answers.add("a")
        return changes

    follower_touched: list[ChunkId] = []
    events = StoreEvents(taken, answered)
    first, second = sent(events), sent(events)
    assert not first
    assert second.copies == {FOUND: 1}
    assert second.answered == {"a": 1}
    assert not sent(events)


def test_the_end_of_a_lookup_waits_for_changes_that_do_not_fit_into_a_step():
    follower = StoreFollower(lambda _: True)
    chunks = [ChunkId(name) for name in "abcde"]
    for chunk in chunks:
        follower.touched(chunk)
    answers = [{"request"}]
    events = StoreEvents(follower.take, lambda: answers.pop() if answers else set(), most=2)
    steps = [sent(events) for _ in range(3)]
    assert [sorted(step.copies) for step in steps] == [chunks[:2], chunks[2:4], chunks[4:]]
    assert [step.answered for step in steps] == [{}, {}, {"request": 1}]
