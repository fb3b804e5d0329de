"""How the weights of a model's linear layers are kept: as they are, in the order that oneDNN reads them in, or as int8.

PyTorch gives oneDNN its weights row by row, and a product of few rows then reads them at half the speed of the memory.
Packed once, they are read at all of it. Not a bit of the result differs, and they take the same memory: the packed
weights stand in for the model's own.
"""

import logging
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from chunkweave.config import Weights
from chunkweave.errors import UsageError

logger = logging.getLogger(__name__)

_FEW_ROWS = 8
"""Up to so many rows int8 weights are multiplied as they are; for more it is faster to dequantize them first."""

_TOLERANCE = 0.02
"""How far a product by packed weights may be from the plain one."""


class PackedLinear(nn.Module):
    """A linear layer whose weights oneDNN has packed; for inference only."""

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
        """The weights as they were, `[out_features, in_features]`; a copy."""
        return self._packed.to_dense()


class Int8Linear(nn.Module):
    """A linear layer whose weights are one byte each, with a scale for each output; for inference only.

    Symmetric: the greatest magnitude of an output's weights becomes 127. States are not quantized: that
    costs more than the weights do.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        wide = linear.weight.detach().float()
        scales = (wide.abs().amax(1) / 127).to(linear.weight.dtype)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        self._scales = scales
        self._quantized = (wide / scales.float().unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
        # PyTorch's kernel reads past the end of what is no multiple of its vectors.
        self._few = _FEW_ROWS if self.in_features % 16 == 0 and self.out_features % 4 == 0 else 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        rows = states.reshape(-1, self.in_features)
        if len(rows) <= self._few:
            product = torch._weight_int8pack_mm(rows, self._quantized, self._scales)
        else:
            product = F.linear(rows, self._quantized.to(rows.dtype)).mul_(self._scales)
        if self.bias is not None:
            product += self.bias
        return product.view(*states.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:
        """The weights as they count, `[out_features, in_features]`; a copy."""
        return self._quantized.to(self._scales.dtype).mul_(self._scales.unsqueeze(1))


def keep_weights(model: Any, weights: Weights) -> None:
    """Let a transformers model's linear layers keep their weights so. Changes `model` in place.

    A head whose weights are the embeddings' has a copy of its own afterwards. What is no plain `nn.Linear`, such as
    the experts of a mixture, stays as it is.

    Raises:
        UsageError: int8 is asked for where it is not supported.
    """
    if weights is Weights.INT8:
        check_int8(str(model.device), str(model.dtype).removeprefix("torch."))
        _replace_linear(model, Int8Linear)
    elif weights is Weights.AUTO and _packable(model):
        _replace_linear(model, PackedLinear)


def check_int8(device: str, dtype: str) -> None:
    """Refuse int8 weights where they are not supported, by what is known before weights are read.

    Raises:
        UsageError: naming what to choose instead.
    """
    if device != "cpu":
        raise UsageError(f"weights='int8' is for CPUs, not for {device}; use weights='auto'")
    if dtype not in ("bfloat16", "float32"):
        raise UsageError(f"weights='int8' is for models in bfloat16 or float32, not in {dtype}")


def _replace_linear(model: Any, kind: type[PackedLinear | Int8Linear]) -> None:
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if type(module) is nn.Linear:
                setattr(parent, name, kind(module))


def _packable(model: Any) -> bool:
    """Whether this machine multiplies by packed weights, and does it right; they are for bfloat16 on CPUs."""
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
        logger.warning("weights stay as they are: oneDNN cannot pack them (%s)", failure)
        return False
    return bool(error <= _TOLERANCE)
