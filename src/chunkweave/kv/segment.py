"""The stored KV of one chunk, immutable and usable at any position, and codecs for its tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from chunkweave.errors import UnknownMethodError


@dataclass(frozen=True, slots=True, eq=False)
class SegmentKV:
    """Keys and values of one chunk.

    Keys are after RoPE at the positions from `keys_at` on, or before RoPE if that is None. `kv` is `[layers, 2, tokens,
    kv_heads, head_dim]`; index 0 of the second axis is keys, 1 is values. It is layer-major, so that one layer of one
    chunk is one contiguous read. Immutable after construction: a position shift returns new tensors.
    """

    kv: torch.Tensor
    keys_at: int | None = None

    def __post_init__(self) -> None:
        if self.kv.dim() != 5 or self.kv.shape[1] != 2:
            raise ValueError(f"not [layers, 2, tokens, kv_heads, head_dim]: {tuple(self.kv.shape)}")

    @property
    def tokens(self) -> int:
        return self.kv.shape[2]

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    @property
    def device(self) -> torch.device:
        return self.kv.device

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]` (a view)."""
        return self.kv[index]


class SegmentLost(Exception):  # noqa: N818  (a signal between layers of the library, never seen by its users)
    """A segment's layer cannot be read: missing, corrupt, or too late. The caller drops the segment and computes it."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"segment {segment}: {reason}")
        self.segment = segment


class SegmentLate(SegmentLost):
    """A layer was not read in time; the segment itself may be intact."""


class SegmentHeldUp(SegmentLate):
    """An earlier read in the same queue is stuck; this segment's own tier may be fine."""


class SegmentSource(Protocol):
    """A segment that is read layer by layer: `SegmentKV`, or one whose layers are still on disk."""

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in memory."""

    @property
    def keys_at(self) -> int | None:
        """First position that the keys are rotated to; None: they are before RoPE."""

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]`; may read and block.

        The layer may be read into `scratch` (uint8, one dimension), and the result may be a view of it. Mapped memory
        avoids the page faults of new memory, which cost as much as reading from a fast disk.

        Raises:
            SegmentLost: the layer cannot be read.
        """


def cut_of(source: SegmentSource, start: int, stop: int) -> SegmentKV | None:
    """A copy of a segment's tokens from `start` up to `stop`, in the memory that it is in; None: it cannot be read."""
    try:
        num_layers = source.nbytes // max(1, source.layer(0).nbytes)
        layers = [source.layer(index)[:, start:stop] for index in range(num_layers)]
    except SegmentLost:
        return None
    return SegmentKV(torch.stack(layers), None if source.keys_at is None else source.keys_at + start)


Shape = tuple[int, ...]


class EncodingError(ValueError):
    """A codec cannot represent this KV; nothing was written."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One of the tensors of an encoded layer; `suffix` is appended to the layer's name in a file."""

    suffix: str
    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Codec(Protocol):
    """Encodes one layer's KV `[2, tokens, kv_heads, head_dim]` as tensors to store, and decodes them."""

    @property
    def name(self) -> str:
        """The name for `make_codec`, stored in every file."""

    def layout(self, shape: Shape, dtype: torch.dtype) -> tuple[TensorLayout, ...]:
        """The encoded tensors of a layer of `shape` and `dtype`, in file order."""

    def encode_layer(self, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of `layout`, contiguous and in host memory.

        Raises:
            EncodingError: the codec cannot represent this KV.
        """

    def decode_layer(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """KV in `dtype` from the tensors of `layout`; may be a view of them."""


class RawCodec:
    """Stores the dtype unchanged: lossless, and the only codec that accepts infinities and NaN."""

    name = "raw"

    def layout(self, shape: Shape, dtype: torch.dtype) -> tuple[TensorLayout, ...]:
        """One tensor of the layer's own shape and dtype."""
        return (TensorLayout("", dtype, shape),)

    def encode_layer(self, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The layer itself."""
        return (kv.detach().cpu().contiguous(),)

    def decode_layer(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The stored tensor itself."""
        return tensors[0].to(dtype)


@dataclass(frozen=True, slots=True)
class PerChannelCodec:
    """One byte per element, and one fp32 scale per (K or V, head, dimension) over the chunk's tokens.

    Symmetric: a channel's greatest magnitude becomes `limit`. Keys are stored before RoPE, where outliers stay in fixed
    channels (KIVI, arXiv:2402.02750 §3, which also quantizes keys per channel; here values too, for one layout). Scales
    are fp32: fp16 would save 2 bytes in `tokens + 4` and overflow on bf16 outliers. Scales come first, so that both
    tensors of a layer are aligned for any number of tokens.
    """

    name: str
    stored: torch.dtype
    limit: float

    def layout(self, shape: Shape, dtype: torch.dtype) -> tuple[TensorLayout, ...]:  # noqa: ARG002
        """Scales `[2, kv_heads, head_dim]`, then the quantized layer."""
        return (TensorLayout(".scales", torch.float32, (shape[0], *shape[2:])), TensorLayout("", self.stored, shape))

    def encode_layer(self, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Scales and the quantized layer; a channel of zeros has scale 1.

        Raises:
            EncodingError: the layer has infinities or NaN, which have no scale.
        """
        wide = kv.detach().to(device="cpu", dtype=torch.float32)
        scales = wide.abs().amax(dim=1) / self.limit
        if not bool(torch.isfinite(scales).all()):
            raise EncodingError(f"codec {self.name}: KV with infinities or NaN cannot be quantized")
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        # Decoding must not round the greatest fp32 up to infinity.
        scales = scales.clamp_(max=torch.finfo(torch.float32).max / self.limit * (1 - 2**-22))
        scaled = (wide / scales.unsqueeze(1)).clamp_(-self.limit, self.limit)
        if not self.stored.is_floating_point:
            scaled = scaled.round_()
        return scales.contiguous(), scaled.to(self.stored).contiguous()

    def decode_layer(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Quantized values times their channel's scale, rounded to `dtype`."""
        scales, quantized = tensors
        if self.stored is torch.float8_e4m3fn:
            quantized = _e4m3_as_half(quantized)
            scales = scales * 256
        return quantized.to(torch.float32).mul_(scales.unsqueeze(1)).to(dtype)


def _e4m3_as_half(values: torch.Tensor) -> torch.Tensor:
    """Finite e4m3 values as fp16, 256 times too small: sign, exponent and mantissa shifted to fp16's bits.

    Exact, denormals included (exponent bias 7 against 15), and several times faster than torch's own conversion on a
    CPU. The sign ends up in bits 15 and 14; the mask clears the second.
    """
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(~(1 << 14)).view(torch.float16)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        RawCodec(),
        PerChannelCodec("int8", torch.int8, 127.0),
        PerChannelCodec("fp8", torch.float8_e4m3fn, 448.0),
    )
}


def make_codec(name: str) -> Codec:
    """The codec with this name; raises `UnknownMethodError` if there is none."""
    if name not in CODECS:
        raise UnknownMethodError(f"no codec {name!r}; known: {', '.join(sorted(CODECS))}")
    return CODECS[name]
