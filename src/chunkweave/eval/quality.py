"""Answer quality by reuse method: every contender answers the same questions over the same warm store."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from chunkweave.chunking.prompt import Prompt
from chunkweave.config import ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.engine.request import Durations, make_report
from chunkweave.engine.runner import Prefilled
from chunkweave.errors import UsageError
from chunkweave.eval.contenders import make_contenders
from chunkweave.eval.datasets import Example
from chunkweave.eval.decoding import answer_text, decode_greedily
from chunkweave.eval.prompt_baselines import PromptBaseline, split_baselines
from chunkweave.eval.scores import best_scores
from chunkweave.eval.summaries import QualitySample
from chunkweave.eval.ttft import Progress, Warmth, prefill_and_store
from chunkweave.kv.request_cache import RequestCache
from chunkweave.metrics import ReuseReport
from chunkweave.models.base import LayerwiseModel
from chunkweave.planning.method import ReuseMethod

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
        return make_contenders(("full", "full-reuse", *methods), self.ratios, self.alphas, reuse)

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
    engine: Engine, examples: Sequence[Example], config: QualityConfig, progress: Progress | None = None
) -> Iterator[QualitySample]:
    """Answer every example with every contender, greedily, and score it; samples of a question come together.

    With warm `queries:N` the first N examples fill the store (prefilled in full, stored in their contexts) and the rest
    are measured; with `alone` each question's chunks are computed context-free before it. What is measured stores
    nothing, so that every contender finds the same.

    Raises:
        UnknownMethodError: a method does not exist.
        PromptTooLongError: a question's prompt does not fit the model's context.
    """
    by_question = [config.contenders()] * (len(examples) - config.warm.queries)
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
            others = [measured[(index + step) % len(measured)] for step in (1, 2)] if warm.in_company else []
            warm.prepare(engine, prompt, [_prompt(engine, other) for other in others])
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


@dataclass(frozen=True, slots=True)
class Deviation:
    """One contender against full prefill on one prompt; every list has one entry a layer.

    `kv` is the mean over the prompt's tokens of the L2 norm of the difference of (K, V); `attention` the L2 norm of
    the difference of the attention that the question's tokens pay to all tokens, over heads, queries and keys, by the
    square root of heads x queries (at most sqrt 2). `rank_correlation` has Spearman's correlation between the tokens'
    KV deviations of each layer and the next (from layer 1 on: layer 0 has none), None where nothing deviates.
    """

    kv: tuple[float, ...]
    attention: tuple[float, ...]
    rank_correlation: tuple[float | None, ...]


def deviation_from(full: Prefilled, woven: Prefilled, model: LayerwiseModel) -> Deviation:
    """Compare two caches of the same prompt.

    Raises:
        UsageError: the prompts differ, or have no question.
    """
    if full.prompt.token_ids != woven.prompt.token_ids or full.prompt.parts[-1].id is not None:
        raise UsageError("a deviation is measured between two caches of one prompt that ends in a question")
    tokens = len(full.prompt)
    layers = range(model.geometry.num_layers)
    by_token = [_kv_deviation(full.cache, woven.cache, layer, tokens) for layer in layers]
    attention = [
        (one - two).pow(2).sum().sqrt().item() / (one.shape[0] * one.shape[1]) ** 0.5
        for one, two in zip(question_attention(full, model), question_attention(woven, model), strict=True)
    ]
    return Deviation(
        kv=tuple(deviation.mean().item() for deviation in by_token),
        attention=tuple(attention),
        rank_correlation=tuple(_spearman(a, b) for a, b in pairwise(by_token[1:])),
    )


@torch.inference_mode()
def question_attention(prefilled: Prefilled, model: LayerwiseModel) -> list[torch.Tensor]:
    """Attention weights of the question's tokens over a finished cache, `[heads, queries, keys]` a layer, float32."""
    tokens, device = len(prefilled.prompt), prefilled.logits.device
    positions = torch.arange(prefilled.prompt.spans()[-1].start, tokens, device=device)
    hidden = model.embed(torch.tensor(prefilled.prompt.parts[-1].token_ids, device=device))
    future = torch.arange(tokens, device=device) > positions[:, None]
    weights = []
    for layer in range(model.geometry.num_layers):
        q, _, _ = model.qkv(layer, hidden)
        keys, values = prefilled.cache.view(layer, tokens)
        group = q.shape[1] // keys.shape[1]
        k, v = (states.float().repeat_interleave(group, dim=1).transpose(0, 1) for states in (keys, values))
        scores = model.rotate(q, positions).float().transpose(0, 1) @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        paid = scores.masked_fill(future, -torch.inf).softmax(-1)
        weights.append(paid)
        attended = (paid @ v).transpose(0, 1).reshape(len(positions), -1)
        hidden = model.finish(layer, hidden, attended.to(hidden.dtype))
    return weights


def mean_deviation(several: Sequence[Deviation]) -> dict[str, Any]:
    """Layer-wise means over prompts, JSON-able."""
    rank = [[r for r in layer if r is not None] for layer in zip(*(d.rank_correlation for d in several), strict=True)]
    return {
        "kv": [fmean(layer) for layer in zip(*(d.kv for d in several), strict=True)],
        "attention": [fmean(layer) for layer in zip(*(d.attention for d in several), strict=True)],
        "rank_correlation": [fmean(layer) if layer else None for layer in rank],
    }


def _kv_deviation(full: RequestCache, woven: RequestCache, layer: int, tokens: int) -> torch.Tensor:
    """L2 norm a token, `[tokens]`; taken after RoPE, which turns both keys alike and so leaves the norm."""
    pairs = zip(full.view(layer, tokens), woven.view(layer, tokens), strict=True)
    return torch.stack([(a.float() - b.float()).pow(2).sum((1, 2)) for a, b in pairs]).sum(0).sqrt()


def _spearman(one: torch.Tensor, two: torch.Tensor) -> float | None:
    moved = (one > 0) | (two > 0)
    if int(moved.sum()) < 2:
        return None
    try:
        from scipy.stats import spearmanr
    except ImportError as error:
        raise UsageError("rank correlation needs scipy: pip install 'chunkweave[bench]'") from error
    correlation = float(spearmanr(one[moved].numpy(), two[moved].numpy()).statistic)
    return correlation if correlation == correlation else None  # NaN: one of them is constant
