"""What the GPU benchmarks can show at most, from sizes and a machine's rates alone. Needs no GPU, and no PyTorch.

    PYTHONPATH=src python benchmarks/gpu/limits.py --update-docs docs/results/tables-gpu.md

A time is the largest of three: operations over the rate of a large matrix product; the weights, read once, over the
bandwidth of device memory; the reused KV over the bandwidth of where it lies. Nothing is measured.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from docs_tables import markdown_table, rewrite_page

from chunkweave.planning.cost import known_shape
from chunkweave.planning.outcome import LayerWork, full_prefill_flops, prefill_flops
from chunkweave.types import Geometry

CHUNK_TOKENS, QUESTION_TOKENS, BYTES = 512, 33, 2
CONTEXTS, RATIOS, SHARES = (4096, 8192, 16384, 32768), (0.0, 0.05, 0.15, 0.3), (0.05, 0.15, 0.3)
WEAVE_HEADS = [
    "shape, context, ratio",
    "full",
    "operations",
    "KV on device",
    "KV on host",
    "weave",
    "speed-up",
    "bound by",
]
KERNEL_HEADS = ["context, share of queries", "GFLOP", "limit"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one machine, a second: operations of a bf16 product, bytes of device memory, bytes from host to device."""

    flops: float
    memory: float
    host: float


H200 = Rates(flops=788e12, memory=4.3e12, host=55e9)
"""A bf16 product on random data and a device-to-device copy as read on one; PCIe 5.0 x16 after overheads, assumed."""


def main() -> None:
    """Compute, print, write into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tflops", type=float, default=H200.flops / 1e12, help="of a bf16 product")
    parser.add_argument("--memory-tb-s", type=float, default=H200.memory / 1e12, help="of a device-to-device copy")
    parser.add_argument("--host-gb-s", type=float, default=H200.host / 1e9, help="from host to device")
    parser.add_argument("--update-docs", type=Path, metavar="PAGE", help="with the rates of an H200")
    arguments = parser.parse_args()
    rates = Rates(arguments.tflops * 1e12, arguments.memory_tb_s * 1e12, arguments.host_gb_s * 1e9)
    print("\n\n".join(tables_of(rates).values()))
    if arguments.update_docs is not None:
        rewrite_page(arguments.update_docs)


def tables(_: Mapping[str, Any]) -> dict[str, str]:
    """The tables for the page: an H200's."""
    return tables_of(H200)


def tables_of(rates: Rates) -> dict[str, str]:
    """Limits of weaving and of the kernel by their names on the page."""
    weave = [row for shape in ("llama-3-8b", "mistral-7b") for row in weave_rows(shape, rates)]
    return {
        "weave-limits": markdown_table(WEAVE_HEADS, weave),
        "kernel-limits": markdown_table(KERNEL_HEADS, kernel_rows(rates)),
    }


def weave_rows(shape: str, rates: Rates) -> list[list[str]]:
    """Each context and ratio of one shape."""
    geometry = known_shape(shape).geometry
    weights_s = weight_bytes(geometry) / rates.memory
    rows = []
    for context in CONTEXTS:
        full_s = max(full_prefill_flops(geometry, context + QUESTION_TOKENS) / rates.flops, weights_s)
        nbytes = context * geometry.kv_elements_per_token() * BYTES
        device_s, host_s = 2 * nbytes / rates.memory, nbytes / rates.host
        for ratio in RATIOS:
            flops_s = prefill_flops(geometry, weave_work(geometry, context, ratio)) / rates.flops
            times = {"operations": flops_s, "weights": weights_s, "KV from host": host_s}
            bound = max(times, key=lambda name: times[name])
            seconds = [full_s, flops_s, device_s, host_s, times[bound]]
            name = f"{shape}, {context // 1024}k, {ratio:g}"
            rows.append([name, *(f"{one * 1e3:.1f} ms" for one in seconds), f"{full_s / times[bound]:.1f}x", bound])
    return rows


def weave_work(geometry: Geometry, reused: int, ratio: float) -> list[LayerWork]:
    """`cacheblend` with one check layer, 1: everything is active up to it; at 0 `full-reuse`, only the question is."""
    tokens = reused + QUESTION_TOKENS
    kept = QUESTION_TOKENS + round(ratio * reused)
    visible = QUESTION_TOKENS * tokens + (kept - QUESTION_TOKENS) * reused // 2  # the chosen lie anywhere
    later = [LayerWork(kept, kept, kept, visible)] * (geometry.num_layers - 3)
    last = LayerWork(kept, kept, 1, tokens)
    if not ratio:
        return [*[LayerWork(kept, kept, kept, visible)] * 2, *later, last]
    first = LayerWork(tokens, tokens, tokens, tokens * (tokens + 1) // 2)
    return [first, LayerWork(tokens, kept, kept, visible), *later, last]


def weight_bytes(geometry: Geometry) -> int:
    """Bytes of the layers and of the output head: what every prefill reads at least once."""
    g = geometry
    q_width, kv_width = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    layer = g.hidden_size * (2 * q_width + 2 * kv_width + 3 * g.intermediate_size)
    return BYTES * (g.num_layers * layer + g.hidden_size * g.vocab_size)


def kernel_rows(rates: Rates) -> list[list[str]]:
    """Attention of evenly spread queries: 32 heads of 128 dimensions."""
    rows = []
    for context in (8192, 32768):
        for share in SHARES:
            flops = 4 * 32 * 128 * share * context * context / 2
            rows.append(
                [f"{context // 1024}k, {share:.0%}", f"{flops / 1e9:.0f}", f"{flops / rates.flops * 1e3:.3f} ms"]
            )
    return rows


if __name__ == "__main__":
    main()
