"""A pass through vLLM's own layers and kernels: one that looks at nothing but keys and values.

Per layer the order is the project's own (planning/plan.py): fresh K and V of the active tokens, evidence, refine;
cached KV of all others into the blocks; then the stock layer, which writes and attends for the survivors.
"""

from collections.abc import Mapping, Sequence

import torch

from chunkweave.fusion.evidence import measure
from chunkweave.fusion.start import starting_rows, weighted
from chunkweave.models.ranks import Ranks
from chunkweave.planning.plan import KeepTop, Pass
from chunkweave.types import Span
from chunkweave.vllm.paged_cache import PagedCache
from chunkweave.vllm.stock_layers import ActiveSet, BlockTable, StockLayers


class StockPass:
    """Runs the active tokens of one request through the layers; all of them have blocks. Owned by its weave."""

    evidence: torch.Tensor | None = None
    """Nothing is watched here."""

    def __init__(
        self,
        layers: StockLayers,
        table: BlockTable,
        cache: PagedCache,
        a_pass: Pass,
        token_ids: torch.Tensor,
        *,
        reused: torch.Tensor,
        ranks: Ranks,
        evidence: torch.Tensor | None = None,
        recomputed: Sequence[Span] = (),
        decided: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """`token_ids` `[tokens]` is the whole prompt, on the device; `reused` flags the tokens of reused parts, on the
        host.

        The pass starts by `evidence` if it has a start, without what was `recomputed` before. Where it was `decided`
        before which positions a layer's rule keeps, these are kept.
        """
        self._layers, self._table, self._cache = layers, table, cache
        self._ranks, self._reused = ranks, reused
        self._rules = {rule.layer: rule for rule in a_pass.keep_top}
        self._decided = decided or {}
        self.kept: dict[int, torch.Tensor] = {}
        if a_pass.start is not None and evidence is not None:
            evidence = weighted(evidence, a_pass, a_pass.start)
        start = starting_rows(a_pass, len(token_ids), layers.device, evidence=evidence, recomputed=recomputed)
        self.started = start.positions[start.candidates]
        self._candidate = torch.zeros(len(start.positions), dtype=torch.bool, device=layers.device)
        self._candidate[start.candidates] = True
        self._activate(start.positions)
        self._hidden = layers.embed(token_ids[start.positions]) if len(start.positions) else None
        self._residual: torch.Tensor | None = None
        self._layer = 0
        self._depth = layers.num_layers if a_pass.depth is None else a_pass.depth
        self.recompute_work = 0

    @property
    def layer(self) -> int:
        """How many layers were run."""
        return self._layer

    @property
    def done(self) -> bool:
        return self._layer == self._depth

    @property
    def active_tokens(self) -> int:
        """Tokens that enter the next layer."""
        return len(self._active.positions)

    @property
    def recomputed(self) -> list[int]:
        """Positions of reused chunks that are active now, ascending."""
        positions = self._active.positions.cpu()
        found: list[int] = positions[self._reused[positions]].tolist()
        return found

    def next_layer(self) -> None:
        """Run one more layer; there must be one."""
        layer, self._layer = self._layer, self._layer + 1
        if layer in self._rules and self._hidden is not None:
            self._refine(self._rules[layer], layer)
        self._cache.fill(layer, self._passive)
        self.recompute_work += self._active_reused
        if self._hidden is None or not len(self._hidden):
            return
        if layer < self._depth - 1:
            self._hidden, self._residual = self._layers.run(layer, self._active, self._hidden, self._residual)
            return
        # Nobody reads hidden states of these tokens behind the last layer: their K and V are all that is left to do.
        keys, values = self._layers.keys_values(layer, self._hidden, self._residual)
        positions = self._active.positions
        self._layers.paged.write(
            layer, self._table.slots(positions), self._layers.rotation.forward(keys, positions), values
        )

    def _refine(self, rule: KeepTop, layer: int) -> None:
        assert self._hidden is not None
        rows = torch.nonzero(self._candidate).squeeze(1)
        if layer in self._decided:
            best = torch.nonzero(torch.isin(self._active.positions[rows], self._decided[layer])).squeeze(1)
        else:
            best = self._best(rule, layer, rows)
        self.kept[layer] = self._active.positions[rows[best]].sort().values
        keep = ~self._candidate
        keep[rows[best]] = True
        kept = torch.nonzero(keep).squeeze(1)
        self._candidate = self._candidate[kept]
        self._hidden = self._hidden[kept]
        self._residual = None if self._residual is None else self._residual[kept]
        self._activate(self._active.positions[kept])

    def _best(self, rule: KeepTop, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Which of the candidates `rows` the rule keeps: places in `rows`, those with the most evidence first."""
        assert self._hidden is not None
        keys, values = self._layers.keys_values(layer, self._hidden, self._residual)
        cached = self._cache.cached_before_rope(layer, self._active.positions[rows])
        evidence = measure(rule.by, keys[rows], values[rows], cached, ranks=self._ranks)
        return torch.sort(evidence, descending=True, stable=True).indices[: rule.count]

    def _activate(self, positions: torch.Tensor) -> None:
        """Make `positions` the active ones; what follows from them is worked out once, here."""
        self._active: ActiveSet = self._layers.activate(positions, self._table)
        self._active_reused = int(self._reused[positions.cpu()].sum())
        self._passive = torch.nonzero(~torch.isin(self._cache.cached, positions)).squeeze(1)
