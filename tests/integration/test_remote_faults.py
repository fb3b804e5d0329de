"""A remote that is dead, slow, restarted, full or lying costs a miss and a bounded time, and nothing else."""

import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import chunkweave
from chunkweave.errors import UsageError
from chunkweave.kv.segment import SegmentKV
from chunkweave.store.records import SegmentRecord
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.blobs import BlobKey, BlobRefused, BlobStore, RedisBlobs
from chunkweave.tiers.remote import RemoteTier, RunningPuts
from chunkweave.tiers.remote_calls import CircuitBreaker, RemoteCalls, RemoteGarbage, RemoteUnavailable
from chunkweave.types import SegmentId
from tests.integration.redis_server import PASSWORD, Proxy, Server
from tests.integration.test_remote_tier import FINGERPRINT, assert_same, make_segment
from tests.toys import run_at_once

SLACK_S = 4.0
"""For a machine that is busy with other things; calls without a limit would take five times as long."""


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def url_of(proxy: Proxy) -> str:
    return f"redis://:{PASSWORD}@127.0.0.1:{proxy.port}/0"


def make_tier(blobs: BlobStore, *, deadline_s: float = 5.0, cool_down_s: float = 0.2) -> RemoteTier:
    """A tier that is patient, unless a test is about its deadline."""
    return RemoteTier(
        blobs, FINGERPRINT, deadline_s=deadline_s, breaker=CircuitBreaker("remote store", cool_down_s=cool_down_s)
    )


def make_store(tier: RemoteTier) -> SegmentStore:
    return SegmentStore(tier, budget_bytes=1 << 30, shared=True, load=False)


def stored(url: str, seed: int) -> tuple[SegmentRecord, SegmentKV]:
    """A segment that a patient tier has put there."""
    record, payload = make_segment(seed)
    make_tier(RedisBlobs(url)).put(record, payload)
    return record, payload


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def wait_until_found(tier: RemoteTier, segment: SegmentId, *, limit_s: float = 5.0) -> None:
    ends = time.monotonic() + limit_s
    while tier.get(segment) is None:
        assert time.monotonic() < ends, "it does not come back"
        time.sleep(0.02)


def run_python(program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(chunkweave.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, env=environment)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


# ---------------------------------------------------------------- a real server that fails


def test_a_killed_server_is_a_miss_at_once_and_comes_back(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tier = make_tier(RedisBlobs(server.url))
    record, payload = make_segment(1)
    tier.put(record, payload)
    server.kill()
    with at_most(3 * SLACK_S):
        for _ in range(100):
            assert tier.get(record.id) is None
            assert tier.nbytes(record.id) == 0
    assert tier.stats.unavailable == 200
    with pytest.raises(RemoteUnavailable):
        tier.put(record, payload)
    assert len(warnings_in(caplog)) == 1, "one state change, one line"
    server.start()
    ends = time.monotonic() + 5
    while True:  # the data died with the server; the write is what shows that it is back
        try:
            tier.put(record, payload)
            break
        except OSError:
            assert time.monotonic() < ends
            time.sleep(0.05)
    wait_until_found(tier, record.id)
    assert_same(tier.get(record.id), payload)
    assert not tier.breaker.is_open
    assert [entry.getMessage() for entry in caplog.records if "works again" in entry.getMessage()]
    assert len(warnings_in(caplog)) == 1


def test_a_server_that_restarts_with_its_data_is_used_again(tmp_path: Path) -> None:
    server = Server(tmp_path, lines=("appendonly yes", "appendfsync always"))
    server.start()
    try:
        tier = make_tier(RedisBlobs(server.url))
        record, payload = make_segment(2)
        tier.put(record, payload)
        server.kill()
        server.start()
        assert_same(tier.get(record.id), payload)  # the dead connection costs a retry
        assert tier.stats.unavailable == 0
        server.kill()
        assert tier.get(record.id) is None
        server.start()
        wait_until_found(tier, record.id)
        assert_same(tier.get(record.id), payload)
    finally:
        server.kill()


def test_a_server_killed_while_clients_read_and_write(server: Server) -> None:
    segments = [make_segment(seed, tokens=64) for seed in range(8)]
    tier = make_tier(RedisBlobs(server.url), deadline_s=0.5)
    stop = threading.Event()

    def read_and_write(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            record, payload = rng.choice(segments)
            with at_most(0.5 + SLACK_S):
                if rng.random() < 0.5:
                    with suppress(OSError):
                        tier.put(record, payload)
                elif (held := tier.get(record.id)) is not None:
                    assert_same(held, payload)

    with ThreadPoolExecutor(3) as pool:
        clients = pool.map(read_and_write, range(3))
        try:
            for _ in range(4):
                time.sleep(0.25)
                server.kill()
                time.sleep(0.1)
                server.start()
            time.sleep(0.5)
        finally:
            stop.set()
    list(clients)  # raises what one of them raised
    assert tier.stats.garbage == 0
    assert tier.stats.hits > 0


def test_a_server_that_does_not_speak_the_protocol() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def talk() -> None:
            listener.settimeout(0.05)
            while not stop.is_set():
                try:
                    client, _ = listener.accept()
                except TimeoutError:
                    continue
                with client:
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"\xff" * 500)

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            tier = make_tier(RedisBlobs(f"redis://127.0.0.1:{listener.getsockname()[1]}"), deadline_s=0.5)
            with at_most(3 * (0.5 + SLACK_S)):
                assert tier.get(make_segment(4)[0].id) is None
                assert tier.nbytes(make_segment(4)[0].id) == 0
                with pytest.raises(OSError, match="ends after 0 segments"):
                    next(tier.records())
        finally:
            stop.set()
            thread.join()


def test_a_full_server_refuses_writes_and_still_serves_reads(server: Server) -> None:
    tier = make_tier(RedisBlobs(server.url))
    record, payload = make_segment(5)
    tier.put(record, payload)
    RedisBlobs(server.url)._client.config_set("maxmemory", 1)
    for _ in range(5):
        with pytest.raises(BlobRefused):
            tier.put(*make_segment(6))
    assert not tier.breaker.is_open
    assert_same(tier.get(record.id), payload)
    assert tier.stats.failed_puts == 5


# ---------------------------------------------------------------- a network that fails


def test_a_server_that_hangs(server: Server) -> None:
    tier = make_tier(RedisBlobs(f"{server.url}?socket_timeout=0.2"), deadline_s=0.3)
    record, _ = stored(server.url, 16)
    server.pause()
    try:
        for call in (tier.get, tier.nbytes, tier.delete):
            refused = pytest.raises(OSError, match="did not confirm") if call == tier.delete else nullcontext()
            with at_most(0.3 + SLACK_S), refused:
                call(record.id)
        assert (tier.stats.unavailable, tier.stats.failed_deletes) == (2, 1)
    finally:
        server.resume()
    wait_until_found(tier, record.id)
    tier.delete(record.id)
    assert tier.get(record.id) is None


@pytest.mark.parametrize("deadline_s", [0.2, 0.6])
def test_a_reply_that_trickles_ends_at_the_deadline(proxy: Proxy, deadline_s: float) -> None:
    record, payload = stored(url_of(proxy), 7)
    tier = make_tier(RedisBlobs(url_of(proxy)), deadline_s=deadline_s)
    proxy.byte_delay_s = 0.01  # no single read ever times out; the whole reply would take 25 s
    began = time.monotonic()
    assert tier.get(record.id) is None
    elapsed = time.monotonic() - began
    assert deadline_s * 0.9 < elapsed < deadline_s + SLACK_S
    assert tier.stats.unavailable == 1
    wait_until_idle()  # while replies still trickle: the call was cut
    proxy.byte_delay_s = 0.0
    wait_until_found(tier, record.id)
    assert_same(tier.get(record.id), payload)


def test_a_slow_remote_opens_the_breaker_and_costs_nothing_more(proxy: Proxy) -> None:
    record, _ = stored(url_of(proxy), 8)
    tier = make_tier(RedisBlobs(f"{url_of(proxy)}?socket_timeout=0.1"), deadline_s=0.25, cool_down_s=30.0)
    proxy.reply_delay_s = 1.0
    with at_most(3 * (0.25 + SLACK_S)):
        for _ in range(50):
            assert tier.get(record.id) is None
    assert tier.breaker.is_open


@pytest.mark.parametrize("cut_after_bytes", [0, 1, 40, 1500])
def test_a_connection_cut_in_mid_reply(proxy: Proxy, cut_after_bytes: int) -> None:
    record, payload = stored(url_of(proxy), 10)
    tier = make_tier(RedisBlobs(url_of(proxy)), deadline_s=0.5)
    proxy.cut_after_bytes = cut_after_bytes
    with at_most(0.5 + SLACK_S):
        assert tier.get(record.id) is None
    proxy.cut_after_bytes = None
    wait_until_found(tier, record.id)
    assert_same(tier.get(record.id), payload)
    assert tier.stats.garbage == 0


def test_a_list_that_is_cut_says_so(proxy: Proxy) -> None:
    tier = make_tier(RedisBlobs(url_of(proxy)))
    for seed in range(20):
        tier.put(*make_segment(seed))
    records = tier.records()
    next(records)
    proxy.cut_after_bytes = 0
    proxy.drop()
    with pytest.raises(OSError, match="ends after"):
        next(records)


def test_nobody_listens() -> None:
    tier = make_tier(RedisBlobs("redis://127.0.0.1:1"))
    record, payload = make_segment(11)
    with at_most(2 * SLACK_S):
        assert tier.get(record.id) is None
        with pytest.raises(OSError, match="ends after 0 segments"):
            next(tier.records())
        with pytest.raises(RemoteUnavailable):
            tier.put(record, payload)
        with pytest.raises(OSError, match="did not confirm"):
            tier.delete(record.id)


# ---------------------------------------------------------------- deletions win


def test_a_deletion_that_did_not_arrive_is_owed_and_tried_again(server: Server, proxy: Proxy) -> None:
    record, payload = make_segment(12)
    tier, other = make_tier(RedisBlobs(url_of(proxy))), make_tier(RedisBlobs(server.url))
    store = make_store(tier)
    assert store.insert(record, payload)
    proxy.cut_after_bytes = 0
    proxy.drop()
    assert tier.nbytes(record.id) == 0  # every attempt fails, and the breaker opens
    assert tier.breaker.is_open
    with pytest.raises(OSError, match="did not confirm"):
        tier.delete(record.id)
    removal = store.withdraw(lambda _: True)
    assert [left.id for left in removal.left] == [record.id]
    assert store.stats.undeletable == 1
    proxy.cut_after_bytes = None
    time.sleep(0.3)
    store.probe([record.id])
    assert store.get(record.id) is None, "removed is removed, though it is still there"
    assert_same(other.get(record.id), payload)
    assert store.insert(*make_segment(13))
    assert store.stats.undeletable == 0
    assert other.get(record.id) is None


class Stuck:
    """Blobs in a dict; puts wait until they are let through."""

    name, expires = "stuck", False

    def __init__(self) -> None:
        self.data: dict[BlobKey, bytes] = {}
        self.gate = threading.Event()
        self.closed = 0
        self.deletes = True

    def get(self, key: BlobKey, first_bytes: int | None = None) -> bytes | None:
        return self.data.get(key, b"")[:first_bytes] or None

    def put(self, key: BlobKey, data: bytes, ttl_s: float | None = None) -> None:
        self.gate.wait(10)
        self.data[key] = data

    def delete(self, key: BlobKey) -> None:
        if not self.deletes:
            raise ConnectionError("no")
        self.data.pop(key, None)

    def size(self, key: BlobKey) -> int | None:
        return len(self.data[key]) if key in self.data else None

    def keys(self, fingerprint: str) -> Iterator[BlobKey]:
        return iter(tuple(self.data))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def stuck() -> tuple[Stuck, RemoteTier]:
    blobs = Stuck()
    return blobs, make_tier(blobs, deadline_s=0.1)


def test_a_put_that_arrives_after_its_deletion_leaves_nothing(stuck: tuple[Stuck, RemoteTier]) -> None:
    blobs, tier = stuck
    record, payload = make_segment(14)
    with pytest.raises(TimeoutError):
        tier.put(record, payload)
    assert blobs.closed == 1
    with pytest.raises(OSError, match="may still arrive"):
        tier.delete(record.id)
    blobs.gate.set()
    wait_until_idle()
    assert blobs.data == {}
    tier.delete(record.id)


def test_a_put_that_arrives_after_its_deletion_and_cannot_be_deleted_is_owed(stuck: tuple[Stuck, RemoteTier]) -> None:
    blobs, tier = stuck
    store = make_store(tier)
    record, payload = make_segment(14)
    with pytest.raises(TimeoutError):
        store.insert(record, payload)
    assert store.stats.undeletable == 1
    blobs.deletes = False
    blobs.gate.set()
    wait_until_idle()
    assert tier.get(record.id) is not None
    store.probe([record.id])
    assert store.get(record.id) is None, "removed is removed, though it is there"
    blobs.deletes = True
    other, payload = make_segment(15)
    assert store.insert(other, payload)
    assert [key.segment for key in blobs.data] == [other.id]
    assert store.stats.undeletable == 0


def test_a_put_writes_only_while_its_caller_or_another_write_holds_it() -> None:
    puts, key = RunningPuts(), BlobKey(FINGERPRINT, make_segment(14)[0].id)
    put = puts.begin(key)
    assert puts.hold(put)
    puts.release(put)
    assert puts.mark_deleted(key), "its caller may write again"
    assert not puts.hold(put), "its key was deleted"
    puts.release(put)
    assert not puts.mark_deleted(key)
    late = puts.begin(key)
    puts.release(late)
    assert not puts.hold(late), "its caller has returned before the thread began"


def test_an_abandoned_put_that_arrives_is_whole(stuck: tuple[Stuck, RemoteTier]) -> None:
    blobs, tier = stuck
    record, payload = make_segment(15)
    with pytest.raises(TimeoutError):
        tier.put(record, payload)
    blobs.gate.set()
    wait_until_idle()
    assert_same(tier.get(record.id), payload)


def test_stuck_calls_are_bounded() -> None:
    gate = threading.Event()
    started: list[int] = []

    def operation() -> None:
        started.append(1)
        gate.wait(10)

    calls = RemoteCalls(deadline_s=0.05, breaker=CircuitBreaker("x", failures_to_open=1000), max_calls=3)
    for _ in range(6):
        with pytest.raises(TimeoutError):
            calls.call(operation)
    assert len(started) == 3
    gate.set()
    wait_until_idle()
    assert calls.call(lambda: 7) == 7


def test_calls_at_once_are_bounded_under_load() -> None:
    calls = RemoteCalls(deadline_s=5.0, breaker=CircuitBreaker("x"), max_calls=4)
    lock = threading.Lock()
    running, most = 0, 0

    def operation() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.001)
        with lock:
            running -= 1

    run_at_once(10, lambda _: [calls.call(operation) for _ in range(20)])
    assert 1 < most <= 4


CALLS = """
import os, time
from chunkweave.tiers.remote_calls import CircuitBreaker, RemoteCalls
calls = RemoteCalls(deadline_s=5.0, breaker=CircuitBreaker("x"))
assert calls.call(lambda: 1) == 1
"""


def test_a_forked_child_makes_calls_of_its_own() -> None:
    child = "child = os.fork()\nif child == 0: os._exit(0 if calls.call(lambda: 2) == 2 else 1)\n"
    run_python(CALLS + child + "assert os.waitpid(child, 0)[1] == 0")


def test_a_stuck_call_does_not_keep_the_process() -> None:
    run_python(CALLS + "calls.deadline_s = 0.05\ntry: calls.call(lambda: time.sleep(60))\nexcept TimeoutError: pass")


# ---------------------------------------------------------------- retries and the breaker


def failing(times: int, error: type[OSError] = ConnectionError) -> tuple[list[int], Callable[[], str]]:
    tries: list[int] = []

    def operation() -> str:
        tries.append(1)
        if len(tries) <= times:
            raise error("no")
        return "yes"

    return tries, operation


def make_calls(*, deadline_s: float = 10.0, failures_to_open: int = 100) -> RemoteCalls:
    return RemoteCalls(deadline_s=deadline_s, breaker=CircuitBreaker("x", failures_to_open=failures_to_open))


def test_a_call_is_tried_three_times_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, operation = failing(2)
    assert make_calls().call(operation) == "yes"
    assert len(tries) == 3
    for retry, expected in ((True, 3), (False, 1)):
        tries, operation = failing(99)
        with pytest.raises(ConnectionError):
            make_calls().call(operation, retry=retry)
        assert len(tries) == expected
    monkeypatch.setattr("chunkweave.tiers.remote_calls._RETRY_PAUSE_S", 10.0)
    tries, operation = failing(99)
    with pytest.raises(ConnectionError):
        make_calls(deadline_s=2.0).call(operation)
    assert len(tries) == 1, "no pause beyond the deadline"


@pytest.mark.parametrize(("error", "counted"), [(PermissionError, True), (RemoteGarbage, True), (BlobRefused, False)])
def test_what_is_not_retried(error: type[OSError], counted: bool) -> None:
    tries, operation = failing(99, error)
    calls = make_calls(failures_to_open=1)
    with pytest.raises(error):
        calls.call(operation)
    assert len(tries) == 1
    assert calls.breaker.is_open == counted


def test_an_open_breaker_is_asked_before_every_attempt() -> None:
    tries, operation = failing(99)
    calls = make_calls(failures_to_open=2)
    for _ in range(2):
        with pytest.raises(RemoteUnavailable):
            calls.call(operation)
        assert len(tries) == 2


def test_nonsense_is_refused() -> None:
    for values in ({"failures_to_open": 0}, {"cool_down_s": 0.0}):
        with pytest.raises(UsageError):
            CircuitBreaker("x", **values)
    with pytest.raises(UsageError):
        make_calls(deadline_s=0.0)


FAILURES, COOL_DOWN_S = 3, 10.0


class BreakerMachine(RuleBasedStateMachine):
    """The breaker against its rule: outcomes of several calls come back in any order, also of calls from long ago."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.breaker = CircuitBreaker("x", failures_to_open=FAILURES, cool_down_s=COOL_DOWN_S, clock=lambda: self.now_s)
        self.failures_in_a_row, self.opened = 0, 0
        self.blocked_until_s = 0.0

    @rule()
    def ask(self) -> None:
        is_open = self.failures_in_a_row >= FAILURES
        assert self.breaker.allows_call() == (not is_open or self.now_s >= self.blocked_until_s)
        if is_open and self.now_s >= self.blocked_until_s:
            self.blocked_until_s = self.now_s + COOL_DOWN_S
            assert not self.breaker.allows_call(), "one probe per cool-down"

    @rule()
    def succeed(self) -> None:
        self.breaker.succeeded()
        self.failures_in_a_row = 0

    @rule()
    def fail(self) -> None:
        self.breaker.failed("no answer")
        self.failures_in_a_row += 1
        if self.failures_in_a_row == FAILURES:
            self.opened += 1
            self.blocked_until_s = self.now_s + COOL_DOWN_S

    @rule()
    def wait(self) -> None:
        self.now_s += COOL_DOWN_S / 2

    @invariant()
    def agrees(self) -> None:
        assert self.breaker.is_open == (self.failures_in_a_row >= FAILURES)
        assert self.breaker.times_opened == self.opened


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def wait_until_idle() -> None:
    ends = time.monotonic() + 5
    while any(thread.name == "chunkweave-remote" for thread in threading.enumerate()):
        assert time.monotonic() < ends, "a call is left over"
        time.sleep(0.01)
