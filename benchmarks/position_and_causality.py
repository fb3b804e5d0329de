"""The effects of correcting positions and of recomputing tokens, each without the other (Cache-Craft Table 3).

    python benchmarks/position_and_causality.py --model reader --out position-and-causality.json

Chunks are computed alone. Without corrected positions, a chunk's keys keep the rotation of the position where they were
computed, directly after BOS; recomputed tokens get the right one. Without corrected causality nothing is recomputed
(`full-reuse`); with it, `--method` recomputes. Questions are held out, prompts and scoring are those of `chunkweave
bench quality`.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench_program import parse, settings, write
from docs_tables import markdown_table
from rich.console import Console
from rich.table import Table

from chunkweave.cli.console import progress
from chunkweave.engine.engine import Engine
from chunkweave.kv.request_cache import RequestCache, Rotate
from chunkweave_lab.quality import QualityConfig, measure_quality
from chunkweave_lab.summaries import QualitySample, summarize_quality
from chunkweave_lab.worlds.world import world_examples

_load_layer = RequestCache.load_layer


def _load_unshifted(cache: RequestCache, layer: int, rotate: Rotate) -> None:
    """As `load_layer`, with the positions that the keys had when their chunk was computed behind BOS."""
    first = [torch.arange(1, 1 + len(placement.span)) for placement in cache._placements]
    positions = torch.cat(first).to(cache._device) if first else cache._positions
    _load_layer(cache, layer, lambda keys, _: rotate(keys, positions))


@contextmanager
def positions_corrected(yes: bool) -> Iterator[None]:
    """Context: whether cached keys are rotated to their current positions."""
    with patch.object(RequestCache, "load_layer", _load_layer if yes else _load_unshifted):
        yield


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--method", default="cachecraft")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--recompute-ratio", type=float, default=0.15)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    config = QualityConfig(
        methods=(arguments.method,),
        ratios=(arguments.recompute_ratio,),
        alphas=(arguments.alpha,),
        seed=arguments.seed,
    )
    examples = world_examples(arguments.questions, arguments.chunks, seed=arguments.seed)
    samples: list[QualitySample] = []
    with Engine.load(arguments.model) as engine:
        for corrected in (False, True):
            named = "corrected" if corrected else "not corrected"
            with positions_corrected(corrected), progress(f"positions {named}") as report:
                for sample in measure_quality(engine, examples, config, report):
                    if sample.contender == "full" and not corrected:
                        continue
                    own = sample.contender if corrected else f"{sample.contender}, positions not corrected"
                    samples.append(replace(sample, contender=own))
    rows = [row.as_dict() for row in summarize_quality(samples)]
    table = Table("method", "F1", "95 %", "crossing F1", "ROUGE-L", "recomputed")
    for row in rows:
        interval = f"{row['f1_low']:.3f}..{row['f1_high']:.3f}"
        cells = (row["f1"], row["crossing_f1"], row["rouge_l"], row["recompute_fraction"])
        f1, crossing, rouge, recomputed = (f"{cell:.3f}" for cell in cells)
        table.add_row(row["method"], f1, interval, crossing, rouge, recomputed)
    Console().print(table)
    write("position-and-causality", arguments, {name: str(value) for name, value in settings(arguments).items()}, rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation: F1, and that of the kinds that cross passages."""
    found = {row["method"]: f"{row['f1']:.3f} ({row['crossing_f1']:.3f})" for row in result["rows"]}
    methods = [name for name in found if name != "full" and "," not in name]
    heads = ["F1 (crossing kinds)", *(f"`{name}`" for name in methods)]
    cells = [
        ["positions not corrected", *(found[f"{name}, positions not corrected"] for name in methods)],
        ["positions corrected", *(found[name] for name in methods)],
        ["`full`", *[found["full"]] * len(methods)],
    ]
    return {"position-and-causality": markdown_table(heads, cells)}


if __name__ == "__main__":
    main()
