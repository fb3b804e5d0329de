"""Attention of a flat batch by the Triton kernel: all scattered queries of all requests in one launch."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chunkweave.models.attention import FlatResult, Measured, OwnQueries, ScatteredQueries
from chunkweave.models.kernels import device_code
from chunkweave.types import Geometry

SUPPORTED_HEAD_DIMS = (16, 32, 64, 96, 128)
"""Above 128 a tile's accumulator no longer fits the registers with these block sizes."""

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_PARTS = 256
"""More parts than this and the mass by part would take longer than the attention."""

_MAX_SPLITS = 16
_LEAST_SPLIT_KEYS = 256
_FALLBACK_PROCESSORS = 4


@dataclass(frozen=True, slots=True, eq=False)
class FlatQueries:
    """Queries of several requests, after RoPE, and where each stands.

    `states` `[rows, heads, head_dim]`, contiguous; `positions` `[rows]` int64, ascending within a request; `counts` are
    the rows of each request, in order; `stop` is above every position. All known on the host but the positions.
    """

    states: torch.Tensor
    positions: torch.Tensor
    counts: tuple[int, ...]
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyPlaces:
    """Where the keys and values of each request lie.

    `addresses` int64 `[requests, 4]` on the device: of keys and of values `[positions, kv_heads, head_dim]`, of flags
    of the positions that nobody sees (uint8 `[stop]`) and of the part that each key belongs to (int32 `[stop]`, -1:
    none); 0 for what there is none of. `hidden` says whether any request has flags, `parts` how many parts there are
    (0: mass is not asked for; else every request must have the table). Whoever makes this keeps the tensors alive.
    """

    addresses: torch.Tensor
    kv_heads: int
    hidden: bool = False
    parts: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What a launch found.

    `states` `[rows, heads * head_dim]` in the queries' type, the rest in float32: `log_sum_exp` `[rows, heads]` of the
    scaled scores; `by_part` `[rows, heads, parts]` the attention weights summed over each part, a query's own key left
    out, and `own` `[rows, heads]` the weight of that key (both None if not asked for).
    """

    states: torch.Tensor
    log_sum_exp: torch.Tensor
    by_part: torch.Tensor | None = None
    own: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of a launch: rows and keys of a block, into how many splits keys are cut, warps and pipeline stages."""

    rows: int
    keys: int
    splits: int
    warps: int = 4
    stages: int = 2


def choose_blocks(
    counts: Sequence[int], stop: int, heads: int, kv_heads: int, *, dtype: torch.dtype, processors: int
) -> Blocks:
    """Large tiles for many queries; for few, small tiles whose keys are split until there is work for every processor.

    >>> choose_blocks([2048], 8192, 32, 8, dtype=torch.bfloat16, processors=132).splits
    1
    >>> choose_blocks([1], 8192, 32, 8, dtype=torch.bfloat16, processors=132).splits
    16
    """
    group = heads // kv_heads
    wide = dtype == torch.float32
    wanted = max(counts) * group
    rows = next((size for size in (16, 32, 64) if wanted <= size), 64 if wide else 128)
    rows = max(rows, _power_of_two(group))
    tiles = sum(-(-count // (rows // group)) for count in counts)
    splits = min(_MAX_SPLITS, max(1, stop // _LEAST_SPLIT_KEYS), max(1, -(-2 * processors // (tiles * kv_heads))))
    return Blocks(rows, 32 if wide else 64, splits, warps=8 if rows > 64 else 4, stages=2 if wide else 3)


def tile_table(counts: Sequence[int], queries_per_tile: int) -> list[tuple[int, int, int]]:
    """Tiles of one request each: (request, first row, row behind the last).

    >>> tile_table([3, 2], 2)
    [(0, 0, 2), (0, 2, 3), (1, 3, 5)]
    """
    tiles, first = [], 0
    for owner, count in enumerate(counts):
        stop = first + count
        tiles += [(owner, at, min(at + queries_per_tile, stop)) for at in range(first, stop, queries_per_tile)]
        first = stop
    return tiles


def attend(
    queries: FlatQueries,
    places: KeyPlaces,
    *,
    blocks: Blocks | None = None,
    tiles: torch.Tensor | None = None,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
) -> Attended:
    """Exact attention, causal by position, of every query over the keys of its request.

    A query sees the `window` keys up to its own (None: all).

    With `rope`, cosines and sines `[positions, head_dim]`, the keys lie before RoPE and are rotated as they are read
    (by halves, as Llama and its kin do). `tiles` is `tile_table` of these counts and blocks on the device, if
    it is known. Nothing here waits for the device.
    """
    states = queries.states
    rows, heads, dim = states.shape
    if blocks is None:
        blocks = choose_blocks(
            queries.counts,
            queries.stop,
            heads,
            places.kv_heads,
            dtype=states.dtype,
            processors=processors(states.device),
        )
    if tiles is None:
        tiles = to_device(tile_table(queries.counts, blocks.rows // (heads // places.kv_heads)), states.device)
    parts = 0 if not places.parts else max(16, _power_of_two(places.parts))
    splits, device = blocks.splits, states.device
    out_type = torch.float32 if splits > 1 else states.dtype
    out = torch.empty((splits, rows, heads, dim), dtype=out_type, device=device)
    log_sum_exp = torch.empty((splits, rows, heads), dtype=torch.float32, device=device)
    own = torch.empty_like(log_sum_exp) if parts else log_sum_exp
    mass = torch.empty((splits, rows, heads, parts), dtype=torch.float32, device=device) if parts else log_sum_exp
    cos, sin = (states, states) if rope is None else rope
    unit = dim if rope is None else dim // 2
    device_code.scattered_attention[(len(tiles), places.kv_heads, splits)](
        states, out, log_sum_exp, mass, own, queries.positions, tiles, places.addresses, cos, sin,
        dim**-0.5, rows, places.kv_heads * dim, window or 0,
        HEADS=heads, KV_HEADS=places.kv_heads, DIM=dim, PADDED=_power_of_two(dim), PADDED_KEY=_power_of_two(unit),
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, SPLITS=splits, ROTATE=rope is not None, HIDDEN=places.hidden,
        WINDOWED=window is not None, PARTS=parts, WIDEN=interpreted(),
        PRECISION="ieee" if states.dtype == torch.float32 else "tf32",
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if splits == 1:
        found, total, share = out[0], log_sum_exp[0], None
    else:  # one softmax out of those over the splits of the keys, each weighed by its share of the sum
        total = torch.logsumexp(log_sum_exp, 0)
        share = torch.exp(log_sum_exp - total)[..., None]
        found = (out * share).sum(0).to(states.dtype)
    if not parts:
        return Attended(found.flatten(1), total)
    by_part = mass[0] if share is None else (mass * share).sum(0)
    own = own[0] if share is None else (own * share[..., 0]).sum(0)
    return Attended(found.flatten(1), total, by_part[..., : places.parts], own)


def write_rows(keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, addresses: torch.Tensor) -> None:
    """Write one row each of `keys` and `values` `[rows, kv_heads, head_dim]` to `positions` `[rows]` of as many caches.

    `addresses` int64 `[rows, 4]` is that of `KeyPlaces`.
    """
    width = keys.shape[1] * keys.shape[2]
    device_code.write_rows[(len(keys),)](
        keys.contiguous(), values.contiguous(), positions, addresses, width, WIDTH=width, BLOCK=_power_of_two(width)
    )


def interpreted() -> bool:
    """Whether Triton runs its programs in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def to_device(rows: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A small table on the device, without waiting for what the device is at."""
    table = torch.tensor(rows, dtype=dtype)
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return _FALLBACK_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _power_of_two(number: int) -> int:
    """The least power of two that is at least `number`, and at least 16, which the matrix units need."""
    return max(16, 1 << (number - 1).bit_length())


_TABLES_KEPT = 64
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference of outputs in the trial run: values are normal(0, 1), outputs are means of them."""


class TritonAttention:
    """Implements `FlatAttention`. A run of positions from the start on goes through PyTorch's causal kernel.

    All requests of a batch are on the same layer, so that they have the same window. PyTorch's kernel knows nothing of
    scattered positions, and what it need not know makes it the faster one; but it keeps its weights to itself, so that
    requests that want mass by part go through ours.
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
            counts, flat.stop, queries.shape[1], kv_heads, dtype=queries.dtype, processors=processors(device)
        )
        tiles = self._tiles(counts, blocks, queries.shape[1] // kv_heads, device)
        places = key_places(owners, device, measures=measures)
        attended = attend(flat, places, blocks=blocks, tiles=tiles, window=owners[0].queries.window)
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


def unsupported_reason(geometry: Geometry, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel cannot attend for this model; None if it can.

    A few scattered queries with this model's heads are attended and compared with PyTorch: whatever Triton needs beside
    itself (a C compiler, a driver that takes its code) shows here and not in a request.
    """
    heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
    if device.type != "cuda" and not interpreted():
        return f"the model is on {device}, and Triton runs there only with TRITON_INTERPRET=1"
    if geometry.head_dim not in SUPPORTED_HEAD_DIMS or heads % kv_heads:
        return f"it does not know heads of {geometry.head_dim} dimensions, {heads} to {kv_heads}"
    if not geometry.scores(0).plain:
        return "it does not know capped scores or attention sinks"
    if dtype not in SUPPORTED_DTYPES:
        return f"it does not know {dtype}"
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, heads), (90, kv_heads), (90, kv_heads))
    q, k, v = (torch.randn(*shape, geometry.head_dim, generator=generator).to(device, dtype) for shape in shapes)
    where = [3, 17, 64, 70, 89]
    window = 40 if any(geometry.windows) else None
    queries = ScatteredQueries(torch.tensor(where, device=device), dtype, where=where, window=window)
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
