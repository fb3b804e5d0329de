"""The layer loop: executes passes over a flat batch. It knows rules, not methods.

Per layer: load cached KV -> q, k, v of the active tokens -> evidence, refine -> write K and V of the survivors over the
cache -> attention -> attention mass, and the rest of the layer -> refine for the next one. These are CacheBlend's three
interfaces (§6): `fetch_kv` is `RequestCache.load_layer`, `prefill_layer` is `_run_layer`, `synchronize` is the stream
order between them.

Index spaces. A *position* is a token's place in its request's prompt; caches and masks use positions. A *request row*
counts the active tokens of one request, ascending by position. A *flat row* counts the active tokens of all requests,
one request after the other; hidden states, q, k and v use flat rows. Positions of different requests overlap, so only a
request row or a flat row names a token in the batch.
"""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

import torch

from chunkweave.fusion.rows import ActiveRows
from chunkweave.models.attention import FlatAttention, Measured, SdpaAttention
from chunkweave.models.base import DecoderLayers


@dataclass(slots=True)
class LoopTimes:
    """Seconds spent loading cached KV; owned by the caller, who may sum several passes."""

    load_s: float = 0.0


class PassInterrupted(Exception):  # noqa: N818 - a signal, not an error
    """A pass was stopped between two layers for more urgent work. The same rows may run again.

    `part` is the share of its work that was wasted, from 0 to 1.
    """

    def __init__(self, part: float) -> None:
        super().__init__(f"stopped after {part:.0%}")
        self.part = part


class PassRun:
    """One pass of the active tokens of all requests, run layer by layer, each request to its pass's depth.

    The caller may do other work between two layers. Mutates each request's cache and active set. `layer` is the number
    of layers run. Once `done`, `hidden` `[answering rows, hidden]` is the last layer's output for the last active token
    (with drafts: tokens) of each request whose pass gives answers, in batch order; in that layer the request's other
    tokens compute only K and V. A pass without answers ends with the K and V of its last layer.
    """

    def __init__(
        self,
        model: DecoderLayers,
        batch: Sequence[ActiveRows],
        times: LoopTimes | None = None,
        attention: FlatAttention | None = None,
    ) -> None:
        """Embed the tokens; compute nothing else. `attention` is the kernel (None: PyTorch's)."""
        self._model = model
        self._times = times if times is not None else LoopTimes()
        self._attention = attention if attention is not None else SdpaAttention()
        self._live = [(rows, rows.depth or model.geometry.num_layers) for rows in batch]
        self._depth = max(depth for _, depth in self._live)
        self.layer = 0
        self.hidden = model.embed(torch.cat([rows.token_ids for rows in batch]))

    @property
    def done(self) -> bool:
        return self.layer == self._depth

    @property
    def part_done(self) -> float:
        """Share of its layers that were run, from 0 to 1."""
        return self.layer / self._depth

    def take_out(self, rows: ActiveRows, times: LoopTimes) -> "PassRun | None":
        """Take a request out between two layers; returns its own run from here on, None if its pass has ended.

        The new run adds to `times`.
        """
        # `hidden` has the flat rows of requests whose passes continue. Requests that ended earlier have no rows left:
        # only passes through all layers give answers.
        live = [(live_rows, depth) for live_rows, depth in self._live if depth > self.layer]
        hidden = dict(
            zip(
                (live_rows for live_rows, _ in live),
                torch.split(self.hidden, [len(live_rows) for live_rows, _ in live]),
                strict=True,
            )
        )
        if rows not in hidden:
            return None
        out = copy(self)
        out._times = times
        for run in (out, self):
            run._live = [entry for entry in live if (entry[0] is rows) is (run is out)]
            run._depth = max((depth for _, depth in run._live), default=run.layer)
            run.hidden = torch.cat([hidden[live_rows] for live_rows, _ in run._live]) if run._live else self.hidden[:0]
        return out

    def next_layer(self) -> None:
        """Run one more layer; at least one must be left."""
        layer, self.layer = self.layer, self.layer + 1
        self._live = [(rows, depth) for rows, depth in self._live if depth > layer]
        started = time.perf_counter()
        for rows, _ in self._live:
            rows.cache.load_layer(layer, self._model.rotate_keys)
        self._times.load_s += time.perf_counter() - started
        self.hidden = _run_layer(self._model, self._attention, layer, self.hidden, self._live)


def _run_layer(
    model: DecoderLayers,
    attention: FlatAttention,
    layer: int,
    hidden: torch.Tensor,
    live: Sequence[tuple[ActiveRows, int]],
) -> torch.Tensor:
    """Run one layer for the requests in `live`, each given with the number of layers of its pass."""
    batch = [rows for rows, _ in live]
    last = [depth == layer + 1 for _, depth in live]
    # Flat rows at entry: q, k, v and hidden have one row per token that was active after the layer before.
    q, k, v = model.qkv(layer, hidden)
    entered = [len(rows) for rows in batch]
    fresh = zip(batch, torch.split(k, entered), torch.split(v, entered), strict=True)
    # Refine before writing: evidence compares fresh K and V, before RoPE, with stored KV, which `write` replaces.
    # From here on flat rows count the survivors only; a dropped token keeps its stored KV on this layer and above.
    keep = _joined([rows.refine(layer, keys, values) for rows, keys, values in fresh], entered, k.device)
    if keep is not None:
        hidden = hidden[keep]
        q = q[keep]
        k = k[keep]
        v = v[keep]
    positions = batch[0].positions if len(batch) == 1 else torch.cat([rows.positions for rows in batch])
    rotated_k = model.rotate_keys(layer, k, positions)
    for rows, ends in zip(batch, last, strict=True):
        if ends:
            rows.end()
    # Three nested tails of each request's rows: finishing <= queried <= active. In a pass's last layer all rows still
    # write K and V, but only the answering row (or none) runs attention and MLP. Without an answer, a watch may still
    # read every query.
    active = [len(rows) for rows in batch]
    finishing = [rows.finishing for rows in batch]
    queried = [rows.queried for rows in batch]
    querying = _tails(active, queried, q.device)
    finished = _tails(active, finishing, q.device)
    if querying is not None:
        q = q[querying]
        positions = positions[querying]
    rotated_q = model.rotate_queries(layer, q, positions)
    # All K and V are written before any attention, because survivors attend to each other within the layer.
    starts = accumulate(active, initial=0)
    for rows, row in zip(batch, starts, strict=False):
        own_rows = slice(row, row + len(rows))
        rows.write(layer, k[own_rows], rotated_k[own_rows], v[own_rows])
    states, measured = _attend(attention, layer, rotated_q, batch)
    # `stay` has request rows among the finishing ones, which are all active rows unless the pass ends here.
    stay = []
    query = 0
    for rows, ends, entered_tokens, mass in zip(batch, last, entered, measured, strict=True):
        queries = rotated_q[query : query + rows.queried]
        query += rows.queried
        rows.record(entered_tokens)
        kept_rows = None if ends and rows.answers else rows.look(layer, queries, mass)
        stay.append(None if ends else kept_rows)
    if not len(states):
        return hidden[:0]
    hidden = hidden if finished is None else hidden[finished]
    hidden = model.finish(layer, hidden, states)
    keep = _joined(stay, finishing, hidden.device)
    return hidden if keep is None else hidden[keep]


def _attend(
    attention: FlatAttention, layer: int, queries: torch.Tensor, batch: Sequence[ActiveRows]
) -> tuple[torch.Tensor, list[Measured | None]]:
    """Attention of the rows that finish this layer, and the sums measured for each request.

    A request without finishing rows still has queries, because a watch may read them.
    """
    finishing = [rows for rows in batch if rows.finishing]
    if not finishing:
        return queries[:0], [None] * len(batch)
    if len(finishing) < len(batch):
        parts = torch.split(queries, [rows.queried for rows in batch])
        queries = torch.cat([own_rows for own_rows, rows in zip(parts, batch, strict=True) if rows.finishing])
    result = attention.attend(queries, [rows.own_queries(layer) for rows in finishing])
    measured = iter(result.measured)
    return result.states, [next(measured) if rows.finishing else None for rows in batch]


def _tails(lengths: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Flat rows of the last `counts` of each request's `lengths` rows; None if these are all rows."""
    if list(lengths) == list(counts):
        return None
    stops = accumulate(lengths)
    return torch.cat(
        [torch.arange(stop - count, stop, device=device) for stop, count in zip(stops, counts, strict=True)]
    )


def _joined(
    kept_rows: Sequence[torch.Tensor | None], lengths: Sequence[int], device: torch.device
) -> torch.Tensor | None:
    """Flat rows to keep, from the request rows to keep (None: all `lengths` rows); None if all are kept."""
    if all(own_rows is None for own_rows in kept_rows):
        return None
    starts = accumulate(lengths, initial=0)
    return torch.cat(
        [
            start + (torch.arange(length, device=device) if own_rows is None else own_rows)
            for own_rows, length, start in zip(kept_rows, lengths, starts, strict=False)
        ]
    )
