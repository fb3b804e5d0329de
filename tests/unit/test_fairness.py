"""Tenants share queue, steps, places and memory by their weights: simulated, a step's time being that of its tokens."""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import pytest

from chunkweave.config import ReuseConfig
from chunkweave.engine.request_state import RequestState, RequestStatus
from chunkweave.engine.scheduler import Scheduler
from chunkweave.errors import QueueFullError, UsageError
from chunkweave.planning.method_choice import MethodChoice, Why
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.scheduling.queue import CacheAwareQueue, FairQueue, TenantWeights, VirtualTime
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.types import ChunkId

EXACT = MethodChoice("prefix", ReuseConfig(), Why.EXACT)


class Job:
    """A prefill that can be cut anywhere."""

    loading = False
    layers_ready = None
    can_be_cut = True
    lost = None

    def __init__(self, tokens: int) -> None:
        self.next_tokens = self.remaining_tokens = tokens

    def close(self) -> None:
        pass


class Decode:
    """What a scheduler asks of a request that decodes."""

    generated = pending = ()
    position = 0

    def __init__(self) -> None:
        self.prefilled = SimpleNamespace(cache=SimpleNamespace(grow=lambda _: None, capacity=0))
        self.steps = 0

    def let_go(self) -> None:
        pass


class Prompt:
    parts = ()

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens


class Simulation:
    """A server whose step takes 10 ms and 1 ms a token, unless it is set otherwise."""

    step_s, token_s = 0.01, 0.001

    def __init__(self, *weights: str, **limits: int) -> None:
        config = BatchingConfig(tenant_weight=weights, window=4, **{"kv_tokens": 65536, **limits})
        self.scheduler = Scheduler(
            SimpleNamespace(tree=KnowledgeTree(["host"]), chunk_tokens=lambda _: 0),
            config,
            preempting=lambda one: self.preempted.append(one),
            clock=lambda: self.now_s,
        )
        self.preempted: list[RequestState] = []
        self.served: list[RequestState] = []
        self.prefilled: Counter[str] = Counter()
        self.drafts: Counter[str] = Counter()
        self.now_s, self.steps = 0.0, 0
        self._numbers = itertools.count()
        self._answers: dict[RequestState, int] = {}

    def submit(self, tenant: str, tokens: int, answer: int = 8, **options: bool) -> RequestState:
        prepared = SimpleNamespace(prompt=Prompt(tokens), choice=EXACT)
        request = RequestState(next(self._numbers), prepared, lambda _: None, self.now_s, tenant=tenant, **options)
        self._answers[request] = answer
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        for request in self.scheduler.admit():
            request.job = Job(len(request.prepared.prompt))
        took = 0
        for group in self.scheduler.groups():
            self.scheduler.computed(group, [self.drafts[request.tenant] for request in group.decoding])
            took += len(group.decoding) + sum(tokens for _, tokens in group.pieces)
            since_s, self.now_s = self.now_s, self.now_s + self.step_s + self.token_s * took
            if self.scheduler.planner.holds:
                self.scheduler.planner.ran(group, since_s)
            for request, tokens in group.pieces:
                self._prefill(request, tokens)
            for request in group.decoding:
                request.decode.steps += 1
                if request.decode.steps >= self._answers[request]:
                    self.scheduler.end(request)
                    self.served.append(request)
        if not took:
            self.now_s += 0.01
        self.steps += 1
        if self.steps % 50 < 5:
            self.scheduler.check()

    def take_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def prefill(self, request: RequestState) -> None:
        """Take steps until the request has its first token."""
        while request.decode is None:
            self.step()

    def _prefill(self, request: RequestState, tokens: int) -> None:
        self.prefilled[request.tenant] += tokens
        request.job.next_tokens -= tokens
        request.job.remaining_tokens -= tokens
        if not request.job.remaining_tokens:
            request.job, request.status = None, RequestStatus.DECODING
            if request.decode is None:
                request.decode, request.first_token_s = Decode(), self.now_s

    def run(self, arrivals: Iterable[tuple[float, str, int]], until_s: float) -> None:
        left = sorted(arrivals)
        while self.now_s < until_s:
            while left and left[0][0] <= self.now_s:
                arrived_s, tenant, tokens = left.pop(0)
                self.submit(tenant, tokens).arrived_s = arrived_s
            self.step()

    def p99_s(self, tenant: str) -> float:
        times = sorted(one.first_token_s - one.arrived_s for one in self.served if one.tenant == tenant)
        assert len(times) > 20
        return times[int(0.99 * (len(times) - 1))]


def arrivals(tenant: str, *, every_s: float, until_s: float, seed: int, tokens: int = 1000) -> Sequence[tuple]:
    draw, at_s, found = random.Random(seed), 0.0, []
    while (at_s := at_s + draw.expovariate(1 / every_s)) < until_s:
        found.append((at_s, tenant, tokens))
    return found


@pytest.mark.parametrize(("weights", "most"), [((), 2.2), (("good=4",), 1.5)])
def test_a_tenant_that_behaves_is_served_as_if_others_did_too(weights: tuple[str, ...], most: float) -> None:
    """One asks for twice what can be served; the other for a tenth of it, prompts of 1000 tokens."""
    until_s, sustainable_s = 800.0, 1.1
    good = arrivals("good", every_s=10 * sustainable_s, until_s=until_s, seed=1)
    bad = arrivals("bad", every_s=sustainable_s / 2, until_s=until_s, seed=2)
    alone, together = Simulation(), Simulation(*weights)
    alone.run(good, until_s)
    together.run([*good, *bad], until_s)
    ratio = together.p99_s("good") / alone.p99_s("good")
    assert ratio <= most
    alone_bad = Simulation()
    alone_bad.run(bad, until_s)
    assert together.prefilled["bad"] > 0.75 * alone_bad.prefilled["bad"], "what is left is the other's"


@pytest.mark.parametrize(("weights", "ratio"), [((), 1.0), (("a=4",), 4.0), (("b=0.5",), 2.0)])
def test_of_two_that_want_all_each_gets_its_share(weights: tuple[str, ...], ratio: float) -> None:
    run = Simulation(*weights)
    for _ in range(120):
        run.submit("a", 700)
        run.submit("b", 300)
        run.submit("b", 300)
    run.take_steps(100)
    before = run.prefilled.copy()
    run.take_steps(400)
    a, b = (run.prefilled[tenant] - before[tenant] for tenant in "ab")
    assert a / b == pytest.approx(ratio, rel=0.15)


def test_draft_tokens_are_paid_for() -> None:
    shares = []
    for drafts in (0, 9):
        run = Simulation()
        run.drafts["a"] = drafts
        for _ in range(150):
            for tenant in "ab":
                run.submit(tenant, 300, answer=20)
        run.take_steps(300)
        shares.append(run.prefilled["a"] / run.prefilled["b"])
    assert shares[1] < 0.85 * shares[0]


def test_a_lone_tenant_sees_no_difference() -> None:
    """The order in which a single queue would serve, and nobody is preempted."""
    tree: KnowledgeTree[ChunkId] = KnowledgeTree(["host"])
    draw, one = random.Random(3), CacheAwareQueue[int](tree, window=3)
    fair: FairQueue[int] = FairQueue(tree, VirtualTime(), window=3)
    for number in range(200):
        size = draw.randrange(1, 50)
        one.submit(number, (), size)
        fair.of("me").submit(number, (), size)
        if draw.random() < 0.5:
            limit = draw.randrange(1, 60)
            chosen = [queue.pop(lambda it: it.prompt_tokens < limit) for queue in (one, fair)]  # noqa: B023
            assert chosen[0] == chosen[1]
        assert one.next(5) == fair.next(5)
    run = Simulation(kv_tokens=8192)
    for _ in range(30):
        run.submit("me", 900)
    while run.scheduler.requests:
        run.step()
    assert not run.preempted


def test_what_is_lent_is_taken_back_from_the_youngest_and_never_the_last_of_a_tenant() -> None:
    run = Simulation(max_running=4)
    first = [run.submit("a", 400, answer=1000) for _ in range(6)]
    run.take_steps(5)
    assert [one.runs for one in first] == [True] * 4 + [False] * 2
    second = [run.submit("b", 100, answer=1000) for _ in range(3)]
    run.step()
    assert [one.runs for one in second] == [True, True, False]
    assert run.preempted == [first[3], first[2]]
    others = [run.submit(name, 100, answer=1000) for name in "cdef"]
    run.step()
    assert [one.runs for one in others] == [True, True, False, False], "a place for each, as far as there are"
    assert run.preempted[2:] == [second[1], first[1]] or run.preempted[2:] == [first[1], second[1]]


def test_memory_is_taken_back_too() -> None:
    run = Simulation(max_running=8, kv_tokens=4096)
    large = [run.submit("a", 1300, answer=1000) for _ in range(3)]
    run.step()
    assert [one.runs for one in large] == [True] * 3
    other = run.submit("b", 1000, answer=4)
    run.step()
    assert other.runs
    assert run.preempted == [large[2]]
    too_much = run.submit("b", 2000)
    run.step()
    assert not too_much.runs, "with it b would have more than its half"
    assert len(run.preempted) == 1


def test_what_was_saved_up_while_idle_does_not_count() -> None:
    time = VirtualTime(TenantWeights({"a": 2.0}))
    time.join("a")
    time.charge("a", 1000)
    time.join("b")
    assert time.of("a") == time.of("b") == 500
    time.charge("b", 100)
    assert time.leave("b")
    time.charge("a", 2000)
    time.join("b")
    assert time.of("b") == 1500
    assert time.share("a") == pytest.approx(2 / 3)
    assert time.leave("a")
    assert time.leave("b")
    time.join("c")
    assert time.of("c") == 1500, "nor does it that nobody was there"
    assert list(time.tenants) == ["c"]


def test_a_step_is_stopped_for_a_tenant_that_asks_seldom_and_it_pays_for_that() -> None:
    run = Simulation(step_tokens=100, max_running=3)
    scheduler = run.scheduler

    def coming(tenant: str, **options: bool) -> RequestState:
        prepared = SimpleNamespace(prompt=Prompt(100), choice=EXACT)
        return RequestState(1000, prepared, lambda _: None, run.now_s, tenant=tenant, **options)

    assert not scheduler.stops(coming("b")), "nothing runs"
    for _ in range(3):
        run.submit("a", 1000)
    run.step()
    assert scheduler.stops(coming("b"))
    assert not scheduler.stops(coming("b", speculative=True))
    assert not scheduler.stops(coming("a")), "its others run"
    first = coming("b")
    first.discarded_tokens = 1530
    scheduler.add(first)
    assert not scheduler.stops(coming("b")), "it has one under way"
    scheduler.end(first)
    assert not scheduler.stops(coming("b")), "it has paid, and is less than a step behind"
    run.step()
    assert scheduler.stops(coming("b"))
    assert not scheduler.stops(coming("b", background=True))


def test_a_tenant_whose_requests_do_not_fit_is_not_passed_over_for_ever() -> None:
    time = VirtualTime()
    queue: FairQueue[str] = FairQueue(KnowledgeTree(["host"]), time, window=2)
    queue.of("a").submit("large", (), 100)
    for number in range(5):
        queue.of("b").submit(f"small {number}", (), 1)
    time.join("a")
    time.join("b")
    time.charge("b", 1)

    def next_small() -> str | None:
        found = queue.pop(lambda one: one.prompt_tokens < 10)
        return None if found is None else found.request

    assert [next_small() for _ in range(3)] == ["small 0", "small 1", None]
    found = queue.pop()
    assert found is not None
    assert found.request == "large"
    assert next_small() == "small 2"
    queue.forget("b")
    assert (len(queue), queue.tenants) == (0, [])
    queue.close()


def test_who_waits_beyond_its_share_is_refused_alone() -> None:
    weights = TenantWeights.parse(["a=3"])
    weights.refuse_if_full("a", {"a": 9}, 10)
    with pytest.raises(QueueFullError, match="10 requests are already pending"):
        weights.refuse_if_full("a", {"a": 10}, 10)
    weights.refuse_if_full("b", {"a": 10}, 10)
    weights.refuse_if_full("b", {"a": 10, "b": 2}, 10)
    with pytest.raises(QueueFullError):
        weights.refuse_if_full("b", {"a": 10, "b": 3}, 10)


@pytest.mark.parametrize("entry", ["acme", "acme=", "=2", "acme=0", "acme=-1", "acme=nan", "acme=inf", "acme=much"])
def test_weights_that_are_none(entry: str) -> None:
    with pytest.raises(UsageError, match="NAME=WEIGHT"):
        TenantWeights.parse([entry])
