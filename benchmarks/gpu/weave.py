"""Time to first token by recompute ratio, context and tier, against full prefill and against the limits.

    PYTHONPATH=src python benchmarks/gpu/weave.py --shape llama-3-8b --out weave-llama-3-8b.json

Every chunk was computed alone and is stored in the tier of the row; `cacheblend` weaves, `full` is the same engine on
the same ids. Limits: `flops` is what the speed-up would be if time went by floating-point operations; `load` is the
bytes of the reused KV over the measured bandwidth of host to device (of device memory for segments there).
"""

import tempfile
from pathlib import Path
from typing import Any

from bench_setup import (
    FINGERPRINT,
    Ceilings,
    Report,
    as_row,
    ceilings,
    load_model,
    parser_of,
    prompt_of,
    runner_over,
    seconds,
    warm,
)

from chunkweave.config import AttentionKernel, ComputeConfig, ReuseConfig
from chunkweave.engine.profiling import drop_page_cache, kv_bytes_per_token
from chunkweave.engine.runner import Runner
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method import make_method
from chunkweave.planning.outcome import full_prefill_flops, prefill_flops
from chunkweave.prompt.parts import Prompt
from chunkweave.tiers.device import DeviceTier, host_memory_for, moved_into
from chunkweave.tiers.disk import DiskTier
from chunkweave.tiers.host import HostTier

CHUNK_TOKENS = 512


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.05, 0.15, 0.3])
    parser.add_argument("--tiers", nargs="+", default=["device", "host", "disk"])
    parser.add_argument("--attention", default="auto", choices=list(AttentionKernel))
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.contexts, arguments.ratios, arguments.repeats = [96], [0.0, 0.15], 1
    tokens = 32 if arguments.tiny else CHUNK_TOKENS
    report = Report("weave", arguments)
    ceiling = ceilings(arguments)
    report.more["ceilings"] = as_row(ceiling)
    model = load_model(arguments.shape, arguments, max(arguments.contexts) + 1024)
    prompts = [prompt_of(context // tokens, tokens) for context in arguments.contexts]
    compute = ComputeConfig(attention=AttentionKernel(arguments.attention), pinned_bytes=16 << 30)
    with tempfile.TemporaryDirectory() as folder:
        runners = {name: make_runner(name, model, prompts, compute, Path(folder)) for name in arguments.tiers}
        for runner in runners.values():
            warm(runner, prompts[-1])  # chunks of the shorter prompts are its first ones
        for prompt in prompts:
            full_s = prefill_s(next(iter(runners.values())), prompt, "full", 0.0, arguments)
            for name, runner in runners.items():
                for ratio in arguments.ratios:
                    if report.out_of_time():
                        break
                    before = drop_files(Path(folder)) if name == "disk" else None
                    report.add(**row(name, runner, prompt, ratio, full_s, ceiling, arguments, before))
    report.finish()


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
    """What makes the system forget the segments' files, so that the disk is read."""
    return lambda: drop_page_cache(path for path in folder.rglob("*.safetensors"))


def prefill_s(runner: Runner, prompt: Prompt, method: str, ratio: float, arguments: Any, before: Any = None) -> float:
    """Median seconds from the ids to the id of the first token."""
    chosen = make_method(method, ReuseConfig(recompute_ratio=ratio))

    def first_token() -> None:
        runner.prefill(prompt, chosen, capture=False).logits.argmax().item()

    return seconds(first_token, arguments.device, repeats=arguments.repeats, before=before)


def row(
    name: str,
    runner: Runner,
    prompt: Prompt,
    ratio: float,
    full_s: float,
    ceiling: Ceilings,
    arguments: Any,
    before: Any,
) -> dict[str, Any]:
    """One measured row beside its limits."""
    method = "cacheblend" if ratio else "full-reuse"
    woven_s = prefill_s(runner, prompt, method, ratio, arguments, before)
    chosen = make_method(method, ReuseConfig(recompute_ratio=ratio))
    prefilled = runner.prefill(prompt, chosen, capture=False)
    geometry = runner.model.geometry
    flops, full = prefill_flops(geometry, list(prefilled.work)), full_prefill_flops(geometry, len(prompt))
    reused = sum(len(part.span) for part in prefilled.plan.parts if part.segment is not None)
    nbytes = reused * kv_bytes_per_token(geometry, runner.model.dtype)
    bandwidth = ceiling.memory_bytes_per_s if name == "device" else ceiling.host_to_device_bytes_per_s
    return {
        "shape": arguments.shape,
        "context": len(prompt),
        "tier": name,
        "ratio": ratio,
        "ttft_ms": woven_s * 1e3,
        "full_ms": full_s * 1e3,
        "speed_up": full_s / woven_s,
        "flops_limit": full / flops,
        "of_limit": full_s / woven_s / (full / flops),
        "load_limit_ms": nbytes / bandwidth * 1e3,
        "tflop_per_s": flops / woven_s / 1e12,
        "attention": type(runner.attention).__name__,
    }


if __name__ == "__main__":
    main()
