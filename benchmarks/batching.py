"""Decoding throughput of a batching engine compared with one request at a time.

    python benchmarks/batching.py --shape smollm2-135m --out batching.json

Decode-heavy work: every request asks its own question over the same stored chunks, for many tokens. Each number of
running requests answers the same requests, all submitted at once. Tokens per second are the tokens of all answers
divided by the time from the first submission to the last answer, including prefills. Throughput is compared with one
request at a time.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track

from chunkweave import Answer, AsyncEngine, BatchingConfig, Engine, Request, SamplingParams

PASSAGE = "The ferry of day {day} leaves the harbour at seven, at noon and at six, and carries {day} carts of peat. "
HEADS = ["running at once", "tokens/s", "of one at a time", "token every", "TTFT", "steps"]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", default="smollm2-135m", help="random weights")
    model.add_argument("--model", help="a checkpoint")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--passage-repeats", type=int, default=6, help="the length of a chunk, in some 27 tokens")
    parser.add_argument("--method", default="prefix")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    torch.set_num_threads(arguments.threads)
    if arguments.model is not None:
        engine = Engine.load(arguments.model)
    else:
        engine = Engine.load_shape(arguments.shape, seed=arguments.seed)
    requests = _requests(arguments)
    engine.generate_batch(requests[:1], method=arguments.method)
    shown = track(arguments.running, "measuring", console=Console(stderr=True))
    rows = [asyncio.run(_measure(engine, requests, running, arguments.method)) for running in shown]
    title = f"{arguments.model or arguments.shape}: {arguments.requests} requests, {arguments.new_tokens} tokens each"
    show(HEADS, _table(rows), title)
    write("batching", arguments, settings(arguments, "seed"), rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    return {"throughput": markdown_table(HEADS, _table(result["rows"]))}


def _requests(arguments: argparse.Namespace) -> list[Request]:
    chunks = [PASSAGE.format(day=day) * arguments.passage_repeats for day in range(arguments.chunks)]
    sampling = SamplingParams(max_new_tokens=arguments.new_tokens)
    return [
        Request(f"How many carts are carried on day {day}?", chunks, sampling=sampling)
        for day in range(arguments.requests)
    ]


async def _measure(engine: Engine, requests: list[Request], running: int, method: str) -> dict[str, Any]:
    async with AsyncEngine(engine, BatchingConfig(max_running=running)) as batching:
        started = time.perf_counter()
        streams = [batching.submit(request, method=method) for request in requests]
        answers: list[Answer] = await asyncio.gather(*(stream.answer() for stream in streams))
        seconds = time.perf_counter() - started
        steps = batching.stats.steps
    tokens = sum(len(answer.token_ids) for answer in answers)
    reports = [answer.report for answer in answers]
    return {
        "running": running,
        "method": method,
        "new_tokens": tokens,
        "prompt_tokens": statistics.mean(report.prompt_tokens for report in reports),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "time_per_token_s": statistics.mean(r.decode_s / max(1, r.new_tokens - 1) for r in reports),
        "ttft_s": statistics.mean(report.ttft_s for report in reports),
        "steps": steps,
    }


def _table(rows: list[dict[str, Any]]) -> list[list[str]]:
    first = rows[0]["tokens_per_s"]
    return [
        [
            str(row["running"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s'] / first:.2f}x",
            f"{row['time_per_token_s'] * 1e3:.0f} ms",
            f"{row['ttft_s']:.2f} s",
            str(row["steps"]),
        ]
        for row in rows
    ]


if __name__ == "__main__":
    main()
