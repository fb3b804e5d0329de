"""Triton programs: attention of scattered queries, RoPE, and writing rows into the caches of several requests.

One program attends a tile of queries of one request, for one key head and one split of the keys: the rows of a tile are
its queries times the query heads that share the key head. Scores and sums are float32; the softmax is online, with base
2. Keys after the last position of a tile are not read; keys up to its first position need no mask. With a window, key
blocks before those of all the tile's queries are not read. Every block needs a mask if a window ends in it or behind
it, or if the owner has hidden keys.

Whatever differs between two requests or two layers of a model is a run-time number (splits, window, hidden keys,
alignment of small tables): a `tl.constexpr` that depends on a request is a kernel that compiles while serving.
"""

import triton
import triton.language as tl

HIDDEN_SCORE = tl.constexpr(-1.0e30)
"""Score of an invisible key. Finite, so that a block without visible keys gives no NaN: the first visible key scales
what such a block added down to 0.
"""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(
    first, second, keys, cos, sin, key, inside, token_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROTATE: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dot products of the tile's queries with one block of keys; with ROTATE, keys are rotated as they are loaded."""
    offset = tl.arange(0, PADDED)
    half: tl.constexpr = DIM // 2 if ROTATE else DIM
    there = inside[None, :] & (offset < half)[:, None]
    low = tl.load(keys + key[None, :] * token_stride + offset[:, None], mask=there, other=0.0)
    if ROTATE:
        high = tl.load(keys + key[None, :] * token_stride + half + offset[:, None], mask=there, other=0.0)
        low = low.to(tl.float32)
        high = high.to(tl.float32)
        angle = key[None, :] * DIM + offset[:, None]
        cos_low = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + angle + half, mask=there, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + angle + half, mask=there, other=0.0).to(tl.float32)
        rotated_low = (low * cos_low - high * sin_low).to(first.dtype)
        rotated_high = (high * cos_high + low * sin_high).to(first.dtype)
        scores = tl.dot(first, rotated_low, input_precision=PRECISION)
        scores += tl.dot(second, rotated_high, input_precision=PRECISION)
    else:
        if WIDEN:
            low = low.to(tl.float32)
        scores = tl.dot(first, low, input_precision=PRECISION)
    return scores


@triton.jit
def _block(
    start, stop, first, second, out, most, total, mass, own,
    keys, values, hidden, flagged, parts, cos, sin, positions, token_stride, scale, window,
    DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_KEY: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, ROTATE: tl.constexpr, PARTS: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the running softmax."""
    key = start + tl.arange(0, BLOCK_N)
    inside = key < stop
    scores = _scores(
        first, second, keys, cos, sin, key, inside, token_stride, DIM, PADDED_KEY, ROTATE, WIDEN, PRECISION
    )
    scores *= scale
    if MASKED:
        wanted = tl.where(inside, flagged.to(tl.int32), 0) != 0  # a mask by type, in the interpreter too
        flags = tl.load(hidden + key, mask=wanted, other=0)
        there = inside & (flags == 0)
        seen = (key[None, :] <= positions[:, None]) & (key[None, :] > positions[:, None] - window) & there[None, :]
        scores = tl.where(seen, scores, HIDDEN_SCORE)
    top = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(most - top)
    total = total * shrink + tl.sum(weights, 1)
    offset = tl.arange(0, PADDED)
    value = tl.load(
        values + key[:, None] * token_stride + offset[None, :],
        mask=inside[:, None] & (offset < DIM)[None, :],
        other=0.0,
    )
    if WIDEN:
        value = value.to(tl.float32)
    out = out * shrink[:, None]
    out = tl.dot(weights.to(value.dtype), value, out, input_precision=PRECISION)
    if PARTS > 0:
        at_own = key[None, :] == positions[:, None]
        own = own * shrink + tl.sum(tl.where(at_own, weights, 0.0), 1)
        part = tl.load(parts + key, mask=inside, other=-1)
        member = (part[:, None] == tl.arange(0, PARTS)[None, :]).to(tl.float32)
        mass = mass * shrink[:, None]
        mass = tl.dot(tl.where(at_own, 0.0, weights), member, mass, input_precision=PRECISION)
    return out, top, total, mass, own


@triton.jit(
    do_not_specialize=["keys_at", "values_at", "hidden_at", "parts_at", "rows", "window"],
    do_not_specialize_on_alignment=["positions_ptr", "tiles_ptr", "places_ptr"],  # a slice may begin at any element
)
def scattered_attention(
    queries_ptr, out_ptr, lse_ptr, mass_ptr, own_ptr, positions_ptr, tiles_ptr, places_ptr, cos_ptr, sin_ptr,
    keys_at: tl.int64, values_at: tl.int64, hidden_at: tl.int64, parts_at: tl.int64,
    scale, rows, token_stride, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROTATE: tl.constexpr, PARTS: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, key heads, splits).

    `tiles` int32 `[tiles, 3]`: owner, first row, end row. `places` int64 `[owners, 4]`: addresses of the owner's keys,
    values, hidden flags (uint8) and parts of keys (int32; 0 if not requested). For a single owner these addresses are
    arguments, and no table is read: copying one to the device would wait behind the KV that is loaded.

    Outputs have a leading axis of splits:
    `out` `[splits, rows, heads, dim]`, `lse` and `own` `[splits, rows, heads]`, `mass` `[splits, rows, heads, PARTS]`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # longest tiles first: positions ascend within an owner
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    several = keys_at == 0
    owner = tl.load(tiles_ptr + tile * 3, mask=several, other=0)
    first_row = tile * (BLOCK_M // group)
    row_stop = tl.minimum(first_row + BLOCK_M // group, rows)
    first_row = tl.load(tiles_ptr + tile * 3 + 1, mask=several, other=first_row)
    row_stop = tl.load(tiles_ptr + tile * 3 + 2, mask=several, other=row_stop)
    lane = tl.arange(0, BLOCK_M)
    row = first_row + lane // group
    head = kv_head * group + lane % group
    valid = (row < row_stop) & (lane < BLOCK_M // group * group)
    positions = tl.load(positions_ptr + row, mask=valid, other=-1)
    last = tl.max(positions, 0)
    free = tl.min(tl.where(valid, positions, last), 0) + 1

    skipped = tl.maximum(free - window, 0) // BLOCK_N
    blocks = (last + BLOCK_N) // BLOCK_N - skipped
    splits = tl.num_programs(2)
    split_keys = (blocks + splits - 1) // splits * BLOCK_N
    begin = skipped * BLOCK_N + split * split_keys
    end = tl.minimum(begin + split_keys, last + 1)

    # Loaded addresses have no known alignment; without these hints every element would be a separate load.
    places = places_ptr + owner * 4
    keys = tl.load(places, mask=several, other=keys_at)
    keys = tl.multiple_of(keys.to(queries_ptr.dtype), 16) + kv_head * DIM
    values = tl.load(places + 1, mask=several, other=values_at)
    values = tl.multiple_of(values.to(queries_ptr.dtype), 16) + kv_head * DIM
    flags = tl.load(places + 2, mask=several, other=hidden_at)
    hidden = tl.multiple_of(flags.to(tl.pointer_type(tl.uint8)), 16)
    flagged = flags != 0
    cut = flagged | (begin <= last - window)  # the first key of this split may be invisible to a query
    unmasked = tl.where(cut, begin, tl.maximum(begin, tl.minimum(end, free) // BLOCK_N * BLOCK_N))
    parts = tl.load(places + 3, mask=several, other=parts_at)
    parts = tl.multiple_of(parts.to(tl.pointer_type(tl.int32)), 16)

    at = row.to(tl.int64) * HEADS + head
    offset = tl.arange(0, PADDED_KEY)
    half: tl.constexpr = DIM // 2 if ROTATE else DIM
    there = valid[:, None] & (offset < half)[None, :]
    first = tl.load(queries_ptr + at[:, None] * DIM + offset[None, :], mask=there, other=0.0)
    second = first
    if ROTATE:
        second = tl.load(queries_ptr + at[:, None] * DIM + half + offset[None, :], mask=there, other=0.0)
    if WIDEN:
        first = first.to(tl.float32)
        second = second.to(tl.float32)

    out = tl.zeros([BLOCK_M, PADDED], tl.float32)
    most = tl.full([BLOCK_M], HIDDEN_SCORE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    own = tl.zeros([BLOCK_M], tl.float32)
    mass = tl.zeros([BLOCK_M, PARTS if PARTS > 0 else 16], tl.float32)
    for start in range(begin, unmasked, BLOCK_N):
        out, most, total, mass, own = _block(
            start, end, first, second, out, most, total, mass, own,
            keys, values, hidden, flagged, parts, cos_ptr, sin_ptr, positions, token_stride, scale * LOG2_E,
            window,
            DIM, PADDED, PADDED_KEY, BLOCK_N, False, ROTATE, PARTS, WIDEN, PRECISION,
        )  # fmt: skip
    for start in range(unmasked, end, BLOCK_N):
        out, most, total, mass, own = _block(
            start, end, first, second, out, most, total, mass, own,
            keys, values, hidden, flagged, parts, cos_ptr, sin_ptr, positions, token_stride, scale * LOG2_E,
            window,
            DIM, PADDED, PADDED_KEY, BLOCK_N, True, ROTATE, PARTS, WIDEN, PRECISION,
        )  # fmt: skip

    # A split without any key leaves total = 0; it weighs nothing when splits are combined.
    some = total > 0.0
    norm = tl.where(some, total, 1.0)
    at += split.to(tl.int64) * rows * HEADS
    lse = tl.where(some, most / LOG2_E + tl.log(norm), HIDDEN_SCORE)
    tl.store(lse_ptr + at, lse, mask=valid)
    offset = tl.arange(0, PADDED)
    tl.store(
        out_ptr + at[:, None] * DIM + offset[None, :],
        (out / norm[:, None]).to(out_ptr.dtype.element_ty),
        mask=valid[:, None] & (offset < DIM)[None, :],
    )
    if PARTS > 0:
        tl.store(own_ptr + at, own / norm, mask=valid)
        part = tl.arange(0, PARTS)
        tl.store(mass_ptr + at[:, None] * PARTS + part[None, :], mass / norm[:, None], mask=valid[:, None])


@triton.jit(do_not_specialize=["splits", "count"])
def combine_splits(
    parts_ptr, lses_ptr, states_ptr, total_ptr, splits, count,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK of `count` rows and heads): weigh each split's states by its share of the softmax's sum.

    `parts` `[splits, count, DIM]` and `lses` `[splits, count]` are float32, `states` `[count, DIM]`, `total` `[count]`.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = lane < count
    offset = tl.arange(0, PADDED)
    top = tl.full([BLOCK], HIDDEN_SCORE, tl.float32)
    at = lane.to(tl.int64)
    for _ in range(splits):
        top = tl.maximum(top, tl.load(lses_ptr + at, mask=valid, other=0.0))
        at += count
    there = valid[:, None] & (offset < DIM)[None, :]
    total = tl.zeros([BLOCK], tl.float32)
    states = tl.zeros([BLOCK, PADDED], tl.float32)
    at = lane.to(tl.int64)
    for _ in range(splits):
        share = tl.exp(tl.load(lses_ptr + at, mask=valid, other=0.0) - top)
        total += share
        states += share[:, None] * tl.load(parts_ptr + at[:, None] * DIM + offset[None, :], mask=there, other=0.0)
        at += count
    tl.store(total_ptr + lane, top + tl.log(total), mask=valid)
    tl.store(
        states_ptr + lane[:, None] * DIM + offset[None, :],
        (states / total[:, None]).to(states_ptr.dtype.element_ty),
        mask=there,
    )


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def write_rows(
    keys_ptr, values_ptr, positions_ptr, places_ptr, token_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows,): write row i of keys and values `[rows, WIDTH]` to position i of the cache at `places[i]`."""
    row = tl.program_id(0)
    position = tl.load(positions_ptr + row)
    keys = tl.load(places_ptr + row * 4).to(keys_ptr.dtype)
    values = tl.load(places_ptr + row * 4 + 1).to(keys_ptr.dtype)
    offset = tl.arange(0, BLOCK)
    inside = offset < WIDTH
    fresh = row.to(tl.int64) * WIDTH + offset
    there = position * token_stride + offset
    tl.store(keys + there, tl.load(keys_ptr + fresh, mask=inside), mask=inside)
    tl.store(values + there, tl.load(values_ptr + fresh, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["heads"], do_not_specialize_on_alignment=["positions_ptr"])
def turn_halves(
    states_ptr, out_ptr, positions_ptr, cos_ptr, sin_ptr, heads, in_stride, out_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of BLOCK heads): RoPE of `states` `[rows, heads, DIM]`, written to `out`.

    `cos` and `sin` are `[positions, DIM]`; the sines of the first half are negative. Strides are those of rows.
    Products and sum are rounded one by one, as PyTorch's are.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.arange(0, PADDED)
    half: tl.constexpr = DIM // 2
    dtype = states_ptr.dtype.element_ty
    inside = offset < half
    angle = tl.load(positions_ptr + row) * DIM + offset
    cos_low = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = head[:, None] * DIM + offset[None, :]
    there = (head < heads)[:, None] & inside[None, :]
    low = tl.load(states_ptr + row * in_stride + at, mask=there, other=0.0).to(tl.float32)
    high = tl.load(states_ptr + row * in_stride + at + half, mask=there, other=0.0).to(tl.float32)
    turned_low = (low * cos_low).to(dtype).to(tl.float32) + (high * sin_low).to(dtype).to(tl.float32)
    turned_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + at, turned_low.to(dtype), mask=there)
    tl.store(out_ptr + row * out_stride + at + half, turned_high.to(dtype), mask=there)
