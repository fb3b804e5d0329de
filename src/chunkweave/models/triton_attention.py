"""Attention of a flat batch by the Triton kernel: all scattered queries of all requests in one launch."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch

from chunkweave.models.attention import FlatResult, KeyParts, Measured, OwnQueries, ScatteredQueries
from chunkweave.models.kernels import device_code
from chunkweave.models.kernels.compiles import KERNEL_COMPILES
from chunkweave.types import Geometry

SUPPORTED_HEAD_DIMS = (16, 32, 64, 96, 128)
"""Above 128, a tile's accumulator does not fit the registers with these block sizes."""

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PART_SIZES = (32, 64, 256)
"""Numbers of parts that the kernel is compiled for; fewer parts leave the rest empty.

With more than the last, summing the mass by part would take longer than the attention.
"""

MAX_PARTS = PART_SIZES[-1]

_SPLITS = (1, 2, 6, 16)
"""A run-time number for the kernel; few, because a recorded decode step has its number of splits."""

_LEAST_SPLIT_KEYS = 256
_NO_WINDOW = 2**31 - 1
_FALLBACK_PROCESSORS = 4


@dataclass(frozen=True, slots=True, eq=False)
class FlatQueries:
    """Queries of several requests, after RoPE, and their positions.

    `states` `[rows, heads, head_dim]`, contiguous; `positions` `[rows]` int64, ascending within a request; `counts` are
    the rows of each request, in order; `stop` is above every position. The host knows all of this but the positions.
    """

    states: torch.Tensor
    positions: torch.Tensor
    counts: tuple[int, ...]
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyPlaces:
    """Device addresses of each request's keys and values.

    `addresses` int64 `[requests, 4]` on the device, or four numbers for one request: keys and values `[positions,
    kv_heads, head_dim]`, flags of positions that no query sees (uint8 `[stop]`), and the part of each key (int32
    `[stop]`, -1: none); 0 where absent.

    `parts` is the number of parts (0: no mass is summed; else every request needs the table). The caller must keep the
    tensors alive.
    """

    addresses: torch.Tensor | tuple[int, int, int, int]
    kv_heads: int
    parts: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The results of a launch.

    `states` `[rows, heads * head_dim]` has the queries' dtype, the rest is float32: `log_sum_exp` `[rows, heads]` of
    the scaled scores; `by_part` `[rows, heads, parts]` the attention weights summed over each part without a query's
    own key; `own` `[rows, heads]` that key's weight (both None if not requested).
    """

    states: torch.Tensor
    log_sum_exp: torch.Tensor
    by_part: torch.Tensor | None = None
    own: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of a launch: rows and keys per block, number of key splits, warps and pipeline stages.

    All but the number of splits are compiled into the kernel.
    """

    rows: int
    keys: int
    splits: int
    warps: int = 4
    stages: int = 2


def choose_blocks(
    counts: Sequence[int],
    stop: int,
    heads: int,
    kv_heads: int,
    *,
    dtype: torch.dtype,
    processors: int,
    parts: int = 0,
) -> Blocks:
    """Large tiles for many queries; for few, small tiles with keys split until every processor has work.

    With `parts`, tiles and key blocks are smaller: a tile's queries, its keys and their parts must fit the 99 KiB of
    shared memory that a block may have on compute capability 8.6, 8.9 and 12.0. `make compile-matrix` checks it.

    >>> choose_blocks([2048], 8192, 32, 8, dtype=torch.bfloat16, processors=132).splits
    1
    >>> choose_blocks([1], 8192, 32, 8, dtype=torch.bfloat16, processors=132).splits
    16
    """
    group = heads // kv_heads
    wide = dtype == torch.float32
    if parts:
        rows = 32 if wide else 64
    else:
        wanted = max(counts) * group
        rows = next((size for size in (16, 64) if wanted <= size), 64 if wide else 128)
    rows = max(rows, _power_of_two(group))
    keys = 64 if not parts else 32 if parts <= PART_SIZES[1] else 16
    if wide:
        keys = 32 if rows <= 64 and not parts else 16
    tiles = sum(-(-count // (rows // group)) for count in counts)
    wanted_splits = min(_SPLITS[-1], max(1, stop // _LEAST_SPLIT_KEYS), -(-2 * processors // (tiles * kv_heads)))
    splits = next(number for number in _SPLITS if number >= wanted_splits)
    return Blocks(rows, keys, splits, warps=8 if rows > 64 else 4, stages=2 if wide else 3)


def every_launch(heads: int, kv_heads: int, dtype: torch.dtype) -> list[tuple[Blocks, int]]:
    """Blocks and number of parts of one launch for each kernel that any launch for these heads may need.

    >>> len(every_launch(32, 8, torch.bfloat16))
    9
    """
    few = [1]
    some = [max(1, 64 // (heads // kv_heads))]
    many = [4096]
    distinct: dict[tuple[Blocks, int, torch.dtype], tuple[Blocks, int]] = {}
    for parts, counts, stop in product((0, *PART_SIZES), (few, some, many), (1, 1 << 13)):
        blocks = choose_blocks(counts, stop, heads, kv_heads, dtype=dtype, processors=1 << 20, parts=parts)
        distinct.setdefault((replace(blocks, splits=1), parts, _out_dtype(blocks, parts, dtype)), (blocks, parts))
    return list(distinct.values())


def _out_dtype(blocks: Blocks, parts: int, dtype: torch.dtype) -> torch.dtype:
    """The type of a launch's states: float32 if they are combined over splits. With parts always, for fewer kernels."""
    return torch.float32 if blocks.splits > 1 or parts else dtype


def tile_table(counts: Sequence[int], queries_per_tile: int) -> list[tuple[int, int, int]]:
    """Tiles, each within one request: (request, first row, end row).

    >>> tile_table([3, 2], 2)
    [(0, 0, 2), (0, 2, 3), (1, 3, 5)]
    """
    tiles = []
    first = 0
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

    With `rope`, cosines and sines `[positions, head_dim]`, the keys are before RoPE and are rotated as they are read
    (by halves, as in Llama). `tiles` is `tile_table` of these counts and blocks on the device, if known. Does not wait
    for the device.
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
            parts=places.parts,
        )
    per_tile = blocks.rows // (heads // places.kv_heads)
    if isinstance(places.addresses, tuple):
        table, tiles = queries.positions, _no_tiles(states.device)  # not read, but their types are the kernel's
        addresses = places.addresses
        tile_count = -(-rows // per_tile)
    else:
        if tiles is None:
            tiles = to_device(tile_table(queries.counts, per_tile), states.device)
        table = places.addresses
        addresses = (0, 0, 0, 0)
        tile_count = len(tiles)
    parts = next(size for size in (0, *PART_SIZES) if places.parts <= size)
    splits = blocks.splits
    device = states.device
    out = torch.empty((splits, rows, heads, dim), dtype=_out_dtype(blocks, parts, states.dtype), device=device)
    log_sum_exp = torch.empty((splits, rows, heads), dtype=torch.float32, device=device)
    own = torch.empty_like(log_sum_exp) if parts else log_sum_exp
    mass = torch.empty((splits, rows, heads, parts), dtype=torch.float32, device=device) if parts else log_sum_exp
    cos, sin = (states, states) if rope is None else rope
    unit = dim if rope is None else dim // 2
    device_code.scattered_attention[(tile_count, places.kv_heads, splits)](
        states, out, log_sum_exp, mass, own, queries.positions, tiles, table, cos, sin, *addresses,
        dim**-0.5, rows, places.kv_heads * dim, _NO_WINDOW if window is None else window,
        HEADS=heads, KV_HEADS=places.kv_heads, DIM=dim, PADDED=_power_of_two(dim), PADDED_KEY=_power_of_two(unit),
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, ROTATE=rope is not None, PARTS=parts, WIDEN=interpreted(),
        PRECISION="ieee" if states.dtype == torch.float32 else "tf32",
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if not parts:
        if splits == 1:
            return Attended(out[0].flatten(1), log_sum_exp[0])
        attended_states, total = combined(out, log_sum_exp, states.dtype)
        return Attended(attended_states.flatten(1), total)
    if splits == 1:
        attended_states = out[0]
        total = log_sum_exp[0]
        share = None
    else:  # combine the softmaxes over key splits, each weighted by its share of the sum
        total = torch.logsumexp(log_sum_exp, 0)
        share = torch.exp(log_sum_exp - total)[..., None]
        attended_states = (out * share).sum(0)
    by_part = mass[0] if share is None else (mass * share).sum(0)
    own = own[0] if share is None else (own * share[..., 0]).sum(0)
    return Attended(attended_states.to(states.dtype).flatten(1), total, by_part[..., : places.parts], own)


@cache
def _no_tiles(device: torch.device) -> torch.Tensor:
    return torch.empty(0, 3, dtype=torch.int32, device=device)


def combined(out: torch.Tensor, log_sum_exp: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from that over each split of them, and its log-sum-exp.

    `out` `[splits, rows, heads, head_dim]` and `log_sum_exp` `[splits, rows, heads]` are float32; states have `dtype`.
    """
    splits, rows, heads, dim = out.shape
    states = torch.empty(out.shape[1:], dtype=dtype, device=out.device)
    total = torch.empty_like(log_sum_exp[0])
    count = rows * heads
    device_code.combine_splits[(-(-count // _COMBINED_A_BLOCK),)](
        out, log_sum_exp, states, total, splits, count, DIM=dim, PADDED=_power_of_two(dim), BLOCK=_COMBINED_A_BLOCK
    )
    return states, total


def write_rows(keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, addresses: torch.Tensor) -> None:
    """Write one row of `keys` and `values` `[rows, kv_heads, head_dim]` at `positions` `[rows]` of each request's
    cache.

    `addresses` int64 `[rows, 4]` are those of `KeyPlaces`.
    """
    width = keys.shape[1] * keys.shape[2]
    device_code.write_rows[(len(keys),)](
        keys.contiguous(), values.contiguous(), positions, addresses, width, WIDTH=width, BLOCK=_power_of_two(width)
    )


_HEADS_A_BLOCK = 8
_COMBINED_A_BLOCK = 4
"""Rows and heads."""


def turn_halves(
    states: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
) -> torch.Tensor:
    """RoPE of `states` `[rows, heads, head_dim]` at `positions` `[rows]` in one launch; a new tensor.

    `cos` and `signed_sin` are `[all positions, head_dim]`; sines of the first half are negative.
    """
    rows, heads, dim = states.shape
    if states.stride(2) != 1 or states.stride(1) != dim:
        states = states.contiguous()
    out = torch.empty((rows, heads, dim), dtype=states.dtype, device=states.device)
    if rows:
        device_code.turn_halves[(rows, -(-heads // _HEADS_A_BLOCK))](
            states, out, positions, cos, signed_sin, heads, states.stride(0), heads * dim,
            DIM=dim, PADDED=_power_of_two(dim // 2), BLOCK=_HEADS_A_BLOCK,
        )  # fmt: skip
    return out


def interpreted() -> bool:
    """Whether Triton runs its programs in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def to_device(rows: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Copy a small table to the device without waiting for the device's queued work."""
    table = torch.tensor(rows, dtype=dtype)
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def processors(device: torch.device) -> int:
    """Number of multiprocessors of a device."""
    if device.type != "cuda":
        return _FALLBACK_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _power_of_two(number: int) -> int:
    """The lowest power of two that is at least `number` and at least 16, the minimum of the matrix units."""
    return max(16, 1 << (number - 1).bit_length())


_TABLES_KEPT = 64
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference of outputs in the trial run; values are normal(0, 1), outputs are means of them."""


class TritonAttention:
    """Implements `FlatAttention`. A run of positions from the start on uses PyTorch's causal kernel.

    All requests of a batch are at the same layer, so they have the same window. PyTorch's causal kernel is faster,
    because it does not handle scattered positions, but it does not return weights; requests that need mass by part use
    ours.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[tuple[int, ...], int, torch.device], torch.Tensor] = OrderedDict()

    def attend(self, queries: torch.Tensor, owners: Sequence[OwnQueries]) -> FlatResult:
        """One launch for requests that need mass by part, one for the others, and PyTorch's for causal runs."""
        counts = [len(owner.queries) for owner in owners]
        results: list[tuple[torch.Tensor, Measured | None]] = [(queries[:0], None)] * len(owners)
        rows = torch.split(queries, counts)
        groups: dict[bool, list[int]] = {}
        for index, owner in enumerate(owners):
            measures = owner.parts is not None and owner.parts.count <= MAX_PARTS
            if owner.queries.causal and not measures:
                results[index] = owner.queries.attend(rows[index], owner.keys, owner.values), None
            else:
                groups.setdefault(measures, []).append(index)
        for measures, indices in groups.items():
            together = queries if len(indices) == len(owners) else torch.cat([rows[index] for index in indices])
            results = self._launch(together, [owners[index] for index in indices], measures=measures)
            for index, result in zip(indices, results, strict=True):
                results[index] = result
        states = [states for states, _ in results]
        return FlatResult(states[0] if len(states) == 1 else torch.cat(states), [measured for _, measured in results])

    def _launch(
        self, queries: torch.Tensor, owners: Sequence[OwnQueries], *, measures: bool
    ) -> list[tuple[torch.Tensor, Measured | None]]:
        counts = tuple(len(owner.queries) for owner in owners)
        kv_heads = owners[0].keys.shape[1]
        device = queries.device
        positions = [owner.queries.positions for owner in owners]
        flat = FlatQueries(
            queries.contiguous(),
            positions[0] if len(positions) == 1 else torch.cat(positions),
            counts,
            max(len(owner.keys) for owner in owners),
        )
        places = key_places(owners, device, measures=measures)
        blocks = choose_blocks(
            counts,
            flat.stop,
            queries.shape[1],
            kv_heads,
            dtype=queries.dtype,
            processors=processors(device),
            parts=places.parts,
        )
        is_single = isinstance(places.addresses, tuple)
        tiles = None if is_single else self._tiles(counts, blocks, queries.shape[1] // kv_heads, device)
        attended = attend(flat, places, blocks=blocks, tiles=tiles, window=owners[0].queries.window)
        return _by_owner(attended, counts)

    def _tiles(self, counts: tuple[int, ...], blocks: Blocks, group: int, device: torch.device) -> torch.Tensor:
        """The table of tiles; the same for every layer with the same active tokens."""
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
    """Addresses of each owner's tensors; the owners keep them alive."""
    addresses = [
        (
            owner.keys.data_ptr(),
            owner.values.data_ptr(),
            0 if owner.queries.hidden is None else owner.queries.hidden.data_ptr(),
            owner.parts.table.data_ptr() if measures and owner.parts is not None else 0,
        )
        for owner in owners
    ]
    parts = max((owner.parts.count for owner in owners if owner.parts is not None), default=0) if measures else 0
    table = addresses[0] if len(owners) == 1 else to_device(addresses, device, torch.int64)
    return KeyPlaces(table, owners[0].keys.shape[1], parts)


def unsupported_reason(geometry: Geometry, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel cannot attend for this model; None if it can.

    Every kernel that a request may need is compiled, and compared with PyTorch on a few queries with this model's
    heads. So missing dependencies of Triton (a C compiler, a driver that accepts its code) show here and not in a
    request, and no request waits for a compiler.
    """
    heads = geometry.num_heads
    kv_heads = geometry.num_kv_heads
    if device.type != "cuda" and not interpreted():
        return f"the model is on {device}, and Triton runs there only with TRITON_INTERPRET=1"
    if geometry.head_dim not in SUPPORTED_HEAD_DIMS or heads % kv_heads:
        return f"it does not support {heads} query heads for {kv_heads} key heads of {geometry.head_dim} dimensions"
    if not geometry.scores(0).plain:
        return "it does not support capped scores or attention sinks"
    if dtype not in SUPPORTED_DTYPES:
        return f"it does not support {dtype}"
    try:
        error = compile_and_compare(geometry, dtype, device)
    except Exception as failure:  # noqa: BLE001 - any compiler, driver or linker error means it does not run here
        return f"its kernel does not run here ({type(failure).__name__}: {failure})"
    return None if error <= _TOLERANCE[dtype] else f"its result is off by {error:.3g}"


def compile_and_compare(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> float:
    """Launch every kernel once; returns the largest error of states, and of the sums of weights, which are 1.

    NaN if any result has NaN.
    """
    heads = geometry.num_heads
    kv_heads = geometry.num_kv_heads
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, heads), (90, kv_heads), (90, kv_heads))
    q, k, v = (torch.randn(*shape, geometry.head_dim, generator=generator).to(device, dtype) for shape in shapes)
    where = [66, 70, 81, 85, 89]  # the first block of keys needs no mask, unless there is a window
    window = 40 if any(geometry.windows) else None
    queries = ScatteredQueries(torch.tensor(where, device=device), dtype, where=where, window=window)
    flat = FlatQueries(q, queries.positions, (len(where),), len(k))
    expected = queries.attend(q, k, v)
    of_key = torch.arange(len(k), dtype=torch.int32, device=device) // 5
    launches = every_launch(heads, kv_heads, dtype)
    errors = []
    with KERNEL_COMPILES.at_start(len(launches) + 2):
        for blocks, parts in launches:
            owner = OwnQueries(queries, k, v, KeyParts(of_key, parts))
            places = key_places([owner], device, measures=parts > 0)
            attended = attend(flat, places, blocks=blocks, window=window)
            errors.append((attended.states - expected).float().abs().max())
            if attended.by_part is not None and attended.own is not None:
                errors.append((attended.by_part.sum(2) + attended.own - 1.0).abs().max())
        write_rows(k[:1], v[:1], queries.positions[:1], torch.tensor([places.addresses], device=device))
    return torch.stack(errors).max().item()


def _by_owner(attended: Attended, counts: tuple[int, ...]) -> list[tuple[torch.Tensor, Measured | None]]:
    sizes = list(counts)
    states = torch.split(attended.states, sizes)
    if attended.by_part is None or attended.own is None:
        return [(states_of_owner, None) for states_of_owner in states]
    sums = (torch.split(sum_, sizes) for sum_ in (attended.by_part, attended.own, attended.log_sum_exp))
    return [
        (states_of_owner, Measured(*of_owner))
        for states_of_owner, of_owner in zip(states, zip(*sums, strict=True), strict=True)
    ]
