"""Throughput at batch 1, 4 and 8 (Cache-Craft, Figure 23), decoding with and without graphs, and the cost of capture.

    PYTHONPATH=src python benchmarks/gpu/throughput.py --shape llama-3-8b --out throughput.json

A batch of requests, each with its own chunks, is prefilled in one flat batch and then decodes. Capture: a full
prefill of new chunks with their KV kept, with and without what their tokens attend to.
"""

import gc
import time
from functools import partial
from itertools import product
from typing import Any

from bench_setup import Report, load_model, parse, parser_of, prompt_of, runner_over, seconds, wait, warm

from chunkweave.config import CaptureConfig, ComputeConfig, ReuseConfig
from chunkweave.engine.prefill import PrefillOptions
from chunkweave.engine.runner import Decoding, Runner
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import Prompt
from chunkweave.tiers.device import DeviceTier

BATCHES = (1, 4, 8)
METHODS = (("full", 0.0), ("cacheblend", 0.15))
CAPTURES = {"nothing": None, "KV": CaptureConfig(profile=False), "KV and attention": CaptureConfig(profile=True)}


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parse(parser, shape="demo", chunks=2, chunk_tokens=24, new_tokens=4)
    report = Report("throughput", arguments)
    prompts = [prompt_of(arguments.chunks, arguments.chunk_tokens, seed=seed) for seed in range(max(BATCHES))]
    model = load_model(arguments.shape, arguments, len(prompts[0]) + arguments.new_tokens)
    for graphs in (False, True):
        runner = make_runner(model, ComputeConfig(decode_graphs=graphs))
        for prompt in prompts:
            warm(runner, prompt)
        for (method, ratio), batch in product(METHODS, BATCHES):
            key = {"method": f"{method}@{ratio}" if ratio else method, "batch": batch, "graphs": graphs}
            report.measure(partial(row, runner, prompts[:batch], method, ratio, graphs, arguments), **key)
        del runner
        gc.collect()  # a store is in cycles, and its device memory goes with it
    for name, config in CAPTURES.items():
        report.measure(
            partial(capture_row, model, prompts[0], config, arguments), method=f"full, keeps {name}", batch=1
        )
    report.finish()


def make_runner(model: HuggingFaceModel, compute: ComputeConfig, capture: CaptureConfig | None = None) -> Runner:
    """A runner over segments on the device."""
    runner = runner_over(
        model,
        "device",
        DeviceTier(model.device, budget_bytes=8 << 30 if model.device.type == "cuda" else 1 << 28),
        compute,
    )
    runner.capture = capture or runner.capture
    return runner


def row(
    runner: Runner, prompts: list[Prompt], method: str, ratio: float, graphs: bool, arguments: Any
) -> dict[str, Any]:
    """One batch: prompts a second until the first tokens, then tokens a second."""
    prefill_s = seconds(
        lambda: prefilled(runner, prompts, method, ratio, 1), arguments.device, repeats=arguments.repeats
    )
    jobs = prefilled(runner, prompts, method, ratio, arguments.new_tokens)
    last = [int(job.logits.argmax()) for job in jobs]
    decode(runner, jobs, last, 0)
    wait(arguments.device)
    started = time.perf_counter()
    for step in range(1, arguments.new_tokens):
        last = decode(runner, jobs, last, step)
    decode_s = time.perf_counter() - started
    steps = max(1, arguments.new_tokens - 1)
    total_s = prefill_s + decode_s * arguments.new_tokens / steps
    return {
        "decode": "graphs" if runner.graphed and runner.graphed.in_use else "graphs failed" if graphs else "eager",
        "prefill_ms": prefill_s * 1e3,
        "prompts_per_s": len(prompts) / prefill_s,
        "ms_per_token": decode_s / steps * 1e3,
        "tokens_per_s": len(prompts) * steps / decode_s,
        "requests_per_s": len(prompts) / total_s,
    }


def prefilled(runner: Runner, prompts: list[Prompt], method: str, ratio: float, room: int) -> list[Any]:
    """All prompts in one flat batch, pass by pass."""
    chosen = make_method(method, ReuseConfig(recompute_ratio=ratio))
    options = PrefillOptions(new_tokens=room, capture=False)
    jobs = [runner.start(prompt, chosen, options) for prompt in prompts]
    while left := [job for job in jobs if job.prefilled is None]:
        runner.step([], [(job, None) for job in left])
    results = [job.prefilled for job in jobs]
    for job in jobs:
        job.close()
    return results


def decode(runner: Runner, jobs: list[Any], last: list[int], step: int) -> list[int]:
    """One more token of every request, chosen greedily on the host, as an engine does."""
    positions = [len(job.prompt) + step for job in jobs]
    decoding = [Decoding(job.cache, (token,), at) for job, token, at in zip(jobs, last, positions, strict=True)]
    tokens: list[int] = runner.step(decoding, []).argmax(-1).tolist()
    return tokens


def capture_row(
    model: HuggingFaceModel, prompt: Prompt, config: CaptureConfig | None, arguments: Any
) -> dict[str, float]:
    """A full prefill whose KV is kept according to `config`; None: nothing is kept."""
    runner = make_runner(model, ComputeConfig(), config)

    def work() -> None:
        runner.prefill(prompt, make_method("full"), capture=config is not None).logits.argmax().item()

    return {"prefill_ms": seconds(work, arguments.device, repeats=arguments.repeats) * 1e3}


if __name__ == "__main__":
    main()
