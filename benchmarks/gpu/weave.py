"""Time to first token and peak memory by method, context and tier, against full prefill and against the limits.

    PYTHONPATH=src python benchmarks/gpu/weave.py --shape llama-3-8b --out weave-llama-3-8b.json

Every chunk was computed alone and is stored in the tier of the row; `full` is the same engine on the same ids. The
shape has random weights; `smollm2` is the model. `kl` is the distance of the first token's distribution from that of
`full`: about 0 for `cacheblend@1`, which recomputes every token. Limits: `flops_limit` is the speed-up in
floating-point operations; `load_limit_ms` is the bytes of the reused KV over the measured bandwidth of host to device
(of device memory for segments there).
"""

import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from bench_setup import (
    FINGERPRINT,
    Ceilings,
    Report,
    as_row,
    ceilings,
    forget_peak,
    load_model,
    parse,
    parser_of,
    prompt_of,
    runner_over,
    seconds,
    warm,
)
from docs_tables import markdown_table

from chunkweave.calibration.contenders import make_contenders
from chunkweave.config import AttentionKernel, ComputeConfig
from chunkweave.engine.profiling import kv_bytes_per_token
from chunkweave.engine.runner import Runner
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method import ReuseMethod
from chunkweave.planning.outcome import full_prefill_flops, prefill_flops
from chunkweave.prompt.parts import Prompt
from chunkweave.tiers.device import DeviceTier, host_memory_for, moved_into
from chunkweave.tiers.disk import DiskTier
from chunkweave.tiers.host import HostTier
from chunkweave.weaving.stores import drop_page_cache

CHUNK_TOKENS = 512
METHODS = ["full", "cacheblend@0.15", "query@0.05", "epic@0.05", "full-reuse", "cacheblend@1"]


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[3072, 8192, 16384])
    parser.add_argument("--methods", nargs="+", default=METHODS, help="full is the first")
    parser.add_argument("--tiers", nargs="+", default=["host", "device", "disk"])
    parser.add_argument("--attention", default="auto", choices=list(AttentionKernel))
    arguments = parse(parser, shape="demo", contexts=[96])
    tokens = 32 if arguments.tiny else CHUNK_TOKENS
    report = Report("weave", arguments)
    ceiling = ceilings(arguments)
    report.more["ceilings"] = as_row(ceiling)
    model = load_model(arguments.shape, arguments, max(arguments.contexts) + 1024)
    prompts = [prompt_of(context // tokens, tokens) for context in arguments.contexts]
    compute = ComputeConfig(attention=AttentionKernel(arguments.attention), pinned_bytes=16 << 30)
    full, *others = make_contenders(arguments.methods).items()
    with tempfile.TemporaryDirectory() as folder:
        runners = {name: make_runner(name, model, prompts, compute, Path(folder)) for name in arguments.tiers}
        for runner in runners.values():
            warm(runner, prompts[-1])  # chunks of the shorter prompts are its first ones
        for prompt in prompts:
            first = next(iter(runners.values()))
            rows = partial(row, arguments, ceiling, prompt, cache(partial(log_probs, first, prompt, full[1])))
            key = {"shape": arguments.shape, "context": len(prompt)}
            whole = report.measure(partial(rows, first, full[1]), **key, method="full")
            for name, runner in runners.items():
                before = drop_files(Path(folder)) if name == "disk" else None
                for label, method in others:
                    report.measure(partial(rows, runner, method, whole, before), **key, method=label, tier=name)
    report.finish()


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """Time to first token, and how much sooner than full prefill, by method and context: a table for each tier."""
    rows = [row for row in result["rows"] if "ttft_ms" in row]
    contexts = sorted({row["context"] for row in rows})
    made = {}
    for tier in dict.fromkeys(row["tier"] for row in rows if row.get("tier")):
        found: dict[str, dict[int, str]] = {}
        for row in rows:
            if row.get("tier") in (None, tier):
                sooner = f", {row['speed_up']:.1f}x" if row.get("speed_up") else ""
                found.setdefault(row["method"], {})[row["context"]] = f"{row['ttft_ms']:.0f} ms{sooner}"
        lines = [[f"`{method}`", *(cells.get(one, "") for one in contexts)] for method, cells in found.items()]
        made[f"gpu-weave-{tier}"] = markdown_table(["method", *(f"{one:,} tokens" for one in contexts)], lines)
    return made


def make_runner(
    name: str, model: HuggingFaceModel, prompts: list[Prompt], compute: ComputeConfig, folder: Path
) -> Runner:
    """A runner over one tier with room for the longest prompt."""
    nbytes = len(prompts[-1]) * kv_bytes_per_token(model.geometry, model.dtype)
    if name == "device":
        return runner_over(model, name, DeviceTier(model.device, budget_bytes=2 * nbytes), compute)
    if name == "disk":
        return runner_over(model, name, DiskTier(folder, FINGERPRINT), compute)
    memory = host_memory_for(model.device, 4 * nbytes)
    return runner_over(model, name, HostTier(lambda segment: moved_into(memory, segment)), compute)


def drop_files(folder: Path) -> Any:
    """A function that drops the segments' files from the page cache, so that the disk is read."""
    return lambda: drop_page_cache(path for path in folder.rglob("*.safetensors"))


def log_probs(runner: Runner, prompt: Prompt, method: ReuseMethod) -> torch.Tensor:
    """Log-probabilities of the first token."""
    return torch.log_softmax(runner.prefill(prompt, method, capture=False).logits.float(), -1)


def row(
    arguments: Any,
    ceiling: Ceilings,
    prompt: Prompt,
    expected: Callable[[], torch.Tensor],
    runner: Runner,
    method: ReuseMethod,
    whole: dict[str, Any] | None = None,
    before: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """One measured row beside its limits; `whole` is that of full prefill."""
    reference = None if whole is None else expected()
    forget_peak(arguments.device)

    def first_token() -> None:
        runner.prefill(prompt, method, capture=False).logits.argmax().item()

    spent = seconds(first_token, arguments.device, repeats=arguments.repeats, before=before)
    prefilled = runner.prefill(prompt, method, capture=False)
    geometry = runner.model.geometry
    flops, full_flops = prefill_flops(geometry, list(prefilled.work)), full_prefill_flops(geometry, len(prompt))
    found = {"ttft_ms": spent * 1e3, "tflop_per_s": flops / spent / 1e12}
    if whole is None or reference is None:
        return found | {"attention": type(runner.attention).__name__}
    reused = sum(len(part.span) for part in prefilled.plan.parts if part.segment is not None)
    nbytes = reused * kv_bytes_per_token(geometry, runner.model.dtype)
    on_device = runner.store.levels[0].name == "device"
    bandwidth = ceiling.memory_bytes_per_s if on_device else ceiling.host_to_device_bytes_per_s
    distribution = torch.log_softmax(prefilled.logits.float(), -1)
    return found | {
        "speed_up": whole["ttft_ms"] / found["ttft_ms"] if "ttft_ms" in whole else None,
        "flops_limit": full_flops / flops,
        "load_limit_ms": nbytes / bandwidth * 1e3,
        "kl": float(torch.nn.functional.kl_div(distribution, reference, log_target=True, reduction="sum")),
    }


if __name__ == "__main__":
    main()
