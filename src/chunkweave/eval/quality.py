"""Answer quality by reuse method: every contender answers the same questions over the same warm store."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from chunkweave.chunking.prompt import Prompt
from chunkweave.config import ReuseConfig
from chunkweave.engine.answer import Durations, make_report
from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled
from chunkweave.eval.datasets import Example
from chunkweave.eval.prompts import alone_prompts
from chunkweave.eval.scores import best_scores
from chunkweave.eval.ttft import Progress, Warmth
from chunkweave.metrics import ReuseReport
from chunkweave.planning.method import ReuseMethod, make_method

RATIO_FREE = ("full", "prefix", "full-reuse")
"""Methods that take no ratio: one row each, whatever ratios are asked for."""


@dataclass(frozen=True, slots=True)
class QualityConfig:
    """Contenders are every method at every ratio (`RATIO_FREE` methods once)."""

    methods: tuple[str, ...] = ("full", "prefix", "full-reuse", "cacheblend", "epic", "random")
    ratios: tuple[float, ...] = (0.15,)
    check_layers: tuple[int, ...] = (1,)
    warm: Warmth = field(default_factory=Warmth)
    max_new_tokens: int = 24
    seed: int = 0

    def contenders(self) -> dict[str, ReuseMethod]:
        """Methods by the name of their row, `full` and `full-reuse` first: the ends of what is compared.

        Raises:
            UnknownMethodError: a method does not exist.
            UsageError: a ratio is outside [0, 1].
        """
        made: dict[str, ReuseMethod] = {}
        for name in dict.fromkeys(("full", "full-reuse", *self.methods)):
            for ratio in self.ratios[:1] if name in RATIO_FREE else self.ratios:
                label = name if name in RATIO_FREE else f"{name}@{ratio:g}"
                made[label] = make_method(name, ReuseConfig(ratio, self.check_layers, self.seed))
        return made


@dataclass(frozen=True, slots=True)
class QualitySample:
    """One contender's answer to one question, its scores, and its report."""

    question: int
    kind: str
    contender: str
    text: str
    scores: dict[str, float]
    report: ReuseReport


def measure_quality(
    engine: Engine, examples: Sequence[Example], config: QualityConfig, progress: Progress | None = None
) -> Iterator[QualitySample]:
    """Answer every example with every contender, greedily; samples of a question come together.

    With warm `queries:N` the first N examples fill the store (prefilled in full, stored in their contexts) and the rest
    are measured; with `alone` each question's chunks are computed context-free before it. What is measured stores
    nothing, so that every contender finds the same.

    Raises:
        UnknownMethodError: a method does not exist.
        PromptTooLongError: a question's prompt does not fit the model's context.
    """
    contenders = config.contenders()
    earlier, measured = examples[: config.warm.queries], examples[config.warm.queries :]
    full = make_method("full")
    for example in earlier:
        engine.runner.store_new(engine.runner.prefill(_prompt(engine, example), full))
    for index, example in enumerate(measured):
        prompt = _prompt(engine, example)
        if not config.warm.queries:
            _warm_chunks(engine, prompt, full)
        yield from _answers(engine, index, example, prompt, contenders, config.max_new_tokens)
        if progress is not None:
            progress(index + 1, len(measured))


def _prompt(engine: Engine, example: Example) -> Prompt:
    return engine.builder.build(example.question, example.chunks)


def _warm_chunks(engine: Engine, prompt: Prompt, full: ReuseMethod) -> None:
    for part in alone_prompts(prompt):
        if not any(record.alone for record in engine.store.lookup(part).parts[-1].variants):
            engine.runner.store_new(engine.runner.prefill(part, full))


def _answers(
    engine: Engine,
    index: int,
    example: Example,
    prompt: Prompt,
    contenders: dict[str, ReuseMethod],
    max_new_tokens: int,
) -> Iterator[QualitySample]:
    prefilled, times = [], []
    room = min(max_new_tokens, engine.runner.room_for_new_tokens(prompt))
    for method in contenders.values():
        started = time.perf_counter()
        prefilled.append(engine.runner.prefill(prompt, method, new_tokens=room, capture=False))
        times.append(time.perf_counter() - started)
    texts = greedy_answers(engine, prefilled, room)
    geometry = engine.loaded.model.geometry
    for label, one, ttft_s, text in zip(contenders, prefilled, times, texts, strict=True):
        report = make_report(one, geometry, Durations(ttft_s, 0.0, 0.0), 0)
        scores = best_scores(text, example.answers)
        yield QualitySample(index, example.kind, label, text, scores, replace(report, chunks=()))


def greedy_answers(engine: Engine, prefilled: Sequence[Prefilled], max_new_tokens: int) -> list[str]:
    """Decode several prefilled prompts together, greedily, each until a stop token; the texts without it."""
    stop_ids = engine.loaded.tokenizer.stop_ids
    answers: list[list[int]] = [[] for _ in prefilled]
    active = list(range(len(prefilled)))
    logits = torch.stack([one.logits for one in prefilled])
    for _ in range(max_new_tokens):
        tokens = logits.argmax(-1).tolist()
        active = [i for i, token in zip(active, tokens, strict=True) if not _ended(answers[i], token, stop_ids)]
        if not active or len(answers[active[0]]) == max_new_tokens:
            break
        logits = engine.runner.decode(
            [prefilled[i].cache for i in active],
            [answers[i][-1] for i in active],
            [len(prefilled[i].prompt) + len(answers[i]) - 1 for i in active],
        )
    return [engine.loaded.tokenizer.decode(answer).strip() for answer in answers]


def _ended(answer: list[int], token: int, stop_ids: frozenset[int]) -> bool:
    if token in stop_ids:
        return True
    answer.append(token)
    return False
