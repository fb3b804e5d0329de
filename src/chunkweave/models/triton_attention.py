"""Attention of a flat batch by the Triton kernel: all scattered queries of all requests in one launch."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from chunkweave.models.attention import ScatteredQueries
from chunkweave.models.flat_attention import FlatResult, Measured, OwnQueries
from chunkweave.models.kernels.scattered import (
    MAX_PARTS,
    Attended,
    Blocks,
    FlatQueries,
    KeyPlaces,
    attend,
    choose_blocks,
    processors,
    tile_table,
    to_device,
)
from chunkweave.types import Geometry

_TABLES_KEPT = 64
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference of outputs in the trial run: values are normal(0, 1), outputs are means of them."""


class TritonAttention:
    """Implements `FlatAttention`. A run of positions from the start on goes through PyTorch's causal kernel.

    That one knows nothing of scattered positions, and what it need not know makes it the faster one; but it keeps its
    weights to itself, so that whoever wants mass by part goes through ours.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[tuple[int, ...], int, torch.device], torch.Tensor] = OrderedDict()

    def attend(self, queries: torch.Tensor, owners: Sequence[OwnQueries]) -> FlatResult:
        """One launch for those who want mass by part, one for the others, and PyTorch's for causal runs."""
        counts = [len(owner.queries) for owner in owners]
        found: list[tuple[torch.Tensor, Measured | None]] = [(queries[:0], None)] * len(owners)
        rows = torch.split(queries, counts)
        groups: dict[bool, list[int]] = {}
        for index, owner in enumerate(owners):
            measures = owner.parts is not None and owner.parts.count <= MAX_PARTS
            if owner.queries.causal and not measures:
                found[index] = owner.queries.attend(rows[index], owner.keys, owner.values), None
            else:
                groups.setdefault(measures, []).append(index)
        for measures, indices in groups.items():
            together = queries if len(indices) == len(owners) else torch.cat([rows[index] for index in indices])
            results = self._launch(together, [owners[index] for index in indices], measures=measures)
            for index, result in zip(indices, results, strict=True):
                found[index] = result
        states = [states for states, _ in found]
        return FlatResult(states[0] if len(states) == 1 else torch.cat(states), [measured for _, measured in found])

    def _launch(
        self, queries: torch.Tensor, owners: Sequence[OwnQueries], *, measures: bool
    ) -> list[tuple[torch.Tensor, Measured | None]]:
        counts = tuple(len(owner.queries) for owner in owners)
        kv_heads, device = owners[0].keys.shape[1], queries.device
        positions = [owner.queries.positions for owner in owners]
        flat = FlatQueries(
            queries.contiguous(),
            positions[0] if len(positions) == 1 else torch.cat(positions),
            counts,
            max(len(owner.keys) for owner in owners),
        )
        blocks = choose_blocks(
            counts, flat.stop, queries.shape[1], kv_heads, dtype=queries.dtype, processors=processors(queries)
        )
        tiles = self._tiles(counts, blocks, queries.shape[1] // kv_heads, device)
        places = key_places(owners, device, measures=measures)
        attended = attend(flat, places, blocks=blocks, tiles=tiles)
        return _by_owner(attended, counts)

    def _tiles(self, counts: tuple[int, ...], blocks: Blocks, group: int, device: torch.device) -> torch.Tensor:
        """The table of tiles; it is the same for every layer with the same active tokens."""
        key = counts, blocks.rows, device
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = to_device(tile_table(counts, blocks.rows // group), device)
            if len(self._tables) > _TABLES_KEPT:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        return table


def key_places(owners: Sequence[OwnQueries], device: torch.device, *, measures: bool) -> KeyPlaces:
    """Addresses of what each owner's queries look at; the owners keep the tensors alive."""
    addresses = [
        [
            owner.keys.data_ptr(),
            owner.values.data_ptr(),
            0 if owner.queries.hidden is None else owner.queries.hidden.data_ptr(),
            owner.parts.table.data_ptr() if measures and owner.parts is not None else 0,
        ]
        for owner in owners
    ]
    parts = max((owner.parts.count for owner in owners if owner.parts is not None), default=0) if measures else 0
    hidden = any(owner.queries.hidden is not None for owner in owners)
    return KeyPlaces(to_device(addresses, device, torch.int64), owners[0].keys.shape[1], hidden, parts)


def failed_trial(geometry: Geometry, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Attend a few scattered queries with this model's heads and compare with PyTorch; what went wrong, or None.

    Whatever Triton needs beside itself (a C compiler, a driver that takes its code) shows here and not in a request.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, geometry.num_heads), (90, geometry.num_kv_heads), (90, geometry.num_kv_heads))
    q, k, v = (
        torch.randn(rows, heads, geometry.head_dim, generator=generator).to(device, dtype) for rows, heads in shapes
    )
    where = [3, 17, 64, 70, 89]
    queries = ScatteredQueries(torch.tensor(where, device=device), dtype, where=where)
    try:
        ours = TritonAttention().attend(q, [OwnQueries(queries, k, v)]).states
        error = (ours - queries.attend(q, k, v)).abs().max().item()
    except Exception as failure:  # noqa: BLE001 - a compiler, a driver, a linker: all mean that it does not run here
        return f"its kernel does not run here ({type(failure).__name__}: {failure})"
    return None if error <= _TOLERANCE[dtype] else f"its result is off by {error:.3g}"


def _by_owner(attended: Attended, counts: tuple[int, ...]) -> list[tuple[torch.Tensor, Measured | None]]:
    sizes = list(counts)
    states = torch.split(attended.states, sizes)
    if attended.by_part is None or attended.own is None:
        return [(mine, None) for mine in states]
    sums = (torch.split(sum_, sizes) for sum_ in (attended.by_part, attended.own, attended.log_sum_exp))
    return [(mine, Measured(*of_owner)) for mine, of_owner in zip(states, zip(*sums, strict=True), strict=True)]
