"""What scheduler and workers tell each other, once a step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

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


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types
    """Scheduler to workers. `idle`: nothing else is to be computed in this step."""

    weaves: list[WeaveOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    idle: bool = False


@dataclass(slots=True)
class StepResults(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM has no types
    """Workers to scheduler: chunks that came into the store or left it, reports of finished weaves, and failed ones."""

    stored: set[ChunkId] = field(default_factory=set)
    dropped: set[ChunkId] = field(default_factory=set)
    reports: dict[str, dict[str, object]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to send: most steps bring nothing."""
        return bool(self.stored or self.dropped or self.reports or self.failed)

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "StepResults":
        """What all ranks say: a chunk counts as stored if each has it; their reports are the same."""
        assert isinstance(other, StepResults)
        dropped = self.dropped | other.dropped
        stored = (self.stored & other.stored) - dropped
        return StepResults(stored, dropped, self.reports | other.reports, self.failed | other.failed)
