"""Greedy decoding of several prefilled prompts together, as benchmarks do it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was chosen behind one prompt: token ids, a stop token last if one came, and the log-probability of each."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


def decode_greedily(engine: Engine, prefilled: Sequence[Prefilled], max_new_tokens: int) -> list[Decoded]:
    """Decode greedily, each prompt up to a stop token and with it. The caches have room for `max_new_tokens`."""
    stop_ids = engine.loaded.tokenizer.stop_ids
    tokens: list[list[int]] = [[] for _ in prefilled]
    log_probs: list[list[float]] = [[] for _ in prefilled]
    active = list(range(len(prefilled)))
    logits = torch.stack([one.logits for one in prefilled])
    for step in range(max_new_tokens):
        if step:
            logits = engine.runner.decode(
                [prefilled[i].cache for i in active],
                [tokens[i][-1] for i in active],
                [len(prefilled[i].prompt) + step - 1 for i in active],
            )
        best = logits.max(dim=-1)
        chosen = zip(best.indices.tolist(), (best.values - logits.logsumexp(-1)).tolist(), strict=True)
        for i, (token, log_prob) in zip(active, chosen, strict=True):
            tokens[i].append(token)
            log_probs[i].append(log_prob)
        active = [i for i in active if tokens[i][-1] not in stop_ids]
        if not active:
            break
    return [Decoded(tuple(ids), tuple(own)) for ids, own in zip(tokens, log_probs, strict=True)]


def answer_text(engine: Engine, token_ids: Sequence[int]) -> str:
    """Decoded tokens as text, without the stop token that may end them."""
    tokenizer = engine.loaded.tokenizer
    ended = token_ids[:-1] if token_ids and token_ids[-1] in tokenizer.stop_ids else token_ids
    return tokenizer.decode(list(ended)).strip()
