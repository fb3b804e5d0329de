"""What no answer waits for runs behind what computes answers."""

import asyncio
import os
import sys
import threading

import pytest

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


def test_documents_are_taken_in_behind_answers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from chunkweave.retrieval.corpus import Corpus

    seen, update = [], Corpus.update

    def watched(self, *args, **options):
        seen.append(niceness())
        return update(self, *args, **options)

    monkeypatch.setattr(Corpus, "update", watched)
    client = serve()
    assert client.post("/v1/corpora", json={"name": "notes"}).status_code == 201
    added = client.post("/v1/corpora/notes/documents", json={"documents": ["The ferry leaves at seven."]})
    assert added.status_code == 200
    assert seen
    assert all(one > niceness() for one in seen)
