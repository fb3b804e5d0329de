"""Measures time to first token by reuse method, in one run with alternating contenders over one warm store."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import torch

from chunkweave.calibration.fidelity import REFERENCE, measured_report, woven_prefill
from chunkweave.calibration.prompts import PromptMaker, Warmth, company_of, prefill_and_store
from chunkweave.calibration.questions import Example
from chunkweave.config import DEFAULT_RECOMPUTE_RATIO, ReuseConfig
from chunkweave.engine.engine import Engine, Progress
from chunkweave.engine.runner import Prefilled
from chunkweave.errors import UsageError
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method import ReuseMethod
from chunkweave.prompt.parts import Prompt
from chunkweave_lab.baselines import bench_contenders
from chunkweave_lab.summaries import TtftSample

HF_REFERENCE = "hf-forward"
"""The row of the Hugging Face forward on the same ids: shows that `full` is a fair reference."""


@dataclass(frozen=True, slots=True)
class TtftConfig:
    """The settings of a measurement: contenders, size of prompts, way of warming, number of questions.

    `methods` are specifications (`calibration.contenders`), at every value of their parameter unless they name one.
    """

    methods: tuple[str, ...] = ("prefix", "full-reuse", "cacheblend")
    ratios: tuple[float, ...] = (DEFAULT_RECOMPUTE_RATIO,)
    alphas: tuple[float, ...] = (1.0,)
    check_layers: tuple[int, ...] = (1,)
    chunks: int = 6
    chunk_tokens: int = 512
    warm: Warmth = field(default_factory=Warmth)
    questions: int = 10
    seed: int = 0
    hf_reference: bool = True

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise UsageError(f"questions must be at least 1, not {self.questions}")

    def contenders(self) -> dict[str, ReuseMethod | None]:
        """The methods by name of their rows, references first; the Hugging Face forward is None.

        Raises:
            UnknownMethodError: a method does not exist.
            UsageError: a value or setting that a method does not have.
        """
        reuse = ReuseConfig(check_layers=self.check_layers, seed=self.seed)
        methods = bench_contenders((REFERENCE, *self.methods), self.ratios, self.alphas, reuse)
        hugging_face = {HF_REFERENCE: None} if self.hf_reference else {}
        return {REFERENCE: methods[REFERENCE], **hugging_face, **methods}


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that warm the store and prompts that are measured."""

    earlier: tuple[Prompt, ...]
    measured: tuple[Prompt, ...]


Contender = Callable[[Prompt], Prefilled | None]
"""Prefills a prompt up to its first token and waits for it; returns the prefill for a report, if any."""


def hugging_face_forward(model: HuggingFaceModel) -> Contender:
    """The model's own forward on the whole prompt, as in `generate`."""

    @torch.inference_mode()
    def first_token(prompt: Prompt) -> None:
        ids = torch.tensor([prompt.token_ids], device=model.device)
        model.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()

    return first_token


def make_workload(examples: Sequence[Example], engine: Engine, config: TtftConfig) -> Workload:
    """Draw the questions with the config's seed and build their prompts for the engine's tokenizer.

    Raises:
        UsageError: the data set has too few questions or too little text.
        PromptTooLongError: a prompt does not fit the model's context.
    """
    needed = config.warm.queries + config.questions
    if len(examples) < needed:
        raise UsageError(f"the data set has {len(examples)} questions, but {needed} are asked for")
    drawn = Random(config.seed).sample(list(examples), needed)
    maker = PromptMaker(
        examples,
        engine.builder,
        engine.loaded.fingerprint,
        chunks=config.chunks,
        chunk_tokens=config.chunk_tokens,
    )
    prompts = tuple(maker.prompt(example) for example in drawn)
    for prompt in prompts:
        engine.runner.room_for_new_tokens(prompt)
    return Workload(prompts[: config.warm.queries], prompts[config.warm.queries :])


def measure(
    engine: Engine,
    workload: Workload,
    config: TtftConfig,
    progress: Progress | None = None,
) -> Iterator[TtftSample]:
    """Warm the store, run every contender once uncounted, then yield samples question by question.

    Contenders alternate within each question and take turns in running first. A question's samples are yielded
    together, so stopping early keeps whole questions. Unless earlier requests warm the store, a question's chunks are
    warmed just before it is measured: a budget for one prompt is then enough, and all contenders find the same chunks.

    Raises:
        UnknownMethodError: a method of the config does not exist.
        UsageError: a value or setting that a method does not have.
    """
    contenders = first_tokens(engine, config)
    names = list(contenders)
    total, finished = len(workload.earlier) + len(names) * (1 + len(workload.measured)), count(1)

    def step() -> None:
        if progress is not None:
            progress(next(finished), total)

    for prompt in workload.earlier:
        prefill_and_store(engine, prompt)
        step()
    for index, prompt in enumerate(workload.measured):
        config.warm.prepare(engine, prompt, company_of(workload.measured, index))
        if index == 0:
            for name in names:
                contenders[name](prompt)
                step()
        samples = []
        for turn in range(len(names)):
            name = names[(index + turn) % len(names)]
            samples.append(_sample(engine, index, name, contenders[name], prompt))
            step()
        yield from samples


def first_tokens(engine: Engine, config: TtftConfig) -> dict[str, Contender]:
    """All contenders by name of their rows."""
    return {
        name: hugging_face_forward(engine.loaded.model) if method is None else woven_prefill(engine.runner, method)
        for name, method in config.contenders().items()
    }


def _sample(engine: Engine, index: int, name: str, contender: Contender, prompt: Prompt) -> TtftSample:
    started = time.perf_counter()
    prefilled = contender(prompt)
    ttft_s = time.perf_counter() - started
    if prefilled is None:
        return TtftSample(index, name, ttft_s, None)
    return TtftSample(index, name, ttft_s, measured_report(engine, prefilled, ttft_s))
