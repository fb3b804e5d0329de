"""Work between steps: in order, a slice at a time, never beside a step but for what cannot wait."""

from threading import Event

import pytest

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
    assert "request a is not stored" in caplog.text
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
