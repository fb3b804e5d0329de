"""A prompt's plan, and where the segments that it takes come from while it is executed."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from chunkweave.chunking.prompt import Prompt
from chunkweave.config import CaptureConfig
from chunkweave.engine.prefetch import Prefetch
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV, SegmentLost, SegmentSource
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.cost import CostModel, too_slow, without
from chunkweave.planning.method import ReuseMethod, with_history
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.tiers.device import BlockSegment, HostMemory, Send
from chunkweave.tiers.preload import Gone, LayerLoader, LoadingSegment, LoadOrder
from chunkweave.types import SegmentId


@dataclass(frozen=True, slots=True, eq=False)
class PrefillContext:
    """What all prefills of one runner share; its attributes say what each is for."""

    model: HuggingFaceModel
    store: TieredStore[SegmentSource]
    cost: CostModel | None
    load_order: LoadOrder
    capture: CaptureConfig
    send: Send
    memory: HostMemory


def make_plan(
    context: PrefillContext,
    prompt: Prompt,
    method: ReuseMethod,
    *,
    given_up: Collection[SegmentId] = (),
    history: Mapping[int, SegmentId] | None = None,
) -> Plan:
    """Plan with what is stored, but for what was given up or takes longer to load than to compute.

    `history` has the segments of a conversation's earlier turns by the place of their part.
    """
    lookup = without(context.store.lookup(prompt), given_up)
    if history:
        lookup = with_history(lookup, dict(_stored(history, context.store, given_up)))
    if context.cost is not None:
        lookup = without(lookup, too_slow(lookup, context.cost, context.store.tier_of))
    plan = method.plan(lookup, context.model.geometry)
    plan.validate(context.model.geometry.num_layers)
    return plan


def must_be_loaded(source: SegmentSource, device: torch.device) -> bool:
    """Whether a segment is not yet where it is computed with: in a slower tier, or on the host of a GPU."""
    return not isinstance(source, SegmentKV | BlockSegment) or source.device.type != device.type


def _stored(
    history: Mapping[int, SegmentId], store: TieredStore[SegmentSource], given_up: Collection[SegmentId]
) -> Iterator[tuple[int, SegmentRecord]]:
    for place, segment in history.items():
        record = None if segment in given_up else store.record(segment)
        if record is not None:
            yield place, record


class PlanSources:
    """Pins the segments of one plan; those not on the device are read on a thread of its own. Close it.

    `placements` says where every segment goes. Owned by the request whose plan it is.
    """

    def __init__(self, context: PrefillContext, plan: Plan, *, prefetched: Prefetch | None) -> None:
        """Pin and start to read; what was `prefetched` comes from there."""
        self._lease = context.store.lease(plan.segments())
        self._loader: LayerLoader | None = None
        exact = {part.segment for part in plan.parts if part.kv_source is KVSource.EXACT}
        sources: dict[SegmentId, SegmentSource] = {}
        slow: list[tuple[SegmentId, SegmentSource]] = []
        for segment in plan.segments():
            ahead = None if prefetched is None else prefetched.find(segment)
            source = ahead or context.store.get(segment, exact=segment in exact) or Gone(segment)
            sources[segment] = source
            if not isinstance(source, LoadingSegment | Gone) and must_be_loaded(source, context.model.device):
                slow.append((segment, source))
        if prefetched is not None:
            prefetched.start_using()
        if slow:
            wait_s = context.cost.prefill(max(source.tokens for _, source in slow)) if context.cost else None
            self._loader = LayerLoader(
                slow,
                context.model.geometry.num_layers,
                order=context.load_order,
                wait_s=wait_s,
                send=context.send,
                memory=context.memory,
            )
            sources |= {SegmentId(segment.name): segment for segment in self._loader.segments}
            self._loader.release()
        chosen = [(part.span, part.segment) for part in plan.parts if part.segment is not None]
        self.placements = [Placement(span, sources[segment]) for span, segment in chosen]

    def loaded(self) -> Iterator[tuple[SegmentId, SegmentKV]]:
        """The segments that were read from a slower tier, as far as they came in whole."""
        for segment in self._from_below():
            whole = segment.whole()
            if whole is not None:
                yield SegmentId(segment.name), whole

    @property
    def under_way(self) -> bool:
        """Whether a segment is still being read, and may yet come in or be lost."""
        return any(segment.whole() is None and segment.failure is None for segment in self._from_below())

    @property
    def failure(self) -> SegmentLost | None:
        """Why a segment is known to be lost; None as long as none is."""
        sources = (placement.segment for placement in self.placements)
        losses = (source.failure for source in sources if isinstance(source, LoadingSegment | Gone))
        return next((loss for loss in losses if loss is not None), None)

    def close(self) -> None:
        """Stop reading and unpin; a second time is harmless."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
        self._lease.release()

    def _from_below(self) -> tuple[LoadingSegment, ...]:
        sources = (placement.segment for placement in self.placements)
        return tuple(dict.fromkeys(source for source in sources if isinstance(source, LoadingSegment)))
