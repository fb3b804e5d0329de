"""What no answer waits for runs behind what computes answers."""

import asyncio
import os
import sys
import threading

import pytest

from chunkweave.retrieval.corpus import Corpus
from chunkweave_server.threads import TenantThreads
from tests.server.conftest import Serve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_threads_behind_answers_have_less_priority_than_the_others() -> None:
    async def of(threads: TenantThreads) -> int:
        try:
            return await threads.run("acme", niceness)
        finally:
            threads.close()

    async def both() -> tuple[int, int]:
        return await of(TenantThreads(2)), await of(TenantThreads(2, behind=True))

    usual, behind = asyncio.run(both())
    assert usual == niceness()
    assert behind > usual


def test_work_behind_answers_is_interrupted_sooner_until_the_last_of_it_has_ended() -> None:
    usual_s, held, seen = sys.getswitchinterval(), threading.Event(), []

    def short() -> None:
        seen.append(sys.getswitchinterval())

    def long() -> None:
        assert held.wait(60)
        short()

    async def both() -> None:
        threads = TenantThreads(2, behind=True)
        begun = asyncio.create_task(threads.run("acme", long))
        await threads.run("bolt", short)
        seen.append(sys.getswitchinterval())  # `long` has not ended
        held.set()
        await begun
        seen.append(sys.getswitchinterval())
        await TenantThreads(2).run("acme", short)
        threads.close()

    asyncio.run(both())
    *behind, after, beside = seen
    assert len(behind) == 3
    assert all(one < usual_s / 10 for one in behind)
    assert after == beside == usual_s


def test_documents_are_taken_in_behind_answers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, update = [], Corpus.update

    def watched(self, *args, **options):
        seen.append(niceness())
        return update(self, *args, **options)

    monkeypatch.setattr(Corpus, "update", watched)
    serve().make_corpus(documents=["The ferry leaves at seven."])
    assert seen
    assert all(one > niceness() for one in seen)
