"""Prompt lookup decoding: tokens a step, equal answers, and the time of answers over real questions.

    python benchmarks/prompt_lookup.py --dataset xquad.en.json mtrag_reference.json --out prompt-lookup-float32.json

Each question of the data sets' second halves is answered greedily, at most `--new-tokens`, once without and once with
`--draft-tokens`, in alternating sequence, over prompts whose KV is stored. In bfloat16 rounding depends on the number
of rows of a product, so an answer may change where two tokens are about equally likely; beside it are the changes if
two questions are answered at once without drafts. A run that is started again with the same `--out` keeps its rows.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import torch
from bench_program import parse, settings, show, write

from chunkweave import Answer, Engine, Request, SamplingParams
from chunkweave.calibration.summaries import ratio_interval
from chunkweave_lab.datasets import Example, load_dataset


def questions(paths: Sequence[Path], each: int, seed: int) -> Iterator[tuple[str, Example]]:
    """The first questions of a permutation of each data set's second half, with the data set's name."""
    for path in paths:
        examples = load_dataset(path)
        half = examples[len(examples) // 2 :]
        for example in Random(seed).sample(half, min(each, len(half))):
            yield path.stem, example


def answered(engine: Engine, requests: Sequence[Request], drafts: int) -> tuple[list[Answer], float]:
    """The answers of one batch with at most `drafts` draft tokens a step, and the seconds that they took."""
    engine.runner.compute = replace(engine.runner.compute, draft_tokens=drafts)
    began = time.perf_counter()
    answers = engine.generate_batch(requests)
    return answers, time.perf_counter() - began


def row_of(
    engine: Engine, number: int, asked: Sequence[tuple[str, Example]], args: argparse.Namespace
) -> dict[str, Any]:
    """The row of one question."""
    sampling = SamplingParams(args.new_tokens)
    name, example = asked[number]
    request, other = (
        Request(one.question, [chunk.text for chunk in one.chunks][: args.passages], sampling=sampling)
        for one in (example, asked[number ^ 1 if (number ^ 1) < len(asked) else number][1])
    )
    answered(engine, [replace(request, sampling=SamplingParams(1))], 0)  # stores the prompt's KV
    found: dict[int, tuple[Answer, float]] = {}
    for drafts in (0, args.draft_tokens) if number % 2 else (args.draft_tokens, 0):
        (answer,), spent_s = answered(engine, [request], drafts)
        found[drafts] = answer, spent_s - answer.report.ttft_s
    (plain, plain_s), (drafted, drafted_s) = found[0], found[args.draft_tokens]
    row = {
        "dataset": name,
        "question": number,
        "tokens": len(plain.token_ids),
        "steps": drafted.report.new_tokens - drafted.report.accepted_tokens,
        "drafted_tokens": drafted.report.new_tokens,
        "drafts": drafted.report.draft_tokens,
        "same": drafted.token_ids == plain.token_ids,
        "plain_s": plain_s,
        "drafted_s": drafted_s,
    }
    if args.dtype != "float32":
        row["same_in_two"] = answered(engine, [request, other], 0)[0][0].token_ids == plain.token_ids
    return row


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over each data set, and all questions."""
    found = []
    for name in (*dict.fromkeys(row["dataset"] for row in rows), "all"):
        of = [row for row in rows if name in (row["dataset"], "all")]
        tokens, steps = ([row[key] for row in of] for key in ("drafted_tokens", "steps"))
        sooner = ratio_interval([row["plain_s"] for row in of], [row["drafted_s"] for row in of])
        found.append(
            {
                "dataset": name,
                "questions": len(of),
                "tokens": sum(tokens),
                "tokens_a_step": sum(tokens) / sum(steps),
                "median_of_questions": median(a / b for a, b in zip(tokens, steps, strict=True)),
                "sooner": sooner.mean,
                "sooner_ends": [sooner.low, sooner.high],
                "changed": sum(not row["same"] for row in of),
                "changed_in_two": sum(not row.get("same_in_two", True) for row in of),
                "drafts_accepted": 1
                - (sum(row["drafts"] for row in of) - sum(tokens) + sum(steps))
                / max(1, sum(row["drafts"] for row in of)),
                "tokens_mean": fmean(row["tokens"] for row in of),
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--dataset", type=Path, nargs="+", required=True)
    parser.add_argument("--each", type=int, default=100, help="questions of each data set")
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser, argv)
    torch.set_num_threads(args.threads)
    config = settings(args) | {"dataset": [path.name for path in args.dataset]}
    asked = list(questions(args.dataset, args.each, args.seed))
    rows: list[dict[str, Any]] = []
    if args.out is not None and args.out.is_file() and args.out.stat().st_size:
        before = json.loads(args.out.read_text(encoding="utf-8"))
        rows = before["rows"] if before["config"] == config else []
    with Engine.load(args.model, dtype=args.dtype) as engine:
        for number in range(len(rows), len(asked)):
            rows.append(row_of(engine, number, asked, args))
            print(rows[-1], file=sys.stderr)
            write("prompt-lookup", args, config, rows, complete=False)
    found = summary(rows)
    heads = ["dataset", "questions", "tokens_a_step", "sooner", "changed", "changed_in_two", "drafts_accepted"]
    show(
        heads,
        [[f"{one[head]:.3g}" if isinstance(one[head], float) else str(one[head]) for head in heads] for one in found],
    )
    write("prompt-lookup", args, config, rows, {"summary": found})


if __name__ == "__main__":
    main()
