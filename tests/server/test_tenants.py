"""Keys and limits, and that nothing of one tenant is another's."""

import asyncio
import statistics
import threading
from collections import Counter

import pytest
import torch

from chunkweave import Chunk, StoreConfig
from chunkweave.errors import RequestAbortedError, UsageError
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.scheduling.queue import TenantWeights
from chunkweave.weaving.stores import open_store
from chunkweave_server.errors import HttpError
from chunkweave_server.observability import RequestMeta
from chunkweave_server.requests import ChatBody
from chunkweave_server.settings import LimitSettings
from chunkweave_server.tenants import (
    ANONYMOUS,
    KeyRing,
    StoredKey,
    Tenant,
    TenantLimits,
    TokenBucket,
    add_to_file,
    bearer,
    new_key,
    read_keys,
)
from chunkweave_server.threads import TenantThreads
from tests.server.conftest import ADMIN_KEY, KEYS, Client, Serve, key_ring, toy_service, wait_until
from tests.server.conftest import bearer as auth

LONG = "The keeper of the lighthouse writes down every ship that passes the northern cape in a storm. " * 12


@pytest.fixture
def tenants(serve: Serve) -> Client:
    return serve(keys=key_ring())


def cached(client: Client, key: str, **body) -> int:
    response = client.ask(documents=[LONG], key=key, **body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.backend("engine")
def test_without_a_known_key_nothing_is_answered(tenants: Client):
    for headers in ({}, auth("wrong"), {"authorization": f"Basic {KEYS['acme']}"}, auth(KEYS["acme"] + "x")):
        for path in ("/v1/models", "/v1/corpora", "/v1/cache", "/v1/nothing"):
            response = tenants.get(path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
    assert tenants.get("/v1/models", headers=auth(KEYS["acme"])).status_code == 200
    for path in ("/health", "/ready", "/version", "/openapi.json"):
        assert tenants.get(path).status_code == 200


def test_no_tenant_finds_what_another_has_cached(tenants: Client):
    acme, bolt = KEYS["acme"], KEYS["bolt"]
    assert cached(tenants, acme) == 0
    assert cached(tenants, acme) > 0
    assert cached(tenants, bolt) == 0
    assert cached(tenants, bolt) > 0


def test_a_cache_salt_separates_within_a_tenant(tenants: Client):
    acme = KEYS["acme"]
    assert cached(tenants, acme, cache_salt="one") == 0
    assert cached(tenants, acme, cache_salt="two") == 0
    assert cached(tenants, acme, cache_salt="one") > 0


def test_nobody_can_spell_the_salt_of_another(tenants: Client):
    acme, bolt = KEYS["acme"], KEYS["bolt"]
    cached(tenants, acme, cache_salt="x")
    own = Tenant("acme").salt("x")
    for guess in (own, "x", "acmex", Tenant("acme").salt("")):
        assert cached(tenants, bolt, cache_salt=guess) == 0
    salts = [Tenant(name).salt(given) for name in ("a", "ab") for given in ("", "b", "c")] + [ANONYMOUS.salt("b")]
    assert len(set(salts)) == len(salts)
    assert Tenant("a").folder != Tenant("b").folder


@pytest.mark.timed
@pytest.mark.backend("engine")
def test_the_first_token_does_not_tell_what_others_asked(tenants: Client):
    """Time is what a curious tenant can measure: chunks that another has cached take as long as chunks nobody has."""

    def ttft_s(text: str, key: str) -> tuple[float, int]:
        report = tenants.ask(documents=[text], key=key, max_tokens=1).json()["chunkweave"]
        return report["ttft_s"], report["prefix_exact_tokens"] + report["reused_tokens"]

    ttft_s(LONG, KEYS["bolt"])
    known, unknown, own = [], [], []
    for number in range(12):
        seen, fresh = (f"{what} {number}. {LONG}" for what in ("seen", "new "))
        ttft_s(seen, KEYS["acme"])
        known.append(ttft_s(seen, KEYS["bolt"]))
        unknown.append(ttft_s(fresh, KEYS["bolt"]))
        own.append(ttft_s(fresh, KEYS["bolt"]))
    assert {tokens for _, tokens in known} == {tokens for _, tokens in unknown}
    medians = [statistics.median(seconds for seconds, _ in times) for times in (known, unknown, own)]
    assert medians[2] < 0.8 * medians[1], "a hit of one's own must be quicker, or this test sees nothing"
    assert 0.6 < medians[0] / medians[1] < 1.67


@pytest.mark.backend("engine")
def test_tokenizing_does_not_tell_either(tenants: Client):
    tenants.ask(documents=[LONG], key=KEYS["acme"])
    builder = tenants.engine.builder
    held = builder._cache.held_tokens
    tenants.ask(documents=[LONG], key=KEYS["acme"])
    assert builder._cache.held_tokens == held
    tenants.ask(documents=[LONG], key=KEYS["bolt"])
    assert builder._cache.held_tokens == 2 * held


def test_corpora_are_a_tenants_own(tenants: Client):
    acme, bolt = auth(KEYS["acme"]), auth(KEYS["bolt"])
    assert tenants.post("/v1/corpora", json={"name": "notes"}, headers=acme).status_code == 201
    body = {"documents": [{"id": "a", "text": LONG}]}
    assert tenants.post("/v1/corpora/notes/documents", json=body, headers=acme).status_code == 200
    assert tenants.get("/v1/corpora", headers=bolt).json()["data"] == []
    for method, path in (
        ("GET", "/v1/corpora/notes"),
        ("DELETE", "/v1/corpora/notes"),
        ("GET", "/v1/corpora/notes/documents"),
        ("DELETE", "/v1/corpora/notes/documents/a"),
    ):
        assert tenants.request(method, path, headers=bolt).status_code == 404
    asked = tenants.ask(chunkweave={"corpus": "notes"}, key=KEYS["bolt"])
    assert (asked.status_code, asked.json()["error"]["code"]) == (404, "corpus_not_found")
    assert tenants.post("/v1/corpora", json={"name": "notes"}, headers=bolt).status_code == 201
    assert tenants.get("/v1/corpora/notes", headers=acme).json()["documents"] == 1
    assert tenants.get("/v1/corpora/notes", headers=bolt).json()["documents"] == 0


@pytest.mark.backend("engine")
@pytest.mark.parametrize("other", [LONG, LONG.replace("keeper", "miller")])
def test_clearing_a_text_does_not_tell_who_is_asking_it(tenants: Client, other: str):
    """While acme is answered over a text, bolt clears that text and asks it: bolt's own KV is removed once only."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "When?"}], "documents": [other]})
    running = tenants.portal.start_task_soon(
        lambda: tenants.parts.answering.start(Tenant("acme"), body, RequestMeta("id", "acme"))
    ).result()
    tenants.post("/v1/cache/clear", json={"documents": [LONG]}, headers=auth(KEYS["bolt"]))
    first, second = cached(tenants, KEYS["bolt"]), cached(tenants, KEYS["bolt"])
    tenants.portal.call(running.aclose)
    tenants.portal.call(tenants.parts.answering.swept)
    assert first < second == cached(tenants, KEYS["bolt"])


@pytest.mark.backend("engine")
def test_what_all_share_is_for_admins(tenants: Client):
    acme, admin = auth(KEYS["acme"]), auth(ADMIN_KEY)
    cached(tenants, KEYS["acme"])
    told = tenants.get("/v1/cache", headers=acme).json()
    assert list(told) == ["tenant"]
    assert told["tenant"]["requests"] == 1
    assert tenants.get("/v1/cache", headers=auth(KEYS["bolt"])).json()["tenant"]["requests"] == 0
    assert tenants.post("/v1/cache/clear", json={"everything": True}, headers=acme).status_code == 403
    assert tenants.get("/v1/cache", headers=admin).json()["store"]["segments"] > 0
    assert tenants.post("/v1/cache/clear", json={"everything": True}, headers=admin).json()["segments_removed"] > 0
    assert tenants.get("/v1/cache", headers=admin).json()["store"]["segments"] == 0


@pytest.mark.backend("engine")
def test_clearing_reaches_ones_own_only(tenants: Client):
    acme, bolt = auth(KEYS["acme"]), auth(KEYS["bolt"])
    body = {"documents": [LONG]}
    assert tenants.post("/v1/cache/warm", json=body, headers=acme).json() == {"chunks": 1, "computed": 1}
    assert tenants.post("/v1/cache/clear", json=body, headers=bolt).json()["segments_removed"] == 0
    assert tenants.post("/v1/cache/warm", json=body, headers=acme).json()["computed"] == 0
    assert tenants.post("/v1/cache/clear", json=body, headers=acme).json()["segments_removed"] == 1


def test_a_tenant_may_ask_so_often(serve: Serve):
    client = serve(keys=key_ring(), requests_per_minute=2.0, burst=3)  # a token takes longer than a busy machine does
    codes = [client.get("/v1/models", headers=auth(KEYS["acme"])).status_code for _ in range(4)]
    assert codes == [200, 200, 200, 429]
    refused = client.get("/v1/models", headers=auth(KEYS["acme"]))
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert client.get("/v1/models", headers=auth(KEYS["bolt"])).status_code == 200


def test_a_bucket_fills_with_time():
    now = [0.0]
    bucket = TokenBucket(2.0, 2, clock=lambda: now[0])
    assert [bucket.take(), bucket.take(), bucket.take()] == [0, 0, 0.5]
    now[0] = 0.5
    assert bucket.take() == 0
    now[0] = 100.0
    assert [bucket.take(), bucket.take()] == [0, 0]
    assert bucket.take() > 0


def test_a_tenant_may_do_so_much_at_once():
    limits = TenantLimits(LimitSettings(max_concurrent=2))
    slots = [limits.occupy("acme"), limits.occupy("acme")]
    with pytest.raises(HttpError, match="running already") as refused:
        limits.occupy("acme")
    assert refused.value.status_code == 429
    limits.occupy("bolt").close()
    slots[0].close()
    slots[0].close()
    assert limits.running("acme") == 1
    limits.occupy("acme")


@pytest.mark.parametrize(
    "body",
    [
        {"question": LONG * 1000, "documents": ["Short."]},
        {
            "messages": [{"role": "system", "content": LONG * 1000}, {"role": "user", "content": "When?"}],
            "documents": ["Short."],
        },
        {"documents": ["The ferry leaves at seven.", LONG * 1000]},
        {"documents": [f"{number} {LONG}" for number in range(64)]},
        {"question": LONG * 1000, "chunkweave": {"corpus": "notes"}},
    ],
    ids=["question", "system", "document", "documents", "corpus"],
)
def test_of_a_prompt_that_is_far_too_long_the_beginning_is_tokenized(client: Client, monkeypatch, body: dict):
    client.post("/v1/corpora", json={"name": "notes"})
    client.post("/v1/corpora/notes/documents", json={"documents": [LONG]})
    read = watched_tokenizer(client, monkeypatch)
    refused = client.ask(**body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "fit into the context; send fewer or smaller chunks" in error["message"]
    assert sum(read) < 100_000


@pytest.mark.backend("engine")
def test_a_search_for_more_than_a_question_may_have_is_refused(client: Client, monkeypatch):
    client.post("/v1/corpora", json={"name": "notes"})
    read = watched_tokenizer(client, monkeypatch)
    refused = client.post("/v1/corpora/notes/search", json={"query": "x" * 2_000_000})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert sum(read) < 100_000


def watched_tokenizer(client: Client, monkeypatch) -> list[int]:
    """How many characters each text has that is tokenized from now on."""
    tokenizer, read = client.parts.started.tokenizer, []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: read.append(len(text)) or encode(text, **more))
    return read


def test_whoever_has_much_to_tokenize_keeps_no_other_tenant_waiting(tenants: Client, monkeypatch):
    gate, statuses = slow_tokenizer(tenants, monkeypatch), []

    def ask(question: str, key: str) -> None:
        statuses.append((key, tenants.ask(question, documents=["Short."], key=KEYS[key]).status_code))

    asking = [threading.Thread(target=ask, args=("slow?", "acme")) for _ in range(40)]
    for thread in asking:
        thread.start()
    try:
        wait_until(lambda: tenants.service.limits.running("acme") == 40)
        quick = threading.Thread(target=ask, args=("quick?", "bolt"))
        quick.start()
        quick.join(10)
        assert statuses == [("bolt", 200)]
    finally:
        gate.set()
    for thread in asking:
        thread.join(30)
    assert statuses[1:] == [("acme", 200)] * 40


def slow_tokenizer(client: Client, monkeypatch) -> threading.Event:
    """Texts that hold `slow` are tokenized once the event is set."""
    tokenizer, gate = client.parts.started.tokenizer, threading.Event()
    encode = tokenizer.encode

    def slow(text: str, **more) -> list[int]:
        assert "slow" not in text or gate.wait(30)
        return encode(text, **more)

    monkeypatch.setattr(tokenizer, "encode", slow)
    return gate


@pytest.mark.backend("engine")
def test_no_step_waits_for_the_documents_of_a_command(serve: Serve, monkeypatch):
    client = serve(keys=key_ring(), max_concurrent=1)
    gate, done = slow_tokenizer(client, monkeypatch), []
    body = {"documents": ["slow to tokenize"]}

    def act() -> None:
        done.append(client.post("/v1/cache/clear", json=body, headers=auth(KEYS["acme"])).json())

    acting = threading.Thread(target=act)
    acting.start()
    try:
        wait_until(lambda: client.service.limits.running("acme") == 1)
        assert client.ask(key=KEYS["bolt"]).status_code == 200
        assert client.post("/v1/cache/clear", json=body, headers=auth(KEYS["acme"])).status_code == 429
        assert not done
    finally:
        gate.set()
    acting.join(30)
    assert set(done[0].values()) <= {0, 1}


@pytest.mark.backend("engine")
def test_a_tenant_that_asks_for_too_much_keeps_no_other_one_waiting(serve: Serve):
    """acme takes all places and fills the queue; bolt is answered while acme's go on, and gets no error."""
    client = serve(keys=key_ring(), max_num_seqs=2, max_waiting=3, tenant_weight=("bolt=2",))
    statuses, stats = [], client.service.backend.batching

    def ask(question: str) -> None:
        statuses.append(client.ask(question, documents=[LONG[:240]], key=KEYS["acme"], max_tokens=400).status_code)

    asking = [threading.Thread(target=ask, args=(f"When is number {number}?",)) for number in range(5)]
    for thread in asking:
        thread.start()
        wait_until(lambda thread=thread: sum((stats.stats.running, stats.stats.waiting)) > asking.index(thread))
    wait_until(lambda: (stats.stats.running, stats.stats.waiting) == (2, 3))
    refused = client.ask(documents=[LONG], key=KEYS["acme"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert client.ask(documents=[LONG], key=KEYS["bolt"]).status_code == 200
    assert not statuses, "before the first of acme's has ended"
    for thread in asking:
        thread.join(60)
    assert statuses == [200] * 5
    assert stats.stats.preempted == 1


@pytest.mark.backend("engine")
@pytest.mark.parametrize(("asks", "stopped"), [("bolt", 1), ("acme", 0)])
def test_a_step_is_stopped_for_a_tenant_that_asks_seldom(serve: Serve, monkeypatch, asks: str, stopped: int):
    """acme's step hangs in its second layer until the other request has come; its own next one waits its turn."""
    client = serve(keys=key_ring())
    reached, gate, real, layers = threading.Event(), threading.Event(), HuggingFaceModel.qkv, []

    def qkv(self, layer, hidden):
        layers.append(layer)
        if len(layers) == 2:
            reached.set()
            gate.wait(10)
        return real(self, layer, hidden)

    monkeypatch.setattr(HuggingFaceModel, "qkv", qkv)
    statuses, batching = [], client.service.backend.batching

    def ask(tenant: str) -> None:
        statuses.append(client.ask(documents=[LONG], key=KEYS[tenant]).status_code)

    first, second = (threading.Thread(target=ask, args=(tenant,)) for tenant in ("acme", asks))
    first.start()
    assert reached.wait(10)
    second.start()
    wait_until(lambda: batching.stats.pending == 2)
    gate.set()
    for thread in (first, second):
        thread.join(30)
    assert statuses == [200, 200]
    assert batching.stats.interrupted == stopped


@pytest.mark.backend("engine")
@pytest.mark.parametrize("shared_out", [True, False])
def test_a_tenant_that_stores_much_evicts_its_own_first(serve: Serve, tmp_path, shared_out: bool):
    store = StoreConfig(cache_dir=tmp_path, host_budget_bytes=1 << 21, disk_budget_bytes=1 << 21)
    client = serve(keys=key_ring(), store=store, store_by_tenant=shared_out, neutral_tokens=0)

    def warm(tenant: str, number: int) -> None:
        body = {"documents": [f"{tenant} {number}. {LONG}"]}
        assert client.post("/v1/cache/warm", json=body, headers=auth(KEYS[tenant])).json()["computed"] == 1
        assert client.engine.store.flush(10)

    for number in range(2):
        warm("bolt", number)
    for number in range(12):
        warm("acme", number)
    assert client.engine.store.stats.evictions > 4
    held = [Counter(record.owner for record in level.store.records()) for level in client.engine.store.levels]
    assert [one["bolt"] for one in held] == ([2, 2] if shared_out else [0, 0])
    assert all(one["acme"] > 3 for one in held), "it may have what nobody else needs"
    level = open_store(store, client.engine.loaded.fingerprint, torch.device("cpu")).levels[1]
    assert Counter(record.owner for record in level.store.records()) == held[1], "it is known after a restart"


@pytest.mark.backend("engine")
def test_a_stream_gets_a_token_in_every_step_while_a_tenant_warms(serve: Serve, monkeypatch):
    client = serve(keys=key_ring(), max_num_batched_tokens=64, store=StoreConfig(host_budget_bytes=1 << 28))
    runner, steps, warm = client.engine.runner, [], []
    step = runner.step

    def counted(decoding, prefilling, **options):
        steps.append((len(decoding), sum(tokens or 1_000_000 for _, tokens in prefilling)))
        return step(decoding, prefilling, **options)

    monkeypatch.setattr(runner, "step", counted)
    body = {"documents": [f"{number} {LONG}" for number in range(4)]}

    def act() -> None:
        warm.append(client.post("/v1/cache/warm", json=body, headers=auth(KEYS["acme"])).json())

    begun = threading.Event()

    def listen() -> None:
        body = {"messages": [{"role": "user", "content": "When?"}], "max_tokens": 400, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=auth(KEYS["bolt"])) as reply:
            for _ in reply.iter_lines():
                begun.set()

    threads = [threading.Thread(target=listen), threading.Thread(target=act)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert warm == [{"chunks": 4, "computed": 4}]
    decoding = [number for number, (decodes, _) in enumerate(steps) if decodes]
    during = steps[decoding[0] : decoding[-1] + 1]
    assert sum(tokens for _, tokens in during) > 500, "it was warmed while the stream ran"
    assert all(decodes == 1 and tokens < 64 for decodes, tokens in during)


@pytest.mark.backend("engine")
def test_whoever_goes_while_warming_leaves_nothing_under_way(serve: Serve):
    client = serve(max_num_batched_tokens=64)
    stats, chunks = client.service.backend.cache.stats, [Chunk(f"{number} {LONG}") for number in range(200)]
    warming = client.portal.start_task_soon(client.service.backend.cache.warm, "", chunks, "")
    wait_until(lambda: stats()["engine"]["prefilled_tokens"])
    warming.cancel()
    wait_until(lambda: not stats()["engine"]["running"])
    assert stats()["engine"]["waiting"] == 0
    assert stats()["store"]["segments"] < 200


@pytest.mark.backend("engine")
@pytest.mark.parametrize("command", ["clear", "warm"])
def test_commands_on_far_too_long_documents_are_refused(client: Client, monkeypatch, command: str):
    read = watched_tokenizer(client, monkeypatch)
    refused = client.post(f"/v1/cache/{command}", json={"documents": ["Short.", LONG * 1000]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "documents[1]" in refused.json()["error"]["message"]
    assert sum(read) < 100_000


@pytest.mark.backend("engine")
def test_documents_that_no_context_can_hold_are_removed_all_the_same(client: Client):
    client.post("/v1/corpora", json={"name": "notes", "chunk_tokens": 4096})
    client.post("/v1/corpora/notes/documents", json={"documents": [{"id": "a", "text": LONG * 10}]})
    removed = client.delete("/v1/corpora/notes")
    assert (removed.status_code, removed.json()["segments_removed"]) == (200, 0)


@pytest.mark.backend("engine")
def test_what_is_cleared_while_its_request_is_tokenized_is_cleared_again(client: Client, monkeypatch):
    gate, answers = slow_tokenizer(client, monkeypatch), []
    monkeypatch.setattr(client.service.threads, "_threads", 3)
    asking = threading.Thread(target=lambda: answers.append(client.ask("slow?", documents=[LONG])))
    asking.start()
    try:
        wait_until(lambda: client.service.limits.running("") == 1)
        assert client.post("/v1/cache/clear", json={"documents": [LONG]}).json() == {"segments_removed": 0}
    finally:
        gate.set()
    asking.join(30)
    assert answers[0].status_code == 200
    client.portal.call(client.parts.answering.swept)
    assert client.ask(documents=[LONG]).json()["chunkweave"]["chunks"][1]["kv_source"] == "computed"


class Work:
    """Pieces of work that end when they are told to, and in which order they began."""

    def __init__(self, threads: int, weights: TenantWeights | None = None) -> None:
        self.threads = TenantThreads(threads, weights=weights)
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self.undone: list[str] = []

    async def start(self, *names: str) -> None:
        for name in names:
            self.gates[name] = threading.Event()
            self.tasks[name] = asyncio.create_task(
                self.threads.run(name[0], lambda name=name: self._do(name), undo=self._undo)
            )
        await asyncio.sleep(0.02)

    async def end(self, name: str) -> None:
        self.gates[name].set()
        await asyncio.wait([self.tasks[name]])
        await asyncio.sleep(0.02)

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.sleep(0.02)

    def _do(self, name: str) -> str:
        self.begun.append(name)
        assert self.gates[name].wait(30)
        return name

    async def _undo(self, name: str) -> None:
        self.undone.append(name)


def test_tenants_take_turns_and_none_has_all_threads():
    async def main() -> None:
        work = Work(3)
        await work.start("a1", "a2", "a3", "a4", "b1", "b2", "c1")
        assert work.begun == ["a1", "a2", "b1"], "one thread is kept from a"
        for name in ("b1", "a1", "a2", "b2", "c1", "a3", "a4"):
            await work.end(name)
        assert work.begun == ["a1", "a2", "b1", "b2", "a3", "c1", "a4"]
        assert [task.result() for task in work.tasks.values()] == list(work.tasks)
        await work.start("a5", "a6", "a7")
        assert work.begun[7:] == ["a5", "a6"], "nobody else is there, and one thread is free all the same"
        for name in ("a5", "a6", "a7"):
            await work.end(name)

    asyncio.run(main())


def test_tenants_take_turns_by_their_weights():
    async def main() -> None:
        work = Work(2, TenantWeights({"a": 2.0, "c": 0.5}))
        await work.start("x1")
        await work.start("a1", "b1", "a2", "a3", "c1", "b2", "c2", "b3", "a4")
        for _ in range(9):
            await work.end(work.begun[-1])
        assert "".join(name[0] for name in work.begun[1:]) == "abaacbabc"
        await work.end("x1")

    asyncio.run(main())


def test_who_goes_while_waiting_has_nothing_done_and_who_goes_later_has_it_undone():
    async def main() -> None:
        work = Work(2)
        await work.start("a1", "a2", "a3")
        await work.cancel("a2")
        assert work.tasks["a2"].cancelled()
        await work.cancel("a1")
        assert not work.tasks["a1"].done(), "what it uses is in use"
        await work.end("a1")
        assert work.tasks["a1"].cancelled()
        await work.end("a3")
        assert (work.begun, work.undone) == (["a1", "a3"], ["a1"])
        await work.start("a4", "a5")
        work.threads.close()
        await asyncio.wait([work.tasks["a5"]])
        assert isinstance(work.tasks["a5"].exception(), RequestAbortedError)
        await work.end("a4")
        assert work.tasks["a4"].result() == "a4"
        with pytest.raises(RequestAbortedError):
            await work.threads.run("b", lambda: None)

    asyncio.run(main())


def test_large_bodies_are_refused_before_they_are_read(serve: Serve):
    client = serve(max_body="2KB", max_upload="8KB")
    assert client.ask(documents=["x" * 3000]).status_code == 413
    big = {"documents": ["x " * 2000]}
    client.post("/v1/corpora", json={"name": "a"})
    assert client.post("/v1/corpora/a/documents", json=big).status_code == 200
    assert client.post("/v1/corpora/a/documents", json={"documents": ["x " * 9000]}).status_code == 413
    assert client.post("/v1/corpora/a/search", json={"query": "x " * 9000}).status_code == 413

    def endless():
        for _ in range(100):
            yield b"x" * 100

    streamed = client.post("/v1/chat/completions", content=endless(), headers={"content-type": "application/json"})
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (413, "body_too_large")


def test_keys_are_kept_hashed(tmp_path):
    key, other = new_key(), new_key()
    file = tmp_path / "keys"
    add_to_file(file, StoredKey.of(Tenant("acme"), key))
    add_to_file(file, StoredKey.of(Tenant("ops", admin=True), other))
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    ring = read_keys(file, f"bolt={KEYS['bolt']}, ops:admin={ADMIN_KEY}")
    assert ring.find(key) == Tenant("acme")
    assert ring.find(other) == ring.find(ADMIN_KEY) == Tenant("ops", admin=True)
    assert ring.find(KEYS["bolt"]) == Tenant("bolt")
    assert ring.find(key[:-1]) is None
    assert ring.find("") is None
    assert len(ring.tenants) == 3


@pytest.mark.parametrize(
    "lines", ["acme tenant zz zz", "acme boss " + "0" * 32 + " " + "0" * 64, "../x tenant 00 00", "acme"]
)
def test_keys_files_that_are_none(tmp_path, lines):
    file = tmp_path / "keys"
    file.write_text(f"# comment\n\n{lines}\n")
    with pytest.raises(UsageError, match="line 3"):
        read_keys(file, "")
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "none", "")


@pytest.mark.parametrize("variable", ["acme", "acme=short", "a/b=" + "k" * 30, "acme:boss=" + "k" * 30])
def test_environment_entries_that_are_none(variable):
    with pytest.raises(UsageError) as error:
        read_keys(None, variable)
    assert "k" * 30 not in str(error.value)


def test_bearer_takes_one_scheme():
    assert bearer({"authorization": "bearer  abc "}) == "abc"
    assert bearer({"authorization": "Bearer "}) is None
    assert bearer({}) is None


def test_other_addresses_need_keys():
    for host in ("0.0.0.0", "192.168.1.4", "::"):
        with pytest.raises(UsageError, match="API keys"):
            toy_service(host=host)
        toy_service(host=host, allow_anonymous=True)
        toy_service(host=host, keys=key_ring())
    toy_service(host="::1")
    assert len(KeyRing()) == 0
