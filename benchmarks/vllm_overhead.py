r"""The plug-in's cost where it cannot help, and where it can: vLLM with it against vLLM without, alternating.

    python benchmarks/vllm_overhead.py --out docs/results/vllm-overhead.json

Needs an environment with vLLM and chunkweave (`make test-vllm` makes one). Two vLLM engines, each in a process of its
own (workers apart spin while they wait, and take time from the other engine), both with vLLM's prefix caching, get the
same token ids one after the other, the first of each pair in turn. With the plug-in requests name their chunks and ask
for `prefix`, which is exact. After each request both rest for `--rest` seconds, in which the plug-in copies what it
keeps. The plug-in's usual method is `prefix` too: one that reads what chunks attend to would have every request noted
(`capture`). Cases, each `--requests` pairs but for the first of a kind:

- `plain`: requests that name no chunks, all new;
- `cold`: every chunk is new;
- `cold, noted`: as `cold`, and what the chunks attend to is kept (`capture`);
- `repeated`: the instruction and all chunks but the last come again, which vLLM's own cache has;
- `evicted`: whole prompts come again with another question, after more prompts than vLLM's cache holds;
- `no rest`: as `cold`, `BURST` requests after each other, the engines in turn; a value is the time of one burst.

Every case has its own share of the pairs' quotients, time without over time with the plug-in: 1 is no difference.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from bench_program import parse, prepare_vllm, settings, write
from docs_tables import markdown_table
from rich.console import Console

from chunkweave.calibration.summaries import median_interval
from chunkweave.cli.console import progress
from chunkweave_server.vllm_backend.process import VllmFlags

BURST = 8
BLOCK = 32
SAME_PREFIX = 4
"""Consecutive prompts with the same beginning."""
QUESTION, INSTRUCTION = 24, 24
HEADS = ["case", "pairs", "without", "with", "quotient", "95 % interval"]

Request = dict[str, Any]
"""`ids`, `chunks` if any, and whether attention is captured (`noted`)."""
CASES = ("plain", "cold", "cold, noted", "repeated", "evicted", "no rest")


@dataclass
class Engine:
    """vLLM in a separate process."""

    process: subprocess.Popen[str]

    def ask(self, request: Request) -> float:
        """Seconds to the only token of a request."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        while line := self.process.stdout.readline():
            if line.startswith("took "):
                return float(line.split()[1])
        raise RuntimeError("vLLM has ended")


@contextmanager
def started(*, plugin: bool) -> Iterator[Engine]:
    """An engine, ended afterwards."""
    command = [sys.executable, __file__, *sys.argv[1:], "--serve", "with" if plugin else "without"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  (itself)
    try:
        yield Engine(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def serve(args: argparse.Namespace) -> None:
    """Main function of an engine's process: answers requests from standard input."""
    from vllm import LLM, SamplingParams

    plugin = args.serve == "with"
    connector = {
        "kv_connector": "ChunkweaveConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"method": "prefix"},
    }
    engine = LLM(
        VllmFlags(args.model).source,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=tokens_of(args) + 8,
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        num_gpu_blocks_override=args.cache_tokens // BLOCK,
        kv_transfer_config=connector if plugin else None,  # type: ignore[arg-type]
    )
    for line in sys.stdin:
        request = json.loads(line)
        named = {"chunks": request["chunks"], "capture": request["noted"]} if plugin and request["chunks"] else None
        extra = {"kv_transfer_params": {"chunkweave": named}} if named else None
        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=extra)
        begun = time.perf_counter()
        engine.generate({"prompt_token_ids": request["ids"]}, sampling, use_tqdm=False)
        print("took", time.perf_counter() - begun, flush=True)


def tokens_of(args: argparse.Namespace) -> int:
    """Tokens of one prompt."""
    return int(INSTRUCTION + args.chunks * args.chunk_tokens + QUESTION)


@dataclass
class Prompts:
    """Prompts of random token ids."""

    rng: Random
    chunks: int
    chunk_tokens: int

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(100, 40_000) for _ in range(count)]

    def request(self, head: list[int] | None = None, *, noted: bool = False) -> Request:
        """A prompt that begins with `head` (None: all of it is new)."""
        ids = list(head or self.tokens(INSTRUCTION))
        edges = range(INSTRUCTION, INSTRUCTION + (self.chunks + 1) * self.chunk_tokens, self.chunk_tokens)
        ids += self.tokens(edges[-1] - len(ids) + QUESTION)
        return {"ids": ids, "chunks": [[start, start + self.chunk_tokens] for start in edges[:-1]], "noted": noted}

    def plain(self) -> Iterator[tuple[Request, bool]]:
        while True:
            yield {"ids": self.request()["ids"], "chunks": None}, True

    def cold(self, *, noted: bool = False) -> Iterator[tuple[Request, bool]]:
        while True:
            yield self.request(noted=noted), True

    def repeated(self) -> Iterator[tuple[Request, bool]]:
        """Prompts with the same beginning; the first of each group does not count."""
        while True:
            head = self.request()["ids"][: INSTRUCTION + (self.chunks - 1) * self.chunk_tokens]
            for place in range(SAME_PREFIX):
                yield self.request(head), place > 0

    def evicted(self, prompts: int) -> Iterator[tuple[Request, bool]]:
        """Prompts that recur in turn; the first time does not count."""
        heads = [self.request()["ids"][:-QUESTION] for _ in range(prompts)]
        counts = False
        while True:
            for head in heads:
                yield self.request(head), counts
            counts = True


def pairs_of(
    without: Engine,
    plugin: Engine,
    requests: Iterator[tuple[Request, bool]],
    most: int,
    rest_s: float,
    done: Callable[[], None],
) -> list[tuple[float, float]]:
    """Seconds without and with the plug-in of each counted request."""
    pairs: list[tuple[float, float]] = []
    for number, (request, counts) in enumerate(requests):
        took: dict[bool, float] = {}
        for is_plugin in (number % 2 == 0, number % 2 == 1):
            took[is_plugin] = (plugin if is_plugin else without).ask(request)
            time.sleep(rest_s)
        if counts:
            pairs.append((took[False], took[True]))
            done()
        if len(pairs) == most:
            break
    return pairs


def bursts_of(
    without: Engine, plugin: Engine, prompts: Prompts, most: int, rest_s: float, done: Callable[[], None]
) -> list[tuple[float, float]]:
    """Seconds of each burst, without and with the plug-in."""
    pairs = []
    for number in range(most):
        requests = [prompts.request() for _ in range(BURST)]
        took = {}
        for is_plugin in (number % 2 == 0, number % 2 == 1):
            took[is_plugin] = sum((plugin if is_plugin else without).ask(request) for request in requests)
            time.sleep(10 * rest_s)
        pairs.append((took[False], took[True]))
        done()
    return pairs


def row_of(case: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians of a case."""
    quotient = median_interval([without / plugin for without, plugin in pairs])
    return {
        "case": case,
        "pairs": len(pairs),
        "without_median_s": median_interval([one for one, _ in pairs]).mean,
        "with_median_s": median_interval([other for _, other in pairs]).mean,
        "quotient": quotient.mean,
        "quotient_low": quotient.low,
        "quotient_high": quotient.high,
        "seconds": pairs,
    }


def measure(args: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """All cases, one after the other."""
    prompts = Prompts(Random(args.seed), args.chunks, args.chunk_tokens)
    over = 2 * args.cache_tokens // tokens_of(args)
    cases = {
        "plain": prompts.plain(),
        "cold": prompts.cold(),
        "cold, noted": prompts.cold(noted=True),
        "repeated": prompts.repeated(),
        "evicted": prompts.evicted(over),
    }
    rows: list[dict[str, Any]] = []
    bursts = max(2, args.requests // BURST)
    with started(plugin=False) as without, started(plugin=True) as plugin, progress("requests") as report:
        number, total = count(1), sum(bursts if case == "no rest" else args.requests for case in args.cases)

        def done() -> None:
            report(next(number), total)

        for warm_up in (prompts.cold(), prompts.plain()):
            pairs_of(without, plugin, warm_up, 3, args.rest, lambda: None)
        for case in args.cases:
            if case == "no rest":
                rows.append(row_of(case, bursts_of(without, plugin, prompts, bursts, args.rest, done)))
            else:
                rows.append(row_of(case, pairs_of(without, plugin, cases[case], args.requests, args.rest, done)))
            keep(rows)
    return rows


def table_of(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    cells = [
        [
            row["case"],
            str(row["pairs"]),
            f"{row['without_median_s']:.3f} s",
            f"{row['with_median_s']:.3f} s",
            f"{row['quotient']:.3f}x",
            f"{row['quotient_low']:.3f} to {row['quotient_high']:.3f}",
        ]
        for row in result["rows"]
    ]
    return markdown_table(HEADS, cells)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation."""
    return {"vllm-overhead": table_of(result)}


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--requests", type=int, default=200, help="pairs of each case")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=160)
    parser.add_argument("--cache-tokens", type=int, default=8192, help="that vLLM's KV cache holds")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds after each request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parse(parser)
    prepare_vllm()
    if args.serve:
        serve(args)
        return
    config = settings(args, "serve", "seed")
    rows = measure(args, lambda found: write("vllm-overhead", args, config, found, complete=False))
    Console().print(table_of({"rows": rows}))
    write("vllm-overhead", args, config, rows)


if __name__ == "__main__":
    main()
