"""The weights that training starts from: heads that look back one and two tokens, and heads that match what they saw.

A transformer finds out by itself how to copy ("after the last A came B"), but a small one on a CPU takes longer over
that than over all the rest. So the start holds such an induction circuit (Olsson et al. 2022, "In-context learning and
induction heads") in weights that training is free to change: in layer 0 two heads hand each token the content of the
one before and of the one before that; in layer 1 a head finds the tokens whose predecessor is the present token and
adds what they are; all other heads from layer 1 on attend to tokens that are like their own, as in mimetic
initialization (Trockman and Kolter 2023). Matching is done in rotary dimensions that hardly turn within a prompt.
"""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

ROPE_THETA = 500_000.0

_EMBEDDING_STD = 0.05
_OFFSET_PAIRS = 12
"""Rotary pairs, the fastest ones, that a look-back head tells distances with."""
_SLOWEST_TURN = 0.002
"""Rotary pairs that turn by less than this many radians a token carry content."""


@torch.no_grad()
def plant_copying(model: LlamaForCausalLM, seed: int) -> None:
    """Overwrite embeddings and parts of the attention of a model of at least two layers, in place.

    Embedding dimension 0 is the same for all tokens: the constant that look-back heads make their queries and keys of.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    dim, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_(0, _EMBEDDING_STD, generator=generator)
    embeddings[:, 0] = 4 * _EMBEDDING_STD
    turns = ROPE_THETA ** (-torch.arange(dim // 2) / (dim // 2))
    slow = _slow_dimensions(turns)

    def basis(rows: int) -> Tensor:
        """Orthonormal rows over all dimensions but the constant one, `[rows, hidden]`."""
        square = torch.randn(config.hidden_size - 1, rows, generator=generator)
        rest = torch.linalg.qr(square)[0].T
        return torch.cat([torch.zeros(len(rest), 1), rest], dim=1)

    first, second, *_ = (layer.self_attn for layer in model.model.layers)
    content = basis(dim)
    slots = basis(min(2, groups) * dim)
    first.v_proj.weight[:dim] = content
    first.k_proj.weight[:dim] = _offset_weights(turns, 0, config.hidden_size)
    for head in range(len(slots) // dim):
        rows = slice(head * dim, (head + 1) * dim)
        first.q_proj.weight[rows] = _offset_weights(turns, head + 1, config.hidden_size)
        first.o_proj.weight[:, rows] = _EMBEDDING_STD * slots[rows].T

    for layer in list(model.model.layers)[1:]:
        attention = layer.self_attn
        for kv_head in range(config.num_key_value_heads):
            alike = 0.8 * _onto(slow, basis(dim))
            attention.k_proj.weight[kv_head * dim : (kv_head + 1) * dim] = alike
            queries = slice(kv_head * groups * dim, (kv_head + 1) * groups * dim)
            attention.q_proj.weight[queries] = alike.repeat(groups, 1)
    second.k_proj.weight[:dim] = 1.7 * _onto(slow, slots[:dim])
    second.q_proj.weight[:dim] = 1.7 * _onto(slow, content)
    copied = basis(dim)
    second.v_proj.weight[:dim] = copied
    second.o_proj.weight[:, :dim] = 3 * _EMBEDDING_STD * copied.T


def _slow_dimensions(turns: Tensor) -> list[int]:
    """Dimensions of a head, both halves of each pair, that rotation by a prompt's length leaves as they are."""
    pairs = [pair for pair, turn in enumerate(turns.tolist()) if turn < _SLOWEST_TURN]
    return pairs + [pair + len(turns) for pair in pairs]


def _onto(dimensions: list[int], rows: Tensor) -> Tensor:
    """As many of `rows` as there are `dimensions`, moved to these; zero elsewhere."""
    moved = torch.zeros_like(rows)
    moved[dimensions] = rows[: len(dimensions)]
    return moved


def _offset_weights(turns: Tensor, offset: int, hidden: int) -> Tensor:
    """Weights `[head_dim, hidden]` that read the constant dimension alone.

    A query of offset d and a key of offset 0, n tokens apart, score the sum over pairs of cos(turn * (n - d)): most at
    n = d.
    """
    pairs = min(_OFFSET_PAIRS, len(turns))
    weights = torch.zeros(2 * len(turns), hidden)
    angles = -offset * turns[:pairs]
    weights[:pairs, 0] = 1.8 * angles.cos()
    weights[len(turns) : len(turns) + pairs, 0] = 1.8 * angles.sin()
    return weights
