"""What a pass needs of the KV cache that it reads and writes."""

from typing import Protocol

import torch

from chunkweave.kv.request_cache import Rotate


class PassCache(Protocol):
    """One request's KV, layer by layer: a cache of its own (`RequestCache`), or blocks that belong to somebody else.

    Shapes, and what each method does, are those of `RequestCache`. A layer is loaded, and then read and written, before
    the next one is.
    """

    @property
    def capacity(self) -> int:
        """Positions that there is room for."""

    @property
    def kept_from(self) -> int | None:
        """From which position on keys are kept before RoPE too; None if they are not."""

    def load_layer(self, layer: int, rotate: Rotate) -> None:
        """Bring the segments' KV of a layer in, once."""

    def cached_before_rope(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """What the segments have at `positions`."""

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows with fresh KV."""

    def keep(self, layer: int, positions: torch.Tensor, keys: torch.Tensor) -> None:
        """Keep keys before RoPE."""

    def clear(self, layer: int, hidden: torch.Tensor) -> None:
        """Make rows finite that nobody sees."""

    def view(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values of the positions below `stop`."""
