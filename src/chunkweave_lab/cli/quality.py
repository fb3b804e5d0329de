"""`chunkweave bench quality`: quality of answers by reuse method and recompute ratio."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chunkweave.calibration.questions import Example
from chunkweave.calibration.results import QuestionLog
from chunkweave.cli import options
from chunkweave.cli.calibrate import measured_with
from chunkweave.cli.console import Output, check_writable, counted, progress, seconds, stderr, table_of
from chunkweave.cli.options import SeededModelOptions, ValueOptions, with_blocks
from chunkweave.config import PluginConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave_lab.baselines import BENCH_METHODS
from chunkweave_lab.cli.bench import BenchmarkRun, Html, check_pictures
from chunkweave_lab.datasets import WORLDS, generated_examples, load_dataset, refuse_unknown
from chunkweave_lab.plots import Picture, quality_figure
from chunkweave_lab.summaries import PROMPT_BASELINES, QualityRow, QualitySample, summarize_quality

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave_lab.deviation import PromptDeviation
    from chunkweave_lab.quality import QualityConfig


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """Which questions with answers are asked, and the maximum length of their answers."""

    dataset: Annotated[
        str, typer.Option(help="`worlds` (generated, held out), or a MuSiQue, SQuAD 1.1 or JSONL file.")
    ] = WORLDS
    questions: Annotated[int, typer.Option(min=1, help="Number of measured questions.")] = 200
    chunks: Annotated[int, typer.Option(min=1, help="Passages per question, with `worlds`.")] = 6
    kinds: Annotated[str, typer.Option(help="Kinds of question, separated by commas; all if empty.")] = ""
    warm: options.Warm = "alone"
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 24

    def draw(self, seed: int, *, earlier: int = 0, worlds: int = 0) -> list[Example]:
        """The questions, and `earlier` ones that warm the store, drawn with `seed`.

        Questions of the generated data set are about `worlds` worlds; 0: always new ones.

        Raises:
            DocumentError: the file cannot be read as a data set.
            UsageError: it has too few questions with answers, or a kind is unknown.
        """
        count, kinds = self.questions + earlier, options.names(self.kinds)
        if self.dataset == WORLDS:
            return generated_examples(count, self.chunks, seed=seed, kinds=kinds, worlds=worlds)
        examples = load_dataset(Path(self.dataset), seed=seed)
        refuse_unknown(kinds, {example.kind for example in examples})
        scored = [one for one in examples if one.answers and (not kinds or one.kind in kinds)]
        if len(scored) < count:
            raise UsageError(f"{self.dataset} has {len(scored)} fitting questions with answers, but {count} are needed")
        return Random(seed).sample(scored, count)


@with_blocks
def quality(
    *,
    model: SeededModelOptions,
    _plugins: PluginConfig,  # its files bring methods
    methods: Annotated[
        str,
        typer.Option(
            help="Reuse methods, separated by commas; `full` and `full-reuse` are always added. Ablations follow a "
            "colon: `cachecraft:no-focus`; the value of a single method an @: `cacheblend@0.3`. "
            f"There are: {BENCH_METHODS.listed}. Baselines that change the prompt: "
            f"{', '.join(PROMPT_BASELINES)}; `compress@0.5` keeps that share of every chunk's tokens."
        ),
    ] = "cacheblend,epic,random",
    values: ValueOptions,
    asked: QuestionOptions,
    worlds: Annotated[
        int, typer.Option(help="Number of worlds in `worlds`, so that passages recur; 0: always new ones.")
    ] = 0,
    deviations: Annotated[int, typer.Option(help="Questions on which KV and attention deviation are measured.")] = 20,
    samples: options.Samples = None,
    store: StoreConfig,
    plot: Annotated[Path | None, typer.Option(help="Draw F1 against recompute fraction into this PNG.")] = None,
    html: Html = None,
    output: Output,
) -> None:
    """Measure answer quality by reuse method: the same questions, the same warm store, paired intervals."""
    check_pictures(html, plot)
    if samples is not None:
        check_writable(samples)
    model.named()
    from chunkweave.calibration.prompts import Warmth
    from chunkweave_lab.quality import QualityConfig

    config = QualityConfig(
        methods=options.names(methods),
        ratios=values.ratios,
        alphas=values.alphas,
        check_layers=values.layers,
        warm=Warmth.parse(asked.warm),
        max_new_tokens=asked.max_new_tokens,
        seed=model.seed,
    )
    config.contenders()
    config.baselines()
    examples = asked.draw(model.seed, earlier=config.warm.queries, worlds=worlds)
    drawn = {"dataset": asked.dataset, "chunks": asked.chunks, "worlds": worlds, "kinds": asked.kinds}
    with model.open(store=store) as engine:
        from chunkweave_lab.deviation import summarize_deviations

        whole = {**asdict(config), "warm": str(config.warm), "model": model.name, **drawn, **options.kept(store)}
        log = QuestionLog(samples, {**whole, "questions": asked.questions, **measured_with(engine, examples)})
        if len(log):
            stderr().print(f"continuing: {counted(len(log), 'question')} measured before")
        elif log.found is None:
            log.begin({})
        found = [QualitySample.from_dict(one) for line in log.of("contenders") for one in line]
        strayed: list[PromptDeviation] = []
        title = f"{model.name} on {asked.dataset}"
        run = BenchmarkRun(
            "quality",
            engine,
            whole,
            config.seed,
            summarize=lambda: summarize_quality(found),
            table=lambda rows, _: _quality_table(rows, title),
            more=lambda: summarize_deviations(strayed),
            draw=lambda rows: [] if plot is html is None else [_picture(rows, plot, config)],
            html=html,
        )
        with run.reported(output, found):
            _measure_quality(engine, config, examples, log, found)
            _measure_deviations(engine, config, examples[config.warm.queries :], deviations, strayed)


def _measure_quality(
    engine: "Engine",
    config: "QualityConfig",
    examples: Sequence[Example],
    log: QuestionLog,
    found: list[QualitySample],
) -> None:
    from chunkweave_lab.quality import measure_quality

    what = f"answering {counted(len(examples) - config.warm.queries - len(log), 'question')}"
    with progress(f"{what} with {counted(len(config.contenders()) + len(config.baselines()), 'method')}") as report:
        measured = measure_quality(engine, examples, config, report, skip=log.__contains__)
        for question, samples in groupby(measured, lambda sample: sample.question):
            own = list(samples)
            found.extend(own)
            log.add(question, {"contenders": [sample.as_dict() for sample in own]})


def _measure_deviations(
    engine: "Engine",
    config: "QualityConfig",
    examples: Sequence[Example],
    count: int,
    strayed: "list[PromptDeviation]",
) -> None:
    from chunkweave_lab.deviation import measure_deviations

    prompts = [engine.builder.build(example.question, example.chunks) for example in examples]
    with progress("measuring deviations") as report:
        for one in measure_deviations(engine, prompts, config.contenders(), config.warm, count=count, progress=report):
            strayed.append(one)


def _picture(rows: Sequence[QualityRow], plot: Path | None, config: "QualityConfig") -> Picture:
    figure = quality_figure(rows, f"{rows[0].questions} questions, warm {config.warm}")
    return Picture(figure, "F1 against the recomputed share, with 95 % intervals.", plot)


def _quality_table(rows: Sequence[QualityRow], title: str) -> Table:
    """The contenders' scores with intervals, the share of the gap closed, and the cost."""
    caption = (
        f"{rows[0].questions} questions. Intervals: 95 % bootstrap, the difference paired by question. Gap closed: "
        "share of the way from full-reuse to full on the kinds that cross passages. As full: ROUGE-L against full "
        "prefill's own answers."
    )
    return table_of(
        rows,
        ("method", lambda row: row.method),
        ("F1", lambda row: f"{row.f1:.3f}"),
        ("95 %", lambda row: f"{row.f1_low:.3f}..{row.f1_high:.3f}"),
        ("EM", lambda row: f"{row.exact_match:.3f}"),
        ("as full", lambda row: f"{row.rouge_l_of_full:.3f}"),
        ("minus full", lambda row: f"{row.f1_minus_full:+.3f}"),
        ("95 %", lambda row: f"{row.f1_minus_full_low:+.3f}..{row.f1_minus_full_high:+.3f}"),
        ("crossing F1", lambda row: "-" if row.crossing_f1 is None else f"{row.crossing_f1:.3f}"),
        ("gap closed", lambda row: "-" if row.gap_closed is None else f"{row.gap_closed:.0%}"),
        ("recomp. fraction", lambda row: "-" if row.recompute_fraction is None else f"{row.recompute_fraction:.3f}"),
        ("TTFT", lambda row: seconds(row.ttft_s)),
        title=title,
        caption=caption,
    )
