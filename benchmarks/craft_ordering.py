"""CRAFT's orders in our engine and in replays: TTFT, computed tokens, quality, sensitivity.

    python benchmarks/craft_ordering.py savings --dataset FILE --out docs/results/craft-savings.json
    python benchmarks/craft_ordering.py sensitivity --dataset FILE --out docs/results/craft-sensitivity.json
    python benchmarks/craft_ordering.py serve --shape qwen2.5-0.5b --out docs/results/craft-ttft-worlds.json
    python benchmarks/craft_ordering.py serve --shape qwen2.5-0.5b --dataset FILE --out docs/results/craft-ttft-set.json
    python benchmarks/craft_ordering.py serve --model reader --answers --alone --out docs/results/craft-quality.json
    python benchmarks/craft_ordering.py composing --dataset FILE --out docs/results/craft-composing.json

`savings` replays requests through an unlimited cache in every order, beside a clairvoyant one and a bound.
`sensitivity` does so for windows and thresholds, over documents whose popularity drifts (CRAFT's Figures 14 and 15).
`serve` lets engines with separate stores serve one sequence of requests, alternating: with random weights for times,
with `--model reader --answers` for F1. The first `--warm-up` requests, the same for all, warm the store; with `--alone`
every chunk is computed context-free before; with `--lock FILE` other benchmarks that use the lock wait while times are
measured. `composing` computes where order, exact prefix and weaving together save 1.3 times more than the best of them
alone (`craft_composing.py`), and the shares of workloads. Without `--dataset` questions are about generated worlds.

A contender is a method, an ordering after `+`, and a threshold of promotion or continuation after `/` (0: none).
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_program import parse, settings, write
from craft_composing import RATIOS, region_table, regions, shares_of, shares_table
from craft_serving import Contender, close, contenders, row, serve_all
from docs_tables import command_block, markdown_table
from recurring_requests import dataset_requests, zipf_worlds
from rich.console import Console

from chunkweave.calibration.questions import Example
from chunkweave.cli.console import progress
from chunkweave.config import ReuseConfig
from chunkweave.models.loading import load_folder, load_shape
from chunkweave.ordering.ordering import OrderingConfig
from chunkweave.settings import GIB
from chunkweave_lab.chunk_order import ORACLE, ReplayConfig, overlap_of, replay, saving_bound
from chunkweave_lab.simulator.trace import Arrival, Part, poisson_times
from chunkweave_lab.simulator.workloads import QUESTION_TOKENS, Corpus, bundled_token_count, draw_requests

ORDERINGS = ("frequency", "tree-greedy")
METHODS = ("prefix", "cacheblend", "cachecraft", "query")
WINDOWS = (10, 30, 100, 300, 1000, 3000, 1_000_000)
THRESHOLDS = (1, 2, 3, 5)
SKEWS = (0.8, 1.0, 1.2, 1.4)
_FRAME_TOKENS = 10
"""Of the template, around a question."""


def examples_of(arguments: argparse.Namespace) -> list[Example]:
    """The requested examples, in order."""
    count = arguments.warm_up + arguments.requests
    if arguments.dataset is not None:
        return dataset_requests(arguments.dataset, count, arguments.k, exponent=arguments.zipf, seed=arguments.seed)
    return zipf_worlds(
        count,
        arguments.k,
        questions=arguments.questions,
        worlds=arguments.worlds,
        exponent=arguments.zipf,
        seed=arguments.seed,
    )


def as_arrivals(examples: Sequence[Example]) -> list[Arrival]:
    """Their chunks with tokens counted."""
    count = bundled_token_count()
    lengths = {chunk.text: max(1, count(chunk.text)) for one in examples for chunk in one.chunks}
    return [
        Arrival(float(number), tuple(Part(chunk.text, lengths[chunk.text]) for chunk in one.chunks))
        for number, one in enumerate(examples)
    ]


def savings(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Document tokens that each order saves, an unlimited cache given; with each threshold of ours."""
    arrivals = as_arrivals(examples_of(arguments))
    rows = []
    for name in ("original", *ORDERINGS, ORACLE):
        for threshold in (None, 2):
            with progress(f"{name}, threshold {threshold}") as report:
                found = replay(arrivals, name, ReplayConfig(arguments.window, threshold), progress=report)
            rows.append({**found.as_dict(), "promotion_threshold": threshold})
    overlap = overlap_of([[part.name for part in one.documents] for one in arrivals])
    total = rows[0]["document_tokens"]
    more = {"prefix_overlap": overlap.prefix, "total_overlap": overlap.total, "bound": saving_bound(arrivals) / total}
    return rows, more


def sensitivity(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Savings by window and by threshold, over documents whose popularity drifts, and over the data set if given."""
    count = arguments.warm_up + arguments.requests
    corpus = Corpus(1000, arguments.zipf, arguments.k, mean_tokens=128, spread=0.3, max_tokens=256, drift=0.5)
    workloads = {"drifting": draw_requests(corpus, poisson_times(count, 1.0, arguments.seed), arguments.seed)}
    if arguments.dataset is not None:
        workloads["data set"] = as_arrivals(examples_of(arguments))
    rows = []
    for workload, arrivals in workloads.items():
        configs = [ReplayConfig(window, 2) for window in WINDOWS]
        configs += [ReplayConfig(arguments.window, threshold) for threshold in THRESHOLDS]
        for config in dict.fromkeys(configs):
            for name in ORDERINGS:
                found = replay(arrivals, name, config)
                rows.append(
                    {
                        "workload": workload,
                        "ordering": name,
                        "window": config.window,
                        "promotion_threshold": config.promotion_threshold,
                        "saved_share": found.saved_share,
                    }
                )
    return rows, {}


def composing(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """p, g and p' by workload and skew, after `--warm-up` requests and after ten times as many."""
    count = bundled_token_count()
    config = OrderingConfig("tree-greedy", arguments.window)
    corpus = Corpus(1000, 1.0, arguments.k, mean_tokens=128, spread=0.3, max_tokens=256)
    rows = []
    for skew in SKEWS:
        more = argparse.Namespace(**{**vars(arguments), "zipf": skew, "warm_up": 10 * arguments.warm_up})
        times = poisson_times(more.warm_up + more.requests, 1.0, more.seed)
        drawn = draw_requests(replace(corpus, exponent=skew), times, more.seed)
        workloads = {"drawn": (drawn, float(QUESTION_TOKENS))}
        for name, dataset in (("worlds", None), *([("data set", more.dataset)] if more.dataset else [])):
            examples = examples_of(argparse.Namespace(**{**vars(more), "dataset": dataset}))
            questions = statistics.fmean(count(one.question) for one in examples)
            workloads[name] = (as_arrivals(examples), questions + _FRAME_TOKENS)
        for name, (arrivals, questions) in workloads.items():
            for warm_up in (arguments.warm_up, more.warm_up):
                some = arrivals[: warm_up + arguments.requests]
                shares = shares_of(some, config, warm_up=warm_up, question_tokens=questions)
                rows.append({"workload": name, "zipf": skew, "warm_up": warm_up, **shares.as_dict(RATIOS)})
    return sorted(rows, key=lambda one: str(one["workload"])), {"region": regions()}


def serve(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """TTFT, tokens and F1 of every contender."""
    names = arguments.contenders or [f"{m}{o}" for m in METHODS for o in ("", *(f"+{name}" for name in ORDERINGS))]
    loaded = load_folder(arguments.model) if arguments.model else load_shape(arguments.shape, dtype=arguments.dtype)
    reuse = ReuseConfig(recompute_ratio=arguments.recompute_ratio)
    partners = [name.partition("+")[0] for name in names]
    budget = int(arguments.budget_gib * GIB)
    field_of = contenders(loaded, [*partners, *names], reuse, window=arguments.window, budget_bytes=budget)
    requests = examples_of(arguments)
    tokens = arguments.max_new_tokens if arguments.answers else 1
    with progress("serving") as report:
        steps = serve_all(
            field_of,
            requests,
            warm_up=arguments.warm_up,
            max_new_tokens=tokens,
            alone=arguments.alone,
            lock=arguments.lock,
        )
        for done in steps:
            report(done, len(requests))
    named = {one.name: one for one in field_of}
    rows = [row(one, field_of[0], named[one.spec.method]) for one in field_of]
    best, ratio = combination(field_of, rows)
    close(field_of)
    return rows, {"combination": best, "threads": torch.get_num_threads(), **ratio}


def combination(
    field_of: Sequence[Contender], rows: Sequence[dict[str, Any]]
) -> tuple[dict[str, str], dict[str, float]]:
    """Reorder + exact prefix + weaving against the best that uses one of these: by mean and by median TTFT.

    A single method is one in the caller's order, or `prefix` in a free one. Approximate methods of which F1 is known to
    be more than 0.02 below full prefill's, at the interval's lower end, are left out.
    """
    fine = [
        (one, own)
        for one, own in zip(field_of, rows, strict=True)
        if one.name != "full" and ("f1" not in own or own["f1_minus_full"]["low"] > -0.02)
    ]
    combined = [own for one, own in fine if one.spec.ordering and one.spec.method != "prefix"]
    single = [own for one, own in fine if not one.spec.ordering or one.spec.method == "prefix"]
    if not combined or not single:
        return {}, {}
    ours, theirs = (min(rows_of, key=lambda own: own["ttft_mean_s"]) for rows_of in (combined, single))
    return {"ours": ours["method"], "best_single": theirs["method"]}, {
        "ttft_ratio_of_means": theirs["ttft_mean_s"] / ours["ttft_mean_s"],
        "ttft_ratio_of_medians": theirs["ttft_median_s"] / ours["ttft_median_s"],
    }


def table(part: str, rows: Sequence[dict[str, Any]], more: Mapping[str, Any]) -> str:
    """Markdown of one part's rows."""
    if part == "savings":
        heads = ["order", "stored from count", "tokens saved", "of all documents'", "requests found whole"]
        cells = [
            [
                one["ordering"],
                str(one["promotion_threshold"] or 1),
                f"{one['saved_tokens']:,}",
                f"{one['saved_share']:.1%}",
                f"{one['full_hits'] / one['requests']:.1%}",
            ]
            for one in rows
        ]
        overlap = f"prefix overlap {more['prefix_overlap']:.1%}, total overlap {more['total_overlap']:.1%}"
        return f"{markdown_table(heads, cells)}\n\n{overlap}; no order can save more than {more['bound']:.1%}."
    if part == "sensitivity":
        heads = ["workload", "order", "window", "threshold", "tokens saved"]
        names = ("workload", "ordering", "window", "promotion_threshold")
        return markdown_table(heads, [[*(str(one[n]) for n in names), f"{one['saved_share']:.1%}"] for one in rows])
    if part == "composing":
        return f"{region_table()}\n\n{shares_table(rows)}"
    heads = ["contender", "TTFT mean", "median", "sooner than `full`", "exact", "computed", "FLOPs"]
    with_f1 = any("f1" in one for one in rows)
    heads += ["F1", "minus `full`", "minus same method, original order", "p"] if with_f1 else []
    return markdown_table(heads, [_served(one) for one in rows])


def _served(one: dict[str, Any]) -> list[str]:
    cells = [
        f"`{one['method']}`",
        f"{one['ttft_mean_s'] * 1e3:.1f} ms",
        f"{one['ttft_median_s'] * 1e3:.1f} ms",
        f"{one['speedup_of_means']:.2f}x",
        f"{one['exact_share']:.1%}",
        f"{one['computed_share']:.1%}",
        f"{one['flops_share']:.1%}",
    ]
    if "f1" in one:
        full, own = one["f1_minus_full"], one["f1_minus_original"]
        cells += [f"{one['f1']:.3f}", *(f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]" for d in (full, own))]
        cells.append(f"{own['p']:.2f}")
    return cells


def main() -> None:
    """Measure one part, print its table, write JSON and the page's table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["savings", "sensitivity", "serve", "composing"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--dataset", type=Path, help="MuSiQue or SQuAD JSON, or JSONL; generated worlds if left out")
    parser.add_argument("--contenders", nargs="+", default=[])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--questions", type=int, default=200, help="different questions about worlds")
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--recompute-ratio", type=float, default=0.15)
    parser.add_argument("--answers", action="store_true", help="decode answers and score them")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--alone", action="store_true", help="compute every chunk context-free before")
    parser.add_argument("--budget-gib", type=float, default=1.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--lock", type=Path, metavar="FILE", help="held while times are taken, behind the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    parts = {"savings": savings, "sensitivity": sensitivity, "serve": serve, "composing": composing}
    rows, more = parts[arguments.part](arguments)
    shown = table(arguments.part, rows, more)
    console = Console(width=160)
    console.print(shown, highlight=False)
    if "ttft_ratio_of_means" in more:
        console.print(f"{more['combination']}: {more['ttft_ratio_of_means']:.2f}x by mean TTFT", highlight=False)
    config = {name: str(value) for name, value in settings(arguments).items()}
    write(f"craft-{arguments.part}", arguments, config, rows, more)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation, below its command."""
    shown = table(result["config"]["part"], result["rows"], result)
    return {"craft": f"{command_block(result['command'])}\n\n{shown}"}


if __name__ == "__main__":
    main()
