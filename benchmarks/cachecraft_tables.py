"""What Cache-Craft's answers are worth for what it recomputes: the tables of docs/cachecraft.md.

    python benchmarks/cachecraft_tables.py --warm alone --questions 400 --out cachecraft-alone.json
    python benchmarks/cachecraft_tables.py --warm queries:300 --worlds 20 --questions 400 --out cachecraft-queries.json

Held-out questions over chunks that were computed alone, or over a store that earlier questions about the same
`--worlds` filled, so that chunks come back in contexts. Three tables:

- quality: F1 by what was recomputed, for each method at values of its own parameter (the paper's Figure 20);
- ablation: what overlap, CCI, focus and its readings contribute at alpha 1 (Figure 26);
- equal budget: baselines whose ratio is set so that they recompute the same fraction as `cachecraft`, by a straight
  line through the fractions measured before (it is one, but for rounding up), F1 differences paired by question.

And with chunks alone one of FLOPs at an equal share of tokens, counted from what every layer did (`LayerWork`).

Every answer is kept beside `--out` as it comes; the same command goes on where it was interrupted. `--update-docs` puts
the tables into docs/cachecraft.md, those of either kind of store by themselves.
"""

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from docs_tables import markdown_table, update_page
from rich.console import Console

from chunkweave.cli.console import progress
from chunkweave.config import ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.errors import UsageError
from chunkweave.eval.datasets import Example, alone_prompts, digest_of
from chunkweave.eval.quality import QualityConfig, answer_questions
from chunkweave.eval.results import (
    BenchmarkResult,
    check_writable,
    commit,
    versions,
    write_json,
)
from chunkweave.eval.scores import best_scores, mean_interval
from chunkweave.eval.summaries import NOT_WORSE, summarize_quality
from chunkweave.eval.warming import Warmth
from chunkweave.eval.worlds.world import world_examples
from chunkweave.planning.method import ReuseMethod, make_method
from chunkweave.planning.outcome import full_prefill_flops, prefill_flops
from chunkweave.planning.plan import KVSource

logger = logging.getLogger(__name__)

EXACT_OR_BLIND = ("full", "full-reuse", "prefix", "set-cache")
BASELINES = ("cacheblend", "cacheblend:layer-2", "epic", "h2o", "random", "query")
ABLATIONS = {
    "cachecraft@1": "as it is",
    "cachecraft:no-overlap@1": "without overlap (beta)",
    "cachecraft:no-cci@1": "without CCI, tokens drawn at random",
    "cachecraft:no-focus@1": "without focus",
    "cachecraft:no-overlap:no-focus@1": "without overlap and focus",
    "cachecraft:printed@1": "focus as Algorithm 1 is printed",
    "cachecraft:coverage@1": "overlap times coverage",
}
MAX_NEW_TOKENS = 24
FLOPS_QUESTIONS = 20


@dataclass(frozen=True, slots=True)
class Kept:
    """One contender on one question, as far as the tables need it; `found_share` is that of tokens from the store."""

    f1: float
    recompute_fraction: float
    exact_match: float
    rouge_l: float
    jaccard: float
    flops_limit: float
    ttft_s: float
    found_share: float


class Measurements:
    """Results by question and contender, in memory and, line by line, in a file.

    The file's first line has the settings; each further one a result. What was measured under other settings is not
    taken over, nor is a last line that was cut off while it was written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Take over what `path` holds for these `settings`; nothing is written before a first result."""
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        self._found: dict[tuple[int, str], Kept] = {}
        self._lines = 0
        self._read()

    def __contains__(self, key: tuple[int, str]) -> bool:
        return key in self._found

    def of(self, contender: str) -> list[Kept]:
        """One contender's results in the order of the questions."""
        return [self._found[key] for key in sorted(key for key in self._found if key[1] == contender)]

    def add(self, question: int, contender: str, measured: Kept) -> None:
        """Keep a result, on disk before this returns to the caller's next question.

        Raises:
            UsageError: the file cannot be written.
        """
        lines = [] if self._lines else [json.dumps({"settings": self._settings})]
        lines.append(json.dumps({"question": question, "contender": contender, **asdict(measured)}))
        try:
            with self.path.open("a" if self._lines else "w", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._found[question, contender] = measured
        self._lines += len(lines)

    def discard(self) -> None:
        """Remove the file: the result has what it held."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return
        whole, _, cut_off = text.rpartition("\n")
        try:
            first, *rest = [json.loads(line) for line in whole.split("\n")]
            if first["settings"] != self._settings:
                logger.warning("%s was measured under other settings; it is replaced", self.path)
                return
            for line in rest:
                key = line.pop("question"), line.pop("contender")
                self._found[key] = Kept(**line)
        except (ValueError, KeyError, TypeError):
            logger.warning("%s is damaged; it is replaced", self.path)
            self._found.clear()
            return
        self._lines = 1 + len(rest)
        if cut_off:
            self.path.write_text(whole + "\n", encoding="utf-8")


class Run:
    """All questions, the store that they are asked over, and what was measured so far."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace) -> None:
        self.warm = warm = arguments.warm
        worlds = arguments.worlds if warm.queries else 0
        count = arguments.questions + warm.queries
        self.examples = world_examples(count, arguments.chunks, seed=arguments.seed, worlds=worlds)
        self._engine = engine
        settings = {
            "fingerprint": engine.loaded.fingerprint,
            "examples": digest_of(self.examples),
            "warm": str(warm),
            "max_new_tokens": MAX_NEW_TOKENS,
            "versions": versions(),
            "commit": commit(),
        }
        self.measurements = Measurements(arguments.out.with_suffix(".partial.jsonl"), settings)

    @property
    def measured(self) -> Sequence[Example]:
        """The questions that are asked of every contender."""
        return self.examples[self.warm.queries :]

    def measure(self, contenders: Mapping[str, ReuseMethod], title: str) -> None:
        """Answer every question with every contender, where that was not done before."""
        missing = [
            {name: method for name, method in contenders.items() if (question, name) not in self.measurements}
            for question in range(len(self.measured))
        ]
        if not any(missing):
            return
        with progress(f"{self.warm}: {title}") as report:
            answers = answer_questions(self._engine, self.examples, missing, self.warm, MAX_NEW_TOKENS, report)
            for answer in answers:
                found = answer.report
                scores = best_scores(answer.text, self.measured[answer.question].answers)
                kept = Kept(
                    recompute_fraction=found.recompute_fraction,
                    flops_limit=found.flops_limit,
                    ttft_s=found.ttft_s,
                    found_share=1.0 - found.computed_tokens / found.prompt_tokens,
                    **scores,
                )
                self.measurements.add(answer.question, answer.contender, kept)

    def fraction(self, contender: str) -> float:
        """Mean recomputed fraction of a contender that was measured."""
        return fmean(kept.recompute_fraction for kept in self.measurements.of(contender))

    def rows(self, contenders: Sequence[str]) -> list[dict[str, Any]]:
        """The rows of `bench quality` for some contenders, `full` and `full-reuse` among them."""
        samples = [
            SimpleNamespace(question=question, kind=example.kind, contender=name, scores=asdict(kept), report=kept)
            for name in contenders
            for question, (example, kept) in enumerate(zip(self.measured, self.measurements.of(name), strict=True))
        ]
        return [row.as_dict() for row in summarize_quality(samples)]

    def difference(self, one: str, other: str) -> dict[str, Any]:
        """F1 of one contender minus another's on the same questions, with its bootstrap interval."""
        pairs = zip(self.measurements.of(one), self.measurements.of(other), strict=True)
        found = mean_interval([mine.f1 - theirs.f1 for mine, theirs in pairs])
        return {"f1_difference": found.mean, "low": found.low, "high": found.high, "not_worse": found.low > NOT_WORSE}


def tables_of(
    run: Run, alphas: Sequence[float], ratios: Sequence[float], equal_at: Sequence[float], seed: int
) -> dict[str, Any]:
    """Measure what the three tables need, and make them."""
    alphas = tuple(sorted({*alphas, *equal_at}))
    main = QualityConfig(("cachecraft", *EXACT_OR_BLIND, *BASELINES), tuple(ratios), alphas, seed=seed)
    ablation = QualityConfig(tuple(name.partition("@")[0] for name in ABLATIONS), alphas=(1.0,), seed=seed)
    contenders = main.contenders()
    run.measure(contenders | ablation.contenders(), "quality and ablation")
    names = list(contenders)
    pairs: list[tuple[str, str]] = []
    matched: dict[str, ReuseMethod] = {}
    for craft in (f"cachecraft@{alpha:g}" for alpha in equal_at):
        for baseline in BASELINES:
            ratio = ratio_for(run.fraction(craft), [(r, run.fraction(f"{baseline}@{r:g}")) for r in ratios])
            if ratio is not None:
                other = f"{baseline}@{ratio:g}"
                matched[other] = QualityConfig((baseline,), (ratio,), seed=seed).contenders()[other]
                pairs.append((craft, other))
    run.measure(matched, "equal budgets")
    equal = []
    for craft, other in pairs:
        row = {"cachecraft": craft, "recompute_fraction": run.fraction(craft), "baseline": other}
        equal.append({**row, "baseline_fraction": run.fraction(other), **run.difference(craft, other)})
    return {
        "warm": str(run.warm),
        "questions": len(run.measured),
        "found_share": fmean(kept.found_share for kept in run.measurements.of("full-reuse")),
        "quality": run.rows(names),
        "ablation": [row for row in run.rows(["full", "full-reuse", *ABLATIONS]) if row["method"] in ABLATIONS],
        "equal_budget": equal,
    }


def ratio_for(fraction: float, points: Sequence[tuple[float, float]]) -> float | None:
    """The ratio at which a baseline recomputes `fraction`, given some (ratio, fraction); None if even 0 does more.

    >>> ratio_for(0.25, [(0.1, 0.2), (0.3, 0.3)])
    0.2
    """
    (first, low), (second, high) = min(points), max(points)
    ratio = first + (fraction - low) * (second - first) / (high - low)
    return round(min(ratio, 1.0), 4) if ratio > 0.0 else None


def flops_rows(engine: Engine, examples: Sequence[Example], alphas: Sequence[float]) -> list[dict[str, Any]]:
    """Full prefill's FLOPs over each contender's, at tokens that are as many for all; mean over questions.

    `cacheblend` gets, prompt by prompt, the ratio at which it goes on with as many tokens as `cachecraft` starts with.
    """
    geometry = engine.loaded.model.geometry
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for example in examples:
        prompt = engine.builder.build(example.question, example.chunks)
        for part in alone_prompts(prompt):
            engine.runner.store_new(engine.runner.prefill(part, make_method("full"), profiles=True))
        full = full_prefill_flops(geometry, len(prompt))
        for alpha in alphas:
            lookup = engine.store.lookup(prompt)
            plan = make_method("cachecraft", ReuseConfig(alpha=alpha)).plan(lookup, geometry)
            share = plan.passes[0].candidate_tokens / plan.tokens(KVSource.REUSED)
            methods = {
                "cachecraft": make_method("cachecraft", ReuseConfig(alpha=alpha)),
                "cachecraft, no focus": make_method("cachecraft", ReuseConfig(alpha=alpha, focus=False)),
                "cacheblend": make_method("cacheblend", ReuseConfig(recompute_ratio=share)),
                "cacheblend, layer 2": make_method("cacheblend", ReuseConfig(recompute_ratio=share, check_layers=(2,))),
            }
            for name, method in methods.items():
                work = engine.runner.prefill(prompt, method, capture=False).work
                found.setdefault((name, alpha), []).append((share, prefill_flops(geometry, list(work)) / full))
    return [
        {"alpha": alpha, "contender": name, "tokens": fmean(s for s, _ in pairs), "of_full": fmean(f for _, f in pairs)}
        for (name, alpha), pairs in found.items()
    ]


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation."""
    heading = (
        f"{result['questions']} questions, `--warm {result['warm']}`, {result['found_share']:.0%} of tokens stored"
    )
    quality = ("method", "F1", "95 %", "minus `full`", "95 %", "gap closed", "recompute fraction", "FLOPs limit")
    equal = ("`cachecraft`", "recompute fraction", "baseline", "its fraction", "F1 difference", "95 %", "not below")
    made = {
        "quality": f"{heading}:\n\n" + markdown_table(quality, [_quality_row(row) for row in result["quality"]]),
        "ablation": markdown_table(("", *quality[1:]), [_ablation_row(row) for row in result["ablation"]]),
        "equal": markdown_table(equal, [_equal_row(row) for row in result["equal_budget"]]),
    }
    if "flops" in result:
        head = ("alpha", "method", "tokens recomputed", "FLOPs of `full`")
        made["flops"] = markdown_table(head, [_flops_row(row) for row in result["flops"]])
    return made


def _quality_row(row: Mapping[str, Any]) -> list[str]:
    gap = "-" if row["gap_closed"] is None else f"{row['gap_closed']:.0%}"
    return [
        f"`{row['method']}`",
        f"{row['f1']:.3f}",
        f"{row['f1_low']:.3f}..{row['f1_high']:.3f}",
        f"{row['f1_minus_full']:+.3f}",
        f"{row['f1_minus_full_low']:+.3f}..{row['f1_minus_full_high']:+.3f}",
        gap,
        f"{row['recompute_fraction']:.3f}",
        f"{row['flops_limit']:.2f}x",
    ]


def _ablation_row(row: Mapping[str, Any]) -> list[str]:
    return [ABLATIONS[row["method"]], *_quality_row(row)[1:]]


def _equal_row(row: Mapping[str, Any]) -> list[str]:
    return [
        f"`{row['cachecraft']}`",
        f"{row['recompute_fraction']:.3f}",
        f"`{row['baseline']}`",
        f"{row['baseline_fraction']:.3f}",
        f"{row['f1_difference']:+.3f}",
        f"{row['low']:+.3f}..{row['high']:+.3f}",
        "yes" if row["not_worse"] else "**no**",
    ]


def _flops_row(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['alpha']:g}", f"`{row['contender']}`", f"{row['tokens']:.0%}", f"{row['of_full']:.1%}"]


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default="reader")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--warm", type=Warmth.parse, default=Warmth(), help="`alone`, or `queries:N`")
    parser.add_argument("--worlds", type=int, default=20, help="of which the questions are, with `queries:N`")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--alpha", type=numbers, default=(0.5, 1.0, 2.0, 3.0), help="for example 0.5,1")
    parser.add_argument("--recompute-ratio", type=numbers, default=(0.15, 0.3), help="two or more")
    parser.add_argument("--equal-at", type=numbers, default=(0.5, 1.0), help="alphas whose budget the baselines get")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--update-docs", nargs="?", type=Path, const=Path("docs/cachecraft.md"), metavar="FILE")
    return parser.parse_args()


def main() -> None:
    """Measure, print the tables, write JSON, and put the tables into the document if asked to."""
    arguments = parse()
    check_writable(arguments.out)
    with Engine.load(arguments.model) as engine:
        run = Run(engine, arguments)
        result = tables_of(run, arguments.alpha, arguments.recompute_ratio, arguments.equal_at, arguments.seed)
    if not arguments.warm.queries:
        with Engine.load(arguments.model) as engine:
            result["flops"] = flops_rows(engine, run.measured[:FLOPS_QUESTIONS], arguments.alpha)
    config = {name: str(value) for name, value in vars(arguments).items()}
    command = shlex.join(["python", *sys.argv])
    written = BenchmarkResult("cachecraft-tables", command, arguments.seed, config, [], result)
    write_json(arguments.out, written.as_dict())
    for name, table in tables(result).items():
        Console().print(f"[bold]{name}[/bold]\n\n{table}\n", soft_wrap=True, highlight=False)
    if arguments.update_docs is not None:
        update_page(arguments.update_docs, arguments.out)
    run.measurements.discard()


if __name__ == "__main__":
    main()
