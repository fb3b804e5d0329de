"""The cost of capturing attention in a first computation, and how well a few heads and layers represent all of them.

    python benchmarks/attention_mass.py --model reader --prompts 60 --layers 2,3,4 --heads 1,2 --out attention-mass.json
    python benchmarks/attention_mass.py --shape qwen2.5-0.5b --prompts 1 --out attention-mass.json

Time: full prefill and storing, with and without capture, alternating; medians over rounds, and the median of the ratios
within a round. Bar: 20 % slower at 6 x 512 tokens.

Rank correlation (Spearman) of some heads and layers, evenly spread, with all heads and all layers below the last, over
chunks that have others before them. `ratio` is that of a/b (CCI is its sigmoid) over all chunks of all prompts. `ratio
at a place` is the same among chunks at the same position of their prompts, averaged over positions (a later chunk has
more before it, which alone affects ranks). `outward` is that of a chunk's tokens by their mass on all earlier chunks,
which chooses the tokens to recompute; mean and 10th percentile over chunks. Bar: 0.9 for the three means. With
`--shape` weights are random and only times are meaningful.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_program import parse, settings, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.stats import spearmanr

from chunkweave.calibration.prompts import PromptMaker
from chunkweave.calibration.questions import bundled_examples
from chunkweave.config import CaptureConfig, StoreConfig
from chunkweave.engine.engine import Engine
from chunkweave.fusion.capture import evenly_spread
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import Prompt
from chunkweave.settings import GIB
from chunkweave.store.records import AttentionProfile
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.worlds.world import world_examples

OFF = CaptureConfig(profile=False)
ALL = CaptureConfig(profile=True, layers=None, heads=None)
BAR = 0.9
FEWEST_AT_A_PLACE = 4
"""Minimum number of prompts for a rank correlation among chunks at one position."""


def first_computation_s(engine: Engine, prompt: Prompt, capture: CaptureConfig) -> float:
    """Seconds to prefill in full and store; the store is emptied first."""
    runner = engine.runner
    runner.store.clear()
    runner.capture = capture
    started = time.perf_counter()
    runner.store_new(runner.prefill(prompt, make_method("full")))
    return time.perf_counter() - started


def profiles(engine: Engine, prompt: Prompt, capture: CaptureConfig) -> list[AttentionProfile]:
    """The profile of each chunk that has another before it, in prompt order."""
    engine.runner.capture = capture
    prefilled = engine.runner.prefill(prompt, make_method("full"))
    assert prefilled.attention is not None
    found = [prefilled.attention.profile(kept.part, kept.recomputed) for kept in prefilled.captures]
    return [profile for profile in found if profile is not None and profile.chunks]


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation, or None if it is undefined (fewer than three values, or all equal)."""
    if len(one) < 3 or min(len(set(one)), len(set(other))) < 2:
        return None
    return float(spearmanr(one, other).statistic)


def mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return statistics.fmean(defined) if defined else None


def agreement(some: list[list[AttentionProfile]], everything: list[list[AttentionProfile]]) -> dict[str, float | None]:
    """Rank correlations of a subset's profiles with those of all heads and layers, one list of each a prompt."""
    places: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    outward: list[float] = []
    for ours, theirs in zip(some, everything, strict=True):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            for ratios, profile in zip(places[place], (one, other), strict=True):
                ratios.append(profile.inter_per_pair / profile.intra_per_pair if profile.intra else float("inf"))
            tokens = correlation(one.outward, other.outward)
            if tokens is not None:
                outward.append(tokens)
    pooled = [[ratio for pair in places.values() for ratio in pair[side]] for side in (0, 1)]
    at_a_place = [correlation(*pair) for pair in places.values() if len(pair[0]) >= FEWEST_AT_A_PLACE]
    return {
        "ratio": correlation(*pooled),
        "ratio_at_a_place": mean(at_a_place),
        "outward": mean(outward),
        "outward_p10": sorted(outward)[len(outward) // 10] if outward else None,
    }


def measure(args: argparse.Namespace, engine: Engine, prompts: list[Prompt]) -> list[dict[str, Any]]:
    subsets = [
        CaptureConfig(profile=True, layers=layers, heads=heads) for layers in args.layers for heads in args.heads
    ]
    contenders = [OFF, *subsets, ALL]
    times: dict[CaptureConfig, list[float]] = {config: [] for config in contenders}
    with Progress(console=Console(stderr=True)) as progress:
        timing = progress.add_task("times", total=1 + args.rounds * len(contenders))
        first_computation_s(engine, prompts[0], OFF)
        progress.advance(timing)
        for _ in range(args.rounds):
            for config in contenders:
                times[config].append(first_computation_s(engine, prompts[0], config))
                progress.advance(timing)
        ranking = progress.add_task("ranks", total=len(prompts) * (1 + len(subsets)))
        seen: dict[CaptureConfig, list[list[AttentionProfile]]] = {config: [] for config in (ALL, *subsets)}
        for prompt in prompts:
            for config, found in seen.items():
                found.append(profiles(engine, prompt, config))
                progress.advance(ranking)
    return [
        {
            "layers": "all" if config.layers is None else config.layers,
            "heads": "all" if config.heads is None else config.heads,
            "share": share_of(engine, config),
            "median_s": statistics.median(times[config]),
            "slower": statistics.median(a / b for a, b in zip(times[config], times[OFF], strict=True)) - 1.0,
            **agreement(seen[config], seen[ALL]),
        }
        for config in (*subsets, ALL)
    ] + [{"layers": 0, "heads": 0, "share": 0.0, "median_s": statistics.median(times[OFF]), "slower": 0.0}]


def share_of(engine: Engine, config: CaptureConfig) -> float:
    """The captured share of all heads in the layers below the last."""
    geometry = engine.loaded.model.geometry
    layers = evenly_spread(config.layers, geometry.num_layers - 1)
    heads = evenly_spread(config.heads, geometry.num_heads)
    return len(layers) * len(heads) / ((geometry.num_layers - 1) * geometry.num_heads)


def fewest(rows: list[dict[str, Any]]) -> str:
    """The smallest measured subset within the bar."""
    within = [row for row in rows if all((row.get(name) or 0.0) >= BAR for name in ("ratio", "outward"))]
    within = [row for row in within if (row["ratio_at_a_place"] or BAR) >= BAR]
    if not within:
        return f"nothing measured reaches {BAR}"
    least = min(within, key=lambda row: row["share"])
    return f"least with {BAR} and more: {least['layers']} layers x {least['heads']} heads, {least['share']:.0%} of all"


def show(rows: list[dict[str, Any]], title: str) -> None:
    names = list(rows[0])
    table = Table(title=title)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(formatted(name, row.get(name)) for name in names))
    Console(width=140).print(table)


def formatted(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:+.1%}" if name == "slower" else f"{value:.0%}" if name == "share" else f"{value:.3f}"
    return "" if value is None else str(value)


def prompts_of(args: argparse.Namespace, engine: Engine) -> list[Prompt]:
    """The prompts over which ranks are compared."""
    dataset = args.dataset or ("worlds" if args.model else "documents")
    if dataset == "worlds":
        examples = world_examples(args.prompts, args.chunks, seed=args.seed)
        return [engine.builder.build(example.question, example.chunks) for example in examples]
    known = bundled_examples(args.prompts, seed=args.seed) if dataset == "documents" else load_dataset(Path(dataset))
    tokens = 512 if args.chunk_tokens is None else args.chunk_tokens
    maker = PromptMaker(known, engine.builder, engine.loaded.fingerprint, chunks=args.chunks, chunk_tokens=tokens)
    return [maker.prompt(example) for example in known[: args.prompts]]


def arguments() -> argparse.Namespace:
    default = CaptureConfig()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="a checkpoint folder in Hugging Face format")
    which.add_argument("--shape", help="a model of known geometry with random weights: times alone mean something")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--dataset",
        help="a file, `worlds` (generated) or `documents` (bundled); default: `worlds` with --model, else `documents`",
    )
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, help="default: 512; passages of `worlds` stay as they are")
    parser.add_argument("--prompts", type=int, default=8, help="over which ranks are compared; the first one is timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=numbers, default=(default.layers,), help="for example 4,8,12")
    parser.add_argument("--heads", type=numbers, default=(default.heads,), help="for example 2,4,8")
    parser.add_argument("--seed", type=int, default=0)
    return parse(parser)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation: how well fewer layers and heads stand for all."""
    heads = ["layers x heads", "of all", "*a/b*", "*at a place*", "*tokens*", "their 10th percentile", "slower"]
    names = ("ratio", "ratio_at_a_place", "outward", "outward_p10")
    rows = [row for row in result["rows"] if row.get("share") is not None]
    cells = [
        [
            f"{row['layers']} x {row['heads']}",
            f"{row['share']:.0%}",
            *("-" if row.get(name) is None else f"{row[name]:.3f}" for name in names),
            f"{row['slower']:+.0%}",
        ]
        for row in rows
    ]
    return {"attention-mass": markdown_table(heads, cells)}


def main() -> None:
    args = arguments()
    store = StoreConfig(host_budget_bytes=8 * GIB)
    options: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "store": store}
    if args.model:
        engine = Engine.load(args.model, **options)
    else:
        engine = Engine.load_shape(args.shape, seed=args.seed, **options)
    loaded = engine.loaded
    prompts = prompts_of(args, engine)
    rows = measure(args, engine, prompts)
    show(rows, f"Capturing attention: {loaded.name}, {len(prompts)} prompts, the first one {len(prompts[0])} tokens")
    Console().print(fewest(rows))
    config: dict[str, Any] = {name: str(value) for name, value in settings(args).items()}
    config |= {"prompt_tokens": len(prompts[0]), "computed_in": str(loaded.model.dtype)}
    write("attention-mass", args, config, rows)


if __name__ == "__main__":
    main()
