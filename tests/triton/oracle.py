"""Attention written out in float64, for one request."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One request: queries at `positions`, keys and values below `stop`, flags of hidden keys, the part of each key."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: list[int]
    hidden: torch.Tensor | None
    parts: torch.Tensor


@dataclass(frozen=True)
class Expected:
    states: torch.Tensor
    log_sum_exp: torch.Tensor
    by_part: torch.Tensor
    own: torch.Tensor


def make_case(generator, positions, heads, kv_heads, dim, *, dtype=torch.float32, hidden=(), parts=3) -> Case:
    stop = positions[-1] + 1

    def states(rows, width):
        return torch.randn(rows, width, dim, generator=generator).to(dtype)

    flags = None
    if hidden:
        flags = torch.zeros(stop, dtype=torch.bool)
        flags[[key for key in hidden if key < stop and key not in positions]] = True
    of_key = torch.randint(-1, parts, (stop,), generator=generator, dtype=torch.int32)
    return Case(states(len(positions), heads), states(stop, kv_heads), states(stop, kv_heads), positions, flags, of_key)


def written_out(case: Case, parts: int, window: int | None = None) -> Expected:
    heads, dim = case.queries.shape[1:]
    group = heads // case.keys.shape[1]
    keys, values = (states.double().repeat_interleave(group, 1).transpose(0, 1) for states in (case.keys, case.values))
    scores = case.queries.double().transpose(0, 1) @ keys.transpose(1, 2) / dim**0.5
    at = torch.tensor(case.positions)
    behind = at[:, None] - torch.arange(len(case.keys))
    unseen = (behind < 0) | (behind >= (window or len(case.keys)))
    if case.hidden is not None:
        unseen = unseen | case.hidden
    scores = scores.masked_fill(unseen, -torch.inf)
    weights = scores.softmax(-1)
    own = weights.gather(2, at.view(1, -1, 1).expand(heads, -1, 1)).squeeze(2)
    without = weights.scatter(2, at.view(1, -1, 1).expand(heads, -1, 1), 0.0)
    member = torch.stack([case.parts == part for part in range(parts)], 1).double()
    return Expected(
        (weights @ values).transpose(0, 1).flatten(1),
        scores.logsumexp(-1).T,
        (without @ member).transpose(0, 1),
        own.T,
    )
