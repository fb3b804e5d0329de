"""First tokens inside vLLM: woven against vLLM's own full prefill and its prefix caching, in one interleaved run.

    python benchmarks/vllm_ttft.py --layers 8,24 --out vllm-ttft.json

Needs an environment with vLLM and chunkweave (`make test-vllm` makes one). Random weights of a published geometry, cut
to `--layers` layers, or a `--model`; every chunk of a pool is precomputed alone. A round draws chunks and a question
and sends the same token ids to every contender, in random order:

- `full`: under a cache salt of its own, so that nothing is found in vLLM's prefix cache;
- `prefix caching`: as any user would send it; the pool's chunks come in a new order each time;
- each method of `--methods` through the plug-in, `epic:0.05` at a ratio of its own.

TTFT runs from the request to its first token, of a server that is otherwise idle. The limit is the quotient of FLOPs.
Then, while `--streams` other requests decode, one more request comes in, and the longest pause of the others is noted.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from bench_program import parse, settings, write
from docs_tables import markdown_table
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from chunkweave.config import DEFAULT_RECOMPUTE_RATIO
from chunkweave.models.huggingface import geometry_of
from chunkweave.models.loading import shape_config
from chunkweave.planning.method import RATIO, parameters_of
from chunkweave.planning.outcome import LayerWork, prefill_flops
from chunkweave.types import Geometry
from chunkweave_server.vllm_backend.process import VllmFlags

FULL, PREFIX_CACHING = "full", "prefix caching"

_COLUMNS = ("layers", "method", "TTFT", "over full", "over prefix caching", "limit", "fraction", "pause", "longest")


@dataclass
class Load:
    """Chunks and questions of random tokens; the same for every contender."""

    rng: Random
    vocab: int
    pool: list[list[int]]
    chunks: int
    question: int

    def draw(self) -> tuple[list[int], list[list[int]]]:
        """A prompt's ids and its chunk spans."""
        ids: list[int] = []
        spans = []
        for chunk in self.rng.sample(self.pool, self.chunks):
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        return ids + self.tokens(self.question), spans

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self.rng.randrange(10, self.vocab) for _ in range(count)]


@dataclass
class Server:
    """One vLLM engine in this process, and what was measured of it."""

    engine: Any
    load: Load
    ratio: float
    sent: int = 0
    ttft: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    pauses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fractions: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def send(self, contender: str, ids: list[int], spans: list[list[int]], tokens: int = 1) -> list[float]:
        """One request; the times of its tokens."""
        from vllm import SamplingParams

        self.sent += 1
        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        extra = None
        if contender == FULL:
            prompt["cache_salt"] = f"only-{self.sent}"
        elif contender != PREFIX_CACHING:
            method, _, ratio = contender.partition(":")
            params: dict[str, Any] = {"chunks": spans, "method": method}
            if RATIO in parameters_of(method):
                params[RATIO] = float(ratio or self.ratio)
            extra = {"kv_transfer_params": {"chunkweave": params}}
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
        times, answer = [], None
        async for output in self.engine.generate(prompt, sampling, f"r{self.sent}"):
            times.append(time.perf_counter())
            answer = output
        report = (answer.kv_transfer_params or {}).get("chunkweave", {})
        if "recompute_fraction" in report:
            self.fractions[contender].append(report["recompute_fraction"])
        return times

    async def warm(self) -> None:
        """Every chunk alone, then one request of each kind (compiles, allocates)."""
        for chunk in self.load.pool:
            await self.send("prefix", chunk, [[0, len(chunk)]])

    async def idle_round(self, contenders: list[str]) -> None:
        """One prompt through all contenders, on an idle server."""
        ids, spans = self.load.draw()
        for contender in self.load.rng.sample(contenders, len(contenders)):
            started = time.perf_counter()
            self.ttft[contender].append((await self.send(contender, ids, spans))[0] - started)

    async def busy_round(self, contenders: list[str], streams: int) -> None:
        """While others decode, one prompt of each contender; the longest pause of the others."""
        for contender in self.load.rng.sample(contenders, len(contenders)):
            ids, spans = self.load.draw()
            running = [
                asyncio.create_task(self.send(FULL, self.load.tokens(24), [], tokens=60)) for _ in range(streams)
            ]
            await asyncio.sleep(0.5)
            begun = time.perf_counter()
            ended = (await self.send(contender, ids, spans))[-1]
            pauses = []
            for times in await asyncio.gather(*running):
                pauses += [b - a for a, b in pairwise(times) if b > begun and a < ended]
            if pauses:
                self.pauses[contender].append(max(pauses))


def speedup_limit(geometry: Geometry, prompt: int, chunks: int, ratio: float) -> float:
    """FLOPs of vLLM's full prefill, which finishes every layer for every token, over those of the woven one.

    That is CacheBlend with one check at layer 1 and nothing finished in the last layer, then the question.
    """
    g, kept = geometry, round(ratio * chunks)
    mean = prompt / 2
    rest = prompt - chunks
    dense = LayerWork(chunks, chunks, chunks, int(chunks * mean))
    check = LayerWork(chunks + kept, kept, kept, int(kept * mean))
    thin = LayerWork(kept, kept, kept, int(kept * mean))
    last = LayerWork(kept, kept, 0, 0)
    question = [LayerWork(rest, rest, rest, rest * prompt)] * g.num_layers
    layers = [dense, check, *[thin] * (g.num_layers - 3), last, *question]
    full = [LayerWork(prompt, prompt, prompt, prompt * (prompt + 1) // 2)] * g.num_layers
    return prefill_flops(g, full) / prefill_flops(g, layers)


def _engine(folder: str, args: argparse.Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy" if args.model is None else "auto",
            dtype=args.dtype,
            max_model_len=args.chunks * args.chunk_tokens + 512,
            enforce_eager=not args.compile,
            kv_transfer_config={  # type: ignore[arg-type]
                "kv_connector": "ChunkweaveConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"weave_step_tokens": args.step_tokens},
            },
        )
    )


async def measure(layers: int | None, contenders: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One model, of `layers` layers unless it has weights: rows by contender."""
    with tempfile.TemporaryDirectory() as made:
        if layers is None:
            folder = VllmFlags(args.model).source
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        else:
            folder, config = made, shape_config(args.shape)
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
            config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
            config.save_pretrained(folder)
        engine = _engine(folder, args)
        rng = Random(args.seed)
        load = Load(rng, config.vocab_size, [], args.chunks, args.question_tokens)
        load.pool = [load.tokens(args.chunk_tokens) for _ in range(2 * args.chunks)]
        server = Server(engine, load, args.recompute_ratio)
        try:
            await server.warm()
            await server.idle_round(contenders)
            server.ttft.clear()
            for _ in range(args.rounds):
                await server.idle_round(contenders)
            for _ in range(args.busy_rounds):
                await server.busy_round(contenders, args.streams)
        finally:
            engine.shutdown()
    chunks = args.chunks * args.chunk_tokens

    def limit(ratio: str) -> float:
        each = float(ratio or args.recompute_ratio)
        return speedup_limit(geometry_of(config), chunks + args.question_tokens, chunks, each)

    return [_row(config.num_hidden_layers, one, server, limit(one.partition(":")[2])) for one in contenders]


def _row(layers: int, contender: str, server: Server, limit: float) -> dict[str, Any]:
    mine = server.ttft[contender]
    fractions, pauses = server.fractions[contender], server.pauses[contender]

    def over(other: str) -> float:
        return statistics.median(b / a for a, b in zip(mine, server.ttft[other], strict=True))

    return {
        "layers": layers,
        "method": contender,
        "ttft_median_s": statistics.median(mine),
        "ttft_p10_s": statistics.quantiles(mine, n=10)[0] if len(mine) > 1 else mine[0],
        "ttft_p90_s": statistics.quantiles(mine, n=10)[-1] if len(mine) > 1 else mine[0],
        "over_full": over(FULL),
        "over_prefix_caching": over(PREFIX_CACHING),
        "flops_limit": limit if contender.partition(":")[0] == "cacheblend" else None,
        "recompute_fraction": statistics.median(fractions) if fractions else None,
        "longest_pause_s": max(pauses) if pauses else None,
        "median_pause_s": statistics.median(pauses) if pauses else None,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="First tokens inside vLLM", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name)
    for row in rows:
        table.add_row(
            str(row["layers"]),
            row["method"],
            _shown(row["ttft_median_s"], 1000, "{:.0f} ms"),
            _shown(row["over_full"], 1, "{:.2f}x"),
            _shown(row["over_prefix_caching"], 1, "{:.2f}x"),
            _shown(row["flops_limit"], 1, "{:.2f}x"),
            _shown(row["recompute_fraction"], 1, "{:.3f}"),
            _shown(row["median_pause_s"], 1000, "{:.0f} ms"),
            _shown(row["longest_pause_s"], 1000, "{:.0f} ms"),
        )
    return table


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    heads = ["layers", "", "TTFT", "over full", "over prefix caching", "limit", "pause of others"]
    cells = [
        [
            str(row["layers"]),
            row["method"],
            _shown(row["ttft_median_s"], 1, "{:.2f} s"),
            _shown(row["over_full"], 1, "{:.2f}x"),
            _shown(row["over_prefix_caching"], 1, "{:.2f}x"),
            _shown(row["flops_limit"], 1, "{:.2f}x"),
            _shown(row["median_pause_s"], 1, "{:.2f} s"),
        ]
        for row in result["rows"]
    ]
    if result["config"].get("model") is None:
        return {"vllm-ttft": markdown_table(heads, cells)}
    brief = [[*line[1:3], *line[3:5], ratio_of(row)] for line, row in zip(cells, result["rows"], strict=True)]
    heads = [*heads[1:5], "recomputed"]
    return {"vllm-ttft-short": markdown_table(heads, brief)}


def ratio_of(row: Mapping[str, Any]) -> str:
    """The share of the chunks' work that was computed again."""
    return _shown(row["recompute_fraction"], 100, "{:.1f} %")


def _shown(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else form.format(unit * value)


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--model", help="folder or name: real weights and all layers, in place of a shape")
    parser.add_argument("--layers", default="8,24", help="how many layers the models have, by comma")
    parser.add_argument("--methods", default="cacheblend", help="of the plug-in, by comma, some with a ratio")
    parser.add_argument("--recompute-ratio", type=float, default=DEFAULT_RECOMPUTE_RATIO)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--question-tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy-rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--step-tokens", type=int, help="of weaves in a step that computes others; None: the default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile its own forward")
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    contenders = [FULL, PREFIX_CACHING, *args.methods.split(",")]
    rows: list[dict[str, Any]] = []
    for layers in (None,) if args.model else map(int, args.layers.split(",")):
        rows += asyncio.run(measure(layers, contenders, args))
    Console().print(_table(rows))
    write("vllm-ttft", args, settings(args), rows)


if __name__ == "__main__":
    main()
