"""Attention on CPUs with bfloat16 multiplication, through oneDNN's matrix kernels.

On such a CPU without AMX, PyTorch's own kernel reaches a tenth of the speed of oneDNN's products. oneDNN returns
bfloat16 only, so scores must not be returned: rounding would change them by some hundredths, and weights by some per
cent. Instead the exponential is part of the product: oneDNN applies a sigmoid to its float32 sums, and `sigmoid(s -
40)` is `exp(s - 40)` up to a relative 1e-6 while s is below 26. The result is the weights before normalization, rounded
once, as in PyTorch's kernel. No running maximum is needed while the relevant scores are within that window, which the
sums of the weights show. Otherwise PyTorch's kernel attends.

The product with the values is also rounded, before it is divided by the sums; a second product recovers what was
rounded off. Without it the error against float64 is 1.4 times that of PyTorch's kernel, with it within a tenth
(`tests/integration/test_onednn_attention.py`), on layers of SmolLM2 within a twentieth: in PyTorch the greatest weight
of a row is exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp
from weakref import WeakKeyDictionary

import torch

from chunkweave.models.attention import FlatResult, OwnQueries, ScatteredQueries, seen_keys
from chunkweave.types import Geometry

_OFFSET = 40.0
"""Subtracted from every score; exact in bfloat16."""

_LEAST_SUM = exp(-60.0)
_MOST_SUM = exp(-6.0)
"""If a query's sum of weights is between these, no relevant weight was lost and all are in the exponential range."""

_BLOCK_QUERIES = 64
_BLOCK_ROWS = 256
"""Most queries per block, and most rows of its products (queries times query heads per key head).

Few, so that little beyond the visible keys is computed; enough for the matrix kernels.
"""

_FEW_QUERIES = 4
"""Up to this number of queries (decoding), converting all keys and values to float32 is faster."""

_QUERY_STEP = 8
_KEY_STEP = 128
"""Block sizes are multiples of these, because oneDNN takes half a millisecond to compile a kernel for a new shape.

It caches `ONEDNN_PRIMITIVE_CACHE_CAPACITY` kernels, so blocks have few different sizes (`_key_count`).
"""

_MAX_MASK_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Queries `[start, stop)`, padding included, over keys `[key_start, key_stop)`; all see those before `masked_from`.

    `mask` `[queries, 1, keys from masked_from on]` is 1 for visible keys, else 0; None: not computed yet.
    """

    start: int
    stop: int
    key_start: int
    key_stop: int
    masked_from: int
    mask: torch.Tensor | None = None


class _Blocks:
    """The blocks of a set of queries; made once and used for every layer with the same set.

    `padding` zero queries precede the first one; keys are read up to `key_stop`, beyond the last query's.
    """

    def __init__(self, queries: ScatteredQueries, group: int) -> None:
        """`group` query heads share a key head."""
        where = queries.where
        size = max(_QUERY_STEP, min(_BLOCK_QUERIES, _BLOCK_ROWS // group // _QUERY_STEP * _QUERY_STEP))
        self.padding = -len(where) % size % _QUERY_STEP if len(where) >= _QUERY_STEP else 0
        self._where = [where[0]] * self.padding + list(where)
        self._positions = torch.tensor(self._where)
        self._window, self._hidden = queries.window, queries.hidden
        rest = len(self._where) % size
        edges = [*([0] if rest else []), *range(rest, len(self._where) + 1, size)]
        self._blocks = [self._block(start, stop) for start, stop in pairwise(edges)]
        self.key_stop = max(block.key_stop for block in self._blocks)
        masks = sum((block.stop - block.start) * (block.key_stop - block.masked_from) for block in self._blocks)
        if masks * torch.bfloat16.itemsize <= _MAX_MASK_BYTES:
            self._blocks = [self._masked(block) for block in self._blocks]

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[_Block]:
        return (self._masked(block) if block.mask is None else block for block in self._blocks)

    def _block(self, start: int, stop: int) -> _Block:
        first = self._where[start]
        last = self._where[stop - 1]
        begin = 0 if self._window is None else max(0, first + 1 - self._window)
        key_start = begin - begin % _KEY_STEP
        key_stop = key_start + _key_count(last + 1 - key_start)
        all_seen = self._hidden is None and (self._window is None or last < self._window)
        return _Block(start, stop, key_start, key_stop, first + 1 if all_seen else key_start)

    def _masked(self, block: _Block) -> _Block:
        keys = torch.arange(block.masked_from, block.key_stop)
        seen = seen_keys(keys, self._positions[block.start : block.stop, None], self._window)
        if self._hidden is not None:
            hidden_keys = self._hidden[block.masked_from : block.key_stop]
            seen[:, : len(hidden_keys)] &= ~hidden_keys
        return replace(block, mask=seen.unsqueeze(1).to(torch.bfloat16))


def _key_count(count: int) -> int:
    """`count` rounded up to a multiple of the key step; from 1024 on, to one of eight sizes per octave.

    >>> [_key_count(count) for count in (1, 128, 1100, 2100, 7000)]
    [128, 128, 1152, 2304, 7168]
    """
    step = max(_KEY_STEP, 1 << max(0, count.bit_length() - 4))
    return count + -count % step


class OneDnnAttention:
    """One request after the other, head by head. For bfloat16 on a CPU; measures no sums.

    A few queries are computed explicitly in float32, in three quarters of the time of PyTorch's kernel. Buffers are
    reused between layers, so one caller at a time. PyTorch handles capped scores and sinks.
    """

    def __init__(self) -> None:
        self._blocks: WeakKeyDictionary[ScatteredQueries, _Blocks] = WeakKeyDictionary()
        self._offsets = torch.empty(0, dtype=torch.bfloat16)
        self._room = torch.empty(0, dtype=torch.bfloat16)

    def attend(self, queries: torch.Tensor, owners: Sequence[OwnQueries]) -> FlatResult:
        """Attend each owner's queries by its `ScatteredQueries`."""
        states = []
        row = 0
        for owner in owners:
            own_queries = queries[row : row + len(owner.queries)]
            row += len(owner.queries)
            states.append(self._of_owner(own_queries, owner))
        return FlatResult(states[0] if len(states) == 1 else torch.cat(states), [None] * len(owners))

    def _of_owner(self, queries: torch.Tensor, owner: OwnQueries) -> torch.Tensor:
        few = len(queries) <= _FEW_QUERIES
        attended = self._attended(queries, owner) if owner.scores.plain and not few else None
        if attended is not None:
            return attended
        return owner.queries.attend(queries, owner.keys, owner.values, owner.scores, written_out=few)

    def _attended(self, queries: torch.Tensor, owner: OwnQueries) -> torch.Tensor | None:
        """`[queries, heads * head_dim]`; None if scores are outside the window."""
        n, heads, dim = queries.shape
        kv_heads = owner.keys.shape[1]
        group = heads // kv_heads
        blocks = self._blocks.get(owner.queries)
        if blocks is None:
            blocks = self._blocks[owner.queries] = _Blocks(owner.queries, group)
        rows = self._rows(queries, kv_heads, blocks.padding)
        keys, values = self._by_head(owner, blocks.key_stop, copies=rows.shape[-1] // dim)
        weighted, rest = (rows.new_empty(kv_heads, rows.shape[1], dim) for _ in range(2))
        sums = torch.empty(kv_heads, rows.shape[1], dtype=torch.float32)
        if len(self._offsets) < blocks.key_stop:
            self._offsets = torch.full((blocks.key_stop,), -_OFFSET, dtype=torch.bfloat16)
        for block in blocks:
            block_rows = slice(block.start * group, block.stop * group)
            seen = slice(block.key_start, block.key_stop)
            offsets = self._offsets[: block.key_stop - block.key_start]
            masked = block.masked_from - block.key_start
            for head in range(kv_heads):
                weights = _shifted_sigmoid(rows[head, block_rows], keys[head, seen], offsets)
                if block.mask is not None and block.mask.shape[-1]:
                    weights.view(block.stop - block.start, group, -1)[..., masked:].mul_(block.mask)
                torch.sum(weights, -1, dtype=torch.float32, out=sums[head, block_rows])
                product = torch.mm(weights, values[head, seen], out=weighted[head, block_rows])
                torch.addmm(product, weights, values[head, seen], beta=-1, out=rest[head, block_rows])
        least, most = torch.aminmax(sums)
        if not (least >= _LEAST_SUM and most <= _MOST_SUM):
            return None
        out = weighted.float().add_(rest).div_(sums.unsqueeze(-1)).view(kv_heads, -1, group, dim)
        return out[:, blocks.padding :].transpose(0, 1).to(queries.dtype).reshape(n, heads * dim)

    def _rows(self, queries: torch.Tensor, kv_heads: int, padding: int) -> torch.Tensor:
        """Scaled queries `[kv_heads, padded queries * group, dims]`, query by query.

        If the scale is no power of two, the rounding error of a scaled query is appended to it.
        """
        n, heads, dim = queries.shape
        scale = dim**-0.5
        exact = queries * scale if _power_of_two(scale) else None
        if exact is None:
            wide = queries.float() * scale
            rounded = wide.to(queries.dtype)
            exact = torch.cat((rounded, (wide - rounded).to(queries.dtype)), -1)
        rows = queries.new_zeros(kv_heads, padding + n, heads // kv_heads, exact.shape[-1])
        rows[:, padding:] = exact.view(n, kv_heads, heads // kv_heads, -1).transpose(0, 1)
        return rows.flatten(1, 2)

    def _by_head(self, owner: OwnQueries, stop: int, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[kv_heads, stop, copies * head_dim]` and values `[kv_heads, stop, head_dim]`, padded with 0.

        Valid until the next call.
        """
        num_keys, kv_heads, dim = owner.keys.shape
        num_keys = min(num_keys, stop)
        if self._room.numel() < kv_heads * stop * dim * (copies + 1):
            self._room = torch.empty(kv_heads * stop * dim * (copies + 1), dtype=torch.bfloat16)
        room = self._room[: kv_heads * stop * dim * (copies + 1)]
        keys, values = torch.split(room, [kv_heads * stop * dim * copies, kv_heads * stop * dim])
        keys = keys.view(kv_heads, stop, copies, dim)
        values = values.view(kv_heads, stop, dim)
        keys[:, :num_keys] = owner.keys[:num_keys].transpose(0, 1).unsqueeze(2)
        values[:, :num_keys] = owner.values[:num_keys].transpose(0, 1)
        keys[:, num_keys:] = 0
        values[:, num_keys:] = 0
        return keys.flatten(2), values


def _shifted_sigmoid(rows: torch.Tensor, keys: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`sigmoid(rows @ keys.T + offsets)`, computed in float32 and rounded once, `[rows, keys]`."""
    weights: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, keys, offsets, "sigmoid", [], "")
    return weights


def _power_of_two(scale: float) -> bool:
    return scale.hex().startswith("0x1.0000000000000p")


def unsupported_reason(geometry: Geometry, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel is not used for this model; None if it is.

    A few scattered queries with this model's heads are compared with PyTorch, because the kernel uses an operation that
    PyTorch has for its own compiler.
    """
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return f"it is for bfloat16 on CPUs, and the model is {dtype} on {device}"
    if geometry.num_heads % geometry.num_kv_heads:
        return f"it does not support {geometry.num_heads} query heads for {geometry.num_kv_heads} key heads"
    if not geometry.scores(0).plain:
        return "it does not support capped scores or attention sinks"
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, geometry.num_heads), (90, geometry.num_kv_heads), (90, geometry.num_kv_heads))
    q, k, v = (torch.randn(*shape, geometry.head_dim, generator=generator).to(dtype) for shape in shapes)
    where = [3, 17, 64, 70, 89]
    queries = ScatteredQueries(torch.tensor(where), dtype, where=where, window=40 if any(geometry.windows) else None)
    try:
        ours = OneDnnAttention()._attended(q, OwnQueries(queries, k, v))
    except (AttributeError, RuntimeError, NotImplementedError) as failure:
        return f"its products do not run here ({type(failure).__name__}: {failure})"
    error = torch.inf if ours is None else (ours - queries.attend(q, k, v)).abs().max().item()
    return None if error <= _TOLERANCE else f"its result is off by {error:.3g}"


_TOLERANCE = 0.03


def worth_it() -> bool:
    """Whether the kernel is faster on this CPU: bfloat16 products, and no AMX, which PyTorch's own kernel uses."""
    supported, amx = (
        getattr(torch.cpu, name, lambda: False) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return bool(supported()) and not amx()
