"""Times each method at the least recomputation that a study found to be enough, on a model of real size.

    python benchmarks/query_ttft.py --shape qwen2.5-0.5b --study query-study.json --out query-ttft.json \
        --update-docs docs/query.md
    python benchmarks/query_ttft.py --shape qwen2.5-0.5b --contenders query@0.05 cacheblend@0.15 --questions 6

Contenders alternate within each question over one warm store in memory, as in `chunkweave bench ttft`; the model has
random weights, so only times mean anything. `--setting` names the study's setting whose cheapest values count.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from docs_tables import command_block, markdown_table, update_page
from rich.console import Console

from chunkweave.cli.console import progress
from chunkweave.engine.engine import Engine
from chunkweave.eval.datasets import bundled_examples
from chunkweave.eval.results import BenchmarkResult, check_writable, write_json
from chunkweave.eval.summaries import summarize
from chunkweave.eval.ttft import TtftConfig, make_workload, measure


def cheapest_labels(study: Path, setting: str) -> list[str]:
    """The contenders of a study that are near full prefill with least recomputation, one a method."""
    found = json.loads(study.read_text(encoding="utf-8"))["cheapest"]
    return [f"{one['method']}@{one['value']:g}" for one in found if one["setting"] == setting and one["value"]]


def main() -> None:
    """Measure, print a table, write JSON and the page's table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--study", type=Path)
    parser.add_argument("--setting", default="6 passages")
    parser.add_argument("--contenders", nargs="+", default=[])
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--update-docs", type=Path)
    arguments = parser.parse_args()
    for path in (arguments.out, arguments.update_docs):
        if path is not None:
            check_writable(path)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    labels = [*(cheapest_labels(arguments.study, arguments.setting) if arguments.study else ()), *arguments.contenders]
    sizes = {"chunks": arguments.chunks, "chunk_tokens": arguments.chunk_tokens, "questions": arguments.questions}
    config = TtftConfig(("full-reuse", *labels), **sizes, seed=arguments.seed, hf_reference=False)
    with Engine.load_shape(arguments.shape, dtype=arguments.dtype) as engine:
        workload = make_workload(bundled_examples(arguments.questions, seed=arguments.seed), engine, config)
        with progress("measuring") as report:
            samples = list(measure(engine, workload, config, report))
        dtype = str(engine.loaded.model.dtype).removeprefix("torch.")
    rows = summarize(samples)
    origin: dict[str, Any] = {name: str(value) for name, value in vars(arguments).items()}
    origin |= {"dtype": dtype, "threads": torch.get_num_threads()}
    command = shlex.join(["python", *sys.argv])
    taken = [{"question": s.question, "method": s.method, "ttft_s": s.ttft_s} for s in samples]
    result = BenchmarkResult(
        "query-ttft", command, arguments.seed, origin, [row.as_dict() for row in rows], {"samples": taken}
    ).as_dict()
    Console(width=150).print(table(result["rows"]), highlight=False)
    if arguments.out is not None:
        write_json(arguments.out, result)
    if arguments.update_docs is not None:
        update_page(arguments.update_docs, arguments.out)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation, below its command."""
    return {"query-ttft": f"{command_block(result['command'])}\n\n{table(result['rows'])}"}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Times, how many times sooner than full prefill, and what it would be if time were FLOPs."""
    heads = ["method", "recompute fraction", "TTFT", "sooner than `full`", "10..90 %", "FLOPs limit", "share of it"]
    return markdown_table(
        heads,
        [
            [
                f"`{row['method']}`",
                f"{row['recompute_fraction']:.3f}",
                f"{row['ttft_median_s']:.3f} s",
                f"{row['speedup']:.2f}x",
                f"{row['speedup_p10']:.2f}..{row['speedup_p90']:.2f}",
                f"{row['flops_limit']:.1f}x",
                f"{row['limit_share']:.0%}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
