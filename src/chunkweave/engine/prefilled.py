"""What a finished prefill hands on."""

from dataclasses import dataclass

import torch

from chunkweave.chunking.prompt import Prompt
from chunkweave.fusion.capture import AttentionCapture, PartCapture
from chunkweave.kv.request_cache import RequestCache
from chunkweave.kv.segment import SegmentKV
from chunkweave.planning.outcome import LayerWork, Stop
from chunkweave.planning.plan import Plan
from chunkweave.types import SegmentId, Span


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt whose KV cache is complete up to its last token.

    `logits` `[vocab]` are those of the first new token. `recomputed` are the positions of reused chunks that were
    active at the last layer of a pass; `work` is what every layer of every pass did, `recompute_work` the sum
    over those layers of the reused-chunk tokens among them: a token that was dropped midway counts there for the layers
    it was active at, and is not among `recomputed`. `stop` says where unfocused chunks were dropped, if they were.
    `captures` are the parts whose KV can be stored, `attention` what their tokens attended to, if that was asked for.
    `loaded` are the segments that came from a slower tier.
    `woven` are the reused parts that a conversation keeps as they were recomputed.
    `lost_segments` is how many were planned with and could not be read.
    """

    prompt: Prompt
    plan: Plan
    cache: RequestCache
    logits: torch.Tensor
    captures: tuple[PartCapture, ...]
    attention: AttentionCapture | None
    work: tuple[LayerWork, ...]
    recomputed: tuple[Span, ...]
    recompute_work: int
    stop: Stop | None
    lookup_s: float
    load_s: float
    weave_s: float
    loaded: tuple[tuple[SegmentId, SegmentKV], ...] = ()
    woven: tuple[PartCapture, ...] = ()
    lost_segments: int = 0
