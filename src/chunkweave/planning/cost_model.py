"""What computing and loading cost: measured once a machine and model, kept in a file, interpolated."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from chunkweave.errors import DocumentError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prefill times over a grid of (cached, new) tokens, and each tier's throughput.

    `prefill_s[i][j]` is the time to compute `new_tokens[j]` tokens behind `cached_tokens[i]` cached ones (RAGCache §5.1
    profiles the same table for PGDSF). `tier_bytes_per_s` is what a layer-wise read reaches. Axes ascend.
    """

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    prefill_s: tuple[tuple[float, ...], ...]
    kv_bytes_per_token: int
    tier_bytes_per_s: dict[str, float] = field(default_factory=dict)
    fingerprint: str = ""

    def __post_init__(self) -> None:
        axes = (self.cached_tokens, self.new_tokens)
        if any(not axis or list(axis) != sorted(set(axis)) for axis in axes):
            raise ValueError("the axes of a cost model must ascend")
        if [len(row) for row in self.prefill_s] != [len(self.new_tokens)] * len(self.cached_tokens):
            raise ValueError("the prefill table does not fit its axes")

    def prefill(self, new: float, cached: float = 0.0) -> float:
        """Seconds to compute `new` tokens behind `cached` ones: bilinear, proportional outside the grid."""
        if new <= 0:
            return 0.0
        low, high, at = _bracket(self.cached_tokens, min(cached, self.cached_tokens[-1]))
        first, second = (self._along_new(row, new) for row in (self.prefill_s[low], self.prefill_s[high]))
        return first + at * (second - first)

    def load(self, tokens: float, tier: str) -> float:
        """Seconds to bring the KV of `tokens` tokens in from `tier`: bytes over throughput (CacheBlend §5.1).

        A tier that was not measured costs nothing: it is memory.
        """
        throughput = self.tier_bytes_per_s.get(tier)
        return tokens * self.kv_bytes_per_token / throughput if throughput else 0.0

    def _along_new(self, row: Sequence[float], new: float) -> float:
        axis = self.new_tokens
        if new <= axis[0]:
            return row[0]  # a layer loop of few tokens costs what its overhead costs
        if new >= axis[-1]:
            return row[-1] * new / axis[-1]
        low, high, at = _bracket(axis, new)
        return row[low] + at * (row[high] - row[low])

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DocumentError: the file cannot be read or is no cost model; the message says to measure again.
        """
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("format", None) != FORMAT:
                raise ValueError("another format")
            return cls(
                cached_tokens=tuple(data["cached_tokens"]),
                new_tokens=tuple(data["new_tokens"]),
                prefill_s=tuple(tuple(row) for row in data["prefill_s"]),
                kv_bytes_per_token=data["kv_bytes_per_token"],
                tier_bytes_per_s=dict(data["tier_bytes_per_s"]),
                fingerprint=data["fingerprint"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DocumentError(f"{path} is no cost model ({error}); make one with `chunkweave profile`") from error


def _bracket(axis: Sequence[int], value: float) -> tuple[int, int, float]:
    """Neighbouring places around `value` and how far it lies between them, 0 to 1."""
    high = min(bisect_right(axis, value), len(axis) - 1)
    low = max(high - 1, 0)
    if axis[high] == axis[low] or value <= axis[low]:
        return low, low, 0.0
    return low, high, min(1.0, (value - axis[low]) / (axis[high] - axis[low]))
