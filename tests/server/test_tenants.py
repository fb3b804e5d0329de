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
from chunkweave_server.observability import RequestMeta
from chunkweave_server.requests import ChatBody
from chunkweave_server.tenants import (
    ANONYMOUS,
    KeyRing,
    StoredKey,
    Tenant,
    TokenBucket,
    add_to_file,
    bearer,
    new_key,
    read_keys,
)
from chunkweave_server.threads import TenantThreads
from tests.server.conftest import (
    ADMIN_KEY,
    KEYS,
    Client,
    Serve,
    error_of,
    key_ring,
    later,
    slowed,
    toy_service,
    wait_until,
)
from tests.server.conftest import bearer as auth

LONG = "The keeper of the lighthouse writes down every ship that passes the northern cape in a storm. " * 12


@pytest.fixture
def tenants(serve: Serve) -> Client:
    return serve(keys=key_ring())


def cached(client: Client, key: str, **body) -> int:
    response = client.ask(documents=[LONG], key=key, **body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


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
    held = builder._cache._held_tokens
    tenants.ask(documents=[LONG], key=KEYS["acme"])
    assert builder._cache._held_tokens == held
    tenants.ask(documents=[LONG], key=KEYS["bolt"])
    assert builder._cache._held_tokens == 2 * held


def test_corpora_are_a_tenants_own(tenants: Client):
    acme, bolt = auth(KEYS["acme"]), auth(KEYS["bolt"])
    tenants.make_corpus(documents=[{"id": "a", "text": LONG}], key=KEYS["acme"])
    assert tenants.get("/v1/corpora", headers=bolt).json()["data"] == []
    for method, path in (
        ("GET", "/v1/corpora/notes"),
        ("DELETE", "/v1/corpora/notes"),
        ("GET", "/v1/corpora/notes/documents"),
        ("DELETE", "/v1/corpora/notes/documents/a"),
    ):
        assert tenants.request(method, path, headers=bolt).status_code == 404
    assert error_of(tenants.ask(chunkweave={"corpus": "notes"}, key=KEYS["bolt"])) == (404, "corpus_not_found")
    tenants.make_corpus(key=KEYS["bolt"])
    assert tenants.get("/v1/corpora/notes", headers=acme).json()["documents"] == 1
    assert tenants.get("/v1/corpora/notes", headers=bolt).json()["documents"] == 0


@pytest.mark.backend("engine")
@pytest.mark.parametrize("other", [LONG, LONG.replace("keeper", "miller")], ids=["the same", "another"])
def test_clearing_a_text_does_not_tell_who_is_asking_it(tenants: Client, other: str):
    """While acme is answered over a text, bolt clears that text and asks it: bolt's own KV is removed once only."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "When?"}], "documents": [other]})
    running = tenants.portal.start_task_soon(
        lambda: tenants.parts.answering.start(Tenant("acme"), body, RequestMeta("id", "acme"))
    ).result()
    tenants.clear(LONG, key=KEYS["bolt"])
    first, second = cached(tenants, KEYS["bolt"]), cached(tenants, KEYS["bolt"])
    tenants.portal.call(running.aclose)
    tenants.portal.call(tenants.parts.answering.swept)
    assert first < second == cached(tenants, KEYS["bolt"])


@pytest.mark.backend("engine")
def test_clearing_reaches_ones_own_only(tenants: Client):
    acme, bolt = KEYS["acme"], KEYS["bolt"]
    assert tenants.warm(LONG, key=acme).json() == {"chunks": 1, "computed": 1}
    assert tenants.clear(LONG, key=bolt).json()["segments_removed"] == 0
    assert tenants.warm(LONG, key=acme).json()["computed"] == 0
    assert tenants.clear(LONG, key=acme).json()["segments_removed"] == 1


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
    client.make_corpus(documents=[LONG])
    read = watched_tokenizer(client, monkeypatch)
    refused = client.ask(**body)
    assert error_of(refused) == (400, "context_length_exceeded")
    assert "fit into the context; send fewer or smaller chunks" in refused.json()["error"]["message"]
    assert sum(read) < 100_000


@pytest.mark.backend("engine")
def test_a_search_for_more_than_a_question_may_have_is_refused(notes: Client, monkeypatch):
    read = watched_tokenizer(notes, monkeypatch)
    assert error_of(notes.search("x" * 2_000_000)) == (400, "context_length_exceeded")
    assert sum(read) < 100_000


def watched_tokenizer(client: Client, monkeypatch) -> list[int]:
    """How many characters each text has that is tokenized from now on."""
    tokenizer, read = client.parts.started.tokenizer, []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: read.append(len(text)) or encode(text, **more))
    return read


def test_whoever_has_much_to_tokenize_keeps_no_other_tenant_waiting(tenants: Client, monkeypatch):
    gate = slow_tokenizer(tenants, monkeypatch)
    asking = [later(tenants.ask, "slow?", documents=["Short."], key=KEYS["acme"]) for _ in range(40)]
    try:
        wait_until(lambda: tenants.service.limits.running("acme") == 40)
        quick = later(tenants.ask, "quick?", documents=["Short."], key=KEYS["bolt"])
        assert quick.result(10).status_code == 200
        assert not any(one.done() for one in asking)
    finally:
        gate.set()
    assert [one.result(30).status_code for one in asking] == [200] * 40


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
    gate = slow_tokenizer(client, monkeypatch)
    acting = later(client.clear, "slow to tokenize", key=KEYS["acme"])
    try:
        wait_until(lambda: client.service.limits.running("acme") == 1)
        assert client.ask(key=KEYS["bolt"]).status_code == 200
        assert client.clear("slow to tokenize", key=KEYS["acme"]).status_code == 429
        assert not acting.done()
    finally:
        gate.set()
    assert set(acting.result(30).json().values()) <= {0, 1}


@pytest.mark.backend("engine")
def test_a_tenant_that_asks_for_too_much_keeps_no_other_one_waiting(serve: Serve):
    """acme takes all places and fills the queue; bolt is answered while acme's go on, and gets no error."""
    client = serve(keys=key_ring(), max_num_seqs=2, max_waiting=3, tenant_weight=("bolt=2",))
    batching, asking = client.service.backend.batching, []
    of_acme = {"documents": [LONG[:240]], "key": KEYS["acme"], "max_tokens": 400}
    with slowed(client):
        for running, waiting in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)):
            asking.append(later(client.ask, f"When is number {len(asking)}?", **of_acme))
            wait_until(lambda now=(running, waiting): (batching.stats.running, batching.stats.waiting) == now)
        assert error_of(client.ask(documents=[LONG], key=KEYS["acme"])) == (503, "overloaded")
        assert client.ask(documents=[LONG], key=KEYS["bolt"]).status_code == 200
        assert not any(one.done() for one in asking), "before the first of acme's has ended"
    assert [one.result(60).status_code for one in asking] == [200] * 5
    assert batching.stats.preempted == 1


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
    batching = client.service.backend.batching
    first = later(client.ask, documents=[LONG], key=KEYS["acme"])
    assert reached.wait(10)
    second = later(client.ask, documents=[LONG], key=KEYS[asks])
    wait_until(lambda: batching.stats.pending == 2)
    gate.set()
    assert [one.result(30).status_code for one in (first, second)] == [200, 200]
    assert batching.stats.interrupted == stopped


@pytest.mark.backend("engine")
@pytest.mark.parametrize("shared_out", [True, False])
def test_a_tenant_that_stores_much_evicts_its_own_first(serve: Serve, tmp_path, shared_out: bool):
    store = StoreConfig(cache_dir=tmp_path, host_budget_bytes=1 << 21, disk_budget_bytes=1 << 21)
    client = serve(keys=key_ring(), store=store, tenant_weight=("acme=1",) if shared_out else (), neutral_tokens=0)

    def warm(tenant: str, number: int) -> None:
        assert client.warm(f"{tenant} {number}. {LONG}", key=KEYS[tenant]).json()["computed"] == 1
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
    runner, steps = client.engine.runner, []
    step = runner.step

    def counted(decoding, prefilling, **options):
        steps.append((len(decoding), sum(tokens or 1_000_000 for _, tokens in prefilling)))
        return step(decoding, prefilling, **options)

    monkeypatch.setattr(runner, "step", counted)
    begun = threading.Event()

    def listen() -> None:
        body = {"messages": [{"role": "user", "content": "When?"}], "max_tokens": 400, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=auth(KEYS["bolt"])) as reply:
            for _ in reply.iter_lines():
                begun.set()

    listening = later(listen)
    assert begun.wait(30)
    with slowed(client, 0.002):
        warmed = client.warm(*[f"{number} {LONG}" for number in range(4)], key=KEYS["acme"])
    listening.result(60)
    assert warmed.json() == {"chunks": 4, "computed": 4}
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


@pytest.mark.parametrize("command", ["clear", "warm"])
def test_commands_on_far_too_long_documents_are_refused(client: Client, monkeypatch, command: str):
    read = watched_tokenizer(client, monkeypatch)
    refused = client.post(f"/v1/cache/{command}", json={"documents": ["Short.", LONG * 1000]})
    assert error_of(refused) == (400, "context_length_exceeded")
    assert "documents[1]" in refused.json()["error"]["message"]
    assert sum(read) < 100_000


@pytest.mark.backend("engine")
def test_documents_that_no_context_can_hold_are_removed_all_the_same(client: Client):
    client.make_corpus(documents=[LONG * 10], chunk_tokens=4096)
    removed = client.delete("/v1/corpora/notes")
    assert (removed.status_code, removed.json()["segments_removed"]) == (200, 0)


@pytest.mark.backend("engine")
def test_what_is_cleared_while_its_request_is_tokenized_is_cleared_again(client: Client, monkeypatch):
    gate = slow_tokenizer(client, monkeypatch)
    monkeypatch.setattr(client.service.threads, "_threads", 3)
    asking = later(client.ask, "slow?", documents=[LONG])
    try:
        wait_until(lambda: client.service.limits.running("") == 1)
        assert client.clear(LONG).json() == {"segments_removed": 0}
    finally:
        gate.set()
    assert asking.result(30).status_code == 200
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
    client.make_corpus(documents=["x " * 2000])
    assert client.ask(documents=["x" * 3000]).status_code == 413
    assert client.add(["x " * 9000]).status_code == 413
    assert client.search("x " * 9000).status_code == 413

    def endless():
        for _ in range(100):
            yield b"x" * 100

    streamed = client.post("/v1/chat/completions", content=endless(), headers={"content-type": "application/json"})
    assert error_of(streamed) == (413, "body_too_large")


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
    assert bearer({"authorization": "Basic abc"}) is None
    assert bearer({}) is None


def test_other_addresses_need_keys():
    for host in ("0.0.0.0", "192.168.1.4", "::"):
        with pytest.raises(UsageError, match="API keys"):
            toy_service(host=host)
        toy_service(host=host, allow_anonymous=True)
        toy_service(host=host, keys=key_ring())
    toy_service(host="::1")
    assert len(KeyRing()) == 0
