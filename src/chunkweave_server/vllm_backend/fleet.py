"""The replicas: which are up, which one gets a request, how requests wait, and metrics of all."""

import asyncio
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chunkweave.config import StoreConfig
from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.ordering.arrangement import COUNTS_FILE, Arranged, Arranger, Promotion
from chunkweave.planning.adaptive_methods import promoted_length
from chunkweave.planning.method import reuses_nothing
from chunkweave.planning.method_choice import MethodChoice
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, is_neutral
from chunkweave.scheduling.queue import FairQueue, TenantWeights, VirtualTime, Waiting, waiting_path
from chunkweave.scheduling.routing import Candidate, ReplicaContents, make_routing
from chunkweave.types import ChunkId
from chunkweave_server.errors import HttpError
from chunkweave_server.metrics import MetricSample
from chunkweave_server.settings import Settings
from chunkweave_server.vllm_backend.process import VllmProcess
from chunkweave_server.vllm_backend.upstream import Upstream, UpstreamLateError, UpstreamLostError

logger = logging.getLogger(__name__)


_BURST_TOKENS = 4096
"""Work of a tenant that asks seldom which goes before that of others, whoever's turn it is."""


_POLL_S = 0.1


class NoReplicaError(HttpError):
    """No replica answers now."""

    def __init__(self) -> None:
        super().__init__(503, "no vLLM server is ready; try again", code="no_replica", retry_after_s=5)


@dataclass(slots=True, eq=False)
class Placed:
    """A request at the replica that computes it, its chunks in the order that suits that one.

    `expected_tokens` of it are assumed to be cached there; `work_tokens` are those left, its answer's among them.
    """

    replica: "Replica"
    prepared: PreparedRequest
    arranged: Arranged
    expected_tokens: int
    work_tokens: int
    released: asyncio.Future[None]
    tenant: str = ""
    waiting: Waiting[int] | None = None
    left: bool = False

    @property
    def prompt(self) -> Prompt:
        """As it is computed."""
        return self.arranged.prompt

    @property
    def promotion(self) -> Promotion | None:
        """Over what its exact prefix may grow; a conversation keeps whatever its next turn goes on from."""
        return self.arranged.promotion if self.prepared.turn is None else None


@dataclass(frozen=True, slots=True)
class Found:
    """What a replica says of one request that it prefilled: from what it took each part of the prompt (None: unknown).

    It had KV of `cached_tokens`, of which it may have computed some again. `store_tokens` are those that its store has
    room for, if it says so.
    """

    sources: Sequence[KVSource | None]
    cached_tokens: int
    store_tokens: int | None = None


@dataclass(slots=True, eq=False)
class Replica:
    """One vLLM server, or one data-parallel rank of it, as this server sees it.

    `running` requests were given to it; `outstanding_tokens` count those that wait for it, too. Others are
    `handed_through` beside these. Of the `prompt_tokens` of requests whose report has come, `expected_tokens` were
    assumed to be cached there, and `found_tokens` were.
    """

    name: str
    upstream: Upstream
    contents: ReplicaContents
    arranger: Arranger
    queue: FairQueue[int]
    up: bool = False
    running: int = 0
    handed_through: int = 0
    outstanding_tokens: int = 0
    served: int = 0
    prompt_tokens: int = 0
    expected_tokens: int = 0
    found_tokens: int = 0
    placed: dict[int, Placed] = field(default_factory=dict)


class ReplicaBusyError(UpstreamLateError):
    """A request's turn at a `replica` has not come in time."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(f"{replica.name} was not given a request in time: others are before it")
        self.replica = replica


class Fleet:
    """Routes requests and lets them wait. Belongs to one event loop.

    Each replica has a queue of its own, since what is cached differs; whoever is in it is given to that replica, or
    routed anew when it goes down. Tenants share the replicas by their weights: next is a request of the one whose
    requests were given the fewest tokens of work.
    """

    def __init__(self, upstreams: Sequence[Upstream], settings: Settings) -> None:
        """All replicas are down until they are said to be `up`."""
        self._fleet, self._max_waiting = settings.fleet, settings.batching.max_waiting
        self._store = settings.store
        self._routing = make_routing(settings.fleet.routing, settings.fleet.imbalance)
        self._weights = TenantWeights.parse(settings.batching.tenant_weight)
        self._time = VirtualTime(self._weights, burst=_BURST_TOKENS)
        self._numbers = itertools.count()
        self.replicas = tuple(_replica(one, settings, self._time) for one in upstreams)
        self.on_idle: Callable[[], None] | None = None
        """Called when a request has left and nothing is under way."""

    def save_counts(self) -> None:
        """Keep what was asked for over a restart, if segments are."""
        for replica in self.replicas:
            replica.arranger.save(_counts_file(self._store, replica.name))

    @property
    def ready(self) -> bool:
        """Whether any replica is up."""
        return any(replica.up for replica in self.replicas)

    @property
    def waiting(self) -> int:
        """Requests that wait in all queues."""
        return sum(len(replica.queue) for replica in self.replicas)

    @property
    def running(self) -> int:
        """Requests that replicas were given and have not answered."""
        return sum(replica.running for replica in self.replicas)

    def up(self, server: str) -> None:
        """The replicas of a server answer from now on; they hold nothing yet."""
        for replica in self._of(server):
            if not replica.up:
                replica.contents.clear()
                replica.up = True
                self._release(replica)

    def down(self, server: str) -> None:
        """The replicas of a server answer no more: requests that wait for them fail, and are placed anew."""
        for replica in self._of(server):
            replica.up = False
            for number, placed in list(replica.placed.items()):
                if replica.queue.of(placed.tenant).remove(number) and not placed.released.done():
                    placed.released.set_exception(UpstreamLostError(f"{server} is gone"))

    def least_loaded(self, *, avoid: Replica | None = None) -> Replica:
        """For what is handed through; `avoid` only if there is no other.

        Raises:
            NoReplicaError: none is up.
        """
        return min(self._up(), key=lambda one: (one is avoid, one.outstanding_tokens, one.handed_through, one.served))

    async def place(
        self,
        prepared: PreparedRequest,
        *,
        avoid: Replica | None = None,
        like: Placed | Replica | None = None,
        counted: bool = True,
        tenant: str = "",
        within_s: float | None = None,
    ) -> Placed:
        """Route a request and wait for its turn; `leave` it.

        If another replica is up, it waits no longer than `within_s` in the queue of one. `avoid` is taken only if there
        is no other. A request that was prefilled ahead goes where that was, in the same order, if that replica is still
        up: `like` it. One `like` a replica goes there as it was prepared. A speculative request is not `counted` by
        orderings.

        Raises:
            NoReplicaError: none is up.
            QueueFullError: as many wait as may, and the tenant's share of them.
            UpstreamLostError: the replica went down meanwhile: place it anew.
            ReplicaBusyError: its turn has not come in time: place it anew, and avoid that replica.
        """
        replicas = self._up()
        if avoid is not None and len(replicas) > 1:
            replicas = [one for one in replicas if one is not avoid]
        waiting = Counter[str]()
        for one in self.replicas:
            waiting.update({other: one.queue.waiting(other) for other in one.queue.tenants})
        self._weights.refuse_if_full(tenant, waiting, self._max_waiting)
        placed = self._choose(prepared, replicas, like)
        placed.tenant = tenant
        number = next(self._numbers)
        replica = placed.replica
        path, _ = _reusable(placed.prompt, prepared.choice)
        replica.placed[number] = placed
        replica.outstanding_tokens += placed.work_tokens
        if counted:
            replica.arranger.count(placed.prompt, free=placed.arranged.free, tenant=prepared.request.tenant)
        self._time.join(tenant)
        queue = replica.queue.of(tenant)
        placed.waiting = queue.submit(
            number,
            waiting_path(path, weaves=prepared.weaves, recomputed=prepared.choice.recomputed_share or 0.0),
            len(placed.prompt),
        )
        self._release(replica)
        try:
            async with asyncio.timeout(within_s if len(replicas) > 1 else None):
                await placed.released
        except TimeoutError:
            self.leave(placed)
            raise ReplicaBusyError(replica) from None
        except BaseException:
            self.leave(placed)
            raise
        return placed

    def suited(self, prepared: PreparedRequest, *, avoid: Replica | None = None) -> Replica:
        """The replica that a request would be given to now; `avoid` only if there is no other.

        Raises:
            NoReplicaError: none is up.
        """
        replicas = self._up()
        others = [one for one in replicas if one is not avoid]
        return self._choose(prepared, others or replicas, None).replica

    async def until_another(self, failed: Replica | None, within_s: float) -> None:
        """Wait until another replica is up than one that `failed`, or that answers again; no longer than `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not any(one.up and one is not failed for one in self.replicas):
                    if failed is not None and failed.up and await failed.upstream.healthy():
                        return
                    await asyncio.sleep(_POLL_S)

    def leave(self, placed: Placed, *, served: bool = False) -> None:
        """A request has its answer, or will not get it here; a second time is harmless."""
        if placed.left:
            return
        placed.left = True
        replica = placed.replica
        assert placed.waiting is not None, "it was submitted"
        number = placed.waiting.request
        del replica.placed[number]
        replica.outstanding_tokens -= placed.work_tokens
        replica.served += served
        waited = replica.queue.of(placed.tenant).remove(number)
        if not waited and placed.released.done() and not _failed(placed.released):
            replica.running -= 1
        if self._time.leave(placed.tenant):
            for one in self.replicas:
                one.queue.forget(placed.tenant)
        self._release(replica)
        if not self.running and not self.waiting and self.on_idle is not None:
            self.on_idle()

    def served(self, placed: Placed, found: Found | None) -> None:
        """A replica has prefilled a request: from now on it holds its chunks.

        What it `found` corrects what was assumed of it, and its store's size; None: it has not said.
        """
        replica, weaves = placed.replica, placed.prepared.weaves
        path, sizes = _stored(placed.prompt)
        contents = replica.contents
        if found is not None:
            replica.prompt_tokens += len(placed.prompt)
            replica.expected_tokens += placed.expected_tokens
            replica.found_tokens += found.cached_tokens
            if found.store_tokens is not None:
                contents.resize(min(found.store_tokens, self._fleet.mirror_tokens))
            continued = frozenset[ChunkId]() if placed.promotion is None else placed.promotion.continued
            sources = zip(placed.prompt.parts, found.sources, strict=True)
            stored = [None if part.id in continued else source for part, source in sources if part.id is not None]
            contents.correct(path, sizes, stored, weaves=weaves)
        if not weaves and placed.promotion is not None and (kept := placed.promotion.kept) is not None:
            head = sum(part.kind is PartKind.SYSTEM for part in placed.prompt.parts)
            known = contents.tree.match(path).nodes - head
            length = head + promoted_length([chunk in kept for chunk in path[head:]], max(0, known))
            path, sizes = path[:length], sizes[:length]
        contents.note(path, sizes, weaves=weaves)

    def _choose(self, prepared: PreparedRequest, replicas: Sequence[Replica], like: Placed | Replica | None) -> Placed:
        options: dict[str, Placed] = {}
        candidates: list[Candidate] = []
        there = like.replica if isinstance(like, Placed) else like
        if there is not None and there in replicas:
            replicas = [there]
        for replica in replicas:
            if like is not None and there is replica:
                arranged = like.arranged if isinstance(like, Placed) else prepared.arranged
            else:
                arranged = replica.arranger.arrange(
                    prepared.prompt, prepared.order, counted=False, tenant=prepared.request.tenant
                )
            path, sizes = _reusable(arranged.prompt, prepared.choice)
            cached = replica.contents.cached_tokens(path, sizes, weaves=prepared.weaves)
            work = len(arranged.prompt) - cached + prepared.room
            released = asyncio.get_running_loop().create_future()
            options[replica.name] = Placed(replica, prepared, arranged, cached, work, released)
            # Every replica has the instruction and the neutral passages: they do not count for the route.
            everywhere = sum(len(part) for part in arranged.prompt.parts if _stored_everywhere(part))
            of_chunks = max(0, cached - everywhere)
            candidates.append(Candidate(replica.name, replica.outstanding_tokens, of_chunks, replica.contents.tokens))
        return options[self._routing.choose(len(prepared.prompt), candidates).name]

    def _release(self, replica: Replica) -> None:
        """Give a replica what it may have: of the tenant that was served least, the most cached first."""
        while replica.up and replica.running < self._fleet.replica_requests:
            waiting = replica.queue.pop()
            if waiting is None:
                return
            placed = replica.placed[waiting.request]
            if not placed.released.done():
                replica.running += 1
                self._time.charge(placed.tenant, placed.work_tokens)
                placed.released.set_result(None)

    def _up(self) -> list[Replica]:
        found = [replica for replica in self.replicas if replica.up]
        if not found:
            raise NoReplicaError
        return found

    def _of(self, server: str) -> list[Replica]:
        return [replica for replica in self.replicas if replica.upstream.server == server]


def _replica(upstream: Upstream, settings: Settings, time: VirtualTime) -> Replica:
    contents = ReplicaContents(settings.fleet.mirror_tokens)
    queue: FairQueue[int] = FairQueue(contents, time, window=settings.batching.window)
    arranger = Arranger(settings.ordering, contents.tree)
    arranger.load(_counts_file(settings.store, upstream.name))
    return Replica(upstream.name, upstream, contents, arranger, queue)


def _counts_file(store: StoreConfig, replica: str) -> Path | None:
    return None if store.cache_dir is None else store.cache_dir / f"{replica}-{COUNTS_FILE}"


def _stored_everywhere(part: PromptPart) -> bool:
    return part.kind is PartKind.SYSTEM or (part.id is not None and is_neutral(part.id))


def _stored(prompt: Prompt) -> tuple[list[ChunkId], list[int]]:
    """Ids and sizes of the parts that a replica stores."""
    stored = [(part.id, len(part)) for part in prompt.parts if part.id is not None]
    return [chunk for chunk, _ in stored], [size for _, size in stored]


def _reusable(prompt: Prompt, choice: MethodChoice) -> tuple[list[ChunkId], list[int]]:
    """Those that its method may take from there."""
    return ([], []) if reuses_nothing(choice.method, choice.reuse) else _stored(prompt)


def _failed(future: "asyncio.Future[None]") -> bool:
    return future.cancelled() or future.exception() is not None


_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?P<labels>.*)\})?(?P<rest>\s.*)")


def labelled(expositions: Mapping[str, str]) -> str:
    """Prometheus texts by the name of their server, as one text with the label `replica`.

    Samples of one metric stand together, behind its description, as the format wants it.
    """
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in expositions.items():
        family, seen = "", set[str]()
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if family not in about or family in seen:
                    about.setdefault(family, []).append(line)
                    seen.add(family)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_with_label(line, replica))
    lines = [line for family in samples for line in (*about.get(family, ()), *samples[family])]
    return "\n".join(lines) + "\n" if lines else ""


def fleet_samples(fleet: Fleet, processes: Sequence[VllmProcess], retries: int) -> Iterator[MetricSample]:
    """What this server knows of its replicas."""
    for name, meaning, number in (
        ("running", "Requests given to vLLM servers.", fleet.running),
        ("waiting", "Requests that wait for one here.", fleet.waiting),
    ):
        yield MetricSample(f"num_requests_{name}", meaning, {"": number})
    for name, meaning, value in (
        ("up", "Whether a vLLM server answers.", lambda one: one.up),
        ("requests_running", "Requests given to a vLLM server.", lambda one: one.running),
        ("requests_waiting", "Requests that wait for one here.", lambda one: len(one.queue)),
        ("outstanding_tokens", "Tokens that it has still to compute, by estimate.", lambda one: one.outstanding_tokens),
        ("mirror_tokens", "Tokens that its segment store is assumed to hold.", lambda one: one.contents.tokens),
        ("mirror_budget_tokens", "Most tokens of that.", lambda one: one.contents.budget_tokens),
    ):
        values = {one.name: float(value(one)) for one in fleet.replicas}
        yield MetricSample(f"replica_{name}", meaning, values, "replica")
    for name, meaning, value in (
        ("requests", "Requests with documents that it answered.", lambda one: one.served),
        ("prompt_tokens", "Prompt tokens of requests that it has reported on.", lambda one: one.prompt_tokens),
        ("expected_tokens", "Of these, tokens assumed to be cached there.", lambda one: one.expected_tokens),
        ("found_tokens", "Of these, tokens that were.", lambda one: one.found_tokens),
    ):
        values = {one.name: float(value(one)) for one in fleet.replicas}
        yield MetricSample(f"replica_{name}", meaning, values, "replica", counter=True)
    if restarts := {one.name: one.restarts for one in processes}:
        yield MetricSample("replica_restarts", "How often it was started again.", restarts, "replica", counter=True)
    yield MetricSample("request_retries", "Requests that were given to a server again.", {"": retries}, counter=True)


def _with_label(line: str, replica: str) -> str:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return line
    labels = ",".join(filter(None, (f'replica="{replica}"', found["labels"])))
    return f"{found['name']}{{{labels}}}{found['rest']}"
