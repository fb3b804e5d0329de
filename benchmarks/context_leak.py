"""Whether a secret that is only in a chunk's contexts leaks: its likelihood compared with full prefill's.

    python benchmarks/context_leak.py --model smollm2 --dataset xquad.en.json --out docs/results/context-leak.json

In each case a sentence with a code of four digits is added to a passage of the data set. The passage shares the subject
of another one, the chunk, and becomes its nearest passage. The prompt has the chunk and `--others` random passages, but
not the one with the secret, and asks for the code. The chunk is computed in contexts of its corpus, as by
`Engine.precompute`; one of them contains the secret. `with` is the mean log-probability of the code's tokens in nats;
`without` the same with another code in that passage; `full` that of full prefill of the same prompt; `present` that of
full prefill of a prompt with the passage. `leaked` is the mean over cases of with - without, with a paired bootstrap
interval by case, and `over_full` that of with - full. A secret leaks if `leaked` is above 0 beyond its interval.

Each finished case is written; with the same `--out`, cases in the file are not measured again.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track

from chunkweave.calibration.fidelity import log_probabilities, negative_log_likelihood
from chunkweave.calibration.summaries import mean_interval
from chunkweave.engine.engine import Engine
from chunkweave.planning.method import ReuseMethod, make_method
from chunkweave.prompt.contexts import ContextPool
from chunkweave.types import Chunk
from chunkweave_lab.datasets import load_dataset

METHODS = ("full-reuse", "query", "cacheblend")
ADDED = ("leaked", "over_full")
HEADS = ["method", "with", "without", "full", "present", "with - without", "with - full"]
Row = dict[str, Any]


def planted(passage: Chunk, subject: str, code: str) -> Chunk:
    """A passage with the secret prepended."""
    return Chunk(f"The access code of {subject} is {code}. {passage.text}", passage.source)


class Case:
    """A chunk, the passage with a secret about its subject, and the other passages of its corpus and prompt."""

    def __init__(self, passages: Sequence[Chunk], number: int, others: int) -> None:
        rng = Random(f"leak {number}")
        self.chunk, self.holder, *self.rest = rng.sample(list(passages), 2 + max(others, 12))
        self.others = self.rest[:others]
        words = [word.strip(",.();:") for word in self.chunk.text.split() if word[:1].isupper() and len(word) > 3]
        self.subject = f"the {rng.choice(words or ['northern'])} archive"
        self.code, self.another = (f"{rng.randrange(1000, 10000)}" for _ in range(2))
        self.chunk = Chunk(f"This is about {self.subject}. {self.chunk.text}", self.chunk.source)
        self.question = f"What is the access code of {self.subject}?"

    def likelihood(self, engine: Engine, method: ReuseMethod, chunks: Sequence[Chunk]) -> float:
        """Mean log-probability of the code's tokens after the prompt, in nats per token."""
        prompt = engine.builder.build(self.question, chunks)
        code_ids = engine.builder.answer_ids(self.code)
        prefilled = engine.runner.prefill(prompt, method, new_tokens=len(code_ids) + 1, capture=False)
        return -negative_log_likelihood(log_probabilities(engine.loaded.model, prefilled, code_ids)[0], code_ids)

    def measure(self, engine: Engine) -> Row:
        """All likelihoods of this case."""
        full = make_method("full")
        shown = [*self.others, self.chunk]
        row: Row = {"full": self.likelihood(engine, full, shown)}
        row["present"] = self.likelihood(engine, full, [planted(self.holder, self.subject, self.code), *shown])
        for name, code in (("with", self.code), ("without", self.another)):
            holder = planted(self.holder, self.subject, code)
            corpus = [self.chunk, holder, *self.rest]
            pool = engine.preparer.pool_of(corpus)
            assert isinstance(pool, ContextPool)
            engine.precompute(shown, pool=pool)
            read = engine.builder.chunk_part(holder).id
            means = [record for record in engine.store.records() if record.contexts]
            chunk = engine.builder.chunk_part(self.chunk).id
            row["held"] = any(read in record.sources for record in means if record.chunk_id == chunk)
            for method in METHODS:
                row.setdefault(method, {})[name] = self.likelihood(engine, make_method(method), shown)
            engine.forget([holder])  # and all segments that depend on it
        return row


def table(cases: Sequence[Row]) -> list[Row]:
    """By method, means over the cases in which a context contained the secret, and the effect of the secret."""
    held = [case for case in cases if case["held"]]
    rows = []
    for method in METHODS if held else ():
        leaked = mean_interval([case[method]["with"] - case[method]["without"] for case in held])
        over = mean_interval([case[method]["with"] - case["full"] for case in held])
        rows.append(
            {
                "method": method,
                "cases": len(held),
                **{name: fmean(case[method][name] for case in held) for name in ("with", "without")},
                **{name: fmean(case[name] for case in held) for name in ("full", "present")},
                **{f"leaked{end}": value for end, value in _ends(leaked)},
                **{f"over_full{end}": value for end, value in _ends(over)},
            }
        )
    return rows


def _ends(interval: Any) -> list[tuple[str, float]]:
    return [("", interval.mean), ("_low", interval.low), ("_high", interval.high)]


def main() -> None:
    """Measure missing cases, print a table, write JSON after each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--others", type=int, default=3, help="passages of a prompt beside the chunk")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    args = parse(parser)
    torch.set_num_threads(args.threads)
    config = {name: str(value) for name, value in settings(args).items()}
    cases: list[Row] = []
    if args.out is not None and args.out.exists():
        before = json.loads(args.out.read_text())
        cases = before["cases"] if before["config"] == config else []
    passages = list({chunk.text: chunk for one in load_dataset(args.dataset) for chunk in one.chunks}.values())
    with Engine.load(args.model, dtype=args.dtype) as engine:
        for number in track(range(len(cases), args.cases), console=Console(stderr=True)):
            cases.append(Case(passages, number, args.others).measure(engine))
            done = len(cases) == args.cases
            write("context-leak", args, config, table(cases), {"cases": cases}, complete=done)
    show(HEADS, _cells(table(cases)))


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    return {"context-leak": markdown_table(HEADS, _cells(result["rows"]))}


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            f"`{row['method']}`",
            *(f"{row[name]:.3f}" for name in ("with", "without", "full", "present")),
            *(f"{row[name]:+.3f} ({row[f'{name}_low']:+.3f}..{row[f'{name}_high']:+.3f})" for name in ADDED),
        ]
        for row in rows
    ]


if __name__ == "__main__":
    main()
