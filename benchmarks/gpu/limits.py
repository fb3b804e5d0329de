"""Upper limits of the GPU benchmarks, computed from sizes and a machine's rates. Needs no GPU and no PyTorch.

    PYTHONPATH=src python benchmarks/gpu/limits.py

A time is the largest of three: operations over the rate of a large matrix product; the weights, read once, over the
bandwidth of device memory; the reused KV over the bandwidth of where it lies. The last table adds what the methods do
inside vLLM: keys that the attention kernel reads for each run of active tokens, and kernel launches. Nothing is
measured.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from docs_tables import markdown_table

from chunkweave.planning.cost import known_shape
from chunkweave.planning.outcome import LayerWork, full_prefill_flops, prefill_flops
from chunkweave.types import Geometry

CHUNK_TOKENS, QUESTION_TOKENS, BYTES = 512, 33, 2
CONTEXTS, RATIOS = (8192, 32768), (0.0, 0.05, 0.15, 0.3)
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
VLLM_CONTEXTS = (3072, 8192, 16384)
VLLM_HEADS = ["method", "3k", "8k", "16k", "bound by, at 8k"]
TILE_QUERIES = 32
"""Queries of a tile of our kernel: 128 rows for the four query heads of a key head."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine's rates per second: operations of a bf16 product, bytes of device memory, bytes from host to device.

    `launch_s` is the host's time to launch one kernel.
    """

    flops: float
    memory: float
    host: float
    launch_s: float = 6e-6


H200 = Rates(flops=788e12, memory=4.3e12, host=55e9)
"""Measured: a bf16 product on random data, a device-to-device copy. Assumed: PCIe 5.0 x16 after overheads, launches."""


@dataclass(frozen=True, slots=True)
class Way:
    """A method inside vLLM: the share of tokens that it recomputes, and how.

    `blocks`: the first tokens of each chunk, else tokens anywhere. `tiled`: attention by our kernel, which reads the
    keys once for a tile of queries, else by vLLM's, which reads them for each run. `launches` are those of a layer.
    `dense`: all tokens are active in the first layer.
    """

    name: str
    ratio: float
    launches: int
    blocks: bool = False
    tiled: bool = False
    dense: bool = False


STOCK_LAUNCHES, LOOP_LAUNCHES = 49, 99
"""Launching operations of one layer, through vLLM's own layer and through our layer loop (tests count them)."""

WAYS = (
    Way("epic 5 %", 0.05, STOCK_LAUNCHES, blocks=True),
    Way("cacheblend 15 %, vLLM's kernel", 0.15, STOCK_LAUNCHES, dense=True),
    Way("cacheblend 15 %, our kernel", 0.15, LOOP_LAUNCHES, tiled=True, dense=True),
    Way("query 5 %, our kernel", 0.05, 2 * LOOP_LAUNCHES, tiled=True),  # a pass of the question, and one of the chosen
)


def main() -> None:
    """Compute, print, write into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tflops", type=float, default=H200.flops / 1e12, help="of a bf16 product")
    parser.add_argument("--memory-tb-s", type=float, default=H200.memory / 1e12, help="of a device-to-device copy")
    parser.add_argument("--host-gb-s", type=float, default=H200.host / 1e9, help="from host to device")
    arguments = parser.parse_args()
    rates = Rates(arguments.tflops * 1e12, arguments.memory_tb_s * 1e12, arguments.host_gb_s * 1e9)
    print("\n\n".join(tables_of(rates).values()))


def tables(_: Mapping[str, Any]) -> dict[str, str]:
    """The tables for the page: an H200's."""
    return tables_of(H200)


def tables_of(rates: Rates) -> dict[str, str]:
    """Limits of weaving, in our engine and inside vLLM, by their names on the page."""
    return {
        "weave-limits": markdown_table(WEAVE_HEADS, weave_rows("llama-3-8b", rates)),
        "vllm-limits": markdown_table(VLLM_HEADS, vllm_rows("llama-3-8b", rates)),
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


def vllm_rows(shape: str, rates: Rates) -> list[list[str]]:
    """Each method's time to the first token by context, and how many times sooner than full prefill that is."""
    geometry = known_shape(shape).geometry
    full = [full_prefill_flops(geometry, context) / rates.flops for context in VLLM_CONTEXTS]
    rows = [["full prefill", *(f"{one * 1e3:.0f} ms" for one in full), "operations"]]
    for way in WAYS:
        times = [way_times(geometry, way, context, rates) for context in VLLM_CONTEXTS]
        cells = [
            f"{max(one.values()) * 1e3:.0f} ms, {full_s / max(one.values()):.1f}x"
            for one, full_s in zip(times, full, strict=True)
        ]
        rows.append([way.name, *cells, max(times[1], key=lambda part: times[1][part])])
    return rows


def way_times(geometry: Geometry, way: Way, context: int, rates: Rates) -> dict[str, float]:
    """Seconds of what may bound a method: the GPU's products and attention, launches, and loading from the host."""
    g, runs = geometry, runs_of(way, context)
    kept = sum(stop - start for start, stop in runs)
    read = tiled_keys(runs) if way.tiled else keys_of_runs(runs)
    visible = sum((start + 1 + stop) * (stop - start) // 2 for start, stop in runs)
    work = [LayerWork(kept, kept, kept, 0)] * g.num_layers
    if way.dense:
        work[0] = LayerWork(context, context, context, context * (context + 1) // 2)
    products_s = max(prefill_flops(g, work) / rates.flops, weight_bytes(g) / rates.memory)
    kv_bytes = 2 * g.num_kv_heads * g.head_dim * BYTES
    attention_s = max(read * kv_bytes / rates.memory, 4 * visible * g.num_heads * g.head_dim / rates.flops)
    return {
        "products and attention": products_s + g.num_layers * attention_s,
        "launches": g.num_layers * way.launches * rates.launch_s,
        "KV from host": context * g.kv_elements_per_token() * BYTES / rates.host,
    }


def runs_of(way: Way, context: int) -> list[tuple[int, int]]:
    """Runs `[start, stop)` of the active tokens of a context of chunks."""
    if way.blocks:
        return [(first, first + round(way.ratio * CHUNK_TOKENS)) for first in range(0, context, CHUNK_TOKENS)]
    chosen = sorted(Random(0).sample(range(context), round(way.ratio * context)))
    starts = [chosen[0], *(b for a, b in pairwise(chosen) if b != a + 1)]
    stops = [*(a + 1 for a, b in pairwise(chosen) if b != a + 1), chosen[-1] + 1]
    return list(zip(starts, stops, strict=True))


def keys_of_runs(runs: Iterable[tuple[int, int]]) -> int:
    """Keys that a kernel reads which takes each run as a request of its own, for each head of keys."""
    return sum(stop for _, stop in runs)


def tiled_keys(runs: Iterable[tuple[int, int]], queries: int = TILE_QUERIES) -> int:
    """Keys that a kernel reads which takes tiles of `queries` active tokens, from any runs, for each head of keys."""
    positions = [position for start, stop in runs for position in range(start, stop)]
    return sum(max(positions[first : first + queries]) + 1 for first in range(0, len(positions), queries))


if __name__ == "__main__":
    main()
