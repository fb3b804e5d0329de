"""Choice of the attention kernel."""

import logging
from importlib.util import find_spec

import torch

from chunkweave.config import AttentionKernel
from chunkweave.errors import UsageError
from chunkweave.models import onednn_attention
from chunkweave.models.attention import FlatAttention, SdpaAttention
from chunkweave.types import Geometry

logger = logging.getLogger(__name__)


def make_attention(
    kernel: AttentionKernel, geometry: Geometry, *, dtype: torch.dtype, device: torch.device
) -> FlatAttention:
    """The requested kernel; with `auto` the fastest one that runs here, else PyTorch's.

    `auto` chooses Triton on CUDA, and oneDNN on CPUs that are faster with it, if the model's shape fits and a trial
    gives correct results; a kernel that fails the trial only causes a warning.

    Raises:
        UsageError: the requested kernel does not run here; the message says why.
    """
    if kernel == AttentionKernel.AUTO:
        kernel = _best_kernel(dtype, device)
        if kernel != AttentionKernel.SDPA:
            attention, problem = _kernel_or_problem(kernel, geometry, dtype, device)
            if attention is not None:
                return attention
            logger.warning("attention falls back to PyTorch's: %s", problem)
        return SdpaAttention()
    attention, problem = _kernel_or_problem(kernel, geometry, dtype, device)
    if attention is None:
        raise UsageError(f"the {kernel} kernel was requested, but {problem}; use attention='sdpa'")
    return attention


def _best_kernel(dtype: torch.dtype, device: torch.device) -> AttentionKernel:
    if device.type == "cuda":
        return AttentionKernel.TRITON
    if device.type == "cpu" and dtype is torch.bfloat16:
        return AttentionKernel.ONEDNN if onednn_attention.worth_it() else AttentionKernel.SDPA
    return AttentionKernel.SDPA


def _kernel_or_problem(
    kernel: AttentionKernel, geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> tuple[FlatAttention | None, str | None]:
    """The kernel, or None and the reason why it does not run here."""
    if kernel == AttentionKernel.ONEDNN:
        problem = onednn_attention.unsupported_reason(geometry, dtype=dtype, device=device)
        return (onednn_attention.OneDnnAttention(), None) if problem is None else (None, problem)
    if kernel == AttentionKernel.TRITON:
        if find_spec("triton") is None:
            return None, "Triton is not installed"
        from chunkweave.models import triton_attention

        problem = triton_attention.unsupported_reason(geometry, dtype=dtype, device=device)
        return (triton_attention.TritonAttention(), None) if problem is None else (None, problem)
    return SdpaAttention(), None
