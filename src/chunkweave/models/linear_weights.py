"""Linear layers and their weights in memory: as loaded, in oneDNN's order, or as a GGUF file's 4-bit groups.

By default PyTorch passes weights to oneDNN row by row, and a product of few rows then reads them at half the memory
bandwidth. Packed once, they are read at full bandwidth. Results are bitwise equal, and memory use is the same, because
packed weights replace the model's own.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import AutoModelForCausalLM

from chunkweave.errors import UnsupportedModelError, UsageError
from chunkweave.models.huggingface import own_attention

logger = logging.getLogger(__name__)

_PRODUCT_TOLERANCE = 0.02
"""Largest allowed difference of a product by packed weights from the plain one."""


class PackedLinear(nn.Module):
    """A linear layer with weights packed by oneDNN; for inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self._packed, self.bias, "none", [], "")
        return product

    @property
    def weight(self) -> torch.Tensor:
        """The original weights, `[out_features, in_features]`; a copy."""
        return self._packed.to_dense()


def pack_weights(model: Any) -> None:
    """Convert a transformers model's linear layers to `PackedLinear` where it is faster. Mutates `model`.

    An output head tied to the embeddings gets its own copy. Modules that are no plain `nn.Linear`, such as experts of a
    mixture, are not converted.
    """
    if _packable(model):
        _pack_linear(model)


def _pack_linear(model: Any, *, but: torch.Tensor | None = None) -> None:
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if type(module) is nn.Linear and module.weight is not but:
                setattr(parent, name, PackedLinear(module))


def _packable(model: Any) -> bool:
    """Whether this machine multiplies by packed weights correctly; bfloat16 on CPUs only."""
    if model.device.type != "cpu" or model.dtype is not torch.bfloat16:
        return False
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return False
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(72, 40, dtype=torch.bfloat16)
    states = torch.randn(5, 72, generator=generator).bfloat16()
    try:
        with torch.inference_mode():
            error = (PackedLinear(linear)(states) - linear(states)).abs().max().item()
    except (AttributeError, RuntimeError, NotImplementedError) as failure:
        logger.warning("weights are not packed: oneDNN does not support it here (%s)", failure)
        return False
    return bool(error <= _PRODUCT_TOLERANCE)


GROUP = 32
"""Weights of an output that share a scale and an offset, in Q4_0, Q4_1, Q4_K and Q8_0."""

_BLOCK = 64
"""Outputs are padded to a multiple of this number."""

_FEW_INT4_ROWS = 32
"""Up to this number of rows, 4-bit weights are multiplied directly; for more, dequantizing first is faster."""

_TILE_WEIGHTS = 1 << 22
"""Weights that are dequantized at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Int4Plane:
    """Four bits of each weight: `(number - 8) * scale + offset`. A weight is the sum over its planes.

    `packed` is uint8 `[outputs, inputs / 2]` in PyTorch's order; `scales` bfloat16 `[inputs / 32, outputs, 2]`, each
    group's scale and offset.
    """

    packed: torch.Tensor
    scales: torch.Tensor


class Int4Linear(nn.Module):
    """A linear layer with the 4-bit groups of a GGUF file; for inference in bfloat16 on CPUs only.

    Numbers are those of the file; scales and offsets are rounded to bfloat16. 8-bit weights are two planes, the upper
    four bits first, at 16 times the scale. Products of few rows read the packed weights; for more, weights are
    dequantized, some outputs at a time.
    """

    def __init__(self, in_features: int, out_features: int, planes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias: torch.Tensor | None = None
        padded = -(-out_features // _BLOCK) * _BLOCK
        self.planes = [
            Int4Plane(
                torch.zeros(padded, in_features // 2, dtype=torch.uint8),
                torch.zeros(in_features // GROUP, padded, 2, dtype=torch.bfloat16),
            )
            for _ in range(planes)
        ]

    def fill(self, first: int, parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """Set the weights of some outputs, from `first` on, a multiple of 64.

        Per plane: numbers from 0 to 15, uint8 `[outputs, inputs]`, and float32 scales and offsets `[outputs, groups]`.
        """
        for plane, part in zip(self.planes, parts, strict=True):
            numbers, scales, offsets = map(torch.from_numpy, part)
            outputs = len(numbers)
            whole = F.pad(numbers, (0, 0, 0, -outputs % _BLOCK)).to(torch.int32)
            plane.packed[first : first + len(whole)] = torch._convert_weight_to_int4pack_for_cpu(whole, 1)
            plane.scales[:, first : first + outputs] = torch.stack((scales.t(), offsets.t()), -1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        rows = states.reshape(-1, self.in_features)
        product = self._directly(rows) if 0 < len(rows) <= _FEW_INT4_ROWS else self._dequantized(rows)
        product = product[:, : self.out_features]
        if self.bias is not None:
            product = product + self.bias
        return product.reshape(*states.shape[:-1], self.out_features)

    def _directly(self, rows: torch.Tensor) -> torch.Tensor:
        products = [torch._weight_int4pack_mm_for_cpu(rows, plane.packed, GROUP, plane.scales) for plane in self.planes]
        return products[0] if len(products) == 1 else products[0] + products[1]

    def _dequantized(self, rows: torch.Tensor) -> torch.Tensor:
        outputs = len(self.planes[0].packed)
        step = max(_BLOCK, _TILE_WEIGHTS // self.in_features // _BLOCK * _BLOCK)
        tiles = [rows @ self._columns(first, min(first + step, outputs)) for first in range(0, outputs, step)]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, 1)

    def _columns(self, first: int, stop: int) -> torch.Tensor:
        """The weights of outputs `first` to `stop`, bfloat16 `[in_features, outputs]`."""
        half = int4_half_block()
        inputs = self.in_features
        by_plane: list[torch.Tensor] = []
        for plane in self.planes:
            packed = plane.packed.view(-1, inputs, half)[first // (2 * half) : stop // (2 * half)]
            numbers = torch.empty(inputs, len(packed), 2, half, dtype=torch.bfloat16)
            for side, bits in enumerate((packed & 15, packed >> 4)):
                numbers[:, :, side] = bits.sub_(8).view(torch.int8).transpose(0, 1)
            by_plane.append(numbers.view(inputs // GROUP, GROUP, stop - first))
        whole = by_plane[0]
        if len(by_plane) == 2:
            whole.mul_(16).add_(by_plane[1])  # exact: at most eight bits
        offsets = torch.stack([plane.scales[:, None, first:stop, 1] for plane in self.planes]).sum(0)
        scales = self.planes[-1].scales[:, None, first:stop, 0].contiguous()
        return torch.addcmul(offsets, whole, scales, out=whole).view(inputs, stop - first)

    def outputs(self, ids: torch.Tensor) -> torch.Tensor:
        """The weights of single outputs, float32 `[*ids.shape, in_features]`.

        Raises:
            IndexError: there is no such output.
        """
        half = int4_half_block()
        flat = ids.reshape(-1)
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.out_features:
            raise IndexError(f"of {self.out_features} outputs, {int(flat.min())} to {int(flat.max())} were asked for")
        block = flat // (2 * half)
        within = flat % (2 * half)
        total = torch.zeros(len(flat), self.in_features)
        for plane in self.planes:
            packed = plane.packed.view(-1, self.in_features, half)[block, :, within % half]
            numbers = torch.where((within < half)[:, None], packed & 15, packed >> 4).float().sub_(8)
            scales, offsets = plane.scales[:, flat].float().transpose(0, 1)[:, :, None].unbind(-1)
            groups = numbers.view(len(flat), self.in_features // GROUP, GROUP)
            total += torch.addcmul(offsets, groups, scales).reshape(len(flat), self.in_features)
        return total.view(*ids.shape, self.in_features)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weights, `[out_features, in_features]`; a copy."""
        return self.outputs(torch.arange(self.out_features)).to(torch.bfloat16)


class Int4Embedding(nn.Module):
    """Token embeddings read from the weights of an `Int4Linear`, which may also be the output head."""

    def __init__(self, linear: Int4Linear, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self._scale = linear, scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[...]` -> `[..., in_features]`, bfloat16."""
        embeddings = self.linear.outputs(token_ids).to(torch.bfloat16)
        return embeddings if self._scale == 1.0 else embeddings * torch.tensor(self._scale, dtype=torch.bfloat16)


@cache
def int4_half_block() -> int:
    """Half of the number of outputs in one block of PyTorch's 4-bit order: 32 with AVX-512, 16 with AVX2.

    Of each input, a block has one byte for two outputs: the block's first half is in the lower four bits. 0 if the
    order is another one.
    """
    outputs = torch.arange(_BLOCK, dtype=torch.int32)[:, None].expand(_BLOCK, GROUP).contiguous()
    try:
        packed_ones, sixteens = (
            torch._convert_weight_to_int4pack_for_cpu(of, 1) for of in (outputs % 16, outputs // 16)
        )
    except (AttributeError, RuntimeError):
        return 0
    for half in (32, 16):
        low = ((packed_ones & 15) + 16 * (sixteens & 15)).view(-1, GROUP, half)
        high = ((packed_ones >> 4) + 16 * (sixteens >> 4)).view(-1, GROUP, half)
        first = (torch.arange(_BLOCK) // (2 * half) * 2 * half).view(-1, 2 * half)[:, :half] + torch.arange(half)
        if bool((low == first[:, None]).all()) and bool((high == first[:, None] + half).all()):
            return half
    return 0


def empty_model(config: Any) -> Any:
    """A model without memory for its parameters, whose rotary module is whole."""
    build: Callable[..., Any] = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(config, dtype=torch.bfloat16, attn_implementation=own_attention(config))
    body: Any = model.model
    rotary: Callable[..., Any] = type(body.rotary_emb)
    body.rotary_emb = rotary(config=config)
    return model


def set_int4(model: Any, path: str, linear: Int4Linear, old: nn.Linear | nn.Embedding) -> None:
    """Put 4-bit weights where `old` was; embeddings also become the output head if the model ties both."""
    if isinstance(old, nn.Embedding):
        model.set_submodule(path, Int4Embedding(linear, float(getattr(old, "scalar_embed_scale", 1.0))))
        if model.config.tie_word_embeddings:
            model.lm_head = linear
    else:
        linear.bias = None if old.bias is None or old.bias.is_meta else old.bias.detach()
        model.set_submodule(path, linear)


def finished(model: Any) -> Any:
    """Tie the head where embeddings are plain, and pack other plain weights.

    Raises:
        UnsupportedModelError: some of the model is not in the file.
    """
    embeddings = model.model.embed_tokens
    if model.config.tie_word_embeddings and isinstance(embeddings, nn.Embedding):
        model.lm_head.weight = embeddings.weight
    for name, module in model.named_modules():
        buffers = {key: value for key, value in module.named_buffers(recurse=False) if value.is_meta}
        for key in buffers.keys() & {"embed_scale"}:
            module.register_buffer(key, torch.tensor(module.scalar_embed_scale, dtype=torch.bfloat16), persistent=False)
        parameters = module.named_parameters(recurse=False)
        missing = [*(buffers.keys() - {"embed_scale"}), *(key for key, value in parameters if value.is_meta)]
        if missing:
            raise UnsupportedModelError(f"weights='native': {name}.{missing[0]} is not in the GGUF file; use auto")
    if _packable(model):
        _pack_linear(model, but=getattr(embeddings, "weight", None))
    return model.eval()


def random_int4(config: Any, seed: int) -> Any:
    """A model with random 4-bit linear layers and random bfloat16 embeddings, for timing; its answers mean nothing."""
    model = empty_model(config)
    draw = torch.Generator().manual_seed(seed)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not (config.tie_word_embeddings and name == "lm_head"):
            linear = Int4Linear(module.in_features, module.out_features, 1)
            plane = linear.planes[0]
            plane.packed.random_(0, 256, generator=draw)
            plane.scales[..., 0] = 0.02 / 4.6  # numbers from -8 to 7 deviate by 4.6
            set_int4(model, name, linear, module)
        else:
            for key, value in module.named_parameters(recurse=False):
                filled = torch.empty(value.shape, dtype=torch.bfloat16)
                filled = filled.normal_(0, 0.02, generator=draw) if filled.dim() > 1 else filled.fill_(1)
                setattr(module, key, nn.Parameter(filled, requires_grad=False))
    return finished(model)


def check_native(device: str, dtype: str) -> None:
    """Refuse 4-bit weights on unsupported machines, before weights are read.

    Raises:
        UsageError: the message says what to use instead.
    """
    if device != "cpu":
        raise UsageError(f"weights='native' is for CPUs, not for {device}; use weights='auto'")
    if dtype != "bfloat16":
        raise UsageError(f"weights='native' computes in bfloat16, not in {dtype}; use dtype='bfloat16'")
    if not int4_half_block():
        raise UsageError("weights='native' is not supported by this PyTorch on this CPU; use weights='auto'")
