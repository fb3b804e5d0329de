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
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import chunkweave
from chunkweave.errors import UsageError
from chunkweave.kv.segment import SegmentKV
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.blobs import BlobKey, BlobRefused, BlobStore, RedisBlobs
from chunkweave.tiers.remote import RemoteTier
from chunkweave.tiers.remote_calls import (
    Backoff,
    BreakerState,
    CircuitBreaker,
    Permit,
    RemoteCalls,
    RemoteGarbage,
    RemoteUnavailable,
)
from chunkweave.types import SegmentId
from tests.integration.redis_server import PASSWORD, Proxy, Server
from tests.integration.test_remote_tier import FINGERPRINT, assert_same, make_segment

SLACK_S = 2.0
"""For a machine that is busy with other things; calls without a limit would take ten times as long."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


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


def stored(url: str, seed: int) -> tuple[SegmentRecord, SegmentKV]:
    """A segment that a patient tier has put there."""
    record, payload = make_segment(seed)
    make_tier(RedisBlobs(url)).put(record, payload)
    return record, payload


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
    began = time.monotonic()
    for _ in range(100):
        assert tier.get(record.id) is None
        assert tier.nbytes(record.id) == 0
    assert time.monotonic() - began < 3 * SLACK_S
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
    assert tier.available
    assert [entry.getMessage() for entry in caplog.records if "works again" in entry.getMessage()]
    assert len(warnings_in(caplog)) == 1


def test_a_restarted_server_with_its_data_is_used_again(tmp_path: Path) -> None:
    server = Server(tmp_path, lines=("appendonly yes", "appendfsync always"))
    server.start()
    try:
        tier = make_tier(RedisBlobs(server.url))
        record, payload = make_segment(2)
        tier.put(record, payload)
        server.kill()
        assert tier.get(record.id) is None
        server.start()
        wait_until_found(tier, record.id)
        assert_same(tier.get(record.id), payload)
    finally:
        server.kill()


def test_a_restart_between_two_calls_is_not_even_noticed(tmp_path: Path) -> None:
    server = Server(tmp_path, lines=("appendonly yes", "appendfsync always"))
    server.start()
    try:
        tier = make_tier(RedisBlobs(server.url))
        record, payload = make_segment(3)
        tier.put(record, payload)
        server.kill()
        server.start()
        assert_same(tier.get(record.id), payload)  # the dead connection costs a retry
        assert tier.stats.unavailable == 0
    finally:
        server.kill()


def test_a_server_killed_while_clients_read_and_write(server: Server) -> None:
    segments = [make_segment(seed, tokens=64) for seed in range(8)]
    tier = make_tier(RedisBlobs(server.url), deadline_s=0.5)
    problems: list[BaseException] = []
    slowest = [0.0]
    stop = threading.Event()

    def work(offset: int) -> None:
        rng = random.Random(offset)
        try:
            while not stop.is_set():
                record, payload = rng.choice(segments)
                began = time.monotonic()
                if rng.random() < 0.5:
                    with suppress(OSError):
                        tier.put(record, payload)
                else:
                    found = tier.get(record.id)
                    if found is not None:
                        assert_same(found, payload)
                slowest[0] = max(slowest[0], time.monotonic() - began)
        except BaseException as problem:  # noqa: BLE001  (shown by the test)
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(0.25)
        server.kill()
        time.sleep(0.1)
        server.start()
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems
    assert tier.stats.garbage == 0
    assert tier.stats.hits > 0
    assert slowest[0] < 0.5 + SLACK_S


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
            began = time.monotonic()
            assert tier.get(make_segment(4)[0].id) is None
            assert tier.nbytes(make_segment(4)[0].id) == 0
            with pytest.raises(OSError, match="ends after 0 segments"):
                next(tier.records())
            assert time.monotonic() - began < 3 * (0.5 + SLACK_S)
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
    assert tier.available
    assert_same(tier.get(record.id), payload)
    assert tier.stats.failed_puts == 5


# ---------------------------------------------------------------- a network that fails


def test_a_server_that_hangs(server: Server) -> None:
    tier = make_tier(RedisBlobs(server.url, read_timeout_s=0.2), deadline_s=0.3)
    record, _ = stored(server.url, 16)
    server.pause()
    try:
        for call in (tier.get, tier.nbytes, tier.delete):
            began = time.monotonic()
            with pytest.raises(OSError, match="did not confirm") if call == tier.delete else nullcontext():
                call(record.id)
            assert time.monotonic() - began < 0.3 + SLACK_S
        assert tier.stats.unavailable == 2
        assert tier.undeleted == (record.id,)
    finally:
        server.resume()
    ends = time.monotonic() + 5
    while tier.settle_deletions():
        assert time.monotonic() < ends
        time.sleep(0.05)
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
    wait_until_idle(tier._calls)  # while replies still trickle: the call was cut
    proxy.byte_delay_s = 0.0
    wait_until_found(tier, record.id)
    assert_same(tier.get(record.id), payload)


def test_a_slow_remote_opens_the_breaker_and_costs_nothing_more(proxy: Proxy) -> None:
    record, _ = stored(url_of(proxy), 8)
    tier = make_tier(RedisBlobs(url_of(proxy), read_timeout_s=0.1), deadline_s=0.25, cool_down_s=30.0)
    proxy.reply_delay_s = 1.0
    began = time.monotonic()
    for _ in range(50):
        assert tier.get(record.id) is None
    assert time.monotonic() - began < 3 * (0.25 + SLACK_S)
    assert tier.breaker.state is BreakerState.OPEN


def test_a_remote_slower_than_the_limit_is_given_up_though_it_answers(proxy: Proxy) -> None:
    record, _ = stored(url_of(proxy), 9)
    breaker = CircuitBreaker("remote store", slow_s=0.05, cool_down_s=30.0)
    tier = RemoteTier(RedisBlobs(url_of(proxy)), FINGERPRINT, deadline_s=5.0, breaker=breaker)
    proxy.reply_delay_s = 0.1
    found = [tier.get(record.id) for _ in range(10)]
    assert [segment is not None for segment in found] == [True] * 3 + [False] * 7


@pytest.mark.parametrize("cut_after_bytes", [0, 1, 40, 1500])
def test_a_connection_cut_in_mid_reply(proxy: Proxy, cut_after_bytes: int) -> None:
    record, payload = stored(url_of(proxy), 10)
    tier = make_tier(RedisBlobs(url_of(proxy)), deadline_s=0.5)
    proxy.cut_after_bytes = cut_after_bytes
    began = time.monotonic()
    assert tier.get(record.id) is None
    assert time.monotonic() - began < 0.5 + SLACK_S
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
    began = time.monotonic()
    assert tier.get(make_segment(11)[0].id) is None
    with pytest.raises(OSError, match="ends after 0 segments"):
        next(tier.records())
    with pytest.raises(RemoteUnavailable):
        tier.put(*make_segment(11))
    with pytest.raises(OSError, match="did not confirm"):
        tier.delete(make_segment(11)[0].id)
    assert time.monotonic() - began < 2 * SLACK_S


# ---------------------------------------------------------------- deletions win


def test_a_deletion_that_did_not_arrive_is_owed(server: Server, proxy: Proxy) -> None:
    record, payload = make_segment(12)
    tier, other = make_tier(RedisBlobs(url_of(proxy))), make_tier(RedisBlobs(server.url))
    tier.put(record, payload)
    proxy.cut_after_bytes = 0
    proxy.drop()
    assert tier.nbytes(record.id) == 0  # every attempt fails, and the breaker opens
    assert not tier.available
    with pytest.raises(OSError, match="did not confirm"):
        tier.delete(record.id)
    assert tier.undeleted == (record.id,)
    assert tier.stats.failed_deletes == 1
    proxy.cut_after_bytes = None
    assert tier.get(record.id) is None, "deleted is deleted, though it is still there"
    assert_same(other.get(record.id), payload)
    time.sleep(0.3)
    tier.put(*make_segment(13))
    assert tier.undeleted == ()
    assert other.get(record.id) is None


class Stuck:
    """Blobs in a dict; puts wait until they are let through."""

    name, expires = "stuck", False

    def __init__(self) -> None:
        self.data: dict[BlobKey, bytes] = {}
        self.gate = threading.Event()
        self.closed = 0

    def get(self, key: BlobKey, first_bytes: int | None = None) -> bytes | None:
        return self.data.get(key, b"")[:first_bytes] or None

    def put(self, key: BlobKey, data: bytes, ttl_s: float | None = None) -> None:
        self.gate.wait(10)
        self.data[key] = data

    def delete(self, key: BlobKey) -> None:
        self.data.pop(key, None)

    def size(self, key: BlobKey) -> int | None:
        return len(self.data[key]) if key in self.data else None

    def keys(self, fingerprint: str) -> Iterator[BlobKey]:
        return iter(tuple(self.data))

    def close(self) -> None:
        self.closed += 1


def test_a_put_that_arrives_after_its_deletion_leaves_nothing() -> None:
    blobs = Stuck()
    tier = make_tier(blobs, deadline_s=0.1)
    record, payload = make_segment(14)
    with pytest.raises(TimeoutError):
        tier.put(record, payload)
    assert blobs.closed == 1
    tier.delete(record.id)
    blobs.gate.set()
    wait_until_idle(tier._calls)
    assert blobs.data == {}
    assert tier.undeleted == ()


def test_an_abandoned_put_that_arrives_is_whole() -> None:
    blobs = Stuck()
    tier = make_tier(blobs, deadline_s=0.1)
    record, payload = make_segment(15)
    with pytest.raises(TimeoutError):
        tier.put(record, payload)
    blobs.gate.set()
    wait_until_idle(tier._calls)
    assert_same(tier.get(record.id), payload)


def test_stuck_calls_are_bounded() -> None:
    gate = threading.Event()
    breaker = CircuitBreaker("x", failures_to_open=1000)
    calls = RemoteCalls(deadline_s=0.05, breaker=breaker, max_calls=3, backoff=Backoff(retries=0))
    for _ in range(6):
        with pytest.raises(TimeoutError):
            calls.call(lambda: gate.wait(10))
    assert calls.running == 3
    gate.set()
    wait_until_idle(calls)
    assert calls.call(lambda: 7) == 7


def test_workers_are_reused_and_bounded_under_load() -> None:
    calls = RemoteCalls(deadline_s=5.0, breaker=CircuitBreaker("x"), max_calls=4)
    seen: set[int] = set()
    most = [0]

    def operation() -> int:
        seen.add(threading.get_ident())
        most[0] = max(most[0], calls.running)
        time.sleep(0.001)
        return threading.get_ident()

    threads = [threading.Thread(target=lambda: [calls.call(operation) for _ in range(20)]) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) <= 4
    assert most[0] <= 4
    assert calls.running == 0


def test_workers_with_nothing_to_do_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkweave.tiers.remote_calls._IDLE_S", 0.05)
    calls = RemoteCalls(deadline_s=5.0, breaker=CircuitBreaker("x"))
    worker = calls.call(threading.get_ident)
    ends = time.monotonic() + 5
    while worker in {thread.ident for thread in threading.enumerate()}:
        assert time.monotonic() < ends
        time.sleep(0.02)
    for _ in range(30):  # calls at about the moment at which workers give up
        assert calls.call(lambda: 7) == 7
        time.sleep(0.05)


def test_a_forked_child_makes_calls_of_its_own() -> None:
    program = (
        "import os\n"
        "from chunkweave.tiers.remote_calls import CircuitBreaker\n"
        "from chunkweave.tiers.remote_calls import RemoteCalls\n"
        "calls = RemoteCalls(deadline_s=5.0, breaker=CircuitBreaker('x'))\n"
        "assert calls.call(lambda: 1) == 1\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if calls.call(lambda: 2) == 2 else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    run_python(program)


def test_a_stuck_call_does_not_keep_the_process(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from chunkweave.tiers.remote_calls import CircuitBreaker\n"
        "from chunkweave.tiers.remote_calls import RemoteCalls\n"
        "try:\n"
        "    RemoteCalls(deadline_s=0.05, breaker=CircuitBreaker('x')).call(lambda: time.sleep(60))\n"
        "except TimeoutError:\n"
        "    pass\n"
    )
    run_python(program)


# ---------------------------------------------------------------- retries and the breaker, on a clock of their own


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def failing(times: int, error: type[OSError] = ConnectionError) -> tuple[list[int], Callable[[], str]]:
    tries: list[int] = []

    def operation() -> str:
        tries.append(1)
        if len(tries) <= times:
            raise error("no")
        return "yes"

    return tries, operation


def make_calls(
    fake: FakeTime, *, deadline_s: float = 10.0, retries: int = 4, failures_to_open: int = 100
) -> RemoteCalls:
    return RemoteCalls(
        deadline_s=deadline_s,
        breaker=CircuitBreaker("x", clock=fake.clock, failures_to_open=failures_to_open),
        backoff=Backoff(base_s=1.0, cap_s=3.0, retries=retries),
        clock=fake.clock,
        sleep=fake.sleep,
        rng=random.Random(0),
    )


def test_retries_back_off_with_jitter() -> None:
    fake = FakeTime()
    tries, operation = failing(4)
    assert make_calls(fake).call(operation) == "yes"
    assert len(tries) == 5
    rng = random.Random(0)
    assert fake.slept == [rng.uniform(0.0, limit) for limit in (1.0, 2.0, 3.0, 3.0)]


def test_retries_end_with_their_number_and_with_the_deadline() -> None:
    fake = FakeTime()
    tries, operation = failing(99)
    with pytest.raises(ConnectionError):
        make_calls(fake, retries=2).call(operation)
    assert len(tries) == 3
    fake = FakeTime()
    with pytest.raises(ConnectionError):
        make_calls(fake, deadline_s=2.0, retries=50).call(operation)
    assert sum(fake.slept) < 2.0


@pytest.mark.parametrize(("error", "counted"), [(PermissionError, True), (RemoteGarbage, True), (BlobRefused, False)])
def test_what_is_not_retried(error: type[OSError], counted: bool) -> None:
    fake = FakeTime()
    tries, operation = failing(99, error)
    calls = make_calls(fake, failures_to_open=1)
    with pytest.raises(error):
        calls.call(operation)
    assert len(tries) == 1
    assert (calls.breaker.state is BreakerState.OPEN) == counted


def test_an_open_breaker_is_asked_before_every_attempt() -> None:
    fake = FakeTime()
    tries, operation = failing(99)
    calls = make_calls(fake, failures_to_open=2)
    with pytest.raises(RemoteUnavailable):
        calls.call(operation)
    assert len(tries) == 2
    with pytest.raises(RemoteUnavailable):
        calls.call(operation)
    assert len(tries) == 2


def test_outcomes_from_before_a_change_do_not_count() -> None:
    fake = FakeTime()
    breaker = CircuitBreaker("x", failures_to_open=2, cool_down_s=10.0, clock=fake.clock)
    permits = [permit for permit in (breaker.ask() for _ in range(4)) if permit is not None]
    breaker.failed(permits[0], "no answer")
    breaker.failed(permits[1], "no answer")
    assert breaker.state is BreakerState.OPEN
    fake.now_s += 9.0
    breaker.failed(permits[2], "late")
    assert breaker.times_opened == 1
    fake.now_s += 1.0
    probe = breaker.ask()
    assert probe is not None, "a late failure does not put the probe off"
    breaker.succeeded(permits[3], 0.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.ask() is None
    breaker.succeeded(probe, 0.0)
    assert breaker.state is BreakerState.CLOSED


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError):
        CircuitBreaker("x", failures_to_open=0)
    with pytest.raises(UsageError):
        Backoff(retries=-1)
    with pytest.raises(UsageError):
        RemoteCalls(deadline_s=0.0, breaker=CircuitBreaker("x"))


FAILURES, SLOW_S, COOL_DOWN_S = 3, 1.0, 10.0


class BreakerMachine(RuleBasedStateMachine):
    """The breaker against a plain model; several permits may be out at once, and come back in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.breaker = CircuitBreaker(
            "x", failures_to_open=FAILURES, slow_s=SLOW_S, cool_down_s=COOL_DOWN_S, clock=lambda: self.now_s
        )
        self.state, self.failures, self.since_s, self.opened = BreakerState.CLOSED, 0, 0.0, 0
        self.era = 0
        self.out: list[tuple[Permit, int]] = []

    def _move(self, state: BreakerState) -> None:
        self.state, self.since_s, self.era = state, self.now_s, self.era + 1

    @rule()
    def ask(self) -> None:
        permit = self.breaker.ask()
        if self.state is not BreakerState.CLOSED and self.now_s - self.since_s >= COOL_DOWN_S:
            self._move(BreakerState.HALF_OPEN)
            assert permit is not None, "one probe after the cool-down"
        else:
            assert (permit is not None) == (self.state is BreakerState.CLOSED)
        if permit is not None:
            self.out.append((permit, self.era))

    @precondition(lambda self: self.out)
    @rule(data=st.data(), outcome=st.sampled_from(["fast", "slow", "failed"]))
    def hand_back(self, data: st.DataObject, outcome: str) -> None:
        permit, era = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        if outcome == "failed":
            self.breaker.failed(permit, "no answer")
        else:
            self.breaker.succeeded(permit, SLOW_S * (2.0 if outcome == "slow" else 0.5))
        if era != self.era:
            return
        if outcome == "fast":
            self.failures = 0
            if self.state is BreakerState.HALF_OPEN:
                self._move(BreakerState.CLOSED)
            return
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._move(BreakerState.OPEN)
        elif self.failures >= FAILURES:
            self._move(BreakerState.OPEN)
            self.opened += 1

    @rule(seconds=st.sampled_from([0.1, 3.0, COOL_DOWN_S, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def agrees(self) -> None:
        assert self.breaker.state is self.state
        assert self.breaker.times_opened == self.opened
        probes = [era for _, era in self.out if era == self.era]
        assert self.state is BreakerState.CLOSED or len(probes) <= 1
        assert self.state is not BreakerState.OPEN or not probes


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def wait_until_idle(calls: RemoteCalls) -> None:
    ends = time.monotonic() + 5
    while calls.running:
        assert time.monotonic() < ends, "a call is left over"
        time.sleep(0.01)
