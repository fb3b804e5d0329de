"""The replicas: their state, routing, queues and metrics."""

import asyncio
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.conversation.weave_request import StoredPart
from chunkweave.planning.method import reuses_nothing
from chunkweave.prompt.parts import PartKind, PromptPart, is_neutral
from chunkweave.scheduling.queue import FairQueue, StoredTokens, TenantWeights, VirtualTime, Waiting, waiting_path
from chunkweave.scheduling.routing import Candidate, Router, SentPaths
from chunkweave.types import CacheUse, ChunkId
from chunkweave_server.errors import HttpError
from chunkweave_server.metrics import MetricSample
from chunkweave_server.settings import Settings
from chunkweave_server.vllm_backend.process import VllmProcess
from chunkweave_server.vllm_backend.upstream import Upstream, UpstreamLateError, UpstreamLostError

logger = logging.getLogger(__name__)


_BURST_TOKENS = 4096
"""Tokens of work that an inactive tenant saves up: they are scheduled before other tenants' turns."""


_POLL_S = 0.1
_SENT_TOKENS = 2_000_000
"""Assumed tokens of a replica's segment store, for queues and orderings."""


class NoReplicaError(HttpError):
    """No replica is up."""

    def __init__(self) -> None:
        super().__init__(503, "no vLLM server is ready; try again", code="no_replica", retry_after_s=5)


@dataclass(slots=True, eq=False)
class Placed:
    """A request placed on a replica. `work_tokens` are those assumed to be computed there, and the answer's."""

    replica: "Replica"
    prepared: PreparedRequest
    work_tokens: int
    released: asyncio.Future[None]
    tenant: str = ""
    waiting: Waiting[int] | None = None
    left: bool = False


@dataclass(slots=True, eq=False)
class Replica:
    """State of one vLLM server, or of one of its data-parallel ranks.

    `running` requests are being computed there; `outstanding_tokens` also include those of its queue. `handed_through`
    counts forwarded requests, which are not in these. `sent` are the chunks that it is assumed to store.
    """

    name: str
    upstream: Upstream
    sent: SentPaths
    queue: FairQueue[int]
    up: bool = False
    running: int = 0
    handed_through: int = 0
    outstanding_tokens: int = 0
    served: int = 0
    placed: dict[int, Placed] = field(default_factory=dict)


class ReplicaBusyError(UpstreamLateError):
    """A request was not scheduled on its `replica` in time."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(f"a request waited too long for {replica.name}: others are before it")
        self.replica = replica


class Fleet:
    """Routes and queues requests. Used in one event loop only.

    Each replica has its own queue, since cached segments differ. A queued request runs on that replica, or is routed
    again when the replica goes down. Tenants share the replicas by weight: the next request is of the tenant that got
    the fewest tokens of work.
    """

    def __init__(self, upstreams: Sequence[Upstream], settings: Settings) -> None:
        """All replicas are down until `up` is called."""
        self._fleet, self._max_waiting = settings.fleet, settings.batching.max_waiting
        self._router = Router(settings.fleet.routing)
        self._weights = TenantWeights.parse(settings.batching.tenant_weight)
        self._time = VirtualTime(self._weights, burst=_BURST_TOKENS)
        self._numbers = itertools.count()
        self.replicas = tuple(_replica(upstream, settings, self._time) for upstream in upstreams)
        self.sent = SentPaths(_SENT_TOKENS)
        """The chunks that were sent to any replica, for orderings."""
        self.on_idle: Callable[[], None] | None = None
        """Called when a request has left and no request runs or waits."""

    @property
    def ready(self) -> bool:
        """Whether any replica is up."""
        return any(replica.up for replica in self.replicas)

    @property
    def waiting(self) -> int:
        """Number of requests in all queues."""
        return sum(len(replica.queue) for replica in self.replicas)

    @property
    def running(self) -> int:
        """Number of requests that run on replicas."""
        return sum(replica.running for replica in self.replicas)

    def up(self, server: str) -> None:
        """Mark the replicas of a server as up, and assume that they store nothing."""
        if not self.ready:
            self.sent.clear()  # no path is left that an order could continue
        for replica in self._of(server):
            if not replica.up:
                replica.sent.clear()
                replica.up = True
                self._release(replica)

    def down(self, server: str) -> None:
        """Mark the replicas of a server as down. Their queued requests get `UpstreamLostError`, to be placed again."""
        for replica in self._of(server):
            replica.up = False
            for number, placed in list(replica.placed.items()):
                if replica.queue.of(placed.tenant).remove(number) and not placed.released.done():
                    placed.released.set_exception(UpstreamLostError(f"{server} is gone"))

    def least_loaded(self, *, avoid: Replica | None = None) -> Replica:
        """The replica for a forwarded request; `avoid` only if no other is up.

        Raises:
            NoReplicaError: none is up.
        """
        return min(
            self._up(),
            key=lambda replica: (replica is avoid, replica.outstanding_tokens, replica.handed_through, replica.served),
        )

    async def place(
        self,
        prepared: PreparedRequest,
        *,
        avoid: Replica | None = None,
        at: Replica | None = None,
        tenant: str = "",
        within_s: float | None = None,
    ) -> Placed:
        """Route a request and wait for its turn. The caller calls `leave` at its end.

        Args:
            prepared: the request.
            avoid: a replica to use only if no other is up.
            at: the replica to use if it is up, for example that of the speculative prefill.
            tenant: the tenant of the request.
            within_s: longest wait in the queue if another replica is up; None: no limit.

        Raises:
            NoReplicaError: none is up.
            QueueFullError: the queue is full, and the tenant has its share of it.
            UpstreamLostError: the replica went down meanwhile; place the request again.
            ReplicaBusyError: the wait was too long; place the request again, and avoid that replica.
        """
        replicas = self._up()
        if avoid is not None and len(replicas) > 1:
            replicas = [replica for replica in replicas if replica is not avoid]
        waiting = Counter[str]()
        for started in self.replicas:
            waiting.update({tenant_name: started.queue.waiting(tenant_name) for tenant_name in started.queue.tenants})
        self._weights.refuse_if_full(tenant, waiting, self._max_waiting)
        # Nothing is awaited between this choice and the queue: the state that it was made from does not change.
        replica = at if at is not None and at in replicas else self._routed(prepared, replicas)
        path = _path(prepared)
        tokens = len(prepared.prompt)
        work_tokens = tokens - StoredTokens(replica.sent).stored_tokens(path) + prepared.room
        placed = Placed(replica, prepared, work_tokens, asyncio.get_running_loop().create_future(), tenant)
        number = next(self._numbers)
        replica.placed[number] = placed
        replica.outstanding_tokens += work_tokens
        self._time.join(tenant)
        placed.waiting = replica.queue.of(tenant).submit(number, path, tokens)
        self._release(replica)
        try:  # queued: from here on each exit without an answer must call `leave`
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
        """The replica that routing would choose now; `avoid` only if no other is up.

        Raises:
            NoReplicaError: none is up.
        """
        replicas = self._up()
        alternatives = [replica for replica in replicas if replica is not avoid]
        return self._routed(prepared, alternatives or replicas)

    async def until_another(self, failed: Replica | None, within_s: float) -> None:
        """Wait until a replica other than `failed` is up, or `failed` is healthy again; at most `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not any(replica.up and replica is not failed for replica in self.replicas):
                    if failed is not None and failed.up and await failed.upstream.healthy():
                        return
                    await asyncio.sleep(_POLL_S)

    def leave(self, placed: Placed, *, served: bool = False) -> None:
        """Remove a request that is answered (`served`) or given up here. Idempotent."""
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
            for started in self.replicas:
                started.queue.forget(placed.tenant)
        self._release(replica)
        if not self.running and not self.waiting and self.on_idle is not None:
            self.on_idle()

    def served(self, placed: Placed) -> None:
        """Note that a replica has prefilled a request, and so stores its chunks, unless the request keeps nothing."""
        prepared = placed.prepared
        if prepared.request.cache is not CacheUse.USE:
            return
        for sent in (self.sent, placed.replica.sent):
            parts = list(prepared.stored_parts())
            if prepared.mean is None:
                parts = prepared.kept_parts(partial(_is_exact, sent))
            sent.note([part.id for part in parts], [len(part.span) for part in parts], weaves=prepared.weaves)

    def forget(self, replica: Replica, chunks: Iterable[ChunkId] | None) -> None:
        """Note that a replica has removed chunks, or everything (None)."""
        for sent in (self.sent, replica.sent):
            if chunks is None:
                sent.clear()
            else:
                sent.forget(chunks)

    def _routed(self, prepared: PreparedRequest, replicas: Sequence[Replica]) -> Replica:
        """The replica that routing chooses. All of them store the instruction and the neutral passages."""
        chunks = {part.id for part in prepared.prompt.parts if part.id is not None and not _stored_everywhere(part)}
        candidates = [Candidate(replica.name, replica.outstanding_tokens) for replica in replicas]
        chosen = self._router.choose(len(prepared.prompt), chunks, candidates)
        return replicas[candidates.index(chosen)]

    def _release(self, replica: Replica) -> None:
        """Start queued requests while the replica has room: the least served tenant first, then the most cached."""
        while replica.up and replica.running < self._fleet.replica_requests:
            waiting = replica.queue.pop()
            if waiting is None:
                return
            placed = replica.placed[waiting.request]
            if not placed.released.done():  # else its caller was cancelled, and `leave` removes it
                replica.running += 1
                self._time.charge(placed.tenant, placed.work_tokens)
                placed.released.set_result(None)

    def _up(self) -> list[Replica]:
        replicas = [replica for replica in self.replicas if replica.up]
        if not replicas:
            raise NoReplicaError
        return replicas

    def _of(self, server: str) -> list[Replica]:
        return [replica for replica in self.replicas if replica.upstream.server == server]


def _replica(upstream: Upstream, settings: Settings, time: VirtualTime) -> Replica:
    sent = SentPaths(_SENT_TOKENS)
    queue: FairQueue[int] = FairQueue(StoredTokens(sent), time, window=settings.batching.window)
    return Replica(upstream.name, upstream, sent, queue)


def _stored_everywhere(part: PromptPart) -> bool:
    return part.kind is PartKind.SYSTEM or (part.id is not None and is_neutral(part.id))


def _path(prepared: PreparedRequest) -> tuple[ChunkId, ...]:
    """The path of a prompt in the queue: the parts that its method may reuse."""
    reusable = [] if reuses_nothing(prepared.choice.made) else prepared.prompt.parts
    path = [part.id for part in reusable if part.id is not None]
    return waiting_path(path, weaves=prepared.weaves, recomputed=prepared.choice.recomputed_share or 0.0)


def _is_exact(sent: SentPaths, part: StoredPart) -> bool:
    return sent.tree.at((*part.context, part.id)) is not None


def _failed(future: "asyncio.Future[None]") -> bool:
    return future.cancelled() or future.exception() is not None


_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?P<labels>.*)\})?(?P<rest>\s.*)")


def labelled(expositions: Mapping[str, str]) -> str:
    """Merge Prometheus texts, by server name, into one text with the label `replica`.

    The samples of one metric follow its description, as the format requires.
    """
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in expositions.items():
        family = ""
        seen = set[str]()
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
    """Metrics of the replicas, as this server sees them."""
    for name, meaning, number in (
        ("running", "Requests that run on vLLM servers.", fleet.running),
        ("waiting", "Requests in the queues for vLLM servers.", fleet.waiting),
    ):
        yield MetricSample(f"num_requests_{name}", meaning, {"": number})
    for name, meaning, value in (
        ("up", "1 if the replica is up, else 0.", lambda replica: replica.up),
        ("requests_running", "Requests that run on the replica.", lambda replica: replica.running),
        ("requests_waiting", "Requests in the replica's queue.", lambda replica: len(replica.queue)),
        (
            "outstanding_tokens",
            "Estimated tokens that it still has to compute.",
            lambda replica: replica.outstanding_tokens,
        ),
        ("sent_tokens", "Tokens of the chunks that it is assumed to store.", lambda replica: replica.sent.tokens),
    ):
        values = {replica.name: float(value(replica)) for replica in fleet.replicas}
        yield MetricSample(f"replica_{name}", meaning, values, "replica")
    answered = {replica.name: float(replica.served) for replica in fleet.replicas}
    meaning = "Requests with documents that it has answered."
    yield MetricSample("replica_requests", meaning, answered, "replica", counter=True)
    if restarts := {process.name: process.restarts for process in processes}:
        yield MetricSample("replica_restarts", "Restarts of the replica's process.", restarts, "replica", counter=True)
    yield MetricSample("request_retries", "Requests that were sent to vLLM a second time.", {"": retries}, counter=True)


def _with_label(line: str, replica: str) -> str:
    sample = _SAMPLE.fullmatch(line)
    if sample is None:
        return line
    labels = ",".join(filter(None, (f'replica="{replica}"', sample["labels"])))
    return f"{sample['name']}{{{labels}}}{sample['rest']}"
