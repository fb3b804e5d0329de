"""First tokens inside vLLM: woven against vLLM's own full prefill and its prefix caching, in one interleaved run.

    python benchmarks/vllm_ttft.py --layers 8,24 --out vllm-ttft.json

Needs an environment with vLLM and chunkweave (`make test-vllm` makes one). Random weights of a published geometry, cut
to `--layers` layers, or a `--model`; every chunk of a pool is precomputed alone. A round draws chunks and a question
and sends the same token ids to every contender, in random order:

- `full`: with a separate cache salt, so that vLLM's prefix cache has nothing;
- `prefix caching`: as any user would send it; the pool's chunks come in a new order each time;
- each method of `--methods` through the plug-in, `epic:0.05` at a ratio of its own.

TTFT runs from the request to its first token, of a server that is otherwise idle. The limit is the quotient of FLOPs.
Then, while `--streams` other requests decode, one more request comes in, and the longest pause of the others is noted.

With `--answers`, greedy answers to one prompt are compared with that of `full`: the share of tokens before the first
other one, and how far the first token's log-probabilities are apart. With `--dataset`, a `--model` answers
its questions: exact match and F1.
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
from itertools import pairwise, takewhile
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import torch
from bench_program import parse, settings, write
from docs_tables import markdown_table
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from chunkweave.calibration.summaries import f1
from chunkweave.config import DEFAULT_RECOMPUTE_RATIO
from chunkweave.errors import UsageError
from chunkweave.models.huggingface import geometry_of
from chunkweave.models.loading import shape_config
from chunkweave.planning.method import RATIO, parameters_of
from chunkweave.planning.outcome import LayerWork, prefill_flops
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.parts import PartKind
from chunkweave.prompt.template import template_for
from chunkweave.settings import GIB
from chunkweave.types import Geometry
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.summaries import exact_match
from chunkweave_server.vllm_backend.prepare import load_tokenizer
from chunkweave_server.vllm_backend.process import VllmFlags

FULL, PREFIX_CACHING = "full", "prefix caching"

_COLUMNS = ("layers", "method", "TTFT", "over full", "over prefix caching", "limit", "fraction", "pause", "longest")


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
    longest: int
    sent: int = 0
    ttft: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    pauses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fractions: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def send(self, contender: str, ids: list[int], spans: list[list[int]], tokens: int = 1) -> list[float]:
        """One request; the times of its tokens."""
        return (await self.answer(contender, ids, spans, tokens))[0]

    async def answer(
        self, contender: str, ids: list[int], spans: list[list[int]], tokens: int, *, start: int = 0, **sampled: Any
    ) -> tuple[list[float], Any]:
        """One request: the times of its tokens, and vLLM's completion. `start` tokens are before the first chunk.

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
            params: dict[str, Any] = {"chunks": spans, "method": method, "start_tokens": start}
            if RATIO in parameters_of(method):
                params[RATIO] = float(ratio or self.ratio)
            extra = {"kv_transfer_params": {"chunkweave": params}}
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

    async def busy_round(self, contenders: list[str], chunks: int, streams: int) -> None:
        """While others decode, one prompt of each contender; the longest pause of the others."""
        for contender in self.load.rng.sample(contenders, len(contenders)):
            ids, spans = self.load.draw(chunks)
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

    async def ask(self, contenders: list[str], folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
        """Exact match and F1 of each contender's answers to the questions that fit, over chunks computed alone."""
        tokenizer = load_tokenizer(folder, {})
        builder = PromptBuilder(tokenizer, template_for(tokenizer), "benchmark")
        stops = sorted(tokenizer.stop_ids)
        scores: dict[str, list[list[float]]] = {one: [] for one in contenders}
        for example in load_dataset(args.dataset)[: args.questions]:
            prompt = builder.build(example.question, example.chunks)
            parts = list(zip(prompt.parts, prompt.spans(), strict=True))
            if len(prompt) + args.most_tokens > self.longest:
                continue
            start = [token for part, _ in parts if part.kind is PartKind.START for token in part.token_ids]
            spans = [[span.start, span.stop] for part, span in parts if part.kind is PartKind.CHUNK]
            ids = list(prompt.token_ids)
            for first, stop in spans:
                alone = [[len(start), len(start) + stop - first]]
                await self.answer("prefix", start + ids[first:stop], alone, 1, start=len(start))
            for one in contenders:
                answered = await self.answer(
                    one, ids, spans, args.most_tokens, start=len(start), ignore_eos=not stops, stop_token_ids=stops
                )
                text = tokenizer.decode([token for token in answered[1].token_ids if token not in tokenizer.stop_ids])
                scores[one].append(
                    [max(score(text, right) for right in example.answers) for score in (exact_match, f1)]
                )
        return [
            {"method": one, "questions": len(each), "em": mean_of(each, 0), "f1": mean_of(each, 1)}
            for one, each in scores.items()
        ]


def mean_of(scores: Sequence[Sequence[float]], column: int) -> float | None:
    """The mean of a column; None without rows."""
    return statistics.fmean(row[column] for row in scores) if scores else None


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
                "kv_connector_extra_config": {"weave_step_tokens": args.step_tokens, **_given(args, "host_budget")},
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
    """One model, of `layers` layers unless it has weights; `keep` gets rows by contender, and scores of answers."""
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
        server = Server(engine, load, args.recompute_ratio, _longest(sizes, args))
        try:
            await server.warm()
            for chunks in sizes:
                await server.idle_round(contenders, chunks)
                for times in (server.ttft, server.pauses, server.fractions):
                    times.clear()
                for _ in range(args.rounds):
                    await server.idle_round(contenders, chunks)
                for _ in range(args.busy_rounds):
                    await server.busy_round(contenders, chunks, args.streams)
                compared = await server.compare(contenders, chunks, args.answers) if args.answers else {}
                tokens = chunks * args.chunk_tokens

                def limit(ratio: str, tokens: int = tokens) -> float:
                    each = float(ratio or args.recompute_ratio)
                    return speedup_limit(geometry_of(config), tokens + args.question_tokens, tokens, each)

                more = {"prompt_tokens": tokens + args.question_tokens, "device_gib": _device_gib()}
                keep(
                    {
                        **_row(config.num_hidden_layers, one, server, limit(one.partition(":")[2])),
                        **more,
                        **compared.get(one, {}),
                    }
                    for one in contenders
                )
            if args.dataset:
                keep((), await server.ask([one for one in contenders if one != PREFIX_CACHING], folder, args))
        finally:
            engine.shutdown()


def _device_gib() -> float | None:
    """Memory in use on the GPU, by all processes; None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


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
        several = len({row.get("prompt_tokens") for row in result["rows"]}) > 1
        more = {"vllm-ttft-by-context": by_context(result["rows"])} if several else {}
        return {"vllm-ttft": markdown_table(heads, cells), **more}
    brief = [[*line[1:3], *line[3:5], ratio_of(row)] for line, row in zip(cells, result["rows"], strict=True)]
    heads = [*heads[1:5], "recomputed"]
    return {"vllm-ttft-short": markdown_table(heads, brief)}


def by_context(rows: Sequence[Mapping[str, Any]]) -> str:
    """Time to first token, and how much sooner than full prefill, by method for each length of the prompt."""
    contexts = sorted({row["prompt_tokens"] for row in rows})
    found: dict[str, dict[int, str]] = {}
    for row in rows:
        sooner = "" if row["method"] == FULL else f", {row['over_full']:.1f}x"
        found.setdefault(row["method"], {})[row["prompt_tokens"]] = f"{1e3 * row['ttft_median_s']:.0f} ms{sooner}"
    lines = [[f"`{method}`", *(cells.get(one, "") for one in contexts)] for method, cells in found.items()]
    return markdown_table(["method", *(f"{one:,} tokens" for one in contexts)], lines)


def ratio_of(row: Mapping[str, Any]) -> str:
    """The recomputed share of the chunks' work."""
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
    parser.add_argument("--chunks", default="6", help="of a prompt; several sizes by comma")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--question-tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy-rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--step-tokens", type=int, help="of weaves in a step that computes others; None: the default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile its own forward")
    parser.add_argument("--attention-backend", help="of vLLM, by its name; without one vLLM chooses")
    parser.add_argument("--gpu-memory-utilization", type=float, help="of vLLM")
    parser.add_argument("--host-budget", help="of the plug-in, such as 16GiB")
    parser.add_argument("--answers", type=int, default=0, help="tokens of answers to compare with those of full")
    parser.add_argument("--dataset", type=Path, help="file of questions that the model answers")
    parser.add_argument("--questions", type=int, default=30, help="of the data set")
    parser.add_argument("--most-tokens", type=int, default=24, help="of an answer to a question")
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser)
    if args.dataset and not args.model:
        parser.error("random weights answer no question: name a --model too")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    contenders = [FULL, PREFIX_CACHING, *args.methods.split(",")]
    rows: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []

    def keep(more: Iterable[dict[str, Any]], scores: Iterable[dict[str, Any]] = (), *, complete: bool = False) -> None:
        rows.extend(more)
        answers.extend(scores)
        config = settings(args) | {"dataset": args.dataset and str(args.dataset)}
        write("vllm-ttft", args, config, rows, {"answers": answers} if answers else None, complete=complete)

    for layers in (None,) if args.model else map(int, args.layers.split(",")):
        asyncio.run(measure(layers, contenders, args, keep))
    Console().print(_table(rows))
    keep((), complete=True)


if __name__ == "__main__":
    main()
