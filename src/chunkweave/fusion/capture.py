"""Keeps the KV of newly computed and of largely recomputed chunks, so that it can be stored when the request ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.planning.plan import PartPlan
from chunkweave.store.attention_profile import AttentionProfile
from chunkweave.types import Geometry


@dataclass(frozen=True, slots=True, eq=False)
class WovenFrom:
    """The segment that a reused part was taken from: the KV of the tokens that are not recomputed.

    `attention` is what its tokens attended to. At least `least_fraction` of them must be recomputed through the last
    layer, or the woven part is not worth storing.
    """

    segment: SegmentSource
    attention: AttentionProfile | None
    least_fraction: float


class PartCapture:
    """Collects keys before RoPE and values of one part, layer by layer, on the device that computes them.

    To the host they go when they are stored, behind the first token: a copy a layer would stand in the way of the
    next layer's work.

    The tokens of a computed part are active at every layer of one pass, those of a reused part as long as the rules
    let them; either way its rows are one run of the active ones. Where a token was not active, a reused part keeps the
    KV of the segment that it came from. Over several passes a token's last KV counts. A pass may come in slices of its
    rows, each through all layers; whether enough of the part was taken shows behind the last one.
    """

    def __init__(
        self,
        part: PartPlan,
        geometry: Geometry,
        dtype: torch.dtype,
        *,
        device: torch.device,
        woven_from: WovenFrom | None = None,
    ) -> None:
        self.part = part
        self.woven_from = woven_from
        self._tokens = len(part.span)
        self._least = self._tokens if woven_from is None else ceil(woven_from.least_fraction * self._tokens)
        shape = (geometry.num_layers, 2, self._tokens, geometry.num_kv_heads, geometry.head_dim)
        self._device = device
        self._kv: torch.Tensor | None = torch.empty(shape, dtype=dtype, device=device)
        self._offsets = torch.arange(0)
        self._rows = torch.empty(0, dtype=torch.long, device=device)
        self._fresh = torch.zeros(geometry.num_layers, self._tokens, dtype=torch.bool)
        self._layer = 0
        self._in_slices = False

    def start(self, *, in_slices: bool = False) -> None:
        """The next layer to be taken is the first: a pass begins, or a slice of one, with active tokens of its own."""
        self._layer = 0
        self._in_slices = in_slices
        self._offsets, self._rows = torch.arange(0), self._rows[:0]

    def follow(self, offsets: Sequence[int]) -> bool:
        """From the next layer on these tokens of the part are active, ascending, 0 its first.

        False, and never again true, if they are too few for the part to be stored; of a slice they never are.
        """
        if len(offsets) < self._least and not self._in_slices:
            self._kv = None
        elif len(offsets) != len(self._offsets):
            self._offsets = torch.tensor(offsets, dtype=torch.long)
            self._rows = self._offsets.to(self._device)
        return self._kv is not None

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy one layer's fresh `keys` and `values` of the part's active tokens, `[rows, kv_heads, head_dim]`."""
        assert self._kv is not None, "a part that was given up is not followed"
        layer = self._kv[self._layer]
        for kept, fresh in zip(layer, (keys, values), strict=True):
            if len(self._offsets) == self._tokens:
                kept.copy_(fresh)
            elif len(self._offsets):
                kept.index_copy_(0, self._rows, fresh)
        self._fresh[self._layer, self._offsets] = True
        self._layer += 1

    @property
    def complete(self) -> bool:
        """Whether enough of the part was followed through all layers, and it can be stored."""
        return self._kv is not None and int(self._fresh[-1].sum()) >= self._least

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The part's tokens that were active at the last layer (all of a computed part), ascending, 0 its first."""
        return tuple(torch.nonzero(self._fresh[-1]).squeeze(1).tolist())

    @property
    def changed(self) -> bool:
        """Whether a token was active at any layer but the first, where KV depends on the token alone."""
        return bool(self._fresh[1:].any())

    @property
    def nbytes(self) -> int:
        """Bytes of the finished segment."""
        assert self._kv is not None, "a part that was given up has no segment"
        return self._kv.nbytes

    @property
    def attention_before(self) -> AttentionProfile | None:
        """What the tokens of the segment that a reused part was taken from attended to, if that is known."""
        return None if self.woven_from is None else self.woven_from.attention

    @torch.inference_mode()
    def segment(self) -> SegmentKV:
        """The finished segment; call it once, after the last layer."""
        assert self.complete, "a part was taken for fewer layers than the model has"
        assert self._kv is not None
        if self.woven_from is not None:
            for layer, (kv, fresh) in enumerate(zip(self._kv, self._fresh, strict=True)):
                cached = ~fresh
                kv[:, cached] = self.woven_from.segment.layer(layer).to(kv.device)[:, cached]
        return SegmentKV(self._kv)
