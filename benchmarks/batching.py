"""Decoding throughput of a batching engine compared with one request at a time.

    python benchmarks/batching.py --shape smollm2-135m --out batching.json
    python benchmarks/batching.py --model smollm2 --methods full cacheblend --chunks 6 --passage-repeats 18 \
        --shuffle --new-tokens 1 --out batching-first-tokens.json

Decode-heavy work: every request asks its own question over the same stored chunks, for many tokens. Each number of
running requests answers the same requests, all submitted at once. Tokens per second are the tokens of all answers
divided by the time from the first submission to the last answer, including prefills. Throughput is compared with one
request at a time. With several methods each has its rows; with one new token these are prefills of batches, compared
with the first method's. With `--shuffle` every request has the precomputed chunks in another order.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track

from chunkweave import Answer, AsyncEngine, BatchingConfig, Chunk, Engine, Request, SamplingParams

PASSAGE = "The ferry of day {day} leaves the harbour at seven, at noon and at six, and carries {day} carts of peat. "
HEADS = ["running at once", "tokens/s", "of one at a time", "token every", "TTFT", "steps"]
PREFILL_HEADS = ["method", "prompts at once", "seconds a prompt", "sooner than the first"]


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
    parser.add_argument("--shuffle", action="store_true", help="chunks in another order for each request")
    parser.add_argument("--methods", nargs="+", default=["prefix"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    torch.set_num_threads(arguments.threads)
    if arguments.model is not None:
        engine = Engine.load(arguments.model)
    else:
        engine = Engine.load_shape(arguments.shape, seed=arguments.seed)
    requests = _requests(arguments)
    for method in arguments.methods:
        engine.generate_batch(requests[:1], method=method)
    runs = [(running, method) for running in arguments.running for method in arguments.methods]
    shown = track(runs, "measuring", console=Console(stderr=True))
    rows = []
    for running, method in shown:
        if arguments.shuffle:  # drop everything that the run before has stored
            engine.runner.store.clear()
            engine.precompute([Chunk(passage) for passage in _passages(arguments)])
        rows.append(asyncio.run(_measure(engine, requests, running, method)))
    _show(rows, arguments)
    write("batching", arguments, settings(arguments, "seed"), rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    return {
        "throughput": markdown_table(HEADS, _table(result["rows"])),
        "prefill-batches": markdown_table(PREFILL_HEADS, _prefill_table(result["rows"])),
    }


def _requests(arguments: argparse.Namespace) -> list[Request]:
    chunks, draw = _passages(arguments), random.Random(arguments.seed)
    sampling = SamplingParams(max_new_tokens=arguments.new_tokens)
    orders = [draw.sample(chunks, len(chunks)) if arguments.shuffle else chunks for _ in range(arguments.requests)]
    return [
        Request(f"How many carts are carried on day {day}?", order, sampling=sampling)
        for day, order in enumerate(orders)
    ]


def _passages(arguments: argparse.Namespace) -> list[str]:
    return [PASSAGE.format(day=day) * arguments.passage_repeats for day in range(arguments.chunks)]


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


def _prefill_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Seconds per prompt, and the ratio to the first method with the same number at once."""
    base: dict[int, float] = {}
    for row in rows:
        base.setdefault(row["running"], row["tokens_per_s"])
    return [
        [
            row.get("method", ""),
            str(row["running"]),
            f"{1 / row['tokens_per_s']:.2f}",
            f"{row['tokens_per_s'] / base[row['running']]:.2f}x",
        ]
        for row in rows
    ]


def _show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    title = f"{arguments.model or arguments.shape}: {arguments.requests} requests, {arguments.new_tokens} tokens each"
    prefills = arguments.new_tokens == 1
    show(PREFILL_HEADS if prefills else HEADS, (_prefill_table if prefills else _table)(rows), title)


if __name__ == "__main__":
    main()
