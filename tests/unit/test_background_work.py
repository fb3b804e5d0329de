"""Work between steps: in order, a slice at a time, never beside a step but for what cannot wait."""

from contextlib import nullcontext
from threading import Event, Thread

import pytest

from chunkweave.tiers.device import Streams
from chunkweave.vllm.background_work import BackgroundWork, Work

SOON_S = 10.0


@pytest.fixture
def background():
    made = BackgroundWork(most_tokens=100)
    made.begin_step()
    yield made
    made.close()


class Log:
    def __init__(self) -> None:
        self.slices: list[str] = []

    def work(self, name: str, slices: int = 2, **more) -> Work:
        def run():
            for _ in range(slices):
                self.slices.append(name)
                yield

        return Work(run(), name, **{"number": ord(name), "chunks": frozenset(name), "tokens": 40} | more)


def test_nothing_is_done_in_a_step_and_all_after_it(background):
    log, ended = Log(), Event()
    for name in "ab":
        background.add(log.work(name))
    background.add(Work((ended.set() for _ in range(1)), ""))
    assert not ended.wait(0.05)
    assert not log.slices
    background.end_step()
    assert ended.wait(SOON_S)
    assert log.slices == ["a", "a", "b", "b"]
    background.finish()
    assert background.take_done() == {ord("a"), ord("b")}
    assert not background.take_done(), "each is reported once"


def test_a_step_that_begins_waits_for_one_slice_alone(background):
    begun, go_on = Event(), Event()
    log = Log()

    def slow():
        begun.set()
        go_on.wait(SOON_S)
        yield
        log.slices.append("the second slice")
        yield

    background.add(Work(slow(), "a"))
    background.end_step()
    assert begun.wait(SOON_S)
    go_on.set()
    background.begin_step()
    seen = list(log.slices)
    assert seen in ([], ["the second slice"]), "depending on when the step began"
    assert log.slices == seen


class Copy:
    """An event of a copy, which ends when a test says so."""

    def __init__(self) -> None:
        self.ended, self.awaited = Event(), Event()

    def query(self) -> bool:
        return self.ended.is_set()

    def synchronize(self) -> None:
        self.awaited.set()
        assert self.ended.wait(SOON_S)


def test_a_step_begins_while_a_copy_is_awaited(background):
    copy, log = Copy(), Log()

    def copying():
        yield copy
        log.slices.append("stored")

    background.add(Work(copying(), "a", number=1, tokens=1))
    background.end_step()
    assert copy.awaited.wait(SOON_S)
    background.begin_step()
    assert not background.take_done(), "the copy has not ended"
    assert background.reads("a")
    copy.ended.set()
    background.finish()
    assert log.slices == ["stored"]
    assert background.take_done() == {1}


def test_work_that_cannot_wait_waits_for_the_copies_that_it_began(background):
    copy, log = Copy(), Log()

    def copying():
        yield copy
        assert copy.query()
        log.slices.append("stored")

    background.add(Work(copying(), "a"))
    ending = Thread(target=background.finish)
    ending.start()
    assert copy.awaited.wait(SOON_S)
    assert not log.slices
    copy.ended.set()
    ending.join(SOON_S)
    assert log.slices == ["stored"]


def test_each_slice_issues_to_the_stream_for_copies():
    class Counted(Streams):
        entered = 0

        def copying(self):
            Counted.entered += 1
            return nullcontext()

    background, log = BackgroundWork(100, Counted()), Log()
    background.add(log.work("a"))
    background.close()
    assert Counted.entered == 3, "two slices, and the end"


def test_what_is_wanted_is_done_with_what_came_before_it_and_no_more(background):
    log = Log()
    for name in "abc":
        background.add(log.work(name, tokens=1))
    background.finish(lambda work: "b" in work.chunks)
    assert log.slices == ["a", "a", "b", "b"]
    assert [background.reads(name) for name in "abc"] == [False, False, True]
    background.finish(lambda work: "nothing of it" in work.chunks)
    assert len(log.slices) == 4


def test_no_more_waits_than_may_hold_blocks(background):
    log = Log()
    for name in "abc":
        background.add(log.work(name))
    assert log.slices == ["a", "a"], "three times 40 tokens are too many"
    background.add(log.work("d", tokens=0), at_once=True)
    assert log.slices == ["a", "a", "b", "b", "c", "c", "d", "d"]


def test_what_fails_is_logged_counts_as_done_and_holds_nobody_up(background, caplog):
    log = Log()

    def broken():
        yield
        raise OSError("no memory")

    background.add(Work(broken(), "a", number=1, tokens=1))
    background.add(log.work("b"))
    background.finish()
    assert "request a could not be stored" in caplog.text
    assert background.take_done() == {1, ord("b")}
    assert not background.reads("a")
    assert log.slices


def test_what_reads_no_blocks_holds_none(background):
    background.add(Log().work("a", tokens=0))
    assert not background.reads("a")


def test_at_the_end_all_is_done():
    background, log = BackgroundWork(100), Log()
    background.begin_step()
    background.add(log.work("a"))
    background.close()
    assert log.slices == ["a", "a"]
