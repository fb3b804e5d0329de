"""Answer quality by reuse method: every contender answers the same questions over the same warm store."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chunkweave.config import ReuseConfig
from chunkweave.conversation.report import Durations
from chunkweave.engine.decode import make_report
from chunkweave.engine.engine import Engine
from chunkweave.metrics import ReuseReport
from chunkweave.planning.method import ReuseMethod
from chunkweave.prompt.parts import Prompt
from chunkweave_lab.baselines import bench_contenders
from chunkweave_lab.dataset_formats import Example
from chunkweave_lab.decoding import answer_text, decode_greedily
from chunkweave_lab.prompt_baselines import PromptBaseline, split_baselines
from chunkweave_lab.scores import best_scores
from chunkweave_lab.summaries import QualitySample
from chunkweave_lab.ttft import Progress
from chunkweave_lab.warming import Warmth, company_of, prefill_and_store

TOGETHER = 16
"""Most contenders whose caches of one question are held, and decoded, at the same time."""


@dataclass(frozen=True, slots=True)
class QualityConfig:
    """Contenders are every method at every value of its parameter: ratios, alphas or none.

    A method may carry settings after colons and a value of its own: see `eval.contenders`. Prompt baselines may be
    among the methods.
    """

    methods: tuple[str, ...] = ("full", "prefix", "full-reuse", "cacheblend", "epic", "random")
    ratios: tuple[float, ...] = (0.15,)
    alphas: tuple[float, ...] = (1.0,)
    check_layers: tuple[int, ...] = (1,)
    warm: Warmth = field(default_factory=Warmth)
    max_new_tokens: int = 24
    seed: int = 0

    def contenders(self) -> dict[str, ReuseMethod]:
        """Methods by the name of their row, `full` and `full-reuse` first: the ends of what is compared.

        Raises:
            UnknownMethodError: a method does not exist.
            UsageError: a ratio is outside [0, 1], an alpha below 0, a setting unknown, or a value for a method without.
        """
        reuse = ReuseConfig(check_layers=self.check_layers, seed=self.seed)
        methods, _ = split_baselines(self.methods, self.ratios)
        return bench_contenders(("full", "full-reuse", *methods), self.ratios, self.alphas, reuse)

    def baselines(self) -> dict[str, PromptBaseline]:
        """The prompt baselines among the methods, by the name of their row.

        Raises:
            UsageError: a value is out of range, or given to a baseline without.
        """
        return split_baselines(self.methods, self.ratios)[1]


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """One contender's answer to one question, and its report."""

    question: int
    contender: str
    text: str
    report: ReuseReport


def measure_quality(
    engine: Engine,
    examples: Sequence[Example],
    config: QualityConfig,
    progress: Progress | None = None,
    *,
    skip: Callable[[int], bool] = lambda _: False,
) -> Iterator[QualitySample]:
    """Answer every example with every contender, greedily, and score it; samples of a question come together.

    With warm `queries:N` the first N examples fill the store (prefilled in full, stored in their contexts) and the rest
    are measured; with `alone` each question's chunks are computed context-free before it. What is measured stores
    nothing, so that every contender finds the same. Measured questions that `skip` names, by their place, are left out.

    Raises:
        UnknownMethodError: a method does not exist.
        PromptTooLongError: a question's prompt does not fit the model's context.
    """
    wanted = config.contenders()
    by_question = [{} if skip(index) else wanted for index in range(len(examples) - config.warm.queries)]
    answers = answer_questions(
        engine, examples, by_question, config.warm, config.max_new_tokens, progress, baselines=config.baselines()
    )
    for answer in answers:
        example = examples[config.warm.queries + answer.question]
        scores = best_scores(answer.text, example.answers)
        yield QualitySample(answer.question, example.kind, answer.contender, answer.text, scores, answer.report)


def answer_questions(
    engine: Engine,
    examples: Sequence[Example],
    contenders: Sequence[Mapping[str, ReuseMethod]],
    warm: Warmth,
    max_new_tokens: int,
    progress: Progress | None = None,
    *,
    baselines: Mapping[str, PromptBaseline] | None = None,
) -> Iterator[GreedyAnswer]:
    """Warm the store with the first examples, then answer each of the rest with its own contenders.

    As `measure_quality`, without scores. `contenders` has one mapping a measured question; questions without any cost
    nothing. All others have the `baselines` too, behind their contenders.

    Raises:
        PromptTooLongError: a question's prompt does not fit the model's context.
    """
    earlier, measured = examples[: warm.queries], examples[warm.queries :]
    baselines = baselines or {}
    for example in earlier:
        prefill_and_store(engine, _prompt(engine, example))
        for baseline in baselines.values():
            baseline.warm(engine, _prompt(engine, example))
    for index, (example, wanted) in enumerate(zip(measured, contenders, strict=True)):
        if wanted:
            prompt = _prompt(engine, example)
            warm.prepare(engine, prompt, [_prompt(engine, other) for other in company_of(measured, index)])
            labels = list(wanted)
            for first in range(0, len(labels), TOGETHER):
                some = {label: wanted[label] for label in labels[first : first + TOGETHER]}
                yield from _answers(engine, index, prompt, some, max_new_tokens)
            for label, baseline in baselines.items():
                if not warm.queries:
                    baseline.warm(engine, prompt)
                answer = baseline.answer(engine, prompt, max_new_tokens)
                yield GreedyAnswer(index, label, answer.text, answer.report)
        if progress is not None:
            progress(index + 1, len(measured))


def _prompt(engine: Engine, example: Example) -> Prompt:
    return engine.builder.build(example.question, example.chunks)


def _answers(
    engine: Engine, index: int, prompt: Prompt, contenders: Mapping[str, ReuseMethod], max_new_tokens: int
) -> Iterator[GreedyAnswer]:
    prefilled, times = [], []
    room = min(max_new_tokens, engine.runner.room_for_new_tokens(prompt))
    for method in contenders.values():
        started = time.perf_counter()
        prefilled.append(engine.runner.prefill(prompt, method, new_tokens=room, capture=False))
        times.append(time.perf_counter() - started)
    texts = [answer_text(engine, one.token_ids) for one in decode_greedily(engine, prefilled, room)]
    geometry = engine.loaded.model.geometry
    for label, one, ttft_s, text in zip(contenders, prefilled, times, texts, strict=True):
        report = make_report(one, geometry, Durations(ttft_s, 0.0, 0.0), 0)
        yield GreedyAnswer(index, label, text, replace(report, chunks=()))
