"""First tokens inside vLLM: woven against vLLM's own full prefill and its prefix caching, in one interleaved run.

    python benchmarks/vllm_ttft.py --layers 8,24 --out vllm-ttft.json

Needs an environment with vLLM and chunkweave (`make test-vllm` makes one). Random weights of a published geometry, cut
to `--layers` layers, or a `--model`; every chunk of a pool is precomputed alone. A round draws chunks and a question
and sends the same token ids to every contender, in random order:

- `full`: with a separate cache salt, so that vLLM's prefix cache has nothing;
- `prefix caching`: as any user would send it; the pool's chunks come in a new order each time;
- each method of `--methods` through the plug-in, `epic:0.05` at a ratio of its own.

TTFT runs from the request to its first token, of a server that is otherwise idle.

With `--answers`, greedy answers to one prompt are compared with that of `full`: the share of tokens before the first
other one, and how far the first token's log-probabilities are apart.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from random import Random
from typing import Any

import torch
from bench_program import parse, settings, show, write
from transformers import AutoConfig

from chunkweave.config import DEFAULT_RECOMPUTE_RATIO
from chunkweave.errors import UsageError
from chunkweave.models.loading import shape_config
from chunkweave.planning.method import RATIO, parameters_of
from chunkweave.settings import GIB
from chunkweave_server.vllm_backend.process import VllmFlags

FULL, PREFIX_CACHING = "full", "prefix caching"

HEADS = ("method", "layers", "tokens", "TTFT", "over full", "over prefix caching", "recomputed")


@dataclass
class Load:
    """Chunks and questions of random tokens; the same for every contender."""

    rng: Random
    vocab: int
    pool: list[list[int]]
    question: int

    def draw(self, chunks: int) -> tuple[list[int], list[list[int]]]:
        """A prompt's ids and its chunk spans."""
        ids: list[int] = []
        spans = []
        for chunk in self.rng.sample(self.pool, chunks):
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        return ids + self.tokens(self.question), spans

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self.rng.randrange(10, self.vocab) for _ in range(count)]


@dataclass
class Server:
    """One vLLM engine in this process, and its measurements."""

    engine: Any
    load: Load
    ratio: float
    sent: int = 0
    ttft: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fractions: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def send(self, contender: str, ids: list[int], spans: list[list[int]], tokens: int = 1) -> list[float]:
        """One request; the times of its tokens."""
        return (await self.answer(contender, ids, spans, tokens))[0]

    async def answer(
        self, contender: str, ids: list[int], spans: list[list[int]], tokens: int, **sampled: Any
    ) -> tuple[list[float], Any]:
        """One request: the times of its tokens, and vLLM's completion.

        Raises:
            RuntimeError: the plug-in refuses the request.
        """
        from vllm import SamplingParams

        self.sent += 1
        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        extra = None
        if contender == FULL:
            prompt["cache_salt"] = f"only-{self.sent}"
        elif contender != PREFIX_CACHING:
            method, _, ratio = contender.partition(":")
            if RATIO in parameters_of(method):
                method += f":ratio={ratio or self.ratio}"
            extra = {"kv_transfer_params": {"chunkweave": {"chunks": spans, "method": method}}}
        options = {"temperature": 0, "ignore_eos": True, "detokenize": False, "extra_args": extra, **sampled}
        sampling = SamplingParams(max_tokens=tokens, **options)
        times, answer = [], None
        async for output in self.engine.generate(prompt, sampling, f"r{self.sent}"):
            times.append(time.perf_counter())
            answer = output
        report = (answer.kv_transfer_params or {}).get("chunkweave", {})
        if "error" in report:
            raise RuntimeError(report["error"])
        if "recompute_fraction" in report:
            self.fractions[contender].append(report["recompute_fraction"])
        return times, answer.outputs[0]

    async def warm(self) -> None:
        """Every chunk alone, then one request of each kind (compiles, allocates)."""
        for chunk in self.load.pool:
            await self.send("prefix", chunk, [[0, len(chunk)]])

    async def idle_round(self, contenders: list[str], chunks: int) -> None:
        """One prompt through all contenders, on an idle server."""
        ids, spans = self.load.draw(chunks)
        for contender in self.load.rng.sample(contenders, len(contenders)):
            started = time.perf_counter()
            self.ttft[contender].append((await self.send(contender, ids, spans))[0] - started)

    async def compare(self, contenders: list[str], chunks: int, tokens: int) -> dict[str, dict[str, float]]:
        """How far each contender's answer to one prompt is from that of `full`."""
        ids, spans = self.load.draw(chunks)
        found = {one: (await self.answer(one, ids, spans, tokens, logprobs=20))[1] for one in contenders}
        expected = found[FULL]
        compared = {}
        for name, one in found.items():
            pairs = zip(one.token_ids, expected.token_ids, strict=True)
            mine, other = one.logprobs[0], expected.logprobs[0]
            apart = [abs(mine[token].logprob - other[token].logprob) for token in mine.keys() & other.keys()]
            compared[name] = {
                "same_tokens": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / tokens,
                "first_logprob_apart": max(apart, default=inf),
            }
        return compared


def _engine(folder: str, longest: int, args: argparse.Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy" if args.model is None else "auto",
            dtype=args.dtype,
            max_model_len=longest,
            enforce_eager=not args.compile,
            **_given(args, "attention_backend", "gpu_memory_utilization"),
            kv_transfer_config={  # type: ignore[arg-type]
                "kv_connector": "ChunkweaveConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": _given(args, "host_budget"),
            },
        )
    )


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def sizes_within(context: float, args: argparse.Namespace) -> list[int]:
    """The numbers of chunks whose prompts fit into a context; says which do not.

    Raises:
        UsageError: none fits.
    """
    sizes = [int(one) for one in str(args.chunks).split(",")]
    fitting = [size for size in sizes if _longest([size], args) <= context]
    if not fitting:
        raise UsageError(f"no prompt fits into a context of {context} tokens: give fewer --chunks or --chunk-tokens")
    if longer := [size for size in sizes if size not in fitting]:
        print(f"left out, because the model's context has {context} tokens: prompts of {longer} chunks", flush=True)
    return fitting


def _longest(sizes: Sequence[int], args: argparse.Namespace) -> int:
    return max(sizes) * args.chunk_tokens + 512


async def measure(
    layers: int | None, contenders: list[str], args: argparse.Namespace, keep: Callable[..., None]
) -> None:
    """One model, of `layers` layers unless it has weights; `keep` gets rows by contender."""
    with tempfile.TemporaryDirectory() as made:
        if layers is None:
            folder = VllmFlags(args.model).source
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            sizes = sizes_within(getattr(config, "max_position_embeddings", inf), args)
        else:
            folder, config = made, shape_config(args.shape)
            sizes = sizes_within(inf, args)
            config.max_position_embeddings = max(config.max_position_embeddings, _longest(sizes, args))
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
            config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
            config.save_pretrained(folder)
        engine = _engine(folder, _longest(sizes, args), args)
        rng = Random(args.seed)
        load = Load(rng, config.vocab_size, [], args.question_tokens)
        load.pool = [load.tokens(args.chunk_tokens) for _ in range(2 * max(sizes))]
        server = Server(engine, load, args.recompute_ratio)
        try:
            await server.warm()
            for chunks in sizes:
                await server.idle_round(contenders, chunks)
                for times in (server.ttft, server.fractions):
                    times.clear()
                for _ in range(args.rounds):
                    await server.idle_round(contenders, chunks)
                compared = await server.compare(contenders, chunks, args.answers) if args.answers else {}
                tokens = chunks * args.chunk_tokens + args.question_tokens
                more = {"prompt_tokens": tokens, "device_gib": _device_gib()}
                keep(
                    {**_row(config.num_hidden_layers, one, server), **more, **compared.get(one, {})}
                    for one in contenders
                )
        finally:
            engine.shutdown()


def _device_gib() -> float | None:
    """Memory in use on the GPU, by all processes; None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def _row(layers: int, contender: str, server: Server) -> dict[str, Any]:
    mine = server.ttft[contender]
    fractions = server.fractions[contender]

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
        "recompute_fraction": statistics.median(fractions) if fractions else None,
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    fraction = row["recompute_fraction"]
    return [
        row["method"],
        str(row["layers"]),
        str(row["prompt_tokens"]),
        f"{row['ttft_median_s'] * 1e3:.0f} ms",
        f"{row['over_full']:.2f}x",
        f"{row['over_prefix_caching']:.2f}x",
        "" if fraction is None else f"{fraction:.3f}",
    ]


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--model", help="folder or name: real weights and all layers, in place of a shape")
    parser.add_argument("--layers", default="8,24", help="how many layers the models have, by comma")
    parser.add_argument("--methods", default="cacheblend", help="of the plug-in, by comma, some with a ratio")
    parser.add_argument("--recompute-ratio", type=float, default=DEFAULT_RECOMPUTE_RATIO)
    parser.add_argument("--chunks", default="6", help="of a prompt; several sizes by comma")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--question-tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile its own forward")
    parser.add_argument("--attention-backend", help="of vLLM, by its name; without one vLLM chooses")
    parser.add_argument("--gpu-memory-utilization", type=float, help="of vLLM")
    parser.add_argument("--host-budget", help="of the plug-in, such as 16GiB")
    parser.add_argument("--answers", type=int, default=0, help="tokens of answers to compare with those of full")
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    contenders = [FULL, PREFIX_CACHING, *args.methods.split(",")]
    rows: list[dict[str, Any]] = []

    def keep(more: Iterable[dict[str, Any]], *, complete: bool = False) -> None:
        rows.extend(more)
        write("vllm-ttft", args, settings(args), rows, complete=complete)

    for layers in (None,) if args.model else map(int, args.layers.split(",")):
        asyncio.run(measure(layers, contenders, args, keep))
    show(HEADS, [_cells(row) for row in rows], "First tokens inside vLLM")
    keep((), complete=True)


if __name__ == "__main__":
    main()
