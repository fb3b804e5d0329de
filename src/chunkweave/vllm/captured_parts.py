"""What one weave keeps for the store: new chunks with what they attend to, and chunks that it largely recomputed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from chunkweave.chunking.prompt import Prompt
from chunkweave.config import CaptureConfig
from chunkweave.engine.new_segments import parts_to_keep, segments_of
from chunkweave.fusion.attention_capture import AttentionCapture
from chunkweave.fusion.capture import PartCapture
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.planning.plan import Plan
from chunkweave.store.records import SegmentRecord
from chunkweave.store.tiered import TieredStore
from chunkweave.types import Span
from chunkweave.vllm.layer_modules import LayerModules


class CapturedParts:
    """The parts of one prompt that are captured while it is woven: this rank's heads of them. Owned by the weave.

    `captures` take the KV, `attention` what the parts' tokens attend to.
    """

    def __init__(
        self,
        modules: LayerModules,
        prompt: Prompt,
        plan: Plan,
        sources: Sequence[tuple[Span, SegmentSource]],
        store: TieredStore[SegmentSource],
        config: CaptureConfig,
        *,
        first: int,
    ) -> None:
        """Parts that begin before `first` are in vLLM's blocks already, and not looked at."""
        self._prompt, self._plan = prompt, plan
        placements = [Placement(span, source) for span, source in sources]
        parts = parts_to_keep(prompt, plan, placements, store, woven_fraction=config.woven_fraction)
        device = modules.layers.device
        self.captures = tuple(
            PartCapture(part, modules.own_geometry, modules.dtype, device=device, woven_from=origin)
            for part, origin in parts
            if part.span.start >= first
        )
        self.attention: AttentionCapture | None = None
        if self.captures and config.profile:
            self.attention = AttentionCapture(plan.parts, modules.geometry, config, device=device, ranks=modules.ranks)

    def segments(self, exact_to: int) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
        """What is to be stored, after the weave: exact are only parts that end at `exact_to` or before."""
        complete = [capture for capture in self.captures if capture.complete]
        ends = sorted(capture.part.span.stop for capture in complete)  # segments come in prompt order
        found = segments_of(self._prompt, self._plan, complete, self.attention)
        for end, (record, kv) in zip(ends, found, strict=True):
            yield replace(record, exact=record.exact and end <= exact_to), kv

    @property
    def spans(self) -> frozenset[Span]:
        """The spans of the parts that were captured whole."""
        return frozenset(capture.part.span for capture in self.captures if capture.complete)
