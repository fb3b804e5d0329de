"""One question over any backend: what is submitted while its search goes on, and what is shown of it. No torch."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from chunkweave.errors import DeadlineError, QueueFullError
from chunkweave.retrieval.retrievers import RetrievalStage, RetrievedChunk
from chunkweave.retrieval.speculation import Found, NotStarted, Retriever
from chunkweave.types import Chunk


def found(*places: int) -> tuple[RetrievedChunk, ...]:
    return tuple(RetrievedChunk(Chunk(f"text {p}"), "d", p, rank, 1.0, "", {}) for rank, p in enumerate(places, 1))


@dataclass
class Ranked:
    """As much of a report as has ranks."""

    chunks: tuple["Ranked", ...] = ()
    rank: int | None = None


class FakeAnswer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = self.failed = False
        self.seen: list[str] = []

    def confirm(self) -> None:
        self.seen.append("confirmed")

    async def __aiter__(self):
        self.seen.append("read")
        yield self.text

    async def aclose(self) -> None:
        self.seen.append("closed")


class Backend:
    """Answers with the places of the chunks that it was given."""

    def __init__(self, *, pending: int = 0) -> None:
        self.answers: list[tuple[FakeAnswer, bool]] = []
        self.pending = pending
        self.full = False

    async def submit(self, chunks: Sequence[RetrievedChunk], speculative: bool) -> FakeAnswer:
        if self.full:
            raise QueueFullError("too many wait")
        answer = FakeAnswer(str([chunk.place for chunk in chunks]))
        self.answers.append((answer, speculative))
        return answer

    def question(self, *, by_set: bool = False, **options):
        options = {"max_prefill_batch": 1, **options}
        return Retriever(lambda: self.pending, **options).question(self.submit, by_set=by_set)


async def text_of(question, chunks) -> list[str]:
    answer = await question.final(chunks)
    if answer is None:
        answer = await question.start(chunks, speculative=False)
    else:
        answer.confirm()
    return [event async for event in answer]


def test_what_the_search_confirms_is_the_answer_and_is_not_read_before():
    async def main():
        backend = Backend()
        question = backend.question()
        await question.on_stage(found(1, 2))
        ((answer, speculative),) = backend.answers
        assert speculative
        assert answer.seen == []
        await question.on_stage(found(1, 2))
        assert await text_of(question, found(1, 2)) == ["[1, 2]"]
        assert answer.seen == ["confirmed", "read"]
        assert len(backend.answers) == 1
        told = question.summary(search_end_s=5.0, began_s=2.0, ended_s=4.0)
        assert (told.started, told.terminated, told.matched, told.overlap_s) == (1, 0, True, 2.0)

    asyncio.run(main())


def test_another_list_ends_what_runs_and_another_order_is_another_list():
    async def main():
        backend = Backend()
        question = backend.question()
        await question.on_stage(found(1, 2))
        await question.on_stage(found(2, 1))
        assert await text_of(question, found(3)) == ["[3]"]
        assert [(answer.text, kind) for answer, kind in backend.answers] == [
            ("[1, 2]", True),
            ("[2, 1]", True),
            ("[3]", False),
        ]
        assert [answer.seen for answer, _ in backend.answers] == [["closed"], ["closed"], ["read"]]
        told = question.summary(5.0, 2.0, 4.0)
        assert (told.started, told.terminated, told.matched, told.overlap_s) == (2, 2, False, 0.0)

    asyncio.run(main())


def test_where_chunks_may_stand_in_any_order_a_set_is_the_same_request():
    async def main():
        backend = Backend()
        question = backend.question(by_set=True)
        await question.on_stage(found(1, 2, 3))
        await question.on_stage(found(3, 1, 2))
        assert await text_of(question, found(2, 3, 1)) == ["[1, 2, 3]"]
        assert len(backend.answers) == 1
        told = question.summary(5.0, 2.0, 4.0)
        assert (told.started, told.terminated, told.matched) == (1, 0, True)
        report = Ranked((Ranked(rank=2), Ranked(rank=0), Ranked(rank=None)))
        ranks = [chunk.rank for chunk in question.ranked(report, found(2, 3, 1)).chunks]
        assert ranks == [1, 2, None], "chunk 3 was named last when it was submitted, and second at the end"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "pending", "stages", "why"),
    [
        ({"speculate": False}, 0, 0, NotStarted.OFF),
        ({}, 0, 0, NotStarted.BUSY),
        ({}, 1, 3, NotStarted.BUSY),
        ({}, 0, 1, NotStarted.ONE_STAGE),
        ({}, 0, 3, NotStarted.SHORT),
        ({"max_prefill_batch": 2}, 1, 3, None),
    ],
)
def test_it_says_why_nothing_was_computed_ahead(options, pending, stages, why):
    async def main():
        question = Backend(pending=pending).question(**options)
        if why not in (NotStarted.ONE_STAGE, NotStarted.SHORT, NotStarted.OFF) and stages:
            await question.on_stage(found(1))
        assert question.not_started(Found(found(1), stages=stages)) is why

    asyncio.run(main())


def test_one_that_failed_before_is_started_again_and_one_that_is_refused_costs_nothing():
    async def main():
        backend = Backend()
        question = backend.question()
        backend.full = True
        await question.on_stage(found(1))
        backend.full = False
        await question.on_stage(found(1))
        backend.answers[0][0].failed = True
        await question.on_stage(found(1))
        assert [kind for _, kind in backend.answers] == [True, True]
        assert await question.final(found(1)) is backend.answers[1][0]

    asyncio.run(main())


def test_nothing_starts_while_others_are_pending_but_its_own_does_not_count():
    async def main():
        backend = Backend(pending=1)
        question = backend.question()
        await question.on_stage(found(1))
        assert not backend.answers
        backend.pending = 0
        await question.on_stage(found(1))
        backend.pending = 1  # its own, which has not begun
        await question.on_stage(found(2))
        assert [answer.text for answer, _ in backend.answers] == ["[1]", "[2]"]
        assert await question.final(found(3)) is None
        await question.aclose()

    asyncio.run(main())


class GatedCorpus:
    def __init__(self) -> None:
        self.gate, self.waiting = threading.Event(), threading.Event()
        self.left = False

    def __len__(self) -> int:
        return 3

    def embed_query(self, question: str):
        return None

    def search(self, vector, k: int):
        return found(2)

    def search_stages(self, vector, k: int):
        try:
            yield RetrievalStage(found(1), 1, False, 0.0, 0)
            self.waiting.set()
            assert self.gate.wait(20)
            yield RetrievalStage(found(2), 2, True, 0.0, 0)
        finally:
            self.left = True


def test_a_search_tells_of_its_stages_and_returns_the_last():
    async def main():
        corpus, seen = GatedCorpus(), []

        async def on_stage(chunks):
            seen.append(chunks)
            corpus.gate.set()

        retriever = Retriever(lambda: 0)
        last = await retriever.search(corpus, "?", 1, on_stage=on_stage)
        assert (seen, last.chunks, last.last) == ([found(1)], found(2), True)
        without = await Retriever(lambda: 0, speculate=False).search(corpus, "?", 1, on_stage=on_stage)
        assert isinstance(without, Found)
        assert len(seen) == 1
        await retriever.close()

    asyncio.run(main())


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_search_can_be_waited_for_however_it_ends(cancelled):
    async def main():
        corpus, retriever, staged = GatedCorpus(), Retriever(lambda: 0), asyncio.Event()

        async def on_stage(_chunks):
            await asyncio.to_thread(corpus.waiting.wait, 20)
            staged.set()
            if not cancelled:
                raise DeadlineError("late")

        search = asyncio.create_task(retriever.search(corpus, "?", 1, on_stage=on_stage))
        await staged.wait()
        if cancelled:
            await asyncio.sleep(0)
            search.cancel()
        await asyncio.sleep(0.05)
        assert not search.done()
        assert not corpus.left
        corpus.gate.set()
        with pytest.raises(asyncio.CancelledError if cancelled else DeadlineError):
            await search
        assert corpus.left

    asyncio.run(main())
