"""Which parts of a prompt are kept while it is prefilled, and the segments that are stored of them afterwards."""

from collections.abc import Iterator, Sequence

from chunkweave.chunking.prompt import Prompt
from chunkweave.fusion.capture import AttentionCapture, PartCapture, WovenFrom
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.planning.plan import KVSource, PartPlan, Plan
from chunkweave.store.records import AttentionProfile, SegmentRecord, segment_id
from chunkweave.store.store import TieredStore


def parts_to_keep(
    prompt: Prompt,
    plan: Plan,
    placements: Sequence[Placement],
    store: TieredStore[SegmentSource],
    *,
    woven_fraction: float | None,
) -> Iterator[tuple[PartPlan, WovenFrom | None]]:
    """Each computed part that is to be kept, and with its origin each reused one that may be worth storing as woven.

    The latter is worth it if at least `woven_fraction` of it is recomputed (None: never), and if no variant of this
    context is stored yet. A woven part is the cached KV with one pass written over it, so there is none after several.
    """
    sources = {placement.span: placement.segment for placement in placements}
    least = woven_fraction if len(plan.passes) == 1 else None
    for part, context in zip(plan.parts, prompt.contexts(), strict=True):
        if part.part.id is None or not part.kept:
            continue
        if part.kv_source is KVSource.COMPUTED:
            yield part, None
        elif part.kv_source is KVSource.REUSED and least and segment_id(part.part.id, context) not in store:
            yield part, WovenFrom(sources[part.span], _attention_of(part, store), least)


def parts_that_weave(plan: Plan, placements: Sequence[Placement]) -> Iterator[tuple[PartPlan, WovenFrom]]:
    """Each reused part of which tokens may be recomputed, however few, with its origin. History is none."""
    sources = {placement.span: placement.segment for placement in placements}
    for part in plan.parts:
        if part.kv_source is KVSource.REUSED and len(part.fresh) < len(part.span):
            yield part, WovenFrom(sources[part.span], None, 0.0)


def segments_of(
    prompt: Prompt, plan: Plan, captures: Sequence[PartCapture], attention: AttentionCapture | None
) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
    """The finished segments in prompt order, with their profiles if attention was captured.

    A part is exact only if every part before it was; what follows a reused chunk never is, nor is a woven one.
    """
    captured = {capture.part.span: capture for capture in captures}
    exact = True
    for part, context in zip(plan.parts, prompt.contexts(), strict=True):
        exact = exact and part.kv_source is not KVSource.REUSED
        capture = captured.get(part.span)
        if capture is None or part.part.id is None:
            continue
        profile = None if attention is None else attention.profile(part, capture.recomputed, capture.attention_before)
        record = SegmentRecord.of(
            part.part.id,
            context,
            part.part.token_ids,
            exact=exact,
            nbytes=capture.nbytes,
            source=part.part.source,
            attention=profile,
        )
        yield record, capture.segment()


def _attention_of(part: PartPlan, store: TieredStore[SegmentSource]) -> AttentionProfile | None:
    record = None if part.segment is None else store.record(part.segment)
    return None if record is None else record.attention
