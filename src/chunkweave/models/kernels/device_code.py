"""Triton programs: attention of scattered queries, and writing rows into the caches of several requests.

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
        low, high = low.to(tl.float32), high.to(tl.float32)
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
    do_not_specialize=["rows", "window"],
    do_not_specialize_on_alignment=["positions_ptr", "tiles_ptr", "places_ptr"],  # a slice may begin at any element
)
def scattered_attention(
    queries_ptr, out_ptr, lse_ptr, mass_ptr, own_ptr, positions_ptr, tiles_ptr, places_ptr, cos_ptr, sin_ptr,
    scale, rows, token_stride, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PADDED_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROTATE: tl.constexpr, PARTS: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, key heads, splits).

    `tiles` int32 `[tiles, 3]`: owner, first row, end row. `places` int64 `[owners, 4]`: addresses of the owner's keys,
    values, hidden flags (uint8) and parts of keys (int32; 0 if not requested). Outputs have a leading axis of splits:
    `out` `[splits, rows, heads, dim]`, `lse` and `own` `[splits, rows, heads]`, `mass` `[splits, rows, heads, PARTS]`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # longest tiles first: positions ascend within an owner
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    owner = tl.load(tiles_ptr + tile * 3)
    first_row = tl.load(tiles_ptr + tile * 3 + 1)
    row_stop = tl.load(tiles_ptr + tile * 3 + 2)
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
    keys = tl.multiple_of(tl.load(places_ptr + owner * 4).to(queries_ptr.dtype), 16) + kv_head * DIM
    values = tl.multiple_of(tl.load(places_ptr + owner * 4 + 1).to(queries_ptr.dtype), 16) + kv_head * DIM
    flags = tl.load(places_ptr + owner * 4 + 2)
    hidden = tl.multiple_of(flags.to(tl.pointer_type(tl.uint8)), 16)
    flagged = flags != 0
    cut = flagged | (begin <= last - window)  # the first key of this split may be invisible to a query
    unmasked = tl.where(cut, begin, tl.maximum(begin, tl.minimum(end, free) // BLOCK_N * BLOCK_N))
    parts = tl.multiple_of(tl.load(places_ptr + owner * 4 + 3).to(tl.pointer_type(tl.int32)), 16)

    at = row.to(tl.int64) * HEADS + head
    offset = tl.arange(0, PADDED_KEY)
    half: tl.constexpr = DIM // 2 if ROTATE else DIM
    there = valid[:, None] & (offset < half)[None, :]
    first = tl.load(queries_ptr + at[:, None] * DIM + offset[None, :], mask=there, other=0.0)
    second = first
    if ROTATE:
        second = tl.load(queries_ptr + at[:, None] * DIM + half + offset[None, :], mask=there, other=0.0)
    if WIDEN:
        first, second = first.to(tl.float32), second.to(tl.float32)

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
