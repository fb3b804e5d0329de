"""How far a woven KV cache is from full prefill's, layer by layer (CacheBlend §4.1, Figures 6 and 8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from chunkweave.engine.runner import Prefilled
from chunkweave.errors import UsageError
from chunkweave.kv.request_cache import RequestCache
from chunkweave.models.base import LayerwiseModel


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
