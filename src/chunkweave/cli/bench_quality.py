"""`chunkweave bench quality`: answer quality by reuse method and recompute ratio."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.bench_run import BenchmarkRun
from chunkweave.cli.console import Output, progress
from chunkweave.cli.option_blocks import SeededModelOptions, StoreOptions, with_blocks
from chunkweave.cli.question_options import QuestionOptions
from chunkweave.cli.tables import seconds
from chunkweave.eval.datasets import Example
from chunkweave.eval.quality_table import QualityRow, ScoredSample, summarize_quality
from chunkweave.eval.results import check_writable

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.eval.deviation import Deviation
    from chunkweave.eval.quality import QualityConfig


@with_blocks
def quality(
    *,
    model: SeededModelOptions,
    methods: Annotated[
        str,
        typer.Option(
            help="Reuse methods, separated by commas; `full` and `full-reuse` are always added. Ablations follow a "
            "colon: `cachecraft:no-focus`."
        ),
    ] = "cacheblend,epic,random",
    recompute_ratio: Annotated[str, typer.Option(help="Ratios, separated by commas.")] = "0.15",
    alpha: Annotated[str, typer.Option(help="Cache-Craft's alphas, separated by commas.")] = "1",
    check_layers: options.CheckLayers = "1",
    asked: QuestionOptions,
    worlds: Annotated[
        int, typer.Option(help="How many worlds `worlds` asks about, so that passages come back; 0: ever new ones.")
    ] = 0,
    deviations: Annotated[int, typer.Option(help="Questions on which KV and attention deviation are measured.")] = 20,
    store: StoreOptions,
    plot: Annotated[Path | None, typer.Option(help="Draw F1 against recompute fraction into this PNG.")] = None,
    output: Output,
) -> None:
    """Answer quality by reuse method: the same questions, the same warm store, paired intervals."""
    if plot is not None:
        check_writable(plot)
    choice = model.choice()
    from chunkweave.eval.quality import QualityConfig
    from chunkweave.eval.ttft import Warmth

    config = QualityConfig(
        methods=options.names(methods),
        ratios=tuple(options.numbers(recompute_ratio, "--recompute-ratio")),
        alphas=tuple(options.numbers(alpha, "--alpha")),
        check_layers=options.whole_numbers(check_layers, "--check-layers"),
        warm=Warmth.parse(asked.warm),
        max_new_tokens=asked.max_new_tokens,
        seed=model.seed,
    )
    config.contenders()
    examples = asked.draw(model.seed, earlier=config.warm.queries, worlds=worlds)
    kept = store.config()
    drawn = {"dataset": asked.dataset, "chunks": asked.chunks, "worlds": worlds, "kinds": asked.kinds}
    with choice.open(store=kept) as engine:
        run = QualityRun(engine, config, {"model": choice.name, **drawn, **options.kept(kept)}, plot)
        with run.reported(output):
            run.measure(examples, deviations)


class QualityRun(BenchmarkRun[ScoredSample, QualityRow]):
    """Answers of all contenders, question by question."""

    def __init__(
        self, engine: "Engine", config: "QualityConfig", origin: dict[str, Any], plot: Path | None = None
    ) -> None:
        super().__init__("quality", engine, {**asdict(config), "warm": str(config.warm), **origin}, config.seed)
        self._measured = config
        self._plot = plot
        self._deviations: dict[str, list[Deviation]] = {}

    def measure(self, examples: Sequence[Example], deviations: int) -> None:
        """Answer every question with every contender, then measure deviations on the first `deviations` of them."""
        from chunkweave.eval.quality import measure_quality

        with progress("answering") as report:
            for sample in measure_quality(self.engine, examples, self._measured, report):
                self.samples.append(sample)
        chosen = examples[self._measured.warm.queries :][:deviations]
        with progress("measuring deviations") as report:
            for done, example in enumerate(chosen, start=1):
                self._measure_deviation(example)
                report(done, len(chosen))

    def _measure_deviation(self, example: Example) -> None:
        from chunkweave.eval.deviation import deviation_from

        prompt = self.engine.builder.build(example.question, example.chunks)
        caches = {
            label: self.engine.runner.prefill(prompt, method, capture=False)
            for label, method in self._measured.contenders().items()
        }
        for label, woven in caches.items():
            measured = deviation_from(caches["full"], woven, self.engine.loaded.model)
            self._deviations.setdefault(label, []).append(measured)

    def summarize(self) -> list[QualityRow]:
        """Contenders, the ends of the scale first."""
        return summarize_quality(self.samples)

    def more(self) -> dict[str, Any]:
        """Mean deviations from full prefill by contender."""
        from chunkweave.eval.deviation import mean_deviation

        return {"deviation": {label: mean_deviation(found) for label, found in self._deviations.items()}}

    def table(self, rows: Sequence[QualityRow], result: dict[str, Any]) -> Table:
        """Contenders with intervals."""
        return quality_table(rows, f"{result['config']['model']} on {result['config']['dataset']}")

    def draw(self, rows: Sequence[QualityRow]) -> None:
        """F1 against recompute fraction."""
        if self._plot is not None:
            from chunkweave.eval.plots import plot_quality

            plot_quality(rows, self._plot, f"{rows[0].questions} questions, warm {self._measured.warm}")


def quality_table(rows: Sequence[QualityRow], title: str) -> Table:
    """Contenders with intervals, the share of the gap closed, and what it cost."""
    caption = (
        f"{rows[0].questions} questions. Intervals: 95 % bootstrap, the difference paired by question. Gap closed: "
        "share of the way from full-reuse to full on the kinds that cross passages."
    )
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("method", no_wrap=True)
    for name in ("F1", "95 %", "EM", "minus full", "95 %", "crossing F1", "gap closed", "recomp. fraction", "TTFT"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.method,
            f"{row.f1:.3f}",
            f"{row.f1_low:.3f}..{row.f1_high:.3f}",
            f"{row.exact_match:.3f}",
            f"{row.f1_minus_full:+.3f}",
            f"{row.f1_minus_full_low:+.3f}..{row.f1_minus_full_high:+.3f}",
            "-" if row.crossing_f1 is None else f"{row.crossing_f1:.3f}",
            "-" if row.gap_closed is None else f"{row.gap_closed:.0%}",
            f"{row.recompute_fraction:.3f}",
            seconds(row.ttft_s),
        )
    return table
