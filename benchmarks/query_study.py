"""Which tokens to recompute: answers by method, ratio, kind of question, number and order of passages.

    python benchmarks/query_study.py --model reader --questions 4000 --folder study --out query-study.json \
        --plots docs/results --update-docs docs/query.md
    python benchmarks/query_study.py --study variants --model reader --questions 400 --folder study \
        --out query-variants.json --update-docs docs/query.md

`methods` compares `query` with the others on worlds that the reader never saw; `variants` compares kinds of evidence,
on the worlds of the training split and another seed, and is where the defaults of `query` come from. Every answer is
kept in `--folder` as soon as it is there: the same command goes on where it was interrupted, and more `--questions`
add to those that were asked. Prompts and scoring are those of `chunkweave bench quality`.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from docs_tables import update_page
from query_study_answers import Answers
from query_study_report import StudyReport, summarize_study
from query_study_report import tables as tables  # docs_tables looks for it here
from rich.console import Console

from chunkweave.cli.console import progress
from chunkweave.config import ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.eval.datasets import Example
from chunkweave.eval.quality import QualityConfig, answer_questions
from chunkweave.eval.results import BenchmarkResult, check_writable, commit, write_json
from chunkweave.eval.scores import best_scores
from chunkweave.eval.warming import Warmth
from chunkweave.eval.worlds.records import Request, Split
from chunkweave.eval.worlds.world import world_requests
from chunkweave.planning.method import ReuseMethod, make_method

RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
ALPHAS = (0.05, 0.12, 0.24, 0.36, 0.5, 0.75, 1.0, 2.0)
METHODS = ("query", "query:third", "cacheblend", "cachecraft", "epic", "h2o", "random")
VARIANTS = (
    "query",
    "query:two-rounds",
    "query:first-token",
    "query:mixed",
    "query:measured",
    "query:head-sum",
    "query:layer-max",
    "query:late",
    "query:third",
    "query:third:head-sum",
    "query:layers=1",
    "query:tail=4",
    "query:whole",
    "query:whole:token-max",
    "query:whole:head-sum",
    "query:whole:head-sum:measured",
)
IN_USE = ("query", "query:stored", "query:mixed", "query:measured", "query:two-rounds", "cachecraft")
WORLDS = 20
MAX_NEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of prompt: how many passages, in which order, and how the store was warmed."""

    name: str
    passages: int = 6
    order: str = "drawn"
    warm: str = "alone"
    worlds: int = 0


STUDIES: dict[str, tuple[Setting, ...]] = {
    "methods": (
        Setting("6 passages"),
        Setting("3 passages", passages=3),
        Setting("12 passages", passages=12),
        Setting("6 passages, needed ones first", order="first"),
        Setting("6 passages, needed ones last", order="last"),
    ),
    "variants": (Setting("6 passages"), Setting("6 passages, a store in use", warm="queries:60", worlds=WORLDS)),
}


def contenders_of(
    study: str, setting: Setting, ratios: tuple[float, ...], only: Sequence[str] = ()
) -> dict[str, ReuseMethod]:
    """Every method (of `only`, if given) at every value of its parameter, by row; full prefill and full reuse first."""
    if only:
        return QualityConfig(tuple(only), ratios=ratios, alphas=ALPHAS).contenders()
    methods = METHODS if study == "methods" else IN_USE if setting.worlds else VARIANTS
    made = QualityConfig(methods, ratios=ratios, alphas=ALPHAS).contenders()
    if study == "methods":
        for ratio in ratios:  # where the check layer is one whose KV depends on other passages in this reader
            config = ReuseConfig(recompute_ratio=ratio, check_layers=(2,))
            made[f"cacheblend:layer-2@{ratio:g}"] = make_method("cacheblend", config)
    return made


def examples_of(setting: Setting, count: int, split: Split, seed: int) -> list[Example]:
    """`count` questions beyond those that warm the store."""
    total = count + Warmth.parse(setting.warm).queries
    requests = world_requests(total, setting.passages, seed=seed, split=split, worlds=setting.worlds)
    return [as_example(request, setting.order) for request in requests]


def as_example(request: Request, order: str) -> Example:
    """The request with the passages that the answer takes where `order` says: as drawn, first or last."""
    places = sorted(range(len(request.chunks)), key=lambda place: (place in request.needed) == (order == "last"))
    chunks = request.chunks if order == "drawn" else tuple(request.chunks[place] for place in places)
    return Example(request.question, chunks, request.answers, str(request.kind))


def measure(
    engine: Engine, setting: Setting, examples: Sequence[Example], contenders: Mapping[str, ReuseMethod], kept: Answers
) -> None:
    """Ask every question of every contender that has not answered it yet."""
    warm = Warmth.parse(setting.warm)
    measured = examples[warm.queries :]
    missing = [
        {label: method for label, method in contenders.items() if (setting.name, number, label) not in kept.found}
        for number in range(len(measured))
    ]
    if not any(missing):
        return
    with progress(setting.name) as report:
        for answer in answer_questions(engine, examples, missing, warm, MAX_NEW_TOKENS, report):
            example = measured[answer.question]
            line = {
                "setting": setting.name,
                "question": answer.question,
                "kind": example.kind,
                "contender": answer.contender,
                "f1": best_scores(answer.text, example.answers)["f1"],
                "fraction": answer.report.recompute_fraction,
                "text": answer.text,
            }
            kept.add(line)


def main() -> None:
    """Measure, print tables, write JSON, plots and the page's tables."""
    arguments = parse_arguments()
    for path in (arguments.out, arguments.update_docs):
        if path is not None:
            check_writable(path)
    variants = arguments.study == "variants"
    split, seed = (Split.TRAIN, arguments.seed + 1) if variants else (Split.TEST, arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    complete = True
    with Engine.load(arguments.model, dtype=arguments.dtype) as engine:
        origin = {"study": arguments.study, "model": engine.loaded.fingerprint, "seed": seed, "commit": commit()}
        kept = Answers(arguments.folder / f"query-{arguments.study}.jsonl", origin)
        settings = [s for s in STUDIES[arguments.study] if not arguments.settings or s.name in arguments.settings]
        try:
            for setting in settings:
                examples = examples_of(setting, arguments.questions, split, seed)
                contenders = contenders_of(arguments.study, setting, tuple(arguments.ratios), arguments.methods)
                measure(engine, setting, examples, contenders, kept)
        except KeyboardInterrupt:
            complete = False
            print("interrupted: the same command goes on from here; the result covers what was answered")
    report = summarize_study(list(kept.found.values()))
    show(report)
    config = {name: str(value) for name, value in vars(arguments).items()} | {"split": str(split), "seed": seed}
    more = {"settings": [asdict(setting) for setting in settings], **report.as_dict()}
    rows = more.pop("rows")
    command = shlex.join(["python", *sys.argv])
    result = BenchmarkResult(f"query-{arguments.study}", command, seed, config, rows, more, complete).as_dict()
    if arguments.out is not None:
        write_json(arguments.out, result)
    if arguments.plots is not None:
        from query_study_plots import plot_study

        plot_study(report, arguments.plots, arguments.study)
    if arguments.update_docs is not None:
        update_page(arguments.update_docs, arguments.out)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", choices=sorted(STUDIES), default="methods")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--questions", type=int, default=400, help="of each setting")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--methods", nargs="+", default=(), help="only these, with their settings after colons")
    parser.add_argument("--settings", nargs="+", help="only these, by their names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="where answers are kept while it runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plots", type=Path, help="folder for PNG files")
    parser.add_argument("--update-docs", type=Path, help="page whose tables are written anew")
    return parser.parse_args()


def show(report: StudyReport) -> None:
    """The tables, for people."""
    for title, table in report.tables():
        Console(width=150).print(f"{title}\n\n{table}\n", highlight=False)


if __name__ == "__main__":
    main()
