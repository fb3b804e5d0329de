"""What scheduler and workers send each other, once a step."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from chunkweave.chunking.prompt import Prompt
from chunkweave.types import ChunkId
from chunkweave.vllm.request import WeaveRequest


@dataclass(frozen=True, slots=True)
class WeaveOrder:
    """Bring the KV of positions `first` to `stop` of a request into its blocks."""

    request_id: str
    request: WeaveRequest
    block_ids: tuple[int, ...]
    first: int
    stop: int

    def blocks_to_fill(self, block_size: int) -> set[int]:
        """The blocks that the positions from `first` on lie in."""
        return set(self.block_ids[self.first // block_size :])


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """After this step's forward the KV of positions below `computed` is in the blocks: store the parts that end there.

    Those that end at `saved` or before are stored already. `exact` says that vLLM computed every position itself.
    """

    request_id: str
    request: WeaveRequest
    block_ids: tuple[int, ...]
    saved: int
    computed: int
    exact: bool


@dataclass(frozen=True, slots=True)
class LookupOrder:
    """Find out whether a tier that others fill too has something of a prompt; the request waits for that."""

    request_id: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Holdings(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM has no types
    """One worker to the scheduler, once, at start-up: what its tiers hold, and whether others fill them too."""

    chunks: frozenset[ChunkId]
    shared: bool


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types
    """Scheduler to workers. `idle`: nothing else is to be computed in this step."""

    weaves: list[WeaveOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    lookups: list[LookupOrder] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    idle: bool = False


@dataclass(slots=True)
class StepResults(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM has no types
    """Workers to scheduler: what came into the stores or left them, reports of finished weaves, and failed ones.

    `copies` says by how many more ranks (or fewer) something of a chunk is held now, `answered` on how many ranks the
    remote lookup of a request has ended.
    """

    copies: Counter[ChunkId] = field(default_factory=Counter)
    reports: dict[str, dict[str, object]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    answered: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        """Whether there is anything to send: most steps bring nothing."""
        return bool(self.copies or self.reports or self.failed or self.answered)

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "StepResults":
        """What all ranks say; their reports are the same."""
        assert isinstance(other, StepResults)
        copies, answered = Counter(self.copies), Counter(self.answered)
        copies.update(other.copies)
        answered.update(other.answered)
        return StepResults(copies, self.reports | other.reports, self.failed | other.failed, answered)
