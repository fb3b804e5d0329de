"""The gain of concurrent requests from waiting for parts that another request's prefill computes.

    python benchmarks/shared_prefills.py --out docs/results/shared-prefills.json

Loads: six requests over the same two documents, six over two documents each of its own, and 24 over two of twelve
documents drawn by Zipf's law, all submitted at once. Contenders alternate, each over an empty store: waiting for parts
(`shared`), no waiting (`apart`: a prefill is stored only at its end), and one request at a time. The lower limit of
tokens is what sequential requests prefill.
"""

import argparse
import asyncio
import random
import statistics
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from bench_program import parse, settings, show, write
from passages import passages
from rich.console import Console
from rich.progress import track

from chunkweave import AsyncEngine, BatchingConfig, Engine, Request, SamplingParams
from chunkweave.scheduling.in_progress import Saving

HEADS = ["load", "contender", "prefilled tokens", "mean TTFT", "requests/s", "rate of apart"]
CONTENDERS = {"shared": 8, "apart": 8, "one at a time": 1}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="prefix")
    parser.add_argument("--chunk-tokens", type=int, default=360)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    torch.set_num_threads(arguments.threads)
    engine = Engine.load(arguments.model)
    loads = _loads(engine, arguments)
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    turns = [(load, name) for _ in range(arguments.rounds) for load in loads for name in CONTENDERS]
    engine.generate_batch(loads["disjoint"][:1])
    for load, name in track(turns, "measuring", console=Console(stderr=True)):
        engine.runner.store.clear()
        runs.setdefault((load, name), []).append(asyncio.run(_run(engine, loads[load], name, arguments)))
    rows = [_row(load, name, runs) for load, name in runs]
    show(HEADS, [_shown(row) for row in rows])
    write("shared-prefills", arguments, settings(arguments, "seed"), rows)


def _loads(engine: Engine, arguments: argparse.Namespace) -> dict[str, list[Request]]:
    texts = passages(engine.builder.tokenizer, 12, arguments.chunk_tokens)
    draw, ranks = random.Random(arguments.seed), range(1, len(texts) + 1)
    drawn = []
    while len(drawn) < 24:
        pair = draw.choices(texts, [1 / rank for rank in ranks], k=2)
        drawn += [pair] if pair[0] != pair[1] else []
    documents = {
        "equal": [texts[:2]] * 6,
        "disjoint": [texts[2 * n : 2 * n + 2] for n in range(6)],
        "mixed": drawn,
    }
    sampling = SamplingParams(arguments.new_tokens, temperature=0.0)
    return {
        load: [Request(f"How many carts leave at {n}?", chunks, sampling=sampling) for n, chunks in enumerate(each)]
        for load, each in documents.items()
    }


async def _run(
    engine: Engine, requests: list[Request], contender: str, arguments: argparse.Namespace
) -> dict[str, float]:
    with ExitStack() as stack:
        if contender == "apart":
            stack.enter_context(patch("chunkweave.engine.scheduler.saving_of", lambda *_, **__: Saving()))
            stack.enter_context(patch.object(engine.runner, "store_computed", lambda _: 0))
        async with AsyncEngine(engine, BatchingConfig(max_running=CONTENDERS[contender])) as batching:
            started = time.perf_counter()
            streams = [batching.submit(request, method=arguments.method) for request in requests]
            answers = await asyncio.gather(*(stream.answer() for stream in streams))
            seconds = time.perf_counter() - started
            stats = batching.stats
    return {
        "prefilled_tokens": stats.prefilled_tokens,
        "shared": stats.shared,
        "ttft_mean_s": statistics.mean(answer.report.ttft_s for answer in answers),
        "requests_per_s": len(requests) / seconds,
    }


def _row(load: str, name: str, runs: dict[tuple[str, str], list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds, including the ratio to the run without waiting in the same round."""
    own, apart = runs[load, name], runs[load, "apart"]
    medians = {key: statistics.median(one[key] for one in own) for key in own[0]}
    ratios = [mine["requests_per_s"] / other["requests_per_s"] for mine, other in zip(own, apart, strict=True)]
    return {"load": load, "contender": name, **medians, "rate_of_apart": statistics.median(ratios), "runs": own}


def _shown(row: dict[str, Any]) -> list[str]:
    return [
        row["load"],
        row["contender"],
        f"{row['prefilled_tokens']:.0f}",
        f"{row['ttft_mean_s']:.2f} s",
        f"{row['requests_per_s']:.2f}",
        f"{row['rate_of_apart']:.2f}x",
    ]


if __name__ == "__main__":
    main()
