"""Load a GGUF file's weights as they are: the 4-bit and 8-bit groups of its linear layers, without requantizing them.

Formats: Q4_0, Q4_1, Q4_K and Q8_0 (`ggml-common.h` and `ggml-quants.c` of llama.cpp). Weights of other formats
are dequantized to bfloat16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from torch import nn

from chunkweave.models.gguf_checkpoint import GgufFile
from chunkweave.models.linear_weights import GROUP, Int4Linear, empty_model, finished, set_int4

_ROWS_WEIGHTS = 1 << 22
"""Weights that are converted at once."""

_Plane = tuple[np.ndarray, np.ndarray, np.ndarray]
"""One plane of rows: numbers from 0 to 15 `[rows, inputs]`, float32 scales and offsets `[rows, inputs / 32]`."""


def native_model(file: GgufFile) -> Any:
    """A transformers model, in evaluation mode, with the weights of `file`, each held once.

    Raises:
        UnsupportedModelError: a tensor's type is unknown.
    """
    model = empty_model(file.config)
    for name, parameter in file.names.items():
        path, _, kind = parameter.rpartition(".")
        module = model.get_submodule(path)
        format_of = file.tensors[name].tensor_type
        if kind == "weight" and isinstance(module, nn.Linear | nn.Embedding) and format_of in _PLANES:
            set_int4(model, path, _linear(file, name), module)
        else:
            setattr(module, kind, nn.Parameter(file.dequantized(name), requires_grad=False))
    return finished(model)


def _linear(file: GgufFile, name: str) -> Int4Linear:
    tensor = file.tensors[name]
    inputs, outputs = (int(size) for size in tensor.shape)
    planes, planes_of = _PLANES[tensor.tensor_type]
    linear = Int4Linear(inputs, outputs, planes)
    rows = file.ordered(name, tensor.data.reshape(outputs, -1))
    step = max(64, _ROWS_WEIGHTS // inputs // 64 * 64)
    for first in range(0, outputs, step):
        planes_of_rows = planes_of(np.ascontiguousarray(rows[first : first + step]))
        linear.fill(first, planes_of_rows)
    return linear


def _half(blocks: np.ndarray) -> np.ndarray:
    """Two bytes of each block as float16, in float32: `[..., 2]` -> `[...]`."""
    return np.ascontiguousarray(blocks).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """Lower and then upper four bits of a run of bytes: `[..., n]` -> `[..., 2 n]`."""
    return np.concatenate((data & 15, data >> 4), -1)


def q4_0(rows: np.ndarray) -> list[_Plane]:
    """`(q - 8) d`, 18 bytes for 32 weights."""
    blocks = rows.reshape(len(rows), -1, 18)
    scales = _half(blocks[..., :2])
    return [(_nibbles(blocks[..., 2:]).reshape(len(rows), -1), scales, np.zeros_like(scales))]


def q4_1(rows: np.ndarray) -> list[_Plane]:
    """`q d + m`, 20 bytes for 32 weights."""
    blocks = rows.reshape(len(rows), -1, 20)
    scales = _half(blocks[..., :2])
    return [(_nibbles(blocks[..., 4:]).reshape(len(rows), -1), scales, _half(blocks[..., 2:4]) + 8 * scales)]


def q8_0(rows: np.ndarray) -> list[_Plane]:
    """`q d`, 34 bytes for 32 weights, as two planes: the upper four bits times 16 d, and the lower times d."""
    blocks = rows.reshape(len(rows), -1, 34)
    scales = _half(blocks[..., :2])
    numbers = blocks[..., 2:].reshape(len(rows), -1)
    # Both planes are centered: their products are rounded before they are added, and must not cancel.
    return [((numbers >> 4) ^ 8, 16 * scales, 8 * scales), (numbers & 15, scales, np.zeros_like(scales))]


def q4_k(rows: np.ndarray) -> list[_Plane]:
    """`q d s - dmin m`, 144 bytes for 256 weights: eight groups, each with 6-bit s and m."""
    blocks = rows.reshape(len(rows), -1, 144)
    packed = blocks[..., 4:16]
    low = packed[..., :4]
    middle = packed[..., 4:8]
    high = packed[..., 8:]
    factors = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), -1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 6) << 4)), -1)
    scales = _half(blocks[..., :2])[..., None] * factors
    offsets = 8 * scales - _half(blocks[..., 2:4])[..., None] * minima
    numbers = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, GROUP))
    flat = (len(rows), -1)
    return [(numbers.reshape(flat), scales.reshape(flat), offsets.reshape(flat))]


_PLANES: dict[Any, tuple[int, Callable[[np.ndarray], list[_Plane]]]] = {
    Kind.Q4_0: (1, q4_0),
    Kind.Q4_1: (1, q4_1),
    Kind.Q4_K: (1, q4_k),
    Kind.Q8_0: (2, q8_0),
}
"""By format: how many planes hold its weights, and the function that makes them."""
