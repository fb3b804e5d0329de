"""Attention of scattered queries: our kernel against SDPA with a mask, SDPA in blocks, and FlexAttention.

    PYTHONPATH=src python benchmarks/gpu/kernel.py --out kernel.json
    PYTHONPATH=src python benchmarks/gpu/kernel.py --sweep    # ours with other block sizes
    PYTHONPATH=src python benchmarks/gpu/kernel.py --stalls   # calls of our kernel that compile

Time, and the rate over the operations that the result needs: four times head_dim for every query, head and visible key.
Every contender's result is compared with float32 on the same inputs. `first_ms` is a contender's first call, which may
compile. `--stalls` calls our kernel once at each of many sizes, as requests of growing length do.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from bench_setup import Report, dtype_of, parse, parser_of, seconds, wait

from chunkweave.config import AttentionKernel
from chunkweave.models.attention import FlatAttention, OwnQueries, ScatteredQueries
from chunkweave.models.kernels.choice import make_attention
from chunkweave.types import Geometry

HEADS, KV_HEADS, DIM = 32, 8, 128
STALL_S = 0.02
"""A call that takes longer was compiled."""

Attend = Callable[[], torch.Tensor]


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.15, 0.3])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--stalls", action="store_true")
    arguments = parse(parser, contexts=[128])
    report = Report("kernel", arguments)
    if arguments.stalls:
        report.more["start_s"], attention = started(arguments)
        for name, share in (("one", 0.0), *((f"{share:.0%} of the keys", share) for share in arguments.shares)):
            report.measure(partial(stalls, attention, share, arguments), queries=name)
        report.finish()
        return
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
            key = {"context": context, "share": share, "kernel": name}
            report.measure(partial(measured, attend, expected, flops, arguments), **key)
    report.finish()


def measured(attend: Attend, expected: torch.Tensor, flops: int, arguments: Any) -> dict[str, Any]:
    """Time, rate and error of one contender; its first call compiles and makes tables."""
    first_s, found = first_call(attend, arguments.device)
    spent = seconds(attend, arguments.device, repeats=4 * arguments.repeats)
    off = ((found.float() - expected).norm() / expected.norm()).item()
    return {"ms": spent * 1e3, "first_ms": first_s * 1e3, "tflop_per_s": flops / spent / 1e12, "relative_error": off}


def stalls(attention: FlatAttention, share: float, arguments: Any) -> dict[str, Any]:
    """The first calls of our kernel over ever more keys, with that share of them as queries; 0: one query."""
    calls = []
    for keys in (64, 128) if arguments.tiny else range(256, max(arguments.contexts) + 1, 256):
        where = torch.arange(keys, device=arguments.device)[-max(1, int(share * keys)) :]
        q, k, v = (
            torch.ones(n, h, DIM, device=arguments.device, dtype=dtype_of(arguments))
            for n, h in ((len(where), HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
        )
        own = [OwnQueries(ScatteredQueries(where, q.dtype), k, v)]
        spent_s = first_call(partial(attention.attend, q, own), arguments.device)[0]
        calls.append((spent_s, keys))
    slow = [(spent, keys) for spent, keys in calls if spent > STALL_S]
    return {
        "calls": len(calls),
        "stalls": len(slow),
        "stalled_s": sum(spent for spent, _ in slow),
        "longest_s": max(calls)[0],
        "at_keys": [keys for _, keys in slow],
    }


def started(arguments: Any) -> tuple[float, FlatAttention]:
    """Attention as an engine gets it, and the seconds of its start-up."""
    geometry = Geometry(1, HEADS * DIM, HEADS, KV_HEADS, DIM, 1, 1, max(arguments.contexts))
    device, dtype = torch.device(arguments.device), dtype_of(arguments)
    logging.basicConfig(level=logging.INFO)  # it says what is compiled
    begun = time.perf_counter()
    attention = make_attention(AttentionKernel.AUTO, geometry, dtype=dtype, device=device)
    wait(arguments.device)
    return time.perf_counter() - begun, attention


def first_call(attend: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds of one call, and its result."""
    wait(device)
    started = time.perf_counter()
    found = attend()
    wait(device)
    return time.perf_counter() - started, found


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
    """All contenders by name."""
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
        with contextlib.suppress(ImportError):
            yield "vLLM's FlashAttention, a run a request", by_runs(q, k, v, where)
        yield "FlexAttention", flex(by_head, where, len(k))


def by_runs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor) -> Attend:
    """The kernel of vLLM's backend FLASH_ATTN over blocks of keys; each run of consecutive queries is a request."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    block = 16
    keys, values = (state[: len(k) // block * block].unflatten(0, (-1, block)) for state in (k, v))
    edges = torch.nonzero(where[1:] != where[:-1] + 1).squeeze(1) + 1
    starts = torch.cat((edges.new_zeros(1), edges, edges.new_full((1,), len(where))))
    lengths = (where[starts[1:] - 1] + 1).to(torch.int32)
    table = torch.arange(len(keys), dtype=torch.int32, device=k.device).repeat(len(lengths), 1)
    longest = int((starts[1:] - starts[:-1]).max())
    starts = starts.to(torch.int32)

    def attend() -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(
            q, keys, values, longest, starts, len(k), seqused_k=lengths, causal=True, block_table=table
        )
        return out.flatten(1)

    return attend


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
            lambda: attend(queries, KeyPlaces(addresses, KV_HEADS, parts)).states,
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
