r"""The plug-in's cost where it cannot help, and where it can: vLLM with it against vLLM without, alternating.

    python benchmarks/vllm_overhead.py --out docs/results/vllm-overhead.json

Needs an environment with vLLM and chunkweave (`make test-vllm` makes one). Three vLLM engines, each in a process of
its own (workers apart spin while they wait, and take time from the others), all with vLLM's prefix caching, get the
same token ids one after the other, in turn: without the plug-in, with it, and without it again (the control, whose
quotient says how far two equal engines differ here). With the plug-in requests name their chunks and ask for `prefix`,
which is exact. After each request all rest for `--rest` seconds, in which the plug-in copies what it keeps. Its usual
method is `prefix` too: one that reads what chunks attend to would have every request noted (`capture`).
Cases, each `--requests` rounds but for the first of a kind:

- `plain`: requests that name no chunks, all new;
- `cold`: every chunk is new;
- `cold, noted`: as `cold`, and what the chunks attend to is kept (`capture`);
- `repeated`: the instruction and all chunks but the last come again, which vLLM's own cache has;
- `evicted`: whole prompts come again with another question, after more prompts than vLLM's cache holds;
- `no rest`: as `cold`, `BURST` requests after each other, the engines in turn; a value is the time of one burst.

A quotient is time without over time with the plug-in (or of the control) in one round: 1 is no difference. `inside` is
the share of a request's time that the process spends in the connector's methods; a busy machine changes it little.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import count
from random import Random
from statistics import median
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
HEADS = ["case", "rounds", "without", "quotient", "control's quotient", "inside the plug-in"]

Request = dict[str, Any]
"""`ids`, `chunks` if any, and whether attention is captured (`noted`)."""
CASES = ("plain", "cold", "cold, noted", "repeated", "evicted", "no rest")
ENGINES = ("without", "with", "control")

Times = dict[str, tuple[float, float]]
"""By engine, the seconds of a request and those inside the plug-in."""


@dataclass
class Engine:
    """vLLM in a separate process."""

    process: subprocess.Popen[str]

    def ask(self, request: Request) -> tuple[float, float]:
        """Seconds to the only token of a request, and those inside the plug-in."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        while line := self.process.stdout.readline():
            if line.startswith("took "):
                return float(line.split()[1]), float(line.split()[2])
        raise RuntimeError("vLLM has ended")


@dataclass
class Inside:
    """Time spent in a class's methods; a method called by another one counts once."""

    seconds: float = 0.0
    depth: int = 0

    def watch(self, watched: type) -> None:
        """Time every method from now on."""
        for name, method in list(vars(watched).items()):
            if callable(method) and not name.startswith("__") and not isinstance(method, type):
                setattr(watched, name, self._timed(method))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun, self.depth = time.perf_counter(), self.depth + 1
            try:
                return method(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.perf_counter() - begun

        return timed


@contextmanager
def started(name: str) -> Iterator[Engine]:
    """An engine, ended afterwards."""
    command = [sys.executable, __file__, *sys.argv[1:], "--serve", name]
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

    from chunkweave.vllm.connector import ChunkweaveConnector

    plugin, inside = args.serve == "with", Inside()
    if plugin:
        inside.watch(ChunkweaveConnector)
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
        begun, inside_before = time.perf_counter(), inside.seconds
        engine.generate({"prompt_token_ids": request["ids"]}, sampling, use_tqdm=False)
        print("took", time.perf_counter() - begun, inside.seconds - inside_before, flush=True)


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


def rounds_of(
    engines: Mapping[str, Engine],
    requests: Iterator[tuple[Request, bool]],
    most: int,
    rest_s: float,
    done: Callable[[], None],
) -> list[Times]:
    """Times of each counted request; every engine is the first in turn."""
    rounds: list[Times] = []
    for number, (request, counts) in enumerate(requests):
        took: Times = {}
        for name in in_turn(number):
            took[name] = engines[name].ask(request)
            time.sleep(rest_s)
        if counts:
            rounds.append(took)
            done()
        if len(rounds) == most:
            break
    return rounds


def bursts_of(
    engines: Mapping[str, Engine], prompts: Prompts, most: int, rest_s: float, done: Callable[[], None]
) -> list[Times]:
    """Times of each burst."""
    rounds = []
    for number in range(most):
        requests = [prompts.request() for _ in range(BURST)]
        took: Times = {}
        for name in in_turn(number):
            asked = [engines[name].ask(request) for request in requests]
            took[name] = sum(seconds for seconds, _ in asked), sum(inside for _, inside in asked)
            time.sleep(10 * rest_s)
        rounds.append(took)
        done()
    return rounds


def in_turn(number: int) -> list[str]:
    """The engines' order in a round."""
    first = number % len(ENGINES)
    return [*ENGINES[first:], *ENGINES[:first]][:: 1 if number // len(ENGINES) % 2 else -1]


def row_of(case: str, rounds: list[Times]) -> dict[str, Any]:
    """Medians of a case."""
    quotient, control = (
        median_interval([took["without"][0] / took[name][0] for took in rounds]) for name in ("with", "control")
    )
    return {
        "case": case,
        "rounds": len(rounds),
        **{f"{name}_median_s": median(took[name][0] for took in rounds) for name in ENGINES},
        "quotient": quotient.mean,
        "quotient_low": quotient.low,
        "quotient_high": quotient.high,
        "control": control.mean,
        "control_low": control.low,
        "control_high": control.high,
        "inside_share": median(took["with"][1] / took["with"][0] for took in rounds),
        "seconds": [[took[name][0] for name in ENGINES] for took in rounds],
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
    with ExitStack() as stack:
        engines = {name: stack.enter_context(started(name)) for name in ENGINES}
        report = stack.enter_context(progress("requests"))
        number, total = count(1), sum(bursts if case == "no rest" else args.requests for case in args.cases)

        def done() -> None:
            report(next(number), total)

        for warm_up in (prompts.cold(), prompts.plain()):
            rounds_of(engines, warm_up, 3, args.rest, lambda: None)
        for case in args.cases:
            if case == "no rest":
                rows.append(row_of(case, bursts_of(engines, prompts, bursts, args.rest, done)))
            else:
                rows.append(row_of(case, rounds_of(engines, cases[case], args.requests, args.rest, done)))
            keep(rows)
    return rows


def table_of(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    cells = [
        [
            row["case"],
            str(row["rounds"]),
            f"{row['without_median_s']:.3f} s",
            f"{row['quotient']:.3f}x ({row['quotient_low']:.3f} to {row['quotient_high']:.3f})",
            f"{row['control']:.3f}x ({row['control_low']:.3f} to {row['control_high']:.3f})",
            f"{row['inside_share']:.1%}",
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
    parser.add_argument("--requests", type=int, default=200, help="rounds of each case")
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
