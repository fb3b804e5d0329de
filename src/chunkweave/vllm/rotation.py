"""Turning keys to a position and back, by the tables that a model's own modules in vLLM rotate with."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from chunkweave.errors import UnsupportedModelError

BEFORE_ROPE = -1
"""In place of a position."""


class Rotation:
    """Turns keys to a position and back, with the table of cosines and sines that the model itself rotates with.

    Computed in float32 and rounded once. The inverse divides by cos² + sin², which is 1 for plain RoPE, the square of
    the attention factor for YaRN, and off by rounding where the table is bfloat16.
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
        self._turned: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def forward(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys before RoPE `[tokens, heads, head_dim]` -> as they are at `positions` `[tokens]`."""
        return self._rotated(keys, *self._angles(positions))

    def inverse(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys as they are at `positions` `[tokens]` -> before RoPE, `[tokens, heads, head_dim]`."""
        return self.turn(keys, positions, torch.full_like(positions, BEFORE_ROPE))

    def turn(self, keys: torch.Tensor, at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Keys as they are `at` -> as they are `to`, positions or `BEFORE_ROPE`, `[tokens]` each; rounded once.

        Keys that stay where they are do not change: their cosine comes out as 1, their sine as 0. For the same two
        tensors as the last time, a layer before, the angles are not worked out again.
        """
        if self._turned is None or self._turned[0] is not at or self._turned[1] is not to:
            self._turned = at, to, *self._between(at, to)
        _, _, cos, sin = self._turned
        return self._rotated(keys, cos, sin)

    def _between(self, at: torch.Tensor, to: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotation from one to the other, as `_angles` has them."""
        (cos_at, sin_at), (cos_to, sin_to) = self._angles_or_none(at), self._angles_or_none(to)
        scale = cos_at * cos_at + sin_at * sin_at
        return (cos_to * cos_at + sin_to * sin_at) / scale, (sin_to * cos_at - cos_to * sin_at) / scale

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, `[tokens, 1, rotated dims / 2]`. Read each time: the module may replace its table."""
        cos, sin = _table_of(self._rotary)[positions].float()[:, None].chunk(2, dim=-1)
        return cos, sin

    def _angles_or_none(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, of no rotation where there is no position."""
        cos, sin = self._angles(positions)
        none = (positions == BEFORE_ROPE)[:, None, None]
        return cos.masked_fill(none, 1.0), sin.masked_fill(none, 0.0)

    def _rotated(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Keys turned by angles, in float32; dims that are not rotated stay. In few launches: each layer has them."""
        turned, rotated = torch.empty_like(keys), keys[..., : self._dims].float()
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
    """The rotation of every layer: layers of one rotary module share it, and some may have none."""

    def __init__(self, rotaries: Sequence[Any]) -> None:
        """`rotaries` are vLLM's modules in layer order, None where a layer does not rotate.

        Raises:
            UnsupportedModelError: as for `Rotation`.
        """
        found = {id(rotary): None if rotary is None else Rotation(rotary) for rotary in rotaries}
        self._layers = [found[id(rotary)] for rotary in rotaries]

    def forward(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys before RoPE `[tokens, heads, head_dim]` -> as a layer has them at `positions` `[tokens]`."""
        rotation = self._layers[layer]
        return keys if rotation is None else rotation.forward(keys, positions)

    def inverse(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys as a layer has them at `positions` `[tokens]` -> before RoPE, `[tokens, heads, head_dim]`."""
        rotation = self._layers[layer]
        return keys if rotation is None else rotation.inverse(keys, positions)

    def turn(self, layer: int, keys: torch.Tensor, at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Keys as a layer has them `at` positions or `BEFORE_ROPE` `[tokens]` -> as it has them `to` others."""
        rotation = self._layers[layer]
        return keys if rotation is None else rotation.turn(keys, at, to)


class SharedRotary:
    """The rotary module of transformers that all layers of a model share; it may tell types of layers apart."""

    def __init__(
        self, module: Any, layer_types: Sequence[str], positions: int, probe: torch.Tensor, *, interleaved: bool = False
    ) -> None:
        """`layer_types` are empty strings if the module does not ask for them; `probe` has the dtype and the device.

        `interleaved` rotates dim 2i with dim 2i + 1, else with dim i + half of those that are rotated.
        """
        self._module, self._types, self._probe = module, tuple(layer_types), probe
        self._halves = not interleaved
        self._tables: dict[str, torch.Tensor] = {}
        self._positions = torch.arange(positions, device=probe.device)

    def angles(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines as a layer of transformers wants them, `[1, tokens, rotated dims]`."""
        kind = self._types[layer]
        cos, sin = self._module(self._probe, positions[None], *((kind,) if kind else ()))
        return cos, sin

    def table(self, layer: int, head_size: int) -> SimpleNamespace:
        """As vLLM's own rotary modules have it; layers of a type have the same."""
        kind = self._types[layer]
        if kind not in self._tables:
            halves = [part[0].chunk(2, dim=-1)[0] for part in self.angles(layer, self._positions)]
            self._tables[kind] = torch.cat(halves, dim=-1)
        return SimpleNamespace(cos_sin_cache=self._tables[kind], head_size=head_size, is_neox_style=self._halves)
