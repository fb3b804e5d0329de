"""Attention of scattered queries: our kernel against SDPA with a mask, SDPA in blocks, and FlexAttention.

    PYTHONPATH=src python benchmarks/gpu/kernel.py --out kernel.json
    PYTHONPATH=src python benchmarks/gpu/kernel.py --sweep   # ours with other block sizes

Time, and the rate over the operations that the result needs: four times head_dim for every query, head and visible key.
Every contender's result is held against float32 on the same inputs.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from bench_setup import Report, dtype_of, parser_of, seconds

from chunkweave.config import AttentionKernel
from chunkweave.models.attention import OwnQueries, ScatteredQueries
from chunkweave.models.kernels.choice import make_attention
from chunkweave.types import Geometry

HEADS, KV_HEADS, DIM = 32, 8, 128
Attend = Callable[[], torch.Tensor]


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.15, 0.3])
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.contexts, arguments.repeats = [128], 1
    report = Report("kernel", arguments)
    for context, share in product(arguments.contexts, arguments.shares):
        generator = torch.Generator().manual_seed(0)
        count = int(share * context)
        where = torch.randperm(context, generator=generator)[:count].sort().values
        where[-1] = context - 1
        states = [
            torch.randn(n, h, DIM, generator=generator)
            for n, h in ((count, HEADS), (context, KV_HEADS), (context, KV_HEADS))
        ]
        q, k, v = (state.to(arguments.device, dtype_of(arguments)) for state in states)
        flops = 4 * DIM * HEADS * int((where + 1).sum())
        expected = reference(q, k, v, where.to(q.device))
        for name, attend in contenders(q, k, v, where.to(q.device), sweep=arguments.sweep):
            if report.out_of_time():
                break
            report.add(context=context, share=share, kernel=name, **measured(attend, expected, flops, arguments))
    report.finish()


def measured(attend: Attend, expected: torch.Tensor, flops: int, arguments: Any) -> dict[str, Any]:
    """Time, rate and error of one contender, or why it does not run here."""
    try:
        found = attend().float()
        spent = seconds(attend, arguments.device, repeats=4 * arguments.repeats)
    except Exception as error:  # noqa: BLE001 - a contender that does not run is a row, not the end
        return {"ms": float("nan"), "note": f"{type(error).__name__}: {str(error)[:80]}"}
    off = ((found - expected).norm() / expected.norm()).item()
    return {"ms": spent * 1e3, "tflop_per_s": flops / spent / 1e12, "relative_error": off}


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Attention in float32, a head at a time."""
    group, out = HEADS // KV_HEADS, []
    unseen = torch.arange(len(k), device=q.device) > where[:, None]
    for head in range(HEADS):
        scores = q[:, head].float() @ k[:, head // group].float().T * DIM**-0.5
        out.append(scores.masked_fill_(unseen, -torch.inf).softmax(-1) @ v[:, head // group].float())
    return torch.cat(out, 1)


def contenders(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor, *, sweep: bool
) -> Iterator[tuple[str, Attend]]:
    """Everything that is measured, by name."""
    geometry = Geometry(1, HEADS * DIM, HEADS, KV_HEADS, DIM, 1, 1, len(k))
    attention = make_attention(AttentionKernel.AUTO, geometry, dtype=q.dtype, device=q.device)
    own = [OwnQueries(ScatteredQueries(where, q.dtype), k, v)]
    yield f"ours ({type(attention).__name__})", lambda: attention.attend(q, own).states
    if sweep:
        yield from block_sizes(q, k, v, where)
        return
    yield from ours_with_more(q, k, v, where)
    blocks = ScatteredQueries(where, q.dtype)
    yield "SDPA in blocks", lambda: blocks.attend(q, k, v)
    mask = torch.arange(len(k), device=q.device) <= where[:, None]
    by_head = [state.transpose(0, 1)[None] for state in (q, k, v)]

    def masked() -> torch.Tensor:
        out = F.scaled_dot_product_attention(*by_head, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    yield "SDPA with a mask", masked
    if q.device.type == "cuda":
        yield "FlexAttention", flex(by_head, where, len(k))


def flex(by_head: list[torch.Tensor], where: torch.Tensor, keys: int) -> Attend:
    """Compiled, with a block mask by position; both are made in the first call, which is not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return key <= where[query]

    @cache
    def made() -> Any:
        return torch.compile(flex_attention), create_block_mask(
            visible, None, None, len(where), keys, device=where.device
        )

    def attend() -> torch.Tensor:
        compiled, mask = made()
        out = compiled(*by_head, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    return attend


def ours_with_more(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor
) -> Iterator[tuple[str, Attend]]:
    """Our kernel with mass by part, and over keys before RoPE (rotated by nothing, for the same result)."""
    with contextlib.suppress(ImportError):
        from chunkweave.models.triton_attention import FlatQueries, KeyPlaces, attend, interpreted

        if q.device.type != "cuda" and not interpreted():
            return
        of_key = (torch.arange(len(k), device=q.device) // 512).to(torch.int32)
        parts = int(of_key[-1]) + 1
        addresses = torch.tensor([[k.data_ptr(), v.data_ptr(), 0, of_key.data_ptr()]], device=q.device)
        queries = FlatQueries(q, where, (len(where),), len(k))
        yield (
            f"ours, mass on {parts} parts",
            lambda: attend(queries, KeyPlaces(addresses, KV_HEADS, False, parts)).states,
        )
        still = torch.ones(len(k), DIM, device=q.device, dtype=q.dtype), torch.zeros_like(k[:, 0])
        yield "ours, RoPE on load", lambda: attend(queries, KeyPlaces(addresses, KV_HEADS), rope=still).states


def block_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor) -> Iterator[tuple[str, Attend]]:
    """Our kernel over a grid of launch sizes."""
    from chunkweave.models.triton_attention import Blocks, FlatQueries, KeyPlaces, attend

    addresses = torch.tensor([[k.data_ptr(), v.data_ptr(), 0, 0]], device=q.device)
    queries = FlatQueries(q, where, (len(where),), len(k))
    for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        blocks = Blocks(rows, keys, 1, warps, stages)
        yield (
            f"{rows}x{keys}, {warps} warps, {stages} stages",
            lambda blocks=blocks: attend(queries, KeyPlaces(addresses, KV_HEADS), blocks=blocks).states,
        )


if __name__ == "__main__":
    main()
