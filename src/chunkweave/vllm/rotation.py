"""RoPE by the angles of vLLM's own rotary module, and its inverse."""

from typing import Any

import torch

from chunkweave.errors import UnsupportedModelError


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
        table = getattr(rotary, "cos_sin_cache", None)
        if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.shape[1] != rotary.head_size:
            raise UnsupportedModelError(
                f"{type(rotary).__name__} is not supported: keys can be shifted only where whole heads are rotated "
                "by the position alone"
            )
        self._rotary = rotary
        self._halves = bool(rotary.is_neox_style)

    def forward(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys before RoPE `[tokens, heads, head_dim]` -> as they are at `positions` `[tokens]`."""
        cos, sin = self._angles(positions)
        one, two = self._split(keys.float())
        return self._join(one * cos - two * sin, two * cos + one * sin).to(keys.dtype)

    def inverse(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys as they are at `positions` `[tokens]` -> before RoPE, `[tokens, heads, head_dim]`."""
        cos, sin = self._angles(positions)
        scale = cos.square() + sin.square()
        cos, sin = cos / scale, sin / scale
        one, two = self._split(keys.float())
        return self._join(one * cos + two * sin, two * cos - one * sin).to(keys.dtype)

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, `[tokens, 1, head_dim / 2]`. The module may replace its table: it is asked each time."""
        cos, sin = self._rotary.cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
        return cos, sin

    def _split(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._halves:
            one, two = keys.chunk(2, dim=-1)
            return one, two
        return keys[..., 0::2], keys[..., 1::2]

    def _join(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        if self._halves:
            return torch.cat((one, two), dim=-1)
        return torch.stack((one, two), dim=-1).flatten(-2)
