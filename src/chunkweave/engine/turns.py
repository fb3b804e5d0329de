"""Keeps a prompt's woven chunks, in memory, for one that goes on from it and may recompute more of them.

A `Conversation` is something else (`engine.conversing`): it goes on from segments in the store, and leaves them alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from chunkweave.chunking.prompt import Prompt
from chunkweave.engine.new_segments import captured_records
from chunkweave.fusion.capture import PartCapture, WovenFrom
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.plan import KVSource, PartPlan, Plan
from chunkweave.planning.turns import KeptPart
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one turn leaves for the next: its parts as they were woven, with the tokens that were computed in it.

    Owned by the conversation; a turn never changes and stands for all before it. Its tensors are the prompt's KV in
    host memory, but for the question's and for what was taken exact from the store.
    """

    kept: Mapping[SegmentId, KeptPart]
    segments: Mapping[SegmentId, SegmentKV]

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(segment.nbytes for segment in self.segments.values())


def turn_captures(
    plan: Plan,
    placements: Sequence[Placement],
    records: Mapping[SegmentId, SegmentRecord | None],
    model: HuggingFaceModel,
) -> Iterator[PartCapture]:
    """A capture for every part that is woven or computed and has an id, however little of it will be recomputed."""
    sources = {placement.span: placement.segment for placement in placements}
    for part in plan.parts:
        if part.part.id is None or part.kv_source is KVSource.EXACT:
            continue
        origin = None
        if part.kv_source is KVSource.REUSED:
            assert part.segment is not None, "a reused part has a segment"
            record = records[part.segment]
            origin = WovenFrom(sources[part.span], record.attention if record is not None else None, 0.0)
        yield PartCapture(part, model.geometry, model.dtype, device=model.device, woven_from=origin)


def turn_of(prompt: Prompt, plan: Plan, captures: Sequence[PartCapture]) -> Turn:
    """The turn that was just woven; `captures` are those of `turn_captures`, complete."""
    kept, segments = {}, {}
    records = captured_records(prompt, plan, captures, lambda _, capture: capture.attention_before)
    for part, capture, record in records:
        kept[record.id] = KeptPart(record, _fresh(part, capture))
        segments[record.id] = SegmentKV(capture.segment().kv.cpu())
    return Turn(kept, segments)


def _fresh(part: PartPlan, capture: PartCapture) -> frozenset[int]:
    """Offsets computed in this context: by this turn, or by those before."""
    return part.fresh | frozenset(capture.recomputed)
