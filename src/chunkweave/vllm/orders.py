"""What the connector's halves send each other: orders to the workers in every step, and what became of them."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from chunkweave.prompt.parts import Prompt
from chunkweave.types import ChunkId, SegmentId
from chunkweave.vllm.removal import RemovalOrder, Removed
from chunkweave.vllm.request import WeaveRequest

PLACED_PER_COMPUTED = 32
"""As how many stored tokens, placed in a layer, one that is computed counts: moving keys and values is bytes, computing
is all weights of the layer. Assumed, not measured."""

BlockIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class WeaveOrder:
    """Bring the KV of positions `first` to `stop` of a request into its blocks, which are given by group of layers.

    Others may take the blocks below `exact`: what is in them already is exact, and what is brought must be.
    """

    request_id: str
    request: WeaveRequest
    block_ids: BlockIds
    first: int
    stop: int
    exact: int = 0
    adapter: int = 0
    """The LoRA adapter's number in vLLM, 0 if there is none."""


class NotWoven(Exception):  # noqa: N818  (a signal within the worker, never seen by users)
    """Nothing is wrong, but vLLM had better compute this request."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """After this step's forward the KV of positions below `computed` is in the blocks: store the parts that end there.

    The blocks stay as they are until the workers say that the order of this `number` is done, or the request is among
    the preempted ones.

    Those that end at `saved` or before are stored already. `exact` says that vLLM computed every position.
    `windowed` layers have lost what lies before `readable`, or may have after the next step.
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


@dataclass(frozen=True, slots=True)
class LookupOrder:
    """Find out whether a tier that others fill too has something of a prompt; the request waits for that."""

    request_id: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class AskedOrder:
    """Count a request that is not woven: `local` of its tokens were in vLLM's own cache, it computes the others.

    If those were woven for another one, `woven` says how.
    """

    request_id: str
    prompt: Prompt
    local: int
    woven: WeaveRequest | None = None


@dataclass(frozen=True, slots=True)
class Holdings(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM has no types
    """One worker to the scheduler, once, at start-up: what its tiers hold, and whether others fill them too.

    `store_tokens` are those that they have room for; None if that is not known.
    """

    stored: frozenset[ChunkId | SegmentId]
    shared: bool
    store_tokens: int | None = None


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types
    """Scheduler to workers. `idle`: nothing else is to be computed in this step.

    Requests that are `waiting` have come in and got no blocks in this step. Blocks of `preempted` requests are given to
    others in this step; those of `held` ones, which have ended, when the workers have copied what they were to save.
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
    idle: bool = False


@dataclass(slots=True)
class StepResults(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM has no types
    """Workers to scheduler: what came into the stores or left them, reports of finished weaves, and failed ones.

    `copies` says by how many more ranks (or fewer) something of a chunk, or an exact segment, is held now. `answered`
    says on how many ranks the remote lookup of a request has ended, `saved` on how many a save of this number is done.
    `removed` has an answer of each rank that has done what a command asked for.
    """

    copies: Counter[ChunkId | SegmentId] = field(default_factory=Counter)
    reports: dict[str, dict[str, object]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    answered: Counter[str] = field(default_factory=Counter)
    saved: Counter[int] = field(default_factory=Counter)
    removed: dict[str, list[Removed]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to send: most steps bring nothing."""
        return bool(self.copies or self.reports or self.failed or self.answered or self.saved or self.removed)

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "StepResults":
        """What all ranks say; their reports are the same."""
        assert isinstance(other, StepResults)
        copies, answered, saved = Counter(self.copies), Counter(self.answered), Counter(self.saved)
        copies.update(other.copies)
        answered.update(other.answered)
        saved.update(other.saved)
        reports, failed = self.reports | other.reports, self.failed | other.failed
        both = self.removed.keys() | other.removed.keys()
        removed = {name: [*self.removed.get(name, ()), *other.removed.get(name, ())] for name in both}
        return StepResults(copies, reports, failed, answered, saved, removed)
