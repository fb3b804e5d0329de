"""How the weights of a model's linear layers are kept: as they are, or in the order that oneDNN reads them in.

PyTorch gives oneDNN its weights row by row, and a product of few rows then reads them at half the speed of the memory.
Packed once, they are read at all of it. Not a bit of the result differs, and they take the same memory: the packed
weights stand in for the model's own.
"""

import logging
from typing import Any

import torch
from torch import nn

from chunkweave.config import Weights

logger = logging.getLogger(__name__)


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


def keep_weights(model: Any, weights: Weights) -> None:
    """Let a transformers model's linear layers keep their weights so. Changes `model` in place.

    A head whose weights are the embeddings' has a copy of its own afterwards. What is no plain `nn.Linear`, such as
    the experts of a mixture, stays as it is.
    """
    if weights is Weights.PLAIN or not _packable(model):
        return
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if type(module) is nn.Linear:
                setattr(parent, name, PackedLinear(module))


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


_TOLERANCE = 0.02
