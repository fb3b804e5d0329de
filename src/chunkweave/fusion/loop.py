"""The layer loop: executes passes over a flat batch. It knows rules, not methods.

Per layer: load cached KV -> q, k, v of the active tokens -> evidence, refine -> K and V of the survivors over the
cache -> attention -> attention mass, and the rest of the layer -> refine for the next one. These are CacheBlend's three
interfaces (§6): `fetch_kv` is `RequestCache.load_layer`, `prefill_layer` is `_run_layer`, `synchronize` is the stream
order between them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from chunkweave.fusion.rows import ActiveRows
from chunkweave.models.base import LayerwiseModel


@dataclass(slots=True)
class LoopTimes:
    """Seconds spent bringing cached KV in; the caller owns it and adds up several passes."""

    load_s: float = 0.0


def run_pass(model: LayerwiseModel, batch: Sequence[ActiveRows], times: LoopTimes | None = None) -> torch.Tensor:
    """Run the active tokens of all requests through all layers, or as many as their pass has: all of them equally many.

    Mutates each request's cache and active set. Returns the hidden state behind the last layer of each request's last
    active token, `[requests, hidden]`; in that layer the others give their K and V only. A pass that gives no answers
    ends with the K and V of its last layer, and what is returned means nothing.
    """
    times = times if times is not None else LoopTimes()
    hidden = model.embed(torch.cat([rows.token_ids for rows in batch]))
    stops = [int(rows.positions[-1]) + 1 for rows in batch]
    depth = batch[0].depth or model.geometry.num_layers
    for layer in range(depth):
        started = time.perf_counter()
        for rows in batch:
            rows.cache.load_layer(layer, model.rotate)
        times.load_s += time.perf_counter() - started
        hidden = _run_layer(model, layer, hidden, batch, stops, last=layer == depth - 1)
    return hidden


def _run_layer(
    model: LayerwiseModel,
    layer: int,
    hidden: torch.Tensor,
    batch: Sequence[ActiveRows],
    stops: Sequence[int],
    *,
    last: bool,
) -> torch.Tensor:
    q, k, v = model.qkv(layer, hidden)
    entered = [len(rows) for rows in batch]
    keep = _joined(_refined(layer, k, v, batch), entered, k.device)
    if keep is not None:
        hidden, q, k, v = hidden[keep], q[keep], k[keep], v[keep]
    positions = torch.cat([rows.positions for rows in batch])
    rotated_k = model.rotate(k, positions)
    if last and not batch[0].answers:
        return _end_unanswered(model, layer, (q, k, v), rotated_k, batch, entered)
    if last:
        ends = _ends(batch).to(hidden.device)
        hidden, q, positions = hidden[ends], q[ends], positions[ends]
        for rows in batch:
            rows.finish_only_last()
    rotated_q = model.rotate(q, positions)
    active = [len(rows) for rows in batch]
    attended, stay = [], []
    row = query = 0
    for rows, before, stop in zip(batch, entered, stops, strict=True):
        mine, finishing = slice(row, row + len(rows)), slice(query, query + rows.finishing)
        rows.write(layer, k[mine], rotated_k[mine], v[mine])
        attended.append(rows.attend(layer, rotated_q[finishing], stop))
        rows.record(before)
        stay.append(None if last else rows.look(layer, rotated_q[finishing], stop))
        row, query = mine.stop, finishing.stop
    hidden = model.finish(layer, hidden, attended[0] if len(attended) == 1 else torch.cat(attended))
    keep = _joined(stay, active, hidden.device)
    return hidden if keep is None else hidden[keep]


def _end_unanswered(
    model: LayerwiseModel,
    layer: int,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rotated_k: torch.Tensor,
    batch: Sequence[ActiveRows],
    entered: Sequence[int],
) -> torch.Tensor:
    """The last layer of a pass without answers: K and V are written, the attention is noted, nobody is finished."""
    q, k, v = qkv
    rotated_q = model.rotate(q, torch.cat([rows.positions for rows in batch]))
    row = 0
    for rows, before in zip(batch, entered, strict=True):
        mine = slice(row, row + len(rows))
        rows.write(layer, k[mine], rotated_k[mine], v[mine])
        rows.finish_none()
        rows.record(before)
        rows.look(layer, rotated_q[mine], int(rows.positions[-1]) + 1)
        row = mine.stop
    return q[:0]


def _ends(batch: Sequence[ActiveRows]) -> torch.Tensor:
    """Row of each request's last active token in the flat batch, `[requests]`."""
    return torch.tensor([len(rows) for rows in batch]).cumsum(0) - 1


def _refined(
    layer: int, keys: torch.Tensor, values: torch.Tensor, batch: Sequence[ActiveRows]
) -> list[torch.Tensor | None]:
    """For each request the rows that its rule for this layer keeps, or None if it has none."""
    edges = [0, *accumulate(len(rows) for rows in batch)]
    return [
        rows.refine(layer, keys[start:stop], values[start:stop])
        for rows, (start, stop) in zip(batch, pairwise(edges), strict=True)
    ]


def _joined(kept: Sequence[torch.Tensor | None], lengths: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Rows of the flat batch that stay, given those of each request (None: all of its `lengths`); None if all do."""
    if all(mine is None for mine in kept):
        return None
    starts = accumulate(lengths, initial=0)
    return torch.cat(
        [
            start + (torch.arange(length, device=device) if mine is None else mine)
            for mine, length, start in zip(kept, lengths, starts, strict=False)
        ]
    )
