"""An answer never reaches the scheduler before what it brought."""

from chunkweave.store.index import ChunkFollower, ChunkNews
from chunkweave.types import ChunkId
from chunkweave.vllm.messages import StepResults
from chunkweave.vllm.store_events import StoreEvents

FOUND = ChunkId("found")


def told(news: StoreEvents) -> StepResults:
    results = StepResults()
    news.tell(results)
    return results


def test_an_answer_that_comes_in_while_news_are_taken_is_told_with_the_next():
    answers: set[str] = set()
    follower = ChunkFollower(lambda _: True)

    def answered() -> set[str]:
        taken = set(answers)
        answers.clear()
        return taken

    def taken(limit: int) -> ChunkNews:
        news = follower.take(limit)
        if not follower_touched:  # the probe ends right behind the news
            follower_touched.append(FOUND)
            follower.touched(FOUND)
            answers.add("a")
        return news

    follower_touched: list[ChunkId] = []
    news = StoreEvents(taken, answered)
    first, second = told(news), told(news)
    assert not first.has_news
    assert second.copies == {FOUND: 1}
    assert second.answered == {"a": 1}
    assert not told(news).has_news


def test_an_answer_waits_for_news_that_do_not_fit_into_a_step():
    follower = ChunkFollower(lambda _: True)
    chunks = [ChunkId(name) for name in "abcde"]
    for chunk in chunks:
        follower.touched(chunk)
    answers = [{"request"}]
    news = StoreEvents(follower.take, lambda: answers.pop() if answers else set(), most=2)
    steps = [told(news) for _ in range(3)]
    assert [sorted(step.copies) for step in steps] == [chunks[:2], chunks[2:4], chunks[4:]]
    assert [step.answered for step in steps] == [{}, {}, {"request": 1}]
