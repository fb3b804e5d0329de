"""`chunkweave bench fidelity`: how close reuse methods come to full prefill of the same model, without labels."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chunkweave.calibration.results import QuestionLog
from chunkweave.calibration.summaries import FidelityRow, FidelitySample, summarize_fidelity
from chunkweave.cli import options
from chunkweave.cli.calibrate import PromptOptions, computed_behind, measured_with, samples_of
from chunkweave.cli.console import Output, check_writable, counted, progress, seconds, stderr, table_of
from chunkweave.cli.options import Only, SeededModelOptions, ValueOptions, with_blocks
from chunkweave.config import CaptureConfig, PluginConfig, ReuseConfig, StoreConfig, Weights
from chunkweave.errors import UsageError
from chunkweave_lab.baselines import BENCH_METHODS
from chunkweave_lab.cli.bench import BenchmarkRun, Html, check_pictures
from chunkweave_lab.plots import Picture, deviations_figure, fidelity_figure
from chunkweave_lab.summaries import PROMPT_BASELINES

if TYPE_CHECKING:
    from chunkweave.calibration.fidelity import Task
    from chunkweave.engine.engine import Engine
    from chunkweave_lab.deviation import PromptDeviation
    from chunkweave_lab.fidelity import Base, FidelityConfig


class Reference(StrEnum):
    """The model whose full prefill is the reference."""

    OWN = "own"
    BASE = "base"


@with_blocks
def fidelity(
    *,
    model: SeededModelOptions,
    _plugins: PluginConfig,  # its files bring methods
    methods: Annotated[
        str,
        typer.Option(
            help="Reuse methods, separated by commas; `full`, `full-reuse` and a noise floor are added. Settings "
            f"follow a colon, a value an @: `query:two-rounds@0.05`. There are: {BENCH_METHODS.listed}; and "
            f"baselines with another prompt: {', '.join(PROMPT_BASELINES)}."
        ),
    ] = "prefix,epic,cacheblend,query",
    recompute_fraction: Annotated[
        str,
        typer.Option(
            help="Shares of the reused tokens x layers to recompute, separated by commas: each method gets the ratio "
            "or alpha for that share, including dense first layers. Replaces --recompute-ratio and --alpha."
        ),
    ] = "",
    values: ValueOptions,
    asked: PromptOptions,
    warm: Annotated[
        str,
        typer.Option(
            help=f"{options.HOW_WARM} With several, separated by commas, the methods run again over each further one, "
            "in separate rows (`query neutral@5%`)."
        ),
    ] = "alone",
    reference: Annotated[
        Reference,
        typer.Option(
            help="The reference full prefill: the model's own or, with --adapter or --weights int8, that of the base, "
            "the model without them (rows `of base`)."
        ),
    ] = Reference.OWN,
    new_tokens: options.NewTokens = 16,
    free: Annotated[
        int, typer.Option(min=0, help="Questions that every contender also answers freely, for F1 and ROUGE-L.")
    ] = 40,
    deviations: Annotated[
        int,
        typer.Option(
            min=0,
            help="Questions on which KV and attention deviation are measured by layer (CacheBlend's Figures 6 to 8).",
        ),
    ] = 0,
    samples: options.Samples = None,
    store: Annotated[StoreConfig, Only("host_budget", "cache_dir", "codec")],
    capture: Annotated[CaptureConfig, Only("neutral_tokens", "context_count", "context_tokens")],
    plot: Annotated[Path | None, typer.Option(help="Draw divergence against speed-up into this PNG.")] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--plot-deviations", help="Draw the results of --deviations into this PNG.", show_default=False),
    ] = None,
    html: Html = None,
    output: Output,
) -> None:
    """Compare reuse methods with full prefill: closeness and speed, on your model and documents, without labels."""
    check_pictures(html, plot, figures)
    if samples is not None:
        check_writable(samples)
    if figures is not None and not deviations:
        raise UsageError("--plot-deviations needs --deviations, the number of questions to measure them on")
    if reference is Reference.BASE and (not model.is_changed or deviations):
        raise UsageError("--reference base is for a model with --adapter or --weights int8, not with --deviations")
    model.named()
    from chunkweave.calibration.fidelity import make_tasks, warm_by_earlier
    from chunkweave_lab.contexts import ContextWarmth
    from chunkweave_lab.fidelity import Base, FidelityConfig, judges_of

    first, *also_warm = map(ContextWarmth.parse, options.names(warm) or ("",))
    config = FidelityConfig(
        methods=options.names(methods),
        ratios=values.ratios,
        alphas=values.alphas,
        reuse=ReuseConfig(check_layers=values.layers, seed=model.seed),
        fractions=tuple(options.numbers(recompute_fraction, "--recompute-fraction")) if recompute_fraction else (),
        warm=first,
        also_warm=tuple(also_warm),
        chunks=asked.chunks,
        chunk_tokens=asked.cut_tokens,
        by_retrieval=asked.by_retrieval,
        new_tokens=new_tokens,
        free=free,
    )
    with ExitStack() as opened:
        engines = [
            opened.enter_context(one.open(store=store, reuse=ReuseConfig(capture=capture)))
            for one in (model, *([model.base()] if reference is Reference.BASE else []))
        ]
        engine = engines[0]
        every, drawn = asked.examples(engine, model.seed, config.warm.queries)
        asked_by = [make_tasks(one, every, drawn, config, asked.instruction) for one in engines]
        measured, *others = (tasks[config.warm.queries :] for tasks in asked_by)
        base = Base(engines[1], others[0]) if others else None
        origin = {"model": model.name, "dataset": asked.about, "questions": asked.questions, **asked.asked_as}
        origin |= options.kept(store)
        if Weights(model.model.weights).rounds:
            origin["weights"] = str(model.model.weights)
        if model.is_changed:
            origin["fingerprint"] = engine.loaded.fingerprint
        if base is not None:
            origin["reference"] = model.base().name
        ways: dict[str, Any] = {"warm": str(config.warm), "also_warm": [*map(str, config.also_warm)]}
        whole = {**asdict(config), **ways, **computed_behind((first, *also_warm), capture), **origin}
        del whole["reuse"]["capture"]  # measured runs store nothing
        log = QuestionLog(samples, {**whole, "seed": model.seed, **measured_with(engine, drawn)})
        if len(log):
            stderr().print(f"continuing: {counted(len(log), 'question')} measured before")
        strayed: list[PromptDeviation] = []
        found: list[Mapping[str, FidelitySample]] = [samples_of(line) for line in log.of("contenders")]
        run = BenchmarkRun(
            "fidelity",
            engine,
            whole,
            model.seed,
            summarize=lambda: summarize_fidelity(found, log.found, **judges_of(base is not None)),
            table=lambda rows, shown: fidelity_table(rows, shown),
            more=lambda: _more(log, strayed),
            draw=lambda rows: _pictures(rows, strayed, plot, figures, _title(whole), every=html is not None),
            html=html,
        )
        with run.reported(output, found):
            with progress("warming") as report:
                for one, tasks in zip(engines, asked_by, strict=True):
                    warm_by_earlier(one, tasks[: config.warm.queries], report)
            _measure(engine, measured, config, log, found, store, base)
            _measure_deviations(engine, measured, config, log, deviations, strayed)


def _measure(
    engine: "Engine",
    tasks: "Sequence[Task]",
    config: "FidelityConfig",
    log: QuestionLog,
    found: list[Mapping[str, FidelitySample]],
    store: StoreConfig,
    base: "Base | None",
) -> None:
    from chunkweave_lab.fidelity import fitted_values, measure_fidelity

    if log.found is None:
        with progress("fitting recompute fractions") as report:
            log.begin(fitted_values(engine, tasks, config, report))
    open_questions = [index for index in range(len(tasks)) if index not in log]
    contenders = config.contenders(log.found or {})
    what = f"measuring {counted(len(open_questions), 'question')} with {counted(len(contenders), 'method')}, prefills"
    with progress(what) as report:
        measured = measure_fidelity(
            engine, tasks, contenders, config, base=base, skip=log.__contains__, store=store, progress=report
        )
        for index, samples in zip(open_questions, measured, strict=True):
            found.append(samples)
            log.add(index, {"contenders": {label: one.as_dict() for label, one in samples.items()}})


def _measure_deviations(
    engine: "Engine",
    tasks: "Sequence[Task]",
    config: "FidelityConfig",
    log: QuestionLog,
    count: int,
    strayed: "list[PromptDeviation]",
) -> None:
    from chunkweave_lab.deviation import measure_deviations

    contenders, prompts = config.contenders(log.found or {}), [task.prompt for task in tasks]
    seed = config.reuse.seed
    with progress("measuring deviations") as report:
        for one in measure_deviations(
            engine, prompts, contenders, config.warm, count=count, recomputing=True, seed=seed, progress=report
        ):
            strayed.append(one)


def _more(log: QuestionLog, strayed: "Sequence[PromptDeviation]") -> dict[str, Any]:
    from chunkweave_lab.deviation import summarize_deviations

    return {"commits": sorted({commit for commit in log.of("commit") if commit}), **summarize_deviations(strayed)}


def _pictures(
    rows: Sequence[FidelityRow],
    strayed: "Sequence[PromptDeviation]",
    plot: Path | None,
    figures: Path | None,
    title: str,
    *,
    every: bool,
) -> list[Picture]:
    """The pictures with an output file; with `every`, all that can be drawn."""
    from chunkweave_lab.deviation import summarize_deviations

    drawn = []
    if every or plot is not None:
        about = "Divergence from full prefill against speed-up to the first token; lower right is better."
        drawn.append(Picture(fidelity_figure(rows, title), about, plot))
    found = summarize_deviations(strayed)
    if (every or figures is not None) and "figures" in found:
        drawn.append(
            Picture(deviations_figure(found, rows, title), "CacheBlend's Figures 6 to 8, of this model.", figures)
        )
    return drawn


def _title(config: Mapping[str, Any]) -> str:
    size = f"{config['chunk_tokens']} tokens" if config["chunk_tokens"] else "whole passages"
    against = f" against {config['reference']}" if "reference" in config else ""
    over = f"{config['chunks']} x {size}, chunks computed: {config['warm']}"
    return f"{config['model']}{against} on {config['dataset']}: {over}"


def fidelity_table(rows: Sequence[FidelityRow], config: Mapping[str, Any]) -> Table:
    """The contenders' closeness to full prefill, speed-up and recomputation."""
    most = max((row.questions for row in rows), default=0)
    tokens = next((row.prompt_tokens for row in rows if row.prompt_tokens is not None), 0.0)
    caption = (
        f"{most} questions, {tokens:.0f} tokens a prompt, {config['device']}, {config['dtype']}, threads: "
        f"{config['threads']}. KL: D(full || method) in nats over its own {config['new_tokens']} tokens, mean "
        "(95 % bootstrap by question) and 90th percentile; left: share of full reuse's KL.\nTop-1: both have the same "
        "most likely token. Same: greedy answers equal to full prefill's. NLL: of the first right answer, nats "
        "per token, minus full prefill's. ROUGE-L: against the right answers; as full: against full prefill's.\n"
        "Speed-up: median of full / method; limit: the same if time were FLOPs."
    )
    if "reference" in config:
        caption += f"\nThe reference rows are full prefill and full reuse of {config['reference']} (`of base`)."
    return table_of(
        rows,
        ("method", lambda row: row.method),
        ("KL", lambda row: _number(row.kl, ".4f")),
        ("95 %", lambda row: _between(row.kl_low, row.kl_high, ".4f")),
        ("p90", lambda row: _number(row.kl_p90, ".3f")),
        ("left", lambda row: _number(row.kl_of_full_reuse, ".0%")),
        ("top-1", lambda row: _number(row.agreement, ".1%")),
        ("same", lambda row: _number(row.identical, ".0%")),
        ("NLL", lambda row: _number(row.answer_nll_minus_full, "+.3f")),
        ("95 %", lambda row: _between(row.answer_nll_minus_full_low, row.answer_nll_minus_full_high, "+.3f")),
        ("F1", lambda row: _number(row.f1, ".3f")),
        ("ROUGE-L", lambda row: _number(row.rouge_l, ".3f")),
        ("as full", lambda row: _number(row.rouge_l_of_full, ".2f")),
        ("TTFT", lambda row: "-" if row.ttft_s is None else seconds(row.ttft_s)),
        ("speed-up", lambda row: "-" if row.speedup is None else f"{row.speedup:.2f}x"),
        ("limit", lambda row: "-" if row.flops_limit is None else f"{row.flops_limit:.2f}x"),
        ("recomp.", lambda row: _number(row.recompute_fraction, ".1%")),
        title=_title(config),
        caption=caption,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _between(low: float | None, high: float | None, form: str) -> str:
    return "-" if low is None or high is None else f"{format(low, form)}..{format(high, form)}"
