"""What of a prompt is kept for later ones: which parts are captured, and the segments that they become."""

from collections.abc import Iterable, Iterator, Sequence
from sys import maxsize

import torch

from chunkweave.fusion.capture import AttentionCapture, PartCapture, WovenFrom
from chunkweave.fusion.rows import flags_of
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan
from chunkweave.prompt.parts import Prompt
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.store.store import TieredStore
from chunkweave.types import Geometry


def new_captures(
    parts: Iterable[tuple[PartPlan, WovenFrom | None]], geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> list[PartCapture]:
    """What captures each of `parts`, which are to be kept; `geometry` has the heads that are computed here."""
    return [PartCapture(part, geometry, dtype, device=device, woven_from=origin) for part, origin in parts]


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
    Which tokens a rule will keep nobody knows yet: a part is expected to get its share of them. One that gets more by
    chance is not stored again; to follow every part for its sake takes longer than that saves.
    """
    sources = {placement.span: placement.segment for placement in placements}
    least = woven_fraction if len(plan.passes) == 1 else None
    active = _active_tokens(plan.passes[0], plan.prompt_tokens) if least else torch.zeros(plan.prompt_tokens)
    for part, context in zip(plan.parts, prompt.contexts(), strict=True):
        if part.part.id is None or not part.kept:
            continue
        if part.kv_source is KVSource.COMPUTED:
            yield part, None
        elif part.kv_source is not KVSource.REUSED or not least:
            continue
        elif (
            active[part.span.start : part.span.stop].sum() >= least * len(part.span)
            and segment_id(part.part.id, context) not in store
        ):
            record = None if part.segment is None else store.record(part.segment)
            yield part, WovenFrom(sources[part.span], None if record is None else record.attention, least)


def _active_tokens(a_pass: Pass, tokens: int) -> torch.Tensor:
    """Of each of so many tokens, how likely it is active at the last layer of a pass, `[tokens]` on the host."""
    required, candidates = flags_of(a_pass.required, tokens), flags_of(a_pass.candidates, tokens)
    share = a_pass.candidates_at(maxsize) / max(1, a_pass.candidate_tokens)
    return required.double().maximum(candidates * share)


def segments_of(
    prompt: Prompt,
    plan: Plan,
    captures: Sequence[PartCapture],
    attention: AttentionCapture | None,
    *,
    owner: str = "",
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
            owner=owner,
        )
        yield record, capture.segment()
