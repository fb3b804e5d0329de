"""The options of an engine, for those who hand them on."""

from typing import TypedDict

from chunkweave.chunking.template import PromptTemplate
from chunkweave.config import ComputeConfig, ConversationConfig, ReuseConfig, StoreConfig
from chunkweave.kv.segment import SegmentSource
from chunkweave.ordering.ordering import OrderingConfig
from chunkweave.planning.calibration import CalibrationRecord
from chunkweave.scheduling.shadow import ShadowConfig
from chunkweave.store.store import TieredStore


class EngineOptions(TypedDict, total=False):
    """What `Engine(...)` takes beside the model; it says there what each means."""

    store: StoreConfig | TieredStore[SegmentSource] | None
    method: str | None
    quality: str | None
    reuse: ReuseConfig | None
    order: str
    ordering: OrderingConfig | None
    conversations: ConversationConfig | None
    calibration: CalibrationRecord | None
    template: PromptTemplate | None
    shadow: ShadowConfig | None
    compute: ComputeConfig | None
