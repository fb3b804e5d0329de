"""Deviation of KV and attention under reuse from full prefill, by layer (CacheBlend §4.1, Figures 6 to 8)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import ceil
from statistics import fmean
from typing import Any

import torch

from chunkweave.calibration.fidelity import FULL_REUSE, REFERENCE
from chunkweave.calibration.prompts import Warming, company_of
from chunkweave.calibration.summaries import mean_interval, ratio_interval
from chunkweave.engine.engine import Engine, Progress
from chunkweave.engine.runner import Prefilled
from chunkweave.errors import UsageError
from chunkweave.models.attention import attend_masked, attention_weights, capped, seen_keys
from chunkweave.models.base import LayerwiseModel
from chunkweave.planning.method import ReuseMethod
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import Prompt
from chunkweave.types import Span

RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.3)
"""Shares of the reused tokens that are recomputed for Figure 6."""

QUANTILES = tuple(step / 20 for step in range(21))
"""Quantiles of the tokens' KV deviation for Figure 7."""

TOP = 0.15
"""Share of the tokens whose part of the total deviation is reported: the upper end of the paper's 10 to 15 %."""


class Choice(StrEnum):
    """Which tokens are recomputed."""

    HIGHEST = "highest"
    """On each layer the tokens whose stored KV deviates most from full prefill's: HKVD tokens (CacheBlend §4.3)."""
    RANDOM = "random"
    """Random tokens, the same on all layers."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """One contender against full prefill on one prompt; every list has one entry a layer.

    `kv` is the mean over the prompt's tokens of the L2 norm of the difference of (K, V). `attention` is the L2 norm of
    the difference of the question's attention to all tokens, over heads, queries and keys, divided by the square root
    of heads x queries (at most sqrt 2). `rank_correlation` is Spearman's correlation between the reused tokens' KV
    deviations of each layer and the next (from layer 1, since layer 0 has none); None without deviation.
    """

    kv: tuple[float, ...]
    attention: tuple[float, ...]
    rank_correlation: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class ReuseDeviation:
    """Full KV reuse of one prompt, without and with recomputed tokens; one entry per layer.

    `attention` is as in `Deviation`, by choice of recomputed tokens and their share of the reused ones. `quantiles` are
    those of the reused tokens' KV deviations at `QUANTILES`; `top_share` is the part of their sum that the top `TOP`
    share of the tokens has. `rank_with_first` is Spearman's correlation between layer 1, where CacheBlend checks first,
    and each layer from 2.
    """

    attention: Mapping[tuple[Choice, float], tuple[float, ...]]
    quantiles: tuple[tuple[float, ...], ...]
    top_share: tuple[float | None, ...]
    rank_with_first: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class PromptDeviation:
    """One prompt: all contenders by name of their rows, and full KV reuse with recomputed tokens, if requested."""

    contenders: Mapping[str, Deviation]
    reuse: ReuseDeviation | None = None


def measure_deviations(
    engine: Engine,
    prompts: Sequence[Prompt],
    contenders: Mapping[str, ReuseMethod],
    warm: Warming,
    *,
    count: int,
    recomputing: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[PromptDeviation]:
    """Compare every contender with full prefill on the first `count` prompts. Only `warm` stores anything.

    `contenders` has `full` and `full-reuse`. With `recomputing`, tokens chosen by full prefill's KV are also
    recomputed, which no real method can do; random ones are drawn with `seed`.
    """
    model, count = engine.loaded.model, min(count, len(prompts))
    for index, prompt in enumerate(prompts[:count]):
        warm.prepare(engine, prompt, company_of(prompts, index))
        full = engine.runner.prefill(prompt, contenders[REFERENCE], capture=False, unseen=True)
        found: dict[str, Deviation] = {}
        reuse = None
        for label, method in contenders.items():
            woven = full if label == REFERENCE else engine.runner.prefill(prompt, method, capture=False, unseen=True)
            found[label] = deviation_from(full, woven, model)
            if recomputing and label == FULL_REUSE:
                reuse = reuse_deviation(full, woven, model, seed=seed + index)
        yield PromptDeviation(found, reuse)
        if progress is not None:
            progress(index + 1, count)


def deviation_from(full: Prefilled, woven: Prefilled, model: LayerwiseModel) -> Deviation:
    """Compare two caches of the same prompt.

    Raises:
        UsageError: the prompts differ, or have no question.
    """
    if full.prompt.token_ids != woven.prompt.token_ids or full.prompt.parts[-1].id is not None:
        raise UsageError("a deviation needs two caches of the same prompt, which must end in a question")
    by_token = kv_deviation(full, woven, model)
    reused = by_token[:, reused_positions(woven)]
    return Deviation(
        kv=tuple(by_token.mean(1).tolist()),
        attention=_apart(question_attention(full, model), question_attention(woven, model)),
        rank_correlation=tuple(_spearman(a, b) for a, b in pairwise(reused[1:])),
    )


def reuse_deviation(
    full: Prefilled, reused: Prefilled, model: LayerwiseModel, *, ratios: Sequence[float] = RATIOS, seed: int = 0
) -> ReuseDeviation | None:
    """`ReuseDeviation` from full prefill and full KV reuse of one prompt; None if the prompt reuses nothing."""
    deviation = kv_deviation(full, reused, model)[:, reused_positions(reused)]
    if not deviation.shape[1]:
        return None
    exact = question_attention(full, model)
    attention = {}
    for choice in Choice:
        for ratio in ratios:
            chosen = chosen_tokens(deviation, choice, ratio, seed=seed)
            attention[choice, ratio] = _apart(exact, question_attention(reused, model, chosen))
    places = torch.tensor(QUANTILES, dtype=deviation.dtype)
    count = ceil(TOP * deviation.shape[1])
    tops = zip(deviation.topk(count, dim=1).values.sum(1).tolist(), deviation.sum(1).tolist(), strict=True)
    return ReuseDeviation(
        attention=attention,
        quantiles=tuple(tuple(layer.quantile(places).tolist()) for layer in deviation),
        top_share=tuple(top / whole if whole else None for top, whole in tops),
        rank_with_first=tuple(_spearman(deviation[1], layer) for layer in deviation[2:]),
    )


def kv_deviation(full: Prefilled, woven: Prefilled, model: LayerwiseModel) -> torch.Tensor:
    """L2 norm by layer and token, `[layers, tokens]` in host memory; after RoPE, which rotates both keys equally."""
    tokens, rows = len(full.prompt), []
    for layer in range(model.geometry.num_layers):
        pairs = zip(full.cache.view(layer, tokens), woven.cache.view(layer, tokens), strict=True)
        rows.append(torch.stack([(a.float() - b.float()).pow(2).sum((1, 2)) for a, b in pairs]).sum(0).sqrt())
    return torch.stack(rows).cpu()


def reused_positions(prefilled: Prefilled) -> torch.Tensor:
    """Positions of the tokens whose KV was taken from another context, `[reused tokens]`."""
    return _positions(prefilled.plan.spans(KVSource.REUSED))


def chosen_tokens(deviation: torch.Tensor, choice: Choice, ratio: float, *, seed: int = 0) -> torch.Tensor:
    """The `ceil(ratio * tokens)` tokens to recompute on each layer, as a mask of `deviation` `[layers, tokens]`.

    With the same seed, the random tokens of a smaller ratio are a subset of those of a larger one.
    """
    layers, tokens = deviation.shape
    if choice is Choice.RANDOM:
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)).expand(layers, tokens)
    else:
        order = deviation.argsort(dim=1, descending=True, stable=True)
    chosen = torch.zeros(layers, tokens, dtype=torch.bool)
    return chosen.scatter_(1, order[:, : ceil(ratio * tokens)], torch.ones((), dtype=torch.bool).expand(layers, tokens))


@torch.inference_mode()
def question_attention(
    prefilled: Prefilled, model: LayerwiseModel, chosen: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Attention weights of the question's tokens over a finished cache, `[heads, queries, keys]` per layer, float32.

    With `chosen`, a mask `[layers, reused tokens]`, KV is recomputed there as in CacheBlend §4.2: on each layer the new
    K and V of the chosen tokens, and of all tokens that are not stored, replace the cached ones, and these tokens
    attend to the mixture. A token is computed from layer 0 to the last layer on which it is chosen; on layers where it
    is not chosen its cached KV is used. The cache is not changed.
    """
    tokens, device = len(prefilled.prompt), prefilled.logits.device
    question = prefilled.prompt.spans()[-1]
    fresh = torch.zeros(model.geometry.num_layers, tokens, dtype=torch.bool)
    fresh[:, question.start :] = True
    if chosen is not None:
        fresh[:, _positions(prefilled.plan.spans(KVSource.COMPUTED))] = True
        fresh[:, reused_positions(prefilled)] = chosen
    fresh = fresh.to(device)
    positions = fresh.any(0).nonzero()[:, 0]
    hidden = model.embed(torch.tensor(prefilled.prompt.token_ids, device=device)[positions])
    weights = []
    for layer in range(model.geometry.num_layers):
        carried = fresh[layer:, positions].any(0)
        positions, hidden = positions[carried], hidden[carried]
        q, k, v = model.qkv(layer, hidden)
        q, k = model.rotate_queries(layer, q, positions), model.rotate_keys(layer, k, positions)
        keys, values = (states.clone() for states in prefilled.cache.view(layer, tokens))
        written = fresh[layer, positions]
        keys[positions[written]], values[positions[written]] = k[written], v[written]
        rule = model.geometry.scores(layer)
        seen = seen_keys(torch.arange(tokens, device=device), positions[:, None], model.geometry.window(layer))
        queries = q[-len(question) :].float().transpose(0, 1)
        by_head = keys.float().repeat_interleave(q.shape[1] // keys.shape[1], dim=1).permute(1, 2, 0)
        scores = capped(queries @ by_head / q.shape[-1] ** 0.5, rule)
        weights.append(attention_weights(scores.masked_fill(~seen[-len(question) :], -torch.inf), rule))
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=device).masked_fill_(~seen, -torch.inf)
        hidden = model.finish(layer, hidden, attend_masked(q, keys, values, mask, rule))
    return weights


def summarize_deviations(samples: Sequence[PromptDeviation]) -> dict[str, Any]:
    """Means over prompts, JSON-able: `deviation` by contender, and the `figures` if they were measured.

    In `figures`, `attention` has for each choice and ratio the attention deviation by layer (Figure 6), its mean over
    layers with the bootstrap interval over prompts, and that mean divided by full KV reuse's (`left`). `kv` (Figure 7)
    and `rank_correlation` (Figure 8; `next`: of each layer from 1 on and the next) are by layer.
    """
    labels = samples[0].contenders if samples else ()
    deviation = {label: mean_deviation([one.contenders[label] for one in samples]) for label in labels}
    reuse = [one.reuse for one in samples if one.reuse is not None]
    if not reuse:
        return {"deviation": deviation}
    figures = {
        "questions": len(reuse),
        "attention": [_recomputed(reuse, choice, ratio) for choice, ratio in reuse[0].attention],
        "kv": {
            "shares": list(QUANTILES),
            "quantiles": [
                _means(zip(*layer, strict=True)) for layer in zip(*(one.quantiles for one in reuse), strict=True)
            ],
            "top_share": _means(zip(*(one.top_share for one in reuse), strict=True)),
        },
        "rank_correlation": {
            "next": deviation[FULL_REUSE]["rank_correlation"],
            "first": _means(zip(*(one.rank_with_first for one in reuse), strict=True)),
        },
    }
    return {"deviation": deviation, "figures": figures}


def _recomputed(reuse: Sequence[ReuseDeviation], choice: Choice, ratio: float) -> dict[str, Any]:
    own = [one.attention[choice, ratio] for one in reuse]
    over_layers = [fmean(layers) for layers in own]
    mean = mean_interval(over_layers)
    left = ratio_interval(over_layers, [fmean(one.attention[choice, 0.0]) for one in reuse])
    return {
        "tokens": str(choice),
        "ratio": ratio,
        "mean": mean.mean,
        "mean_low": mean.low,
        "mean_high": mean.high,
        "left": left.mean,
        "left_low": left.low,
        "left_high": left.high,
        "by_layer": _means(zip(*own, strict=True)),
    }


def mean_deviation(several: Sequence[Deviation]) -> dict[str, Any]:
    """Layer-wise means over prompts, JSON-able."""
    return {
        "kv": _means(zip(*(one.kv for one in several), strict=True)),
        "attention": _means(zip(*(one.attention for one in several), strict=True)),
        "rank_correlation": _means(zip(*(one.rank_correlation for one in several), strict=True)),
    }


def _means(columns: Iterator[tuple[float | None, ...]]) -> list[float | None]:
    """The mean of the known values of each column; None if there are none."""
    there = [[value for value in column if value is not None] for column in columns]
    return [fmean(column) if column else None for column in there]


def _apart(full: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """Attention deviation by layer, as in `Deviation`."""
    pairs = zip(full, other, strict=True)
    return tuple((a - b).pow(2).sum().sqrt().item() / (a.shape[0] * a.shape[1]) ** 0.5 for a, b in pairs)


def _positions(spans: Sequence[Span]) -> torch.Tensor:
    return torch.tensor([position for span in spans for position in span.positions()], dtype=torch.long)


def _spearman(one: torch.Tensor, two: torch.Tensor) -> float | None:
    moved = (one > 0) | (two > 0)
    if int(moved.sum()) < 2:
        return None
    ranks = torch.stack([_ranks(one[moved]), _ranks(two[moved])])
    correlation = float(torch.corrcoef(ranks)[0, 1])
    return correlation if correlation == correlation else None  # NaN: one of them is constant


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks in ascending order; equal values share their mean rank."""
    less, same = (compare(values, values[:, None]).sum(1) for compare in (torch.lt, torch.eq))
    return (less + (same + 1) / 2).double()
