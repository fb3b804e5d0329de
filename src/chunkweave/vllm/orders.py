"""Messages between the connector's halves: orders to the workers in every step, and their results."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from chunkweave.conversation.answer import PrefillReport
from chunkweave.conversation.weave_request import WeaveRequest
from chunkweave.metrics import effective_method
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import Prompt
from chunkweave.types import ChunkId, SegmentId
from chunkweave.vllm.removal import RemovalOrder, Removed

PLACED_PER_COMPUTED = 32
"""Number of stored tokens whose placement in a layer costs as much as computing one: moving keys and values is bytes,
computing reads all weights of the layer. Assumed, not measured.
"""

BlockIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class WeaveOrder:
    """Load the KV of positions `[first, stop)` of a request into its blocks, given per group of layers.

    Blocks below position `exact` are shared with other requests: their contents are exact, and what is loaded there
    must be.
    """

    request_id: str
    request: WeaveRequest
    block_ids: BlockIds
    first: int
    stop: int
    exact: int = 0
    adapter: int = 0
    """The LoRA adapter's number in vLLM, 0 without one."""


class NotWoven(Exception):  # noqa: N818  (a signal within the worker, never seen by users)
    """Not an error: vLLM should compute this request itself."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """After this step's forward, the KV below position `computed` is in the blocks: store the parts that end there.

    The blocks do not change until the workers report order `number` as done, or the request is preempted.

    Parts that end at or before `saved` are stored already. `exact`: vLLM computed every position. `windowed` layers
    have lost KV before `readable`, or may have after the next step.
    """

    request_id: str
    request: WeaveRequest
    block_ids: BlockIds
    saved: int
    computed: int
    exact: bool
    readable: int = 0
    windowed: bool = False
    number: int = 0
    adapter: int = 0
    """As in `WeaveOrder`."""


@dataclass(frozen=True, slots=True)
class LookupOrder:
    """Look up a prompt in tiers that other servers fill too; the request waits for the result."""

    request_id: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class AskedOrder:
    """Count a request that is not woven: `local` of its tokens were in vLLM's own cache, vLLM computes the rest.

    If the cached tokens were woven for an earlier request, `woven` describes it.
    """

    request_id: str
    prompt: Prompt
    local: int
    woven: WeaveRequest | None = None


@dataclass(frozen=True, slots=True)
class Holdings(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM has no types
    """One worker to the scheduler, once at start-up: the contents of its tiers, and whether others fill them too."""

    stored: frozenset[ChunkId | SegmentId]
    shared: bool


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types
    """Scheduler to workers. `idle`: this step computes nothing else.

    `reset`: drop all KV first, because weights may have been replaced. Requests in `waiting` have arrived and got no
    blocks in this step. Blocks of `preempted` requests are given to others in this step; those of `held` ones, which
    have ended, once the workers have copied what they save.
    """

    weaves: list[WeaveOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    lookups: list[LookupOrder] = field(default_factory=list)
    waiting: dict[str, WeaveRequest] = field(default_factory=dict)
    asked: list[AskedOrder] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    held: list[str] = field(default_factory=list)
    removals: list[RemovalOrder] = field(default_factory=list)
    reset: bool = False
    idle: bool = False


@dataclass(slots=True)
class StepResults(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM has no types
    """Workers to scheduler: changes of the stores, reports of finished weaves, and failed ones.

    `copies` maps a chunk or exact segment to the change in the number of ranks that hold it. `answered` is the number
    of ranks on which a request's remote lookup has ended, `saved` the number on which a save order is done. `removed`
    has one answer per rank that finished a removal.
    """

    copies: Counter[ChunkId | SegmentId] = field(default_factory=Counter)
    reports: dict[str, PrefillReport] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    answered: Counter[str] = field(default_factory=Counter)
    saved: Counter[int] = field(default_factory=Counter)
    removed: dict[str, list[Removed]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to send; most steps have nothing."""
        return bool(self.copies or self.reports or self.failed or self.answered or self.saved or self.removed)

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "StepResults":
        """The combined results of all ranks; their reports are equal."""
        assert isinstance(other, StepResults)
        copies = Counter(self.copies)
        answered = Counter(self.answered)
        saved = Counter(self.saved)
        copies.update(other.copies)
        answered.update(other.answered)
        saved.update(other.saved)
        reports = self.reports | other.reports
        failed = self.failed | other.failed
        both = self.removed.keys() | other.removed.keys()
        removed = {name: [*self.removed.get(name, ()), *other.removed.get(name, ())] for name in both}
        return StepResults(copies, reports, failed, answered, saved, removed)


def report_fields(request: WeaveRequest, report: PrefillReport) -> dict[str, Any]:
    """The report of one request for its answer, with the fields of `ReuseReport` that are known here."""
    exact = report.tokens(KVSource.EXACT)
    reused = report.tokens(KVSource.REUSED)
    return {
        "method": request.method,
        "why": str(request.choice.why),
        "effective_method": effective_method(request.method, prefix_exact=exact, reused=reused),
        **report.as_dict(),
    }
