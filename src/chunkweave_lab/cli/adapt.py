"""`chunkweave adapt`: train a model to read reused chunks, from the user's documents, without labels."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chunkweave.calibration.questions import read_text
from chunkweave.calibration.results import commit, machine, versions
from chunkweave.cli import options
from chunkweave.cli.console import Output, progress, stderr, table_of
from chunkweave.cli.options import Only, SeededModelOptions, with_blocks
from chunkweave.config import CaptureConfig, ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.models.adapters import adapter_folder
from chunkweave_lab.datasets import WORLDS, load_dataset

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave_lab.adapt.distill import Look
    from chunkweave_lab.adapt.prompts import Group

_HELD_OUT = 0.05
"""Held-out share of the documents and questions."""

_WORLD_QUESTIONS = 400
_WORLD_PASSAGES = 6


@with_blocks
def adapt(
    folder: Annotated[Path, typer.Argument(help="Folder for the adapters, and for the checkpoint to continue from.")],
    *,
    model: SeededModelOptions,
    docs: Annotated[
        list[Path] | None,
        typer.Option("--docs", help="Documents to train on: a text file or a folder of them; repeatable."),
    ] = None,
    dataset: Annotated[
        list[Path] | None,
        typer.Option(
            "--dataset",
            help="Passages with questions to train on: a file as for `bench fidelity`, or `worlds`; repeatable.",
        ),
    ] = None,
    questions_file: Annotated[
        Path | None, typer.Option(help="Questions about --docs, one per line, in addition to generated ones.")
    ] = None,
    start: Annotated[str | None, typer.Option(help="Initial adapters: a folder, or the name of bundled ones.")] = None,
    minutes: Annotated[float, typer.Option(help="Training time, including the time before a checkpoint.")] = 60.0,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    scale: Annotated[int, typer.Option(min=1, help="LoRA's alpha: adapters are scaled by alpha / rank.")] = 32,
    targets: Annotated[str, typer.Option(help="Linear modules that get adapters, separated by commas.")] = "all-linear",
    learning_rate: Annotated[float, typer.Option(help="Maximum learning rate.")] = 5e-4,
    readings: Annotated[
        str, typer.Option(help="How the student reads chunks, alternating: alone, instruction, neutral, full.")
    ] = "alone,neutral,instruction,full",
    chunks: Annotated[int, typer.Option(min=1, help="Maximum chunks per prompt.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Maximum tokens of a prompt's chunks.")] = 1024,
    questions: Annotated[int, typer.Option(min=1, help="Questions per prompt.")] = 6,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 24,
    check_minutes: Annotated[
        float, typer.Option(help="Minutes between two evaluations on the held-out documents.")
    ] = 10.0,
    patience: Annotated[int, typer.Option(min=1, help="Evaluations without improvement before training ends.")] = 4,
    recompute_activations: Annotated[
        bool, typer.Option("--recompute-activations", help="Use less memory and a third more time.")
    ] = False,
    capture: Annotated[CaptureConfig, Only("neutral_tokens")],
    output: Output,
) -> None:
    """Train a model to read reused chunks: low-rank adapters in PEFT's format, distilled from the model itself.

    A second call with the same folder continues. Needs no labels. Use the result with `--adapter FOLDER`.
    """
    if not docs and not dataset:
        raise UsageError("there is nothing to train on: give --docs or --dataset")
    if questions_file is not None and not docs:
        raise UsageError("--questions-file needs --docs, the documents that the questions are about")
    model.named()
    from chunkweave_lab.adapt.distill import AdaptConfig, Distiller
    from chunkweave_lab.adapt.prompts import PromptSizes, PromptSource, digest_of_groups, held_out
    from chunkweave_lab.adapt.reading import Passages, Reading

    known = {str(reading): reading for reading in Reading}
    if unknown := [name for name in options.names(readings) if name not in known]:
        raise UsageError(f"unknown reading {unknown[0]}; there are: {', '.join(known)}")
    sizes = PromptSizes(min(2, chunks), chunks, prompt_tokens, questions)
    config = AdaptConfig(
        minutes=minutes,
        rank=rank,
        scale=scale,
        targets=options.names(targets),
        learning_rate=learning_rate,
        readings=tuple(known[name] for name in options.names(readings)),
        sizes=sizes,
        answer_tokens=answer_tokens,
        check_minutes=check_minutes,
        patience=patience,
        recompute_activations=recompute_activations,
        seed=model.seed,
    )
    with model.with_plain_weights().open(method="full", reuse=ReuseConfig(capture=capture)) as engine:
        groups = _groups(engine, docs or [], dataset or [], questions_file, model.seed)
        learnt, kept = held_out(groups, _HELD_OUT, Random(model.seed))
        opening = engine.builder.opening()
        frame = Passages(opening, engine.preparer.preamble(opening)[len(opening) :], ())
        begin = None if start is None else adapter_folder(start)
        data = digest_of_groups(groups)
        distiller = Distiller(engine.loaded, engine.builder, frame, config, folder, data=data, start=begin)
        sources = [
            PromptSource(
                some, lambda text: len(engine.loaded.tokenizer.encode(text)), sizes, seed=f"{name} {model.seed}"
            )
            for some, name in ((learnt, "learn"), (kept, "held out"))
        ]
        stderr().print(
            f"trains for {minutes:g} minutes on {len(learnt)} documents or questions, with {len(kept)} held out; "
            f"{folder} has the best adapter so far after every {check_minutes:g} minutes",
            soft_wrap=True,
        )
        with progress(f"adapting {model.name}") as report:
            for now in distiller.train(*sources):
                report(round(min(now.elapsed_s, now.total_s)), round(now.total_s))
                if now.look is not None:
                    stderr().print(_line(now.look), soft_wrap=True)
    looks = distiller.looks
    output.show(_table(looks), f"adapters in {folder}: chunkweave ask --model {model.name} --adapter {folder} ...")
    output.finish(
        {
            "benchmark": "adapt",
            "command": options.command_line(),
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "folder": str(folder),
            "rows": [
                {
                    "step": look.step,
                    "elapsed_s": look.elapsed_s,
                    "loss": look.loss,
                    "reading": reading,
                    "kl": one.kl,
                    "agreement": one.agreement,
                }
                for look in looks
                for reading, one in look.held_out.items()
            ],
        }
    )


def _groups(
    engine: "Engine", docs: Sequence[Path], datasets: Sequence[Path], questions_file: Path | None, seed: int
) -> "list[Group]":
    """All training data, split into chunks."""
    from chunkweave_lab.adapt.prompts import Group, groups_of_documents, groups_of_examples

    tokenizer, rng = engine.loaded.tokenizer, Random(seed)
    groups: list[Group] = []
    if docs:
        cut = options.DocumentOptions()
        groups += groups_of_documents(cut.read(docs), tokenizer, rng)
    if questions_file is not None:
        asked = [line.strip() for line in read_text(questions_file, "list of questions").splitlines() if line.strip()]
        every = tuple(chunk for group in groups for chunk in group.chunks)
        groups += [Group(tuple(rng.sample(every, min(len(every), 8))), (question,)) for question in asked]
    for path in datasets:
        if path == Path(WORLDS) and not path.exists():
            from chunkweave_lab.worlds.records import Split
            from chunkweave_lab.worlds.world import world_examples

            examples = world_examples(_WORLD_QUESTIONS, _WORLD_PASSAGES, seed=seed, split=Split.TRAIN)
        else:
            examples = load_dataset(path, seed=seed)
        groups += groups_of_examples(examples, tokenizer, rng)
    return groups


def _line(look: "Look") -> str:
    """One line of progress."""
    learnt = "" if look.loss is None else f", loss {look.loss:.4f}"
    found = ", ".join(f"{reading} {one.kl:.4f} ({one.agreement:.1%})" for reading, one in look.held_out.items())
    return f"step {look.step}, {look.elapsed_s / 60:.0f} minutes{learnt}; held out, KL and top-1: {found}"


def _table(looks: "Sequence[Look]") -> Table:
    """The first and the best evaluation, by reading."""
    first, best = looks[0], min(looks, key=lambda look: look.kl)
    return table_of(
        list(first.held_out),
        ("chunks read", str),
        ("KL before", lambda reading: f"{first.held_out[reading].kl:.4f}"),
        ("KL after", lambda reading: f"{best.held_out[reading].kl:.4f}"),
        ("top-1 before", lambda reading: f"{first.held_out[reading].agreement:.1%}"),
        ("top-1 after", lambda reading: f"{best.held_out[reading].agreement:.1%}"),
        title=f"distance from the model's full prefill on held-out documents ({best.step} steps)",
    )
