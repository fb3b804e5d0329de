"""One request's share of a flat batch: which of its tokens are active, and how the rules narrow them."""

from collections.abc import Sequence
from typing import Self

import torch

from chunkweave.fusion.capture import PartCapture
from chunkweave.fusion.evidence import measure
from chunkweave.kv.request_cache import RequestCache
from chunkweave.models.attention import ScatteredQueries
from chunkweave.planning.flops import LayerWork
from chunkweave.planning.plan import KeepTop, Pass
from chunkweave.types import Span


class ActiveRows:
    """The active tokens of one request during one pass. Owned and narrowed by the layer loop.

    `positions` `[rows]` ascend; `token_ids` are the ids at the positions that were active first.
    """

    def __init__(
        self,
        cache: RequestCache,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        dtype: torch.dtype,
        candidate: torch.Tensor | None = None,
        rules: Sequence[KeepTop] = (),
        captures: Sequence[PartCapture] = (),
    ) -> None:
        """`token_ids` and `positions` are `[rows]`; `candidate` flags the rows that rules may drop (none if absent)."""
        self.cache = cache
        self.token_ids = token_ids
        self.captures = tuple(captures)
        self.work: list[LayerWork] = []
        self._rules = {rule.layer: rule for rule in rules}
        self._candidate = candidate if candidate is not None else torch.zeros_like(positions, dtype=torch.bool)
        self._dtype = dtype
        self._activate(positions)

    @classmethod
    def of_pass(
        cls,
        cache: RequestCache,
        prompt_ids: torch.Tensor,
        a_pass: Pass,
        *,
        dtype: torch.dtype,
        captures: Sequence[PartCapture] = (),
    ) -> Self:
        """The rows that `a_pass` starts with; `prompt_ids` `[tokens]` is the whole prompt, on the model's device."""
        required = torch.zeros(len(prompt_ids), dtype=torch.bool)
        candidate = torch.zeros(len(prompt_ids), dtype=torch.bool)
        _mark(required, a_pass.required)
        _mark(candidate, a_pass.candidates)
        positions = torch.nonzero(required | candidate).squeeze(1)
        return cls(
            cache,
            prompt_ids[positions.to(prompt_ids.device)],
            positions.to(prompt_ids.device),
            dtype=dtype,
            candidate=(candidate & ~required)[positions].to(prompt_ids.device),
            rules=a_pass.rules,
            captures=captures,
        )

    def __len__(self) -> int:
        return len(self.positions)

    def refine(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        """Apply this layer's rule to fresh keys and values before RoPE, `[rows, kv_heads, head_dim]`.

        Returns the rows that stay active, ascending, or None if the layer has no rule. Mutates the active set.
        """
        rule = self._rules.get(layer)
        if rule is None:
            return None
        keep = self._surviving_rows(rule, layer, keys, values)
        self._candidate = self._candidate[keep]
        self._activate(self.positions[keep])
        return keep

    def finish_only_last(self) -> None:
        """From now on only the last active token is attended and finished: nobody reads the others' hidden states."""
        self._finishing = self.positions[-1:]
        self._queries = ScatteredQueries(self._finishing, self._dtype)

    @property
    def finishing(self) -> int:
        """How many active tokens, the last ones, go through attention and MLP."""
        return len(self._finishing)

    def record(self, entered: int) -> None:
        """Note the work of the layer that was just finished; `entered` rows had q, k, v computed."""
        visible = int(self._finishing.sum()) + len(self._finishing)
        self.work.append(LayerWork(entered, len(self), len(self._finishing), visible))

    def write(self, layer: int, keys: torch.Tensor, rotated: torch.Tensor, values: torch.Tensor) -> None:
        """Put the active rows into the request's cache, and into the captures of parts to be stored."""
        self.cache.write(layer, self.positions, rotated, values)
        for capture, first_row in zip(self.captures, self._capture_rows, strict=True):
            capture.take(layer, first_row, keys, values)

    def attend(self, layer: int, queries: torch.Tensor, stop: int) -> torch.Tensor:
        """Attention of the `finishing` rows' queries over the request's cache below position `stop`."""
        keys, values = self.cache.view(layer, stop)
        return self._queries.attend(queries, keys, values)

    def _surviving_rows(self, rule: KeepTop, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(self._candidate).squeeze(1)
        cached = self.cache.cached_before_rope(layer, self.positions[rows])
        evidence = measure(rule.by, keys[rows], values[rows], cached)
        best = torch.sort(evidence, descending=True, stable=True).indices[: rule.count]
        keep = ~self._candidate
        keep[rows[best]] = True
        return torch.nonzero(keep).squeeze(1)

    def _activate(self, positions: torch.Tensor) -> None:
        """Make `positions` the active ones; everything that follows from them is worked out once, here."""
        self.positions = positions
        self._queries = ScatteredQueries(positions, self._dtype)
        self._finishing = positions
        starts = torch.tensor([capture.part.span.start for capture in self.captures], device=positions.device)
        self._capture_rows: list[int] = torch.searchsorted(positions, starts).tolist()


def _mark(flags: torch.Tensor, spans: Sequence[Span]) -> None:
    for span in spans:
        flags[span.start : span.stop] = True
