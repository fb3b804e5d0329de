"""One request's plan, executed over vLLM's layers in slices.

Per layer the order is the project's own (planning/plan.py): fresh K and V of the active tokens, evidence, refine;
cached KV of all others into the blocks; then the stock layer, which writes and attends for the survivors.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil

import torch

from chunkweave.fusion.evidence import measure
from chunkweave.kv.segment import SegmentSource
from chunkweave.planning.plan import Fate, KeepTop, Pass, Plan
from chunkweave.types import Span
from chunkweave.vllm.stock_layers import ActiveSet, BlockTable, StockLayers


class WeaveJob:
    """Brings positions `first` to `stop` of one prompt into its blocks. Owned by one worker, run a few layers a step.

    What lies before `first` is in the blocks already; what lies from `stop` on, vLLM computes afterwards. Both are left
    out of the plan's active sets, which changes nothing for the rest: attention is causal.
    """

    def __init__(
        self,
        layers: StockLayers,
        table: BlockTable,
        plan: Plan,
        sources: Sequence[tuple[Span, SegmentSource]],
        token_ids: Sequence[int],
        *,
        first: int,
        stop: int,
        chosen: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """`sources` are the segments of the plan with the spans that they go to; the plan has one pass.

        `chosen` is what another job of the same chunks and method, from position 0 on, chose by layer: where this one
        begins later, it takes the same, so that an answer does not depend on what vLLM's own cache held.
        """
        (a_pass,) = plan.passes
        self._layers = layers
        self._table = table
        self._plan = plan
        self._rules = {rule.layer: rule for rule in a_pass.keep_top}
        placed = [(span, source) for span, source in sources if span.stop > first and span.start < stop]
        inside = [Span(max(first, span.start), min(stop, span.stop)) for span, _ in placed]
        self._sources = [
            (source, slice(part.start - span.start, part.stop - span.start))
            for part, (span, source) in zip(inside, placed, strict=True)
        ]
        self._cached_positions = _positions(inside).to(layers.device)
        positions, candidate = _starting(a_pass, first, stop)
        self._reused = torch.zeros(plan.prompt_tokens, dtype=torch.bool)
        for span in plan.spans(Fate.REUSED):
            self._reused[span.start : span.stop] = True
        ids = torch.tensor(token_ids, dtype=torch.long)[positions].to(layers.device)
        self._candidate = candidate.to(layers.device)
        self._candidate_share = int(candidate.sum()) / max(1, a_pass.candidate_tokens)
        self._given = chosen if first else None
        self.chosen: dict[int, torch.Tensor] = {}
        """Positions of the candidates that each rule kept, by layer, ascending."""
        self._activate(positions.to(layers.device))
        self._hidden = layers.embed(ids) if len(ids) else None
        self._residual: torch.Tensor | None = None
        self._layer = 0
        self.recompute_work = 0
        """Reused-chunk tokens that were active, summed over the layers done."""

    @property
    def done(self) -> bool:
        return self._layer == self._layers.num_layers

    @property
    def recomputed(self) -> list[int]:
        """Positions of reused chunks that are active now, ascending."""
        positions = self._active.positions.cpu()
        found: list[int] = positions[self._reused[positions]].tolist()
        return found

    def run(self, layers: int) -> bool:
        """The next `layers` layers, or as many as are left; True if that was all."""
        for layer in range(self._layer, min(self._layer + layers, self._layers.num_layers)):
            self._run_layer(layer)
            self._layer = layer + 1
        return self.done

    def _run_layer(self, layer: int) -> None:
        cached = self._cached(layer) if self._sources else None
        if layer in self._rules and self._hidden is not None:
            assert cached is not None, "candidates are tokens of reused chunks"
            self._refine(self._rules[layer], layer, cached)
        if cached is not None and len(self._passive):
            slots = self._passive_slots
            keys, values = cached[:, self._passive]
            keys = self._layers.rotation.forward(keys, self._cached_positions[self._passive])
            self._layers.paged.write(layer, slots, keys, values)
        self.recompute_work += self._active_reused
        if self._hidden is None or not len(self._hidden):
            return
        if layer < self._layers.num_layers - 1:
            self._hidden, self._residual = self._layers.run(layer, self._active, self._hidden, self._residual)
            return
        # Nobody reads hidden states of these tokens behind the last layer: their K and V are all that is left to do.
        keys, values = self._layers.keys_values(layer, self._hidden, self._residual)
        positions = self._active.positions
        self._layers.paged.write(
            layer, self._table.slots(positions), self._layers.rotation.forward(keys, positions), values
        )

    def _cached(self, layer: int) -> torch.Tensor:
        """Keys before RoPE and values of all cached positions, `[2, tokens, kv_heads, head_dim]`."""
        parts = [source.layer(layer)[:, rows] for source, rows in self._sources]
        device, dtype = self._layers.device, self._layers.paged.dtype
        return torch.cat([part.to(device, dtype, non_blocking=True) for part in parts], dim=1)

    def _refine(self, rule: KeepTop, layer: int, cached: torch.Tensor) -> None:
        assert self._hidden is not None
        rows = torch.nonzero(self._candidate).squeeze(1)
        if self._given is not None and layer in self._given:
            best = torch.nonzero(torch.isin(self._active.positions[rows], self._given[layer])).squeeze(1)
        else:
            best = self._best(rule, layer, rows, cached)
        self.chosen[layer] = self._active.positions[rows[best]].sort().values
        keep = ~self._candidate
        keep[rows[best]] = True
        kept = torch.nonzero(keep).squeeze(1)
        self._candidate = self._candidate[kept]
        self._hidden = self._hidden[kept]
        self._residual = None if self._residual is None else self._residual[kept]
        self._activate(self._active.positions[kept])

    def _best(self, rule: KeepTop, layer: int, rows: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """Which of the candidates `rows` the rule keeps: places in `rows`, those with the most evidence first."""
        assert self._hidden is not None
        keys, values = self._layers.keys_values(layer, self._hidden, self._residual)
        places = torch.searchsorted(self._cached_positions, self._active.positions[rows])
        evidence = self._layers.over_ranks(measure(rule.by, keys[rows], values[rows], cached[:, places]))
        count = ceil(rule.count * self._candidate_share)
        return torch.sort(evidence, descending=True, stable=True).indices[:count]

    def _activate(self, positions: torch.Tensor) -> None:
        """Make `positions` the active ones; what follows from them is worked out once, here."""
        self._active: ActiveSet = self._layers.activate(positions, self._table)
        self._active_reused = int(self._reused[positions.cpu()].sum())
        passive = ~torch.isin(self._cached_positions, positions)
        self._passive = torch.nonzero(passive).squeeze(1)
        self._passive_slots = self._table.slots(self._cached_positions[self._passive])


def _starting(a_pass: Pass, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions that are active at layer 0, ascending, and which of them rules may drop."""
    required = torch.zeros(stop, dtype=torch.bool)
    candidate = torch.zeros(stop, dtype=torch.bool)
    for marks, spans in ((required, a_pass.required), (candidate, a_pass.candidates)):
        for span in spans:
            positions = torch.tensor(list(span.positions()), dtype=torch.long)
            marks[positions[(positions >= first) & (positions < stop)]] = True
    candidate &= ~required
    positions = torch.nonzero(required | candidate).squeeze(1)
    return positions, candidate[positions]


def _positions(spans: Sequence[Span]) -> torch.Tensor:
    """The positions of ascending spans in one row, `[tokens]`."""
    assert all(one.stop <= other.start for one, other in pairwise(spans))
    return torch.tensor([position for span in spans for position in span.positions()], dtype=torch.long)
