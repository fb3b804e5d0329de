"""Rotates keys to a position and back, with the tables of a model's own modules in vLLM."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from chunkweave.errors import UnsupportedModelError

BEFORE_ROPE = -1
"""Marks keys before RoPE, in place of a position."""


class Rotation:
    """Rotates keys to a position and back, with the model's own table of cosines and sines.

    Computed in float32 and rounded once. The inverse divides by cos² + sin², which is 1 for plain RoPE, the square of
    the attention factor for YaRN, and inexact where the table is bfloat16.
    """

    def __init__(self, rotary: Any) -> None:
        """Take the angles of a vLLM `RotaryEmbedding`.

        Raises:
            UnsupportedModelError: its rotation is not one angle per pair of dims and position.
        """
        table = _table_of(rotary)
        if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.shape[1] > rotary.head_size:
            raise UnsupportedModelError(
                f"{type(rotary).__name__} is not supported: keys can be shifted only where they are rotated by the "
                "position alone"
            )
        self._rotary = rotary
        self._dims = int(table.shape[1])
        self._halves = bool(getattr(rotary, "is_neox_style", True))
        self._forward: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._turned: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def forward(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate keys before RoPE `[tokens, heads, head_dim]` to `positions` `[tokens]`.

        The angles are cached for the last tensor of positions.
        """
        table = _table_of(self._rotary)
        if self._forward is None or self._forward[0] is not positions or self._forward[1] is not table:
            self._forward = positions, table, *self._angles(positions)
        _, _, cos, sin = self._forward
        return self._rotated(keys, cos, sin)

    def inverse(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate keys at `positions` `[tokens]` back to before RoPE, `[tokens, heads, head_dim]`."""
        return self.turn(keys, positions, torch.full_like(positions, BEFORE_ROPE))

    def turn(self, keys: torch.Tensor, at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Rotate keys from `at` to `to`, positions or `BEFORE_ROPE`, `[tokens]` each; rounded once.

        Keys with equal positions are unchanged: their cosine is exactly 1, their sine 0. The angles are cached for the
        last two tensors, because the next layer uses them too.
        """
        if self._turned is None or self._turned[0] is not at or self._turned[1] is not to:
            self._turned = at, to, *self._between(at, to)
        _, _, cos, sin = self._turned
        return self._rotated(keys, cos, sin)

    def _between(self, at: torch.Tensor, to: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotation from one to the other, in the form of `_angles`."""
        (cos_at, sin_at), (cos_to, sin_to) = self._angles_or_none(at), self._angles_or_none(to)
        scale = cos_at * cos_at + sin_at * sin_at
        return (cos_to * cos_at + sin_to * sin_at) / scale, (sin_to * cos_at - cos_to * sin_at) / scale

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, `[tokens, 1, rotated dims / 2]`. Not cached, because the module may replace its table."""
        cos, sin = _table_of(self._rotary)[positions].float()[:, None].chunk(2, dim=-1)
        return cos, sin

    def _angles_or_none(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, with no rotation where the position is `BEFORE_ROPE`."""
        cos, sin = self._angles(positions)
        none = (positions == BEFORE_ROPE)[:, None, None]
        return cos.masked_fill(none, 1.0), sin.masked_fill(none, 0.0)

    def _rotated(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate keys by angles, in float32; other dims are copied. Few launches, because every layer needs them."""
        turned = torch.empty_like(keys)
        rotated = keys[..., : self._dims].float()
        (one, two), (first, second) = self._halves_of(rotated), self._halves_of(turned[..., : self._dims])
        first.copy_((one * cos).addcmul_(two, sin, value=-1.0))
        second.copy_((two * cos).addcmul_(one, sin))
        if self._dims < keys.shape[-1]:
            turned[..., self._dims :] = keys[..., self._dims :]
        return turned

    def _halves_of(self, dims: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._halves:
            one, two = dims.chunk(2, dim=-1)
            return one, two
        return dims[..., 0::2], dims[..., 1::2]


def _table_of(rotary: Any) -> Any:
    """Cosines and sines by position; LongRoPE's table has those for short contexts first."""
    table = getattr(rotary, "cos_sin_cache", None)
    return getattr(rotary, "long_short_cos_sin_cache", None) if table is None else table


class Rotations:
    """The rotation of every layer: layers with one rotary module share it, and some layers have none."""

    def __init__(self, rotaries: Sequence[Any]) -> None:
        """`rotaries` are vLLM's modules in layer order, None where a layer does not rotate.

        Raises:
            UnsupportedModelError: as for `Rotation`.
        """
        rotations = {id(rotary): None if rotary is None else Rotation(rotary) for rotary in rotaries}
        self._layers = [rotations[id(rotary)] for rotary in rotaries]

    def forward(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate a layer's keys before RoPE `[tokens, heads, head_dim]` to `positions` `[tokens]`."""
        rotation = self._layers[layer]
        return keys if rotation is None else rotation.forward(keys, positions)

    def inverse(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate a layer's keys at `positions` `[tokens]` back to before RoPE, `[tokens, heads, head_dim]`."""
        rotation = self._layers[layer]
        return keys if rotation is None else rotation.inverse(keys, positions)

    def turn(self, layer: int, keys: torch.Tensor, at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Rotate a layer's keys from `at` to `to`, positions or `BEFORE_ROPE`, `[tokens]` each."""
        rotation = self._layers[layer]
        return keys if rotation is None else rotation.turn(keys, at, to)


class SharedRotary:
    """The rotary module of transformers that all layers of a model share; it may distinguish layer types."""

    def __init__(
        self, module: Any, layer_types: Sequence[str], positions: int, probe: torch.Tensor, *, interleaved: bool = False
    ) -> None:
        """`layer_types` are empty strings if the module does not take them; `probe` has the dtype and the device.

        `interleaved` rotates dim 2i with dim 2i + 1; else dim i with dim i + half of the rotated dims.
        """
        self._module, self._types, self._probe = module, tuple(layer_types), probe
        self._halves = not interleaved
        self._tables: dict[str, torch.Tensor] = {}
        self._positions = torch.arange(positions, device=probe.device)

    def angles(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for a layer of transformers, `[1, tokens, rotated dims]`."""
        kind = self._types[layer]
        cos, sin = self._module(self._probe, positions[None], *((kind,) if kind else ()))
        return cos, sin

    def table(self, layer: int, head_size: int) -> SimpleNamespace:
        """The table in the form of vLLM's rotary modules; layers of one type share it."""
        kind = self._types[layer]
        if kind not in self._tables:
            halves = [part[0].chunk(2, dim=-1)[0] for part in self.angles(layer, self._positions)]
            self._tables[kind] = torch.cat(halves, dim=-1)
        return SimpleNamespace(cos_sin_cache=self._tables[kind], head_size=head_size, is_neox_style=self._halves)
