"""`chunkweave study`: `bench fidelity` at equal work, over chunks computed in several ways, against a base model."""

from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from typing import Annotated, Any

import typer

from chunkweave.calibration.fidelity import Task, make_tasks, warm_by_earlier
from chunkweave.calibration.results import QuestionLog
from chunkweave.calibration.summaries import summarize_fidelity
from chunkweave.cli import options
from chunkweave.cli.bench import Benchmark, Free, Kept, fidelity_table, settings_of
from chunkweave.cli.calibrate import PromptOptions, computed_behind, measured_with
from chunkweave.cli.console import Output, check_writable, counted, progress
from chunkweave.cli.options import SeededModelOptions, ValueOptions, with_blocks
from chunkweave.config import PluginConfig, ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.errors import UsageError
from chunkweave_lab.baselines import BENCH_METHODS
from chunkweave_lab.contexts import ContextWarmth
from chunkweave_lab.fidelity import Base, FidelityConfig, fitted_values, judges_of, measure_fidelity


class Reference(StrEnum):
    """The model whose full prefill is the reference."""

    OWN = "own"
    BASE = "base"


@with_blocks
def study(
    *,
    model: SeededModelOptions,
    _plugins: PluginConfig,  # its files bring methods
    methods: Annotated[
        str,
        typer.Option(
            help="As `bench fidelity` takes them, and the papers' baselines and ablations (`cachecraft:no-cci`). "
            f"There are: {BENCH_METHODS.listed}."
        ),
    ] = "cacheblend,query",
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
            help=f"{options.HOW_WARM} Also `nearest:N`, `random:N` and `mixed:N`, the mean over N such contexts. With "
            "several, separated by commas, the methods run again over each further one (`query neutral@5%`)."
        ),
    ] = "alone",
    reference: Annotated[
        Reference,
        typer.Option(
            help="The reference full prefill: the model's own or, with --adapter or rounded --weights, that of the "
            "model without them (rows `of base`)."
        ),
    ] = Reference.OWN,
    new_tokens: options.NewTokens = 16,
    free: Free = 40,
    samples: options.Samples = None,
    store: Kept,
    output: Output,
) -> None:
    """Compare reuse methods with full prefill, at equal work and over chunks computed in several ways."""
    if samples is not None:
        check_writable(samples)
    if reference is Reference.BASE and not model.is_changed:
        raise UsageError("--reference base is for a model with --adapter or rounded --weights")
    model.named()
    first, *also_warm = map(ContextWarmth.parse, options.names(warm) or ("",))
    config = FidelityConfig(
        methods=options.names(methods),
        ratios=values.ratios,
        alphas=values.alphas,
        reuse=ReuseConfig(seed=model.seed),
        fractions=tuple(options.numbers(recompute_fraction, "--recompute-fraction")) if recompute_fraction else (),
        warm=first,
        also_warm=tuple(also_warm),
        chunks=asked.chunks,
        chunk_tokens=asked.cut_tokens,
        by_retrieval=asked.by_retrieval,
        new_tokens=new_tokens,
        free=free,
    )
    settings: dict[str, Any] = settings_of(config, model, asked, store)
    settings |= computed_behind((first, *also_warm))
    settings["also_warm"] = [str(way) for way in also_warm]
    with ExitStack() as opened:
        models = [model, model.base()] if reference is Reference.BASE else [model]
        engines = [opened.enter_context(one.open(store=store)) for one in models]
        engine = engines[0]
        every, drawn = asked.examples(engine, model.seed, first.queries)
        tasks = [make_tasks(one, every, drawn, config, asked.instruction) for one in engines]
        measured, *of_base = (own[first.queries :] for own in tasks)
        base = Base(engines[1], of_base[0]) if of_base else None
        if base is not None:
            settings |= {"reference": model.base().name, "fingerprint": engine.loaded.fingerprint}
        log = QuestionLog(samples, {**settings, "seed": model.seed, **measured_with(engine, drawn)})
        with progress("warming") as report:
            for one, own in zip(engines, tasks, strict=True):
                warm_by_earlier(one, own[: first.queries], report)
        _fit(engine, measured, config, log)
        contenders = config.contenders(log.found)
        benchmark = Benchmark(
            "fidelity",
            engine,
            settings,
            model.seed,
            log,
            fidelity_table,
            lambda questions: summarize_fidelity(questions, log.found, **judges_of(base is not None)),
        )
        with progress(f"measuring {counted(len(measured), 'question')}, prefills") as report:
            samples_by_question = measure_fidelity(
                engine, measured, contenders, config, base=base, skip=log.__contains__, store=store, progress=report
            )
            benchmark.run(samples_by_question, len(measured), output)


def _fit(engine: Engine, tasks: Sequence[Task], config: FidelityConfig, log: QuestionLog) -> None:
    """Find the parameter values for the recompute fractions, unless the log has them."""
    if log.found is None:
        with progress("fitting recompute fractions") as report:
            log.begin(fitted_values(engine, tasks, config, report))
