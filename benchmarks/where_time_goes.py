"""Shares of time in prefilling, weaving and decoding on a CPU, with each attention kernel.

    python benchmarks/where_time_goes.py --model smollm2 --out where-time-goes.json

Methods and kernels alternate over one prompt whose chunks are stored, each computed alone. The CPU time of the
computing thread is measured, so that other load on the machine matters less. The steps of the layer loop are timed by
their calls: `products` is all linear maps with the norms before them, `attention` the kernel, `assembly` loads stored
KV (with its rotation), `evidence` computes the inputs of rules; the rest is rotating and writing fresh KV, Python
around all of them, look-up and plan. Decoding takes one step a round, at the prompt's end. Hugging Face decodes with
its own weights, but what it prefills with are ours, packed. Rows `plain` and `native` are of engines that keep
their weights so (`--also-weights`), by the first kernel and with the methods of `--their-methods`.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from first_tokens import HUGGING_FACE, comparison, contenders, tasks_of
from rich.console import Console
from rich.progress import track

from chunkweave import Engine
from chunkweave.calibration.fidelity import REFERENCE, prepare
from chunkweave.config import AttentionKernel, Weights
from chunkweave.fusion.rows import ActiveRows
from chunkweave.kv.request_cache import RequestCache, keep_freed_memory
from chunkweave.models.attention import FlatAttention
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.kernels.choice import make_attention
from chunkweave.models.loading import load_folder
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import Prompt

METHODS = "full-reuse,epic@0.05,query@0.05,query@0.15,cacheblend@0.15"
DECODING = (1, 8)
"""Requests that decode at a time."""

HEADS = ["what", "attention by", "ms", "speed", "products", "attention", "assembly", "evidence", "rest"]
_SHOWN = ("products", "attention", "assembly", "evidence")

Case = Callable[[], object]


class Stopwatch:
    """CPU seconds by step; nested steps count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time recorded."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, started = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - started
                self._inside = False

        return run

    @contextmanager
    def over(self, kernels: Mapping[str, FlatAttention]) -> Iterator[None]:
        """Time the steps of the layer loop until the block ends."""
        steps = [
            *((HuggingFaceModel, name, "products") for name in ("embed", "qkv", "finish", "logits")),
            *((HuggingFaceModel, name, "rotation") for name in ("rotate_queries", "rotate_keys")),
            *((ActiveRows, name, "evidence") for name in ("refine", "look")),
            (ActiveRows, "write", "writing"),
            (RequestCache, "load_layer", "assembly"),
            *((kind, "attend", "attention") for kind in {type(kernel) for kernel in kernels.values()}),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in steps]
        try:
            for owner, name, step in steps:
                setattr(owner, name, self.timed(step, getattr(owner, name)))
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--kernels", default="onednn,sdpa", help="of each its rows, if it runs here")
    parser.add_argument("--also-weights", default="plain", help="engines with other weights beside the first")
    parser.add_argument("--their-methods", default="query@0.05")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    torch.set_num_threads(1)
    keep_freed_memory()
    engine = Engine.load(arguments.model)
    rows = _measured(engine, arguments)
    table = _table(rows)
    show(HEADS, table, f"{arguments.model}: {arguments.chunks} x {arguments.chunk_tokens} tokens, one thread, CPU time")
    dtype = str(engine.loaded.model.dtype).removeprefix("torch.")
    write("where_time_goes", arguments, settings(arguments, "seed") | {"dtype": dtype}, rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    return {"where-time-goes": markdown_table(HEADS, _table(result["rows"]))}


def _measured(engine: Engine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model = engine.loaded.model
    kernels = {
        name: make_attention(AttentionKernel(name), model.geometry, dtype=model.dtype, device=model.device)
        for name in arguments.kernels.split(",")
    }
    cases: dict[tuple[str, str], Case] = {}
    runners = [engine.runner]
    prompt = _add_cases(cases, "", engine, arguments.methods, kernels, arguments)
    for weights in filter(None, arguments.also_weights.split(",")):
        other = Engine.load(arguments.model, weights=weights)
        runners.append(other.runner)
        _add_cases(cases, f"{weights} ", other, arguments.their_methods, [*kernels][:1], arguments)
    plain = load_folder(arguments.model, weights=Weights.PLAIN).model
    cases["hf-decode 1", ""] = _hugging_face_decode(plain, prompt.token_ids)
    samples: dict[tuple[str, str], list[tuple[float, dict[str, float]]]] = {case: [] for case in cases}
    for round_ in track(range(arguments.rounds + 1), "measuring", console=Console(stderr=True)):
        for (name, kernel), case in [*cases.items()][round_:] + [*cases.items()][:round_]:
            for runner in runners if kernel else []:
                runner.attention = kernels[kernel]
            watch = Stopwatch()
            with watch.over(kernels):
                started = time.thread_time()
                case()
                seconds = time.thread_time() - started
            if round_:
                samples[name, kernel].append((seconds, dict(watch.seconds)))
    return [_row(name, kernel, found) for (name, kernel), found in samples.items()]


def _add_cases(
    cases: dict[tuple[str, str], Case],
    prefix: str,
    engine: Engine,
    methods: str,
    kernels: Iterable[str],
    arguments: argparse.Namespace,
) -> Prompt:
    """Add an engine's cases, named with a prefix; returns its prompt, whose chunks are then stored."""
    config = comparison(tuple(methods.split(",")), chunks=arguments.chunks, chunk_tokens=arguments.chunk_tokens)
    tasks = tasks_of(engine, config, 1, arguments.seed)
    prepare(engine, tasks, 0, config.warm)
    prompt = tasks[0].prompt
    for name, contender in contenders(engine, config, hugging_face=not prefix).items():
        for kernel in [""] if name == HUGGING_FACE else kernels:
            cases[prefix + name, kernel] = lambda contender=contender: contender(prompt)
    steps, method = 2 * len(DECODING) * (arguments.rounds + 2), make_method("full-reuse")
    caches = [
        engine.runner.prefill(prompt, method, new_tokens=steps, capture=False).cache for _ in range(max(DECODING))
    ]
    at = [len(prompt)] * len(caches)
    for count in DECODING:
        for kernel in kernels:

            def decode(count: int = count) -> None:
                engine.runner.decode(caches[:count], [5] * count, at[:count])
                at[:count] = [position + 1 for position in at[:count]]

            cases[f"{prefix}decode {count}", kernel] = decode
    return prompt


def _hugging_face_decode(model: HuggingFaceModel, token_ids: tuple[int, ...]) -> Case:
    """Decoding one token after a cache that the model's own forward has filled."""
    with torch.inference_mode():
        past = model.model(torch.tensor([token_ids]), use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def decode() -> None:
        model.model(torch.tensor([[5]]), past_key_values=past, use_cache=True, logits_to_keep=1)

    return decode


def _row(name: str, kernel: str, found: list[tuple[float, dict[str, float]]]) -> dict[str, Any]:
    total = sum(seconds for seconds, _ in found)
    steps = sorted({step for _, mine in found for step in mine})
    shares = {step: sum(mine.get(step, 0.0) for _, mine in found) / total for step in steps}
    return {
        "what": name,
        "kernel": kernel,
        "cpu_s": statistics.median(seconds for seconds, _ in found),
        "least_cpu_s": min(seconds for seconds, _ in found),
        "shares": shares,
        "samples_s": [seconds for seconds, _ in found],
    }


def _table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Prefills relative to `full` of the same kernel; decoding relative to tokens per second of a single request."""
    by_case = {(row["what"], row["kernel"]): row for row in rows}
    first_kernel = next(row["kernel"] for row in rows if row["kernel"])
    lines = []
    for row in rows:
        kernel = row["kernel"] or first_kernel
        decodes = "decode" in row["what"]
        tokens = int(row["what"].rpartition(" ")[2]) if decodes else 1
        base = by_case["decode 1" if decodes else REFERENCE, kernel]["cpu_s"]
        shares = [f"{row['shares'][step]:.0%}" if step in row["shares"] else "" for step in _SHOWN]
        rest = f"{1 - sum(row['shares'].get(step, 0.0) for step in _SHOWN):.0%}" if row["kernel"] else ""
        speed = f"{tokens * base / row['cpu_s']:.2f}x"
        lines.append([row["what"], row["kernel"] or "its own", f"{row['cpu_s'] * 1e3:.0f}", speed, *shares, rest])
    return lines


if __name__ == "__main__":
    main()
