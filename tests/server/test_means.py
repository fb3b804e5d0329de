"""Chunks that are warmed over HTTP are computed behind each other; what one of them is removed from is not used."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chunkweave import Chunk, Engine, Request, SamplingParams
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId
from tests.server.conftest import KEYS, Client, Serve, engine_of, key_ring, later, settings_of, toy_engine, wait_until

DOCUMENTS = [
    "The lighthouse of Skerrow has a lamp of red glass, lit at dusk by its keeper.",
    "The keeper of the lighthouse of Skerrow climbs to its lamp at dusk.",
    "The ferry crosses the sound at noon and at six, with forty passengers.",
    "Passengers pay for the ferry across the sound at the pier, at noon or before.",
    "Ann keeps nine hives behind the old chapel.",
]
FEW = {"context_count": 2, "context_tokens": 1}
"""Two contexts of one document each: a mean reads two of the others, and not all."""

engine_only = pytest.mark.backend("engine")


def warm(client: Client, documents: list[str] = DOCUMENTS, key: str | None = None, **body: Any) -> dict[str, Any]:
    reply = client.warm(*documents, key=key, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def clear(client: Client, document: str) -> int:
    reply = client.clear(document)
    assert reply.status_code == 200, reply.text
    return reply.json()["segments_removed"]


def chunk_id(engine: Engine, text: str, cache_salt: str = "") -> ChunkId:
    part = engine.builder.chunk_part(text, cache_salt=cache_salt)
    assert part.id is not None
    return part.id


def means(engine: Engine) -> dict[ChunkId, SegmentRecord]:
    """The mean of each chunk; none has two."""
    found = [record for record in engine.store.records() if record.contexts]
    by_chunk = {record.chunk_id: record for record in found}
    assert len(by_chunk) == len(found)
    return by_chunk


def readers(engine: Engine, gone: ChunkId) -> list[SegmentRecord]:
    return [record for record in engine.store.records() if gone in {record.chunk_id, *record.sources}]


def ask(client: Client, documents: list[str], method: str = "full-reuse", **reuse: Any) -> dict[str, Any]:
    reply = client.ask(documents=documents, chunkweave={"method": method, **reuse})
    assert reply.status_code == 200, reply.text
    return reply.json()


# --- what is computed


@engine_only
@pytest.mark.parametrize("method", ["full-reuse", "cacheblend:ratio=0.3"])
def test_what_is_answered_in_another_order_is_what_the_library_answers(serve: Serve, method: str):
    """The same KV: the same tokens, and a report of the same counts."""
    client = serve(**FEW)
    assert warm(client) == {"chunks": 5, "computed": 5}
    assert warm(client)["computed"] == 0
    shown = client.get("/v1/cache").json()["eviction"]["engine"]["host"]
    assert [one["contexts"] for one in shown if one["source"].startswith("document")] == [2] * 5
    library = toy_engine(settings=settings_of(**FEW))
    chunks = [Chunk(text, f"document {place}") for place, text in enumerate(DOCUMENTS)]
    assert library.precompute(chunks) == 5
    assert means(library) == means(client.engine)
    question, order = "When does the ferry leave?", [3, 0, 4, 2, 1]
    request = Request(
        question, tuple(chunks[one] for one in order), sampling=SamplingParams(max_new_tokens=6, temperature=0)
    )
    (expected,) = library.generate_batch([request], method=method)
    answer = ask(client, [DOCUMENTS[one] for one in order], method)
    assert answer["choices"][0]["message"]["content"] == expected.text
    counts = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    assert {name: answer["chunkweave"][name] for name in counts} == {
        name: getattr(expected.report, name) for name in counts
    }
    assert answer["chunkweave"]["recompute_fraction"] == pytest.approx(expected.report.recompute_fraction)
    assert [one["variant"] for one in answer["chunkweave"]["chunks"]] == [one.variant for one in expected.report.chunks]


@engine_only
def test_one_document_is_computed_behind_neutral_passages(serve: Serve):
    client = serve(**FEW)
    assert warm(client, DOCUMENTS[:1]) == {"chunks": 1, "computed": 1}
    (record,) = [one for one in client.engine.store.records() if one.chunk_id == chunk_id(client.engine, DOCUMENTS[0])]
    assert record.neutral


def sent_to(client: Client) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts that were computed ahead, with what the plug-in was to do with them."""
    assert client.fake is not None
    return [(body["prompt"], body["kv_transfer_params"]["chunkweave"]) for body in client.fake.seen]


# --- settings


def contexts_used(client: Client) -> set[int]:
    """Over how many contexts means are, 0 for chunks without one."""
    if client.fake is not None:
        return {params.get("mean", {"of": 0})["of"] for _, params in sent_to(client)[-3:]}
    found = means(client.engine)
    ids = [chunk_id(client.engine, text) for text in DOCUMENTS]
    return {len(found[one].contexts) if one in found else 0 for one in ids}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"contexts": "bundled"}, 0),
        ({"contexts": "corpus"}, 4),
        ({"context_count": 3}, 3),
        ({"context_count": 1, "context_tokens": 50}, 1),
    ],
)
def test_settings_say_in_how_many_contexts(serve: Serve, values: dict[str, Any], expected: int):
    client = serve(**values)
    warm(client)
    assert contexts_used(client) == {expected}


@pytest.mark.parametrize(("tokens", "most"), [(1, 1), (35, 2), (400, 4)])
def test_settings_say_how_long_contexts_are(serve: Serve, tokens: int, most: int):
    """Documents have 15 to 25 tokens; with one context there are four others at most."""
    client = serve(context_count=1, context_tokens=tokens)
    warm(client)
    if client.fake is not None:
        lengths = {len(params["chunks"]) - 1 for _, params in sent_to(client) if "mean" in params}
    else:
        lengths = {len(context) - 1 for one in means(client.engine).values() for context in one.contexts}
    assert lengths == {most}


@pytest.mark.parametrize("value", [{"contexts": "nearest"}, {"context_count": 0}, {"context_count": 33}])
def test_other_settings_are_refused(value: dict[str, Any]):
    with pytest.raises(Exception, match="context"):
        settings_of(**value)


# --- whose contexts


@engine_only
def test_tenants_and_salts_are_no_contexts_of_each_other(serve: Serve):
    client = serve(keys=key_ring(), **FEW)
    for key in KEYS.values():
        assert warm(client, key=key)["computed"] == 5
        assert warm(client, key=key, cache_salt="a")["computed"] == 5
    found = means(client.engine)
    assert len(found) == 4 * 5
    ours = [record.sources for record in found.values()]
    groups: list[set[ChunkId]] = []
    for sources in ours:
        joined = set(sources).union(*(group for group in groups if not group.isdisjoint(sources)))
        groups = [*(group for group in groups if group.isdisjoint(sources)), joined]
    assert len(groups) >= 4, "nothing that one has read another has read"


@engine_only
def test_what_is_computed_beforehand_is_no_answer_to_check(serve: Serve):
    """Contexts are woven, but nobody asked for them."""
    client = serve(**FEW)
    warm(client)
    assert client.get("/v1/cache").json()["learned"]["pending"] == 0
    assert client.metric("comparisons_total") == 0


# --- two calls at once


@engine_only
@pytest.mark.parametrize("contexts", ["corpus", "bundled"])
def test_two_calls_at_once_leave_one_segment_of_each_document(serve: Serve, contexts: str):
    """Either may find that the other has computed what it was to compute, when it waits and when it begins."""
    values = {"contexts": contexts, **FEW}
    client = serve(**values)
    batching, gate = engine_of(client.service).batching, threading.Event()
    batching.between_steps(gate.wait)
    calls = [later(warm, client, order) for order in (DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS)]
    wait_until(lambda: batching.stats.waiting == 3)
    gate.set()
    assert all(call.result()["chunks"] == 5 for call in calls)
    library = toy_engine(settings=settings_of(**values))
    library.precompute([Chunk(text, f"document {place}") for place, text in enumerate(DOCUMENTS)])
    assert {record.id for record in client.engine.store.records()} == {record.id for record in library.store.records()}
    assert len(client.engine.runner.means) == 0, "no share is left over"


# --- removing a document


def hold_at(client: Client, number: int, *, slow: bool = False) -> tuple[threading.Event, threading.Event]:
    """Holds a warm call before it computes its n-th prompt: returns what says that it is there, and what lets it go.

    If `slow`, the call hears of this prompt's beginning after its end.
    """
    backend, there, gate = engine_of(client.service), threading.Event(), threading.Event()
    threads, count = backend.cache._threads, iter(range(10_000))

    async def run(tenant: str, work: Any, **options: Any) -> Any:
        if getattr(work, "func", None) == backend.batching.compute and next(count) == number:
            there.set()
            while not gate.is_set():
                await asyncio.sleep(0.005)
            begun = await threads.run(tenant, work, **options)
            while slow and not backend.batching.idle:
                await asyncio.sleep(0.005)
            return begun
        return await threads.run(tenant, work, **options)

    backend.cache._threads = SimpleNamespace(run=run)
    return there, gate


def means_that_read(engine: Engine, text: str) -> set[ChunkId]:
    return {one.chunk_id for one in readers(engine, chunk_id(engine, text)) if one.contexts}


def audit_removal(client: Client, text: str, had_read: set[ChunkId]) -> None:
    """Nothing has read a document that was removed while a call computed it; the other documents have means.

    But for those that `had_read` it before: their means were removed, and the next call computes them.
    """
    engine, gone = client.engine, chunk_id(client.engine, text)
    others = [one for one in DOCUMENTS if one != text]
    wanted = {chunk_id(engine, one) for one in others}
    assert readers(engine, gone) == []
    assert means(engine).keys() == wanted - had_read
    assert len(engine.runner.means) == 0, "no share is left over"
    assert warm(client, others)["computed"] == len(wanted & had_read)
    assert means(engine).keys() == wanted
    assert readers(engine, gone) == []
    report = ask(client, DOCUMENTS)["chunkweave"]
    assert [one["kv_source"] for one in report["chunks"] if one["rank"] == DOCUMENTS.index(text)] == ["computed"]
    assert sum(one["kv_source"] == "reused" for one in report["chunks"] if one["rank"] is not None) == 4


PROMPTS = 13
"""Of a warm call, at least: twice five contexts, and first passes of chunks that have no mean yet."""


@engine_only
@pytest.mark.parametrize("number", range(0, PROMPTS, 2))
@pytest.mark.parametrize("gone", [0, 4])
@pytest.mark.parametrize("slow", [False, True])
def test_what_is_removed_while_a_call_computes_is_read_by_nothing(serve: Serve, number: int, gone: int, slow: bool):
    """Before each of its prompts, which may read it, or be of it. What was computed before and had read it is missing
    then, and is computed anew by the next call."""
    client = serve(**FEW)
    there, gate = hold_at(client, number, slow=slow)
    call = later(warm, client)
    assert there.wait(20)
    had_read = means_that_read(client.engine, DOCUMENTS[gone])
    clear(client, DOCUMENTS[gone])
    gate.set()
    call.result()
    audit_removal(client, DOCUMENTS[gone], had_read)


@engine_only
@pytest.mark.parametrize("number", [0, 3, 7, 12])
def test_what_is_removed_while_a_prompt_runs_is_read_by_nothing(serve: Serve, monkeypatch, number: int):
    """The prompt is computed, and stored after the document has been removed."""
    client = serve(**FEW)
    runner, there, gate, count = client.engine.runner, threading.Event(), threading.Event(), iter(range(10_000))
    real = runner.store_new

    def store_new(prefilled: Any) -> Any:
        if next(count) == number:
            there.set()
            assert gate.wait(60)
        return real(prefilled)

    monkeypatch.setattr(runner, "store_new", store_new)
    call = later(warm, client)
    assert there.wait(20)
    had_read = means_that_read(client.engine, DOCUMENTS[0])
    removal = later(clear, client, DOCUMENTS[0])
    wait_until(lambda: any(engine_of(client.service).cache._warmings._gone))
    gate.set()
    removal.result()
    call.result()
    audit_removal(client, DOCUMENTS[0], had_read)


@engine_only
def test_what_is_removed_after_a_call_is_read_by_nothing_also_after_a_restart(serve: Serve, tmp_path: Path):
    client = serve(cache_dir=tmp_path / "kv", **FEW)
    warm(client)
    client.engine.store.flush(30)
    gone = chunk_id(client.engine, DOCUMENTS[-1])
    doomed = {record.id for record in readers(client.engine, gone)}
    before = {record.id for record in client.engine.store.records()}
    assert 1 < len(doomed) < len(means(client.engine)), "some means have read it, others have not"
    assert clear(client, DOCUMENTS[-1]) == 2 * len(doomed), "in memory and on disk"
    assert {record.id for record in client.engine.store.records()} == before - doomed
    report = ask(client, DOCUMENTS[::-1])["chunkweave"]
    assert not doomed & {chunk["variant"] for chunk in report["chunks"]}
    clear(client, DOCUMENTS[-1])
    again = serve(cache_dir=tmp_path / "kv", **FEW)
    assert readers(again.engine, gone) == []
    assert means(again.engine).keys() == set(means(client.engine))
    assert warm(again, DOCUMENTS[:-1])["computed"] == len(doomed) - 1, "those that had read it are computed anew"
    assert readers(again.engine, gone) == []
