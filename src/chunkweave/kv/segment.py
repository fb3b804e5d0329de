"""The stored KV of one chunk: immutable, for any position; and how its tensors are encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from chunkweave.errors import UnknownMethodError


@dataclass(frozen=True, slots=True, eq=False)
class SegmentKV:
    """Keys and values of one chunk.

    The keys are as they are at the positions from `keys_at` on, or before RoPE if that is None. `kv` is `[layers, 2,
    tokens, kv_heads, head_dim]`, index 0 of the second axis the keys, 1 the values; layer-major, so that one layer of
    one chunk is one contiguous read. Nobody writes to it after construction: a position shift returns new tensors.
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
    """A segment's layer cannot be had: missing, corrupt, or too late. The caller drops it and computes instead."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"segment {segment}: {reason}")
        self.segment = segment


class SegmentLate(SegmentLost):
    """A layer did not come in time; the segment itself may be sound."""


class SegmentHeldUp(SegmentLate):
    """What is read before it does not come; where it lies itself nothing need be wrong."""


class SegmentSource(Protocol):
    """A segment that is read layer by layer: `SegmentKV` itself, or one whose layers still lie on disk."""

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors once they are in memory."""

    @property
    def keys_at(self) -> int | None:
        """The position of the first token that the keys are rotated to; None: they are before RoPE."""

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]`; may read and block.

        `scratch` (uint8, one dimension) may be read into, and the result may be a view of it: reused or already
        mapped memory saves the page faults of fresh memory, which cost as much as reading from a fast disk.

        Raises:
            SegmentLost: this layer cannot be had.
        """


Shape = tuple[int, ...]


class EncodingError(ValueError):
    """KV that a codec cannot represent; nothing was written."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One of the tensors that an encoded layer consists of; `suffix` follows the layer's name in a file."""

    suffix: str
    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Codec(Protocol):
    """Turns one layer's KV `[2, tokens, kv_heads, head_dim]` into the tensors that are stored, and back."""

    @property
    def name(self) -> str:
        """What `make_codec` knows it by; stands in every file."""

    def layout(self, shape: Shape, dtype: torch.dtype) -> tuple[TensorLayout, ...]:
        """The encoded tensors of a layer of `shape` and `dtype`, in their order in a file."""

    def encode_layer(self, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of `layout`, contiguous and in memory of the host.

        Raises:
            EncodingError: this KV cannot be represented.
        """

    def decode_layer(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """KV of `dtype` from the tensors of `layout`; may be a view of them."""


class RawCodec:
    """The dtype as it is: no error, and the only codec that takes infinities and NaN."""

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
    """One byte an element, and one fp32 scale for each (K or V, head, dimension) over the chunk's tokens.

    Symmetric: a channel's greatest magnitude becomes `limit`. Keys are stored before RoPE, where outliers keep to
    fixed channels (KIVI, arXiv:2402.02750 §3, which also quantizes keys per channel; values here likewise, for one
    layout). fp16 scales would save 2 bytes in `tokens + 4` and overflow on bf16 outliers, so scales are fp32.
    Scales come first: whatever the number of tokens, both tensors of a layer then start aligned.
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
            EncodingError: the layer holds infinities or NaN, which have no scale.
        """
        wide = kv.detach().to(device="cpu", dtype=torch.float32)
        scales = wide.abs().amax(dim=1) / self.limit
        if not bool(torch.isfinite(scales).all()):
            raise EncodingError(f"codec {self.name}: KV with infinities or NaN cannot be quantized")
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        # Rounding must not carry the greatest fp32 to infinity on the way back.
        scales = scales.clamp_(max=torch.finfo(torch.float32).max / self.limit * (1 - 2**-22))
        scaled = (wide / scales.unsqueeze(1)).clamp_(-self.limit, self.limit)
        if not self.stored.is_floating_point:
            scaled = scaled.round_()
        return scales.contiguous(), scaled.to(self.stored).contiguous()

    def decode_layer(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Quantized values times their channel's scale, rounded to `dtype`."""
        scales, quantized = tensors
        if self.stored is torch.float8_e4m3fn:
            quantized, scales = _e4m3_as_half(quantized), scales * 256
        return quantized.to(torch.float32).mul_(scales.unsqueeze(1)).to(dtype)


def _e4m3_as_half(values: torch.Tensor) -> torch.Tensor:
    """Finite e4m3 values as fp16, 256 times too small: sign, exponent and mantissa moved to where fp16 has them.

    Exact, denormals included (exponent bias 7 against 15), and several times faster than torch's own conversion on
    a CPU. The sign arrives twice, in bits 15 and 14; the mask drops the second.
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
    """The codec of that name; raises `UnknownMethodError` if there is none."""
    if name not in CODECS:
        raise UnknownMethodError(f"no codec {name!r}; known: {', '.join(sorted(CODECS))}")
    return CODECS[name]
