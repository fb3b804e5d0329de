"""Ways to serve the same requests with vLLM, in one run: first tokens, throughput, and the reader's answers.

    python benchmarks/vllm_contenders.py --out docs/results/vllm-contenders.json

Needs an environment with vLLM and chunkweave (`make test-vllm` makes one). Contenders are separate vLLM engines, all
running at the same time, with the same token ids except for the order of chunks:

- `full prefill`: vLLM without its prefix cache and without the plug-in;
- `prefix caching`: vLLM as it is installed;
- `prefix caching, order`: the same, chunks put in the order that finds most of the cached prefixes (`tree-greedy`);
- `cacheblend`, `cachecraft`, `query`: the plug-in, chunks in the caller's order;
- `query, order`: all of it: exact prefixes, order, weaving.

Questions about generated worlds recur by Zipf's law, with their passages as a noisy retrieval ranks them. All caches
start empty and are filled only by the requests; `--memory-gib` is the limit of each contender: of vLLM's KV cache, with
the plug-in half of that and half of segments. Three parts: one request after the other (the first `--warm-up` are not
counted), contenders taking turns; then `--clients` clients that send the next request when they have their answer,
`--rounds` times, contenders alternating; before both, the bundled reader answers the requests of the first part.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench_program import parse, settings, write
from docs_tables import command_block, markdown_table
from recurring_requests import zipf_worlds
from rich.console import Console

from chunkweave.calibration.questions import Example
from chunkweave.calibration.summaries import f1, mean_interval
from chunkweave.cli.console import progress
from chunkweave.models.loading import shape_config
from chunkweave.ordering.arrangement import Arranger
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave.prompt.template import template_for
from chunkweave.scheduling.routing import ReplicaContents
from chunkweave.settings import GIB
from chunkweave_server.vllm_backend.prepare import load_tokenizer
from chunkweave_server.vllm_backend.process import VllmFlags

FULL = "full prefill"
READER = VllmFlags("reader").source
HEADS = [
    "contender",
    "TTFT mean",
    "median",
    "sooner than full",
    "than prefix caching",
    "computed",
    "requests/s",
    "of full's",
    "F1 of the reader",
    "minus full",
]


@dataclass(frozen=True, slots=True)
class Way:
    """A contender: a method of the plug-in (None: vLLM alone), an ordering, and whether vLLM's prefix cache is on."""

    name: str
    method: str | None = None
    ordering: str | None = None
    prefix_cache: bool = True


WAYS = (
    Way(FULL, prefix_cache=False),
    Way("prefix caching"),
    Way("prefix caching, order", ordering="tree-greedy"),
    Way("cacheblend", "cacheblend"),
    Way("cachecraft", "cachecraft"),
    Way("query", "query"),
    Way("query, order", "query", "tree-greedy"),
)


@dataclass(frozen=True, slots=True)
class Served:
    """Seconds to the first token, token ids of the answer, and the share of the prompt that was computed."""

    ttft_s: float
    token_ids: tuple[int, ...]
    computed_share: float


@dataclass(slots=True)
class Contender:
    """An engine, the order of its chunks, and its measurements."""

    way: Way
    engine: Any
    builder: PromptBuilder
    settings: dict[str, Any]
    arranger: Arranger = field(init=False)
    contents: ReplicaContents = field(init=False)
    served: list[Served] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    _sent: int = 0

    def __post_init__(self) -> None:
        self.contents = ReplicaContents(100_000)
        config = OrderingConfig(self.way.ordering or "original")
        self.arranger = Arranger(config, self.contents.tree, order=ChunkOrder.FREE)

    async def serve(self, example: Example, tokens: int, stop_ids: Sequence[int] = ()) -> Served:
        """Send one request for at most `tokens` tokens; exactly as many without `stop_ids`."""
        from vllm import SamplingParams

        prompt = self._arranged(example)
        self._sent += 1
        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=not stop_ids,
            stop_token_ids=list(stop_ids),
            detokenize=False,
            extra_args=self._extra(prompt),
        )
        started, first_s, answer = time.perf_counter(), 0.0, None
        async for output in self.engine.generate(
            {"prompt_token_ids": list(prompt.token_ids)}, sampling, f"r{self._sent}"
        ):
            first_s = first_s or time.perf_counter() - started
            answer = output
        report = (answer.kv_transfer_params or {}).get("chunkweave", {})
        if "error" in report:
            raise RuntimeError(report["error"])
        if self.way.method is None:
            computed = len(prompt) - (answer.num_cached_tokens or 0)
        else:
            computed = report["computed_tokens"] + report.get("recomputed_tokens", 0)
        return Served(first_s, tuple(answer.outputs[0].token_ids), computed / len(prompt))

    def _arranged(self, example: Example) -> Prompt:
        prompt: Prompt = self.arranger.arrange(self.builder.build(example.question, example.chunks)).prompt
        chunks = [part for part in prompt.parts if part.kind is PartKind.CHUNK and part.id is not None]
        self.contents.note(
            [part.id for part in chunks if part.id], [len(part) for part in chunks], weaves=self.way.method is not None
        )
        return prompt

    def _extra(self, prompt: Prompt) -> dict[str, Any] | None:
        if self.way.method is None:
            return None
        spans = [
            [span.start, span.stop]
            for part, span in zip(prompt.parts, prompt.spans(), strict=True)
            if part.kind is PartKind.CHUNK
        ]
        start = sum(len(part) for part in prompt.parts if part.kind is PartKind.START)
        params = {"chunks": spans, "start_tokens": start, "method": self.way.method, **self.settings}
        return {"kv_transfer_params": {"chunkweave": params}}


@contextmanager
def contenders(
    names: Sequence[str], folder: str, settings: dict[str, Any], memory_bytes: int, **options: Any
) -> Iterator[list[Contender]]:
    """An engine for each way of `names`, with empty caches of `memory_bytes` in all."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    tokenizer = load_tokenizer(READER, {})
    builder = PromptBuilder(tokenizer, template_for(tokenizer), "benchmark")
    made: list[Contender] = []
    try:
        for way in (way for way in WAYS if way.name in names):
            transfer = {
                "kv_connector": "ChunkweaveConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"host_budget": str(memory_bytes // 2)},
            }
            more: dict[str, Any] = {"kv_cache_memory_bytes": memory_bytes}
            if way.method is not None:
                more = {"kv_cache_memory_bytes": memory_bytes // 2, "kv_transfer_config": transfer}
            engine_args = AsyncEngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                enable_prefix_caching=way.prefix_cache,
                enforce_eager=True,
                **more,
                **options,
            )
            made.append(Contender(way, AsyncLLM.from_engine_args(engine_args), builder, settings))
        yield made
    finally:
        for one in made:
            one.engine.shutdown()


async def first_tokens(field_of: Sequence[Contender], requests: Sequence[Example], warm_up: int) -> None:
    """One request after the other, each contender in turn going first."""
    with progress("first tokens") as report:
        for number, example in enumerate(requests):
            for turn in range(len(field_of)):
                one = field_of[(number + turn) % len(field_of)]
                served = await one.serve(example, 1)
                if number >= warm_up:
                    one.served.append(served)
            report(number + 1, len(requests))


async def throughput(one: Contender, requests: Sequence[Example], clients: int, tokens: int) -> None:
    """As many requests at once as there are clients, until all are answered."""
    waiting = iter(requests)

    async def client() -> None:
        for example in waiting:
            await one.serve(example, tokens)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    one.rates.append(len(requests) / (time.perf_counter() - started))


async def answers(field_of: Sequence[Contender], requests: Sequence[Example], warm_up: int, tokens: int) -> None:
    """The answers to the same sequence, scored."""
    tokenizer = load_tokenizer(READER, {})
    stops = sorted(tokenizer.stop_ids)
    with progress("answers") as report:
        for number, example in enumerate(requests):
            for one in field_of:
                served = await one.serve(example, tokens, stops)
                if number >= warm_up:
                    said = [token for token in served.token_ids if token not in tokenizer.stop_ids]
                    answer = tokenizer.decode(said)
                    one.f1.append(max(f1(answer, right) for right in example.answers))
            report(number + 1, len(requests))


def rows_of(timed: Sequence[Contender], answering: Sequence[Contender]) -> list[dict[str, Any]]:
    """The rows of the table, by contender."""
    full, caching = ([one.ttft_s for one in timed[place].served] for place in (0, 1))
    rows = []
    for one, reader in zip(timed, answering, strict=True):
        times = [served.ttft_s for served in one.served]
        mean = statistics.fmean(times)
        rows.append(
            {
                "ttft_s_each": times,
                "ttft_mean_s": mean,
                "ttft_median_s": statistics.median(times),
                "ttft_p90_s": statistics.quantiles(times, n=10)[-1],
                "over_full": statistics.fmean(full) / mean,
                "over_prefix_caching": statistics.fmean(caching) / mean,
                "computed_share": statistics.fmean(served.computed_share for served in one.served),
                "requests_per_s": statistics.median(one.rates),
                "requests_per_s_of_rounds": one.rates,
                "throughput_over_full": statistics.median(
                    a / b for a, b in zip(one.rates, timed[0].rates, strict=True)
                ),
                **answer_row(reader, answering[0]),
            }
        )
    return rows


def answer_row(reader: Contender, full: Contender) -> dict[str, Any]:
    """The measurements of one contender's answers."""
    minus = mean_interval([own - other for own, other in zip(reader.f1, full.f1, strict=True)])
    return {
        "contender": reader.way.name,
        "f1": statistics.fmean(reader.f1),
        "f1_minus_full": {"mean": minus.mean, "low": minus.low, "high": minus.high},
        "f1_each": reader.f1,
    }


def cells_of(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    minus = row["f1_minus_full"]
    return [
        row["contender"],
        f"{row['ttft_mean_s'] * 1e3:.0f} ms",
        f"{row['ttft_median_s'] * 1e3:.0f} ms",
        f"{row['over_full']:.2f}x",
        f"{row['over_prefix_caching']:.2f}x",
        f"{row['computed_share']:.1%}",
        f"{row['requests_per_s']:.2f}",
        f"{row['throughput_over_full']:.2f}x",
        f"{row['f1']:.3f}",
        f"{minus['mean']:+.3f} [{minus['low']:+.3f}, {minus['high']:+.3f}]",
    ]


def measure(args: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Measure all three parts; `keep` gets the rows after the first part."""
    requests = zipf_worlds(
        args.warm_up + args.requests,
        args.k,
        questions=args.questions,
        worlds=args.worlds,
        exponent=args.zipf,
        seed=args.seed,
    )
    load = zipf_worlds(
        args.load_requests * args.rounds,
        args.k,
        questions=args.questions,
        worlds=args.worlds,
        exponent=args.zipf,
        seed=args.seed + 1,
    )
    settings, memory = {"recompute_ratio": args.recompute_ratio}, int(args.memory_gib * GIB)
    with contenders(args.contenders, READER, settings, memory, dtype="float32") as answering:
        asyncio.run(answers(answering, requests, args.warm_up, args.most_tokens))
        keep([answer_row(one, answering[0]) for one in answering])
    with tempfile.TemporaryDirectory() as folder:
        config = shape_config(args.shape)
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
        options = {"load_format": "dummy", "seed": args.seed, "dtype": args.dtype, "max_model_len": args.max_model_len}
        with contenders(args.contenders, folder, settings, memory, **options) as timed:

            async def both() -> None:
                await first_tokens(timed, requests, args.warm_up)
                for number in range(args.rounds):
                    part = load[number * args.load_requests : (number + 1) * args.load_requests]
                    for turn in range(len(timed)):
                        one = timed[(number + turn) % len(timed)]
                        await throughput(one, part, args.clients, args.answer_tokens)

            asyncio.run(both())
    return rows_of(timed, answering)


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [way.name for way in WAYS]
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, help="the first two are needed")
    parser.add_argument("--shape", default="smollm2-135m", help="random weights, for times")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--recompute-ratio", type=float, default=0.15)
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--load-requests", type=int, default=32, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, default=16, help="of a request under load")
    parser.add_argument("--most-tokens", type=int, default=24, help="of the reader's answers")
    parser.add_argument("--memory-gib", type=float, default=1.0, help="of KV, for each contender")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser)
    if not {way.name for way in WAYS[:2]} <= set(args.contenders):
        parser.error(f"the others are compared with {WAYS[0].name!r} and {WAYS[1].name!r}: name them too")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    rows = measure(args, lambda found: write("vllm-contenders", args, settings(args), found, complete=False))
    Console(width=180).print(table_of(rows), highlight=False)
    write("vllm-contenders", args, settings(args), rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation, below its command."""
    return {"vllm-contenders": f"{command_block(result['command'])}\n\n{table_of(result['rows'])}"}


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Every contender's row."""
    return markdown_table(HEADS, [cells_of(row) for row in rows])


if __name__ == "__main__":
    main()
