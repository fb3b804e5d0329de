"""Effect of chunk order on answers: the given order against random ones (CRAFT Figure 5).

    python benchmarks/random_orders.py --model reader --questions 100 --orders 20 --out random-orders-reader.json

Every prompt is prefilled in full in the order of the data set and in random ones. Of each: how likely the first right
answer is (nats a token), F1 of the answer that is decoded freely, and its ROUGE-L against the answer in the given
order. CRAFT uses BERTScore, which needs another model.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import Any

import torch

from chunkweave.calibration.fidelity import (
    Task,
    answer_text,
    decode_greedily,
    log_probabilities,
    make_tasks,
    negative_log_likelihood,
)
from chunkweave.calibration.results import BenchmarkResult
from chunkweave.calibration.summaries import f1, mean_interval, rouge_l
from chunkweave.cli.calibrate import PromptOptions
from chunkweave.cli.console import check_writable, progress, write_json
from chunkweave.engine.engine import Engine
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave_lab.fidelity import FidelityConfig

MEASURES = ("nll", "f1", "rouge_l")
"""Of the first right answer, of the free answer, and of that against the answer in the given order."""


def shuffled(prompt: Prompt, rng: Random) -> Prompt:
    """The prompt with its chunks in another order, drawn; everything else stays in its place."""
    chunks = [part for part in prompt.parts if part.kind is PartKind.CHUNK]
    drawn = iter(rng.sample(chunks, len(chunks)))
    return Prompt(tuple(next(drawn) if part.kind is PartKind.CHUNK else part for part in prompt.parts))


def answered(engine: Engine, task: Task, prompt: Prompt, new_tokens: int) -> tuple[float, str]:
    """Negative log-likelihood of the first right answer after a prompt, and the free answer."""
    full = engine.runner.prefill(prompt, make_method("full"), new_tokens=new_tokens, capture=False)
    nll = negative_log_likelihood(log_probabilities(engine.loaded.model, full, task.answer_ids)[0], task.answer_ids)
    return nll, answer_text(engine, decode_greedily(engine, [full], new_tokens)[0].token_ids)


def question(engine: Engine, task: Task, orders: int, new_tokens: int, rng: Random) -> list[dict[str, float]]:
    """All measures in the given order, then in random ones."""
    prompts = [task.prompt, *(shuffled(task.prompt, rng) for _ in range(orders))]
    found = [answered(engine, task, prompt, new_tokens) for prompt in prompts]
    return [
        {"nll": nll, "f1": max(f1(text, answer) for answer in task.answers), "rouge_l": rouge_l(text, found[0][1])}
        for nll, text in found
    ]


def rows_of(questions: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """One row per measure: the given order, the mean of random ones, their difference by question, and their spread."""
    rows = []
    for name in MEASURES:
        given = [orders[0][name] for orders in questions]
        drawn = [[one[name] for one in orders[1:]] for orders in questions]
        apart = mean_interval([fmean(own) - one for own, one in zip(drawn, given, strict=True)])
        row = {"measure": name, "given": fmean(given), "random": fmean(map(fmean, drawn))}
        row |= {"random_minus_given": apart.mean, "low": apart.low, "high": apart.high}
        rows.append(row | {"deviation_within_a_question": fmean(map(pstdev, drawn))})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print rows, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", type=Path, default=Path("worlds"))
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--orders", type=int, default=20, help="random ones of each question")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.out is not None:
        check_writable(arguments.out)
    torch.set_num_threads(arguments.threads)
    asked = PromptOptions(dataset=arguments.dataset, questions=arguments.questions, chunks=arguments.chunks)
    config = FidelityConfig(methods=(), chunks=arguments.chunks, new_tokens=arguments.new_tokens)
    with Engine.load(arguments.model) as engine, progress("measuring") as report:
        every, drawn = asked.examples(engine, arguments.seed, 0)
        found = []
        for number, task in enumerate(make_tasks(engine, every, drawn, config), start=1):
            rng = Random(f"{arguments.seed}:{number}")
            found.append(question(engine, task, arguments.orders, arguments.new_tokens, rng))
            report(number, len(drawn))
    rows = rows_of(found)
    for row in rows:
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    if arguments.out is not None:
        settings = {name: str(value) for name, value in vars(arguments).items() if name != "out"}
        settings["dataset"] = arguments.dataset.name
        command = shlex.join(["python", *(sys.argv if argv is None else ["benchmarks/random_orders.py", *argv])])
        result = BenchmarkResult("random-orders", command, arguments.seed, settings, rows, {})
        write_json(arguments.out, result.as_dict())


if __name__ == "__main__":
    main()
