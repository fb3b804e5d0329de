"""Measures answer quality by reuse method: all contenders answer the same questions over the same warm store."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from chunkweave.calibration.fidelity import answer_text, decode_greedily, measured_report
from chunkweave.calibration.prompts import Warmth, company_of, prefill_and_store
from chunkweave.calibration.questions import Example
from chunkweave.config import ReuseConfig
from chunkweave.engine.engine import Engine, Progress
from chunkweave.metrics import ReuseReport
from chunkweave.planning.method import ReuseMethod
from chunkweave.prompt.parts import Prompt
from chunkweave_lab.baselines import bench_contenders
from chunkweave_lab.prompt_baselines import PromptBaseline, split_baselines
from chunkweave_lab.summaries import QualitySample, best_scores

TOGETHER = 16
"""Maximum number of contenders whose caches of one question are held and decoded at once."""


@dataclass(frozen=True, slots=True)
class QualityConfig:
    """The contenders: every method at every value of its parameter (ratios, alphas or none).

    Methods are specifications with settings and values (see `calibration.contenders`), and may be prompt baselines.
    """

    methods: tuple[str, ...] = ("full", "prefix", "full-reuse", "cacheblend", "epic", "random")
    ratios: tuple[float, ...] = (0.15,)
    alphas: tuple[float, ...] = (1.0,)
    check_layers: tuple[int, ...] = (1,)
    warm: Warmth = field(default_factory=Warmth)
    max_new_tokens: int = 24
    seed: int = 0

    def contenders(self) -> dict[str, ReuseMethod]:
        """Methods by name of their row; `full` and `full-reuse` are first.

        Raises:
            UnknownMethodError: a method does not exist.
            UsageError: a ratio is outside [0, 1], an alpha below 0, a setting unknown, or a value given to a method
                without a parameter.
        """
        reuse = ReuseConfig(check_layers=self.check_layers, seed=self.seed)
        methods, _ = split_baselines(self.methods, self.ratios)
        return bench_contenders(("full", "full-reuse", *methods), self.ratios, self.alphas, reuse)

    def baselines(self) -> dict[str, PromptBaseline]:
        """The prompt baselines among the methods, by name of their row.

        Raises:
            UsageError: a value is out of range, or given to a baseline without a parameter.
        """
        return split_baselines(self.methods, self.ratios)[1]


def measure_quality(
    engine: Engine,
    examples: Sequence[Example],
    config: QualityConfig,
    progress: Progress | None = None,
    *,
    skip: Callable[[int], bool] = lambda _: False,
) -> Iterator[QualitySample]:
    """Answer every example greedily with every contender, and score the answers; yields a question's samples together.

    With warm `queries:N` the first N examples fill the store (prefilled in full, stored in their contexts) and the rest
    are measured; with `alone` each question's chunks are computed context-free before it. Measured runs store nothing,
    so every contender finds the same store. Questions for which `skip` is true, by index, are not measured.

    Raises:
        UnknownMethodError: a method does not exist.
        PromptTooLongError: a question's prompt does not fit into the model's context.
    """
    contenders, baselines = config.contenders(), config.baselines()
    earlier, measured = examples[: config.warm.queries], examples[config.warm.queries :]
    for example in earlier:
        prefill_and_store(engine, _prompt(engine, example))
        for baseline in baselines.values():
            baseline.warm(engine, _prompt(engine, example))
    for index, example in enumerate(measured):
        if not skip(index):
            company = [_prompt(engine, other) for other in company_of(measured, index)]
            prompt = _prompt(engine, example)
            config.warm.prepare(engine, prompt, company)
            for label, text, report in _answers(engine, prompt, contenders, baselines, config):
                scores = best_scores(text, example.answers)
                yield QualitySample(index, example.kind, label, text, scores, report)
        if progress is not None:
            progress(index + 1, len(measured))


def _prompt(engine: Engine, example: Example) -> Prompt:
    return engine.builder.build(example.question, example.chunks)


def _answers(
    engine: Engine,
    prompt: Prompt,
    contenders: Mapping[str, ReuseMethod],
    baselines: Mapping[str, PromptBaseline],
    config: QualityConfig,
) -> Iterator[tuple[str, str, ReuseReport]]:
    """Each contender's row, answer and report, decoded in groups of `TOGETHER`, then each baseline's."""
    labels = list(contenders)
    room = min(config.max_new_tokens, engine.runner.room_for_new_tokens(prompt))
    for first in range(0, len(labels), TOGETHER):
        some = labels[first : first + TOGETHER]
        prefilled, times = [], []
        for label in some:
            started = time.perf_counter()
            prefilled.append(engine.runner.prefill(prompt, contenders[label], new_tokens=room, capture=False))
            times.append(time.perf_counter() - started)
        texts = [answer_text(engine, one.token_ids) for one in decode_greedily(engine, prefilled, room)]
        for label, one, ttft_s, text in zip(some, prefilled, times, texts, strict=True):
            yield label, text, measured_report(engine, one, ttft_s)
    for label, baseline in baselines.items():
        if not config.warm.queries:
            baseline.warm(engine, prompt)
        answer = baseline.answer(engine, prompt, config.max_new_tokens)
        yield label, answer.text, answer.report
