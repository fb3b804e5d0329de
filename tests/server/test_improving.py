"""Chunks are computed anew in idle time, behind others of their cache salt, and never more than a server is to."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chunkweave.config import CaptureConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.prompt.contexts import rule_of
from chunkweave.prompt.parts import PartKind, PromptPart
from chunkweave.types import ChunkId
from chunkweave_server.improving import Improver, KnownChunks
from chunkweave_server.settings import ImprovingSettings
from tests.server.conftest import (
    KEYS,
    Client,
    Serve,
    engine_of,
    key_ring,
    later,
    report_of,
    settings_of,
    vllm_of,
    wait_until,
)
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import running_front

SHIPS = ("ferry", "barque", "cutter", "schooner", "tug", "yawl", "ketch", "sloop")
DOCUMENTS = [
    f"The {ship} of Skerrow leaves at {hour} and carries {hour * 7} barrels of tar."
    for hour, ship in enumerate(SHIPS, 3)
]
REUSE = {"method": "full-reuse", "order": "fixed"}


def ask(client: Client, documents: list[str], key: str | None = None, **body: Any) -> dict[str, Any]:
    """The report of an answer over documents."""
    return report_of(client.ask(documents=documents, max_tokens=1, key=key, **{"chunkweave": REUSE, **body}))


def contexts(report: dict[str, Any]) -> list[int]:
    """Over how many contexts the mean of each chunk is, in the order of the request."""
    ranked = {chunk["rank"]: chunk["contexts"] for chunk in report["chunks"] if chunk["rank"] is not None}
    return [ranked[rank] for rank in sorted(ranked)]


def improving(client: Client) -> dict[str, Any]:
    return client.get("/v1/cache").json()["improving"]


def until_improved(client: Client) -> dict[str, Any]:
    wait_until(lambda: improving(client)["queued"] == 0 and idle(client))
    return improving(client)


def idle(client: Client) -> bool:
    return client.service.backend.cache.idle


def decoded(client: Client, ids: tuple[int, ...]) -> str:
    return str(vllm_of(client.service).context.preparer.builder.tokenizer.decode(ids)).strip()


def means(client: Client) -> dict[str, list[set[str]]]:
    """By the text of a chunk, the texts of the chunks in each context of its mean."""
    if client.fake is not None:
        return {
            decoded(client, ids): [{decoded(client, one) for _, one in context} for context in found]
            for (_, ids), found in client.fake.means.items()
        }
    texts, records = client.engine.loaded.tokenizer.decode, client.engine.store.records()
    by_id = {record.chunk_id: texts(record.token_ids).strip() for record in records}
    opening = {part.id for salt in salts(client) for part in client.engine.builder.opening(cache_salt=salt)}
    return {
        by_id[record.chunk_id]: [
            {by_id.get(one, one) for one in context if one not in opening} for context in record.contexts
        ]
        for record in records
        if record.contexts
    }


def salts(client: Client) -> list[str]:
    return ["", *(tenant.salt(salt) for tenant in client.service.keys.tenants for salt in ("", "a", "b")), "a", "b"]


def test_chunks_that_came_with_a_request_become_means_while_nothing_else_runs(serve: Serve):
    client = serve(improve_share=1.0)
    assert contexts(ask(client, DOCUMENTS[:3])) == [0, 0, 0]
    assert until_improved(client)["improved"] == 3
    assert contexts(ask(client, DOCUMENTS[2::-1])) == [2, 2, 2], "each behind the two others"
    assert {text: set.union(*behind) for text, behind in means(client).items()} == {
        text: {*DOCUMENTS[:3]} - {text} for text in DOCUMENTS[:3]
    }
    assert (client.metric("improved_chunks_total"), client.metric("chunks_to_improve")) == (3, 0)
    assert client.metric("improving_seconds_total") > 0


def test_by_default_nothing_is_computed_anew(serve: Serve):
    client = serve()
    ask(client, DOCUMENTS[:3])
    ask(client, DOCUMENTS[2::-1])
    assert "improving" not in client.get("/v1/cache").json()
    assert len(client.service.backend.cache.improving._known) == 0
    assert client.clear(DOCUMENTS[0]).json().keys() == {"segments_removed"}
    assert means(client) == {}
    assert client.fake is None or len(client.fake.seen) == 2


def test_what_exact_methods_are_asked_over_stays_as_it_is(serve: Serve):
    client = serve(improve_share=1.0)
    ask(client, DOCUMENTS[:3], chunkweave={"method": "prefix"})
    assert improving(client) == {"queued": 0, "known": 0, "improved": 0, "spent_s": 0.0}


def test_a_context_is_of_the_same_cache_salt_and_tenant(serve: Serve):
    client = serve(improve_share=1.0, keys=key_ring())
    one, other = KEYS
    asked = [(one, "a", 0), (one, "b", 2), (one, "", 4), (other, "a", 6)]
    for tenant, salt, first in asked:
        ask(client, DOCUMENTS[first : first + 2], KEYS[tenant], **({"cache_salt": salt} if salt else {}))
    known = client.service.backend.cache.improving
    wait_until(lambda: known._known.queued == 0 and idle(client))
    assert known.improved == 8
    assert {text: set.union(*behind) for text, behind in means(client).items()} == {
        text: {DOCUMENTS[number + 1 - 2 * (number % 2)]} for number, text in enumerate(DOCUMENTS)
    }


def test_a_chunk_without_others_of_its_salt_is_left_alone(serve: Serve):
    client = serve(improve_share=1.0)
    ask(client, DOCUMENTS[:1], cache_salt="a")
    ask(client, DOCUMENTS[1:2], cache_salt="b")
    assert until_improved(client)["improved"] == 0
    assert means(client) == {}


def test_the_chunk_that_was_asked_for_most_is_computed_first(serve: Serve):
    client = serve(improve_share=1.0)
    improver = client.service.backend.cache.improving
    hold(client, idle=False)
    for documents in (DOCUMENTS[:4], DOCUMENTS[2:4], DOCUMENTS[3:4]):
        ask(client, documents)
    order = []
    done = improver._done
    improver._done = lambda work: (order.append(work.chunk.asked), done(work))
    hold(client, idle=True)
    until_improved(client)
    assert order == [3, 2, 1, 1]


class Computer:
    """What a backend computes with, that looks busy if it is to, or does not end what it has begun."""

    def __init__(self, client: Client, *, busy: bool = False, go_on: threading.Event | None = None) -> None:
        self._client, self._cache = client, client.service.backend.cache
        self._busy, self._go_on = busy, go_on

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @property
    def idle(self) -> bool:
        return not self._busy and self._cache.idle

    async def compute(self, *args: Any) -> tuple[str, float]:
        if self._go_on is not None and self._client.fake is None:
            engine_of(self._client.service).batching.between_steps(partial(self._go_on.wait, 20))
        return await self._cache.compute(*args)


def hold(client: Client, *, idle: bool) -> None:
    """Have the backend look busy, or as it is."""
    client.service.backend.cache.improving._computer = Computer(client, busy=not idle)


@contextmanager
def begun(client: Client) -> Iterator[Improver]:
    """A chunk is computed anew, and not done before this ends."""
    improver, go_on = client.service.backend.cache.improving, threading.Event()
    if client.fake is not None:
        client.fake.gate.clear()
    improver._computer = Computer(client, go_on=go_on)
    wait_until(lambda: improver._computing is not None and not improver._computing.done())
    if client.fake is not None:
        seen = len(client.fake.seen)
        wait_until(lambda: len(client.fake.seen) >= seen)
    try:
        yield improver
    finally:
        improver._computer = Computer(client)
        go_on.set()
        if client.fake is not None:
            client.fake.gate.set()


def test_means_are_renewed_once_their_nearest_chunks_are_others(serve: Serve):
    client = serve(improve_share=1.0)
    assert client.warm(*DOCUMENTS[:2]).status_code == 200
    assert contexts(ask(client, DOCUMENTS[:2])) == [1, 1]
    assert until_improved(client)["improved"] == 0, "nothing has changed"
    ask(client, DOCUMENTS[2:])
    wait_until(lambda: improving(client)["improved"] == 8 and idle(client))
    assert contexts(ask(client, DOCUMENTS)) == [4] * 8
    ask(client, ["The lighthouse has a lamp of its own."])
    assert until_improved(client)["improved"] == 9, "one chunk more leaves the contexts of the others as they are"
    assert all(len(behind) == 4 for behind in means(client).values())
    if client.fake is None:
        stored = Counter(record.chunk_id for record in client.engine.store.records() if record.contexts)
        assert set(stored.values()) == {1}, "the new mean takes the place of the old one"


def with_four_means(client: Client) -> None:
    """Have the chunks of a corpus computed, each behind the others."""
    client.make_corpus(documents=[{"id": f"d{number}", "text": text} for number, text in enumerate(DOCUMENTS[:4])])
    assert client.warm(corpus="notes").json()["chunks"] == 4


def test_what_had_read_a_deleted_document_is_queued_and_computed_without_it(serve: Serve):
    client = serve(improve_share=1.0)
    with_four_means(client)
    hold(client, idle=False)
    gone = client.delete("/v1/corpora/notes/documents/d1").json()
    assert gone["segments_removed"] >= 4, gone
    assert gone["chunks_queued"] == 3
    assert improving(client)["queued"] == 3
    assert means(client) == {}
    hold(client, idle=True)
    until_improved(client)
    kept = [text for number, text in enumerate(DOCUMENTS[:4]) if number != 1]
    assert {text: set.union(*behind) for text, behind in means(client).items()} == {
        text: {*kept} - {text} for text in kept
    }


@pytest.mark.backend("vllm")
def test_a_removal_also_shows_which_means_a_replica_has_lost(serve: Serve):
    client = serve(improve_share=1.0, context_count=1, context_tokens=1)
    client.warm(*DOCUMENTS[:6])
    assert client.fake is not None
    hold(client, idle=False)
    behind = means(client)
    reader, (context,) = next((text, *contexts) for text, contexts in behind.items() if [{text}] not in behind.values())
    readers = {text for text, contexts in behind.items() if contexts == [{context}]}
    lost = next(text for text in behind if text not in {*readers, context})
    del client.fake.means[next(key for key in client.fake.means if decoded(client, key[1]) == lost)]
    gone = client.clear(context).json()
    assert gone["chunks_queued"] == len(readers) + 1
    assert reader in readers


@pytest.mark.backend("engine")
def test_what_had_read_a_deleted_document_is_queued_also_after_a_restart(serve: Serve, tmp_path: Path):
    values = {"improve_share": 1.0, "data_dir": tmp_path / "data", "store": StoreConfig(cache_dir=tmp_path / "kv")}
    first = serve(**values)
    with_four_means(first)
    assert first.engine.store.flush(20)
    second = serve(**values)
    assert improving(second)["known"] == 0
    gone = second.delete("/v1/corpora/notes/documents/d1").json()
    assert gone["chunks_queued"] == 3
    assert until_improved(second)["improved"] == 3
    assert DOCUMENTS[1] not in {text for contexts in means(second).values() for one in contexts for text in one}


def test_clearing_documents_says_what_is_queued_and_clearing_everything_forgets_all(serve: Serve):
    client = serve(improve_share=1.0)
    ask(client, DOCUMENTS[:3])
    until_improved(client)
    hold(client, idle=False)
    assert client.clear(DOCUMENTS[0]).json()["chunks_queued"] == 2
    assert improving(client)["known"] == 2
    assert client.clear(everything=True).json()["segments_removed"] > 0
    assert improving(client)["known"] == 0
    if client.fake is None:
        assert client.get("/v1/cache").json()["store"]["segments"] == 0


@pytest.mark.parametrize("number", [0, 1], ids=["the chunk", "one of its contexts"])
def test_a_document_that_is_deleted_while_it_is_computed_anew_is_gone(serve: Serve, number: int):
    client = serve(improve_share=1.0)
    hold(client, idle=False)
    ask(client, DOCUMENTS[:3])
    with begun(client) as improver:
        assert improver._work is not None
        assert len(improver._work.reads) == 3
        removed = later(client.clear, DOCUMENTS[number])
        wait_until(lambda: len(improver._known) == 2)
    assert removed.result().status_code == 200
    until_improved(client)
    kept = [text for text in DOCUMENTS[:3] if text != DOCUMENTS[number]]
    assert means(client) == {kept[0]: [{kept[1]}], kept[1]: [{kept[0]}]}
    if client.fake is None:
        part = client.engine.builder.chunk_part(DOCUMENTS[number])
        records = client.engine.store.records()
        assert not any(part.id == record.chunk_id or part.id in record.sources for record in records)


def test_nothing_is_computed_anew_while_a_request_runs(serve: Serve):
    client = serve(improve_share=1.0)
    hold(client, idle=False)
    ask(client, DOCUMENTS[:4])
    go_on = threading.Event()
    if client.fake is not None:
        client.fake.gate.clear()
    else:
        engine_of(client.service).batching.between_steps(lambda: go_on.wait(20))
    running = later(ask, client, DOCUMENTS[4:6])
    wait_until(lambda: not idle(client))
    hold(client, idle=True)
    time.sleep(0.3)
    assert improving(client) == {"queued": 4, "known": 4, "improved": 0, "spent_s": 0.0}
    assert client.service.backend.cache.improving._work is None
    go_on.set()
    if client.fake is not None:
        client.fake.gate.set()
    running.result()
    assert until_improved(client)["improved"] == 6


def test_a_request_is_not_kept_by_what_is_computed_anew(serve: Serve):
    client = serve(improve_share=1.0)
    hold(client, idle=False)
    ask(client, DOCUMENTS)
    with begun(client) as improver:
        seen = 0 if client.fake is None else len(client.fake.seen)
        asked = later(ask, client, DOCUMENTS[:2])
        if client.fake is not None:
            wait_until(lambda: len(client.fake.seen) > seen)
        else:
            wait_until(lambda: engine_of(client.service).batching.stats.waiting == 2)
        assert improver.improved == 0
    asked.result()
    assert improver.improved < 8, "it was answered before all chunks were computed"
    assert until_improved(client)["improved"] == 8


def test_what_fails_is_left_alone_until_it_is_asked_for_again(serve: Serve):
    client = serve(improve_share=1.0)
    improver, fail = client.service.backend.cache.improving, [True]

    class Failing(Computer):
        async def compute(self, *args: Any) -> tuple[str, float]:
            if fail[0]:
                raise UsageError("no")
            return await super().compute(*args)

    improver._computer = Failing(client)
    ask(client, DOCUMENTS[:2])
    wait_until(lambda: improving(client)["queued"] == 0)
    assert improving(client) == {**improving(client), "known": 2, "improved": 0}
    fail[0] = False
    assert contexts(ask(client, DOCUMENTS[:2])) == [0, 0]
    assert until_improved(client)["improved"] == 2


@pytest.mark.backend("vllm")
def test_a_mean_that_no_request_finds_is_not_computed_for_ever(serve: Serve):
    client = serve(improve_share=1.0)
    assert client.fake is not None
    for _ in range(5):
        ask(client, DOCUMENTS[:2])
        until_improved(client)
        client.fake.means.clear()
        client.fake.stored.clear()
    assert improving(client)["improved"] == 6, "three times each"


def test_it_needs_contexts_of_the_corpus_and_a_share():
    with pytest.raises(UsageError, match="contexts corpus"):
        settings_of(improve_share=0.5, contexts="bundled")
    for share in (-0.1, 1.1):
        with pytest.raises(UsageError, match="improve_share"):
            settings_of(improve_share=share)
    assert settings_of(contexts="bundled").improving.improve_share == 0


@pytest.mark.parametrize(("share", "pause_s"), [(1.0, 0.0), (0.5, 2.0), (0.25, 6.0)])
def test_it_pauses_for_the_rest_of_the_time(share: float, pause_s: float):
    now, slept = [0.0], []

    class Fake:
        idle, most_tokens = True, 4096

        def stored(self, part: PromptPart) -> None:
            return None

        async def compute(self, prepared: Any, tenant: str, place: str) -> tuple[str, float]:
            now[0] += 3.0  # one of them it waits for others
            return place, 2.0

        async def settle(self, *_: Any) -> None:
            pass

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    def beforehand(part: PromptPart, contexts: Any, **_: Any) -> Iterator[Any]:
        yield from [SimpleNamespace(mean="a share", prompt=None)] * len(contexts)

    async def improve() -> Improver:
        builder = SimpleNamespace(opening=lambda **_: ())
        preparer: Any = SimpleNamespace(rule=rule_of(CaptureConfig()), builder=builder, beforehand=beforehand)
        improver = Improver(ImprovingSettings(share), preparer, Fake(), clock=lambda: now[0], sleep=sleep)
        improver.start()
        improver.warmed("", "", chunks("ab"), {})
        while improver._known.queued:
            await asyncio.sleep(0.001)
        await improver.close()
        return improver

    improver = asyncio.run(improve())
    assert (improver.improved, improver.spent_s) == (2, 4.0)
    assert sorted(slept)[-2:] == [pause_s, pause_s]


def chunks(names: str) -> list[PromptPart]:
    """Chunks of ten tokens each."""
    return [PromptPart(PartKind.CHUNK, tuple(range(ord(one), ord(one) + 10)), ChunkId(one)) for one in names]


def test_of_too_many_chunks_those_asked_for_longest_ago_are_forgotten():
    known = KnownChunks(most_tokens=30)
    a, b, c, d = chunks("abcd")
    for part in (a, b, c, a, d):
        known.add(part, "salt", "", "")
    assert known.parts("salt") == [c, a, d]
    known.remove([a.id, c.id])
    assert (len(known), known.parts("salt"), known.has("salt", a.id), known.queued) == (1, [d], False, 0)
    known.add(b, "another", "", "")
    assert known.queued == 0, "none has company of its salt"
    known.clear()
    assert (len(known), known.parts("salt"), known._salts, dict(known._changes)) == (0, [], {}, {})


@pytest.mark.backend("vllm")
def test_a_mean_comes_together_at_the_replica_that_was_asked(fakes: tuple[FakeVllm, FakeVllm]):
    one, other = fakes
    with running_front(one, other, routing="round-robin", improve_share=1.0) as front:
        improver = front.service.backend.cache.improving
        for documents in (DOCUMENTS[:3], DOCUMENTS[3:6], DOCUMENTS[:3], DOCUMENTS[6:]):
            front.ask(documents=documents, chunkweave=REUSE).raise_for_status()
            wait_until(lambda: improver._known.queued == 0 and front.service.backend.cache.idle)
        known = list(improver._known._chunks.values())
        for fake, place in ((one, "upstream-0"), (other, "upstream-1")):
            assert not fake._pending, "every mean has all its contexts"
            assert {ids for _, ids in fake.means} == {chunk.part.token_ids for chunk in known if chunk.place == place}
            assert fake.means
