"""One request's plan, executed pass by pass over vLLM's layers, in slices of layers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

import torch

from chunkweave.chunking.prompt import Prompt
from chunkweave.config import CaptureConfig
from chunkweave.engine.prefill import parts_to_keep, segments_of
from chunkweave.fusion.capture import AttentionCapture, PartCapture
from chunkweave.fusion.loop import PassRun
from chunkweave.fusion.rows import ActiveRows, counted, measure, starting_rows, weighted
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.models.base import Ranks
from chunkweave.planning.plan import Evidence, KeepTop, KVSource, Pass, Plan, clipped
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.types import Scattered, Span, joined, spans_of
from chunkweave.vllm.paged_kv import BlockTable, PagedCache
from chunkweave.vllm.stock_layers import ActiveSet, LayerModules, StockLayers

START = -1
"""Where a layer's number would stand: what a pass started with."""

_PLACED_PER_COMPUTED = 32
"""As how many stored tokens, placed in a layer, one that is computed counts: moving keys and values is bytes, computing
is all weights of the layer. Assumed, not measured; it bounds a step in which hardly anything is computed."""

Choices = Mapping[tuple[int, int], torch.Tensor]
"""Positions that evidence chose, by pass and layer."""


class _RunningPass(Protocol):
    """A pass that is run layer by layer: `StockPass` or `LoopPass`."""

    @property
    def done(self) -> bool: ...

    @property
    def layer(self) -> int: ...

    @property
    def active_tokens(self) -> int: ...

    @property
    def started(self) -> torch.Tensor: ...

    @property
    def kept(self) -> Mapping[int, torch.Tensor]: ...

    @property
    def evidence(self) -> torch.Tensor | None: ...

    @property
    def recomputed(self) -> list[int]: ...

    @property
    def recompute_work(self) -> int: ...

    def next_layer(self) -> None: ...


class CapturedParts:
    """The parts of one prompt that are captured while it is woven: this rank's heads of them. Owned by the weave.

    `captures` take the KV, `attention` what the parts' tokens attend to.
    """

    def __init__(
        self,
        modules: LayerModules,
        prompt: Prompt,
        plan: Plan,
        sources: Sequence[tuple[Span, SegmentSource]],
        store: TieredStore[SegmentSource],
        config: CaptureConfig,
        *,
        first: int,
    ) -> None:
        """Parts that begin before `first` are in vLLM's blocks already, and not looked at."""
        self._prompt, self._plan = prompt, plan
        placements = [Placement(span, source) for span, source in sources]
        parts = parts_to_keep(prompt, plan, placements, store, woven_fraction=config.woven_fraction)
        device = modules.layers.device
        self.captures = tuple(
            PartCapture(part, modules.own_geometry, modules.dtype, device=device, woven_from=origin)
            for part, origin in parts
            if part.span.start >= first
        )
        self.attention: AttentionCapture | None = None
        if self.captures and config.profile:
            self.attention = AttentionCapture(plan.parts, modules.geometry, config, device=device, ranks=modules.ranks)

    def segments(self, exact_to: int) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
        """What is to be stored, after the weave: exact are only parts that end at `exact_to` or before."""
        complete = [capture for capture in self.captures if capture.complete]
        ends = sorted(capture.part.span.stop for capture in complete)  # segments come in prompt order
        found = segments_of(self._prompt, self._plan, complete, self.attention)
        for end, (record, kv) in zip(ends, found, strict=True):
            yield replace(record, exact=record.exact and end <= exact_to), kv

    @property
    def spans(self) -> frozenset[Span]:
        """The spans of the parts that were captured whole."""
        return frozenset(capture.part.span for capture in self.captures if capture.complete)


class WeaveJob:
    """Brings positions `first` to `stop` of one prompt into its blocks. Owned by one worker, run a few layers a step.

    What lies before `first` is in the blocks already; what lies from `stop` on, vLLM computes afterwards. Both are left
    out of the plan's active sets, which changes nothing for the rest: attention is causal. Only a question that is
    asked on the way, and tokens of parts that are captured, are computed here too, beside the blocks.
    """

    def __init__(
        self,
        modules: LayerModules,
        table: BlockTable,
        plan: Plan,
        sources: Sequence[tuple[Span, SegmentSource]],
        token_ids: Sequence[int],
        *,
        first: int,
        stop: int,
        captured: CapturedParts | None = None,
        chosen: Choices | None = None,
    ) -> None:
        """`sources` are the segments of the plan with the spans that they go to.

        `captured` are parts that the last pass keeps for the store. `chosen` is what another job of the same chunks and
        method, from position 0 on, chose: where this one begins later, it takes the same, so that an answer does not
        depend on what vLLM's own cache held.
        """
        layers = modules.layers
        self._modules, self._layers = modules, layers
        self._table, self._plan = table, plan
        self._first, self._stop = first, stop
        self._cache = PagedCache(layers, table, sources, first=first, stop=stop, capacity=plan.prompt_tokens)
        self._ids = torch.tensor(token_ids[: plan.prompt_tokens], dtype=torch.long, device=layers.device)
        self._reused = torch.zeros(plan.prompt_tokens, dtype=torch.bool)
        for span in plan.spans(KVSource.REUSED):
            self._reused[span.start : span.stop] = True
        self.captured = captured
        self._given: Choices = (chosen or {}) if first else {}
        self._passes: dict[int, _RunningPass] = {}
        self._next_pass()

    @property
    def done(self) -> bool:
        return self._running.done and self._last_begun

    @property
    def layer(self) -> int:
        """The layer that is run next: the number of those that were, in the pass at hand."""
        return 0 if self._running.done and not self._last_begun else self._running.layer

    @property
    def chosen(self) -> Choices:
        """Positions of the candidates that starts and rules kept so far, ascending."""
        starts = {(n, START): p.started for n, p in self._passes.items() if self._plan.passes[n].start is not None}
        return starts | {(n, layer): kept for n, p in self._passes.items() for layer, kept in p.kept.items()}

    @property
    def recomputed(self) -> list[int]:
        """Positions of reused chunks that were computed again, or are being, ascending."""
        return [position for span in self._recomputed for position in span.positions()]

    @property
    def recompute_work(self) -> int:
        """Reused-chunk tokens that were active, summed over the layers done."""
        return sum(one.recompute_work for one in self._passes.values())

    def run(self, layers: float = inf, work: float = inf) -> int:
        """The next layers of the pass at hand and of those after it: at most `layers`, until `work` is done or more.

        Returns:
            The work done: tokens computed, summed over layers. A layer that computes few counts as those that it
            would take as long to compute as it takes to place what is stored.
        """
        done = 0
        while layers > 0 and done < work and not self.done:
            if self._running.done:
                self._next_pass()
            done += max(self._running.active_tokens, (self._stop - self._first) // _PLACED_PER_COMPUTED, 1)
            self._running.next_layer()
            layers -= 1
        return done

    @property
    def _running(self) -> _RunningPass:
        return self._passes[max(self._passes)]

    @property
    def _last_begun(self) -> bool:
        return len(self._plan.passes) - 1 in self._passes

    @property
    def _recomputed(self) -> tuple[Span, ...]:
        whole = (one for number, one in self._passes.items() if self._plan.passes[number].depth is None)
        return joined(span for one in whole for span in spans_of(one.recomputed))

    def _next_pass(self) -> None:
        """Begin the first pass that was not begun, but for those that only ask what is known already."""
        for number in range(max(self._passes, default=-1) + 1, len(self._plan.passes)):
            a_pass = self._plan.passes[number]
            known = a_pass.watch is not None and (number + 1, START) in self._given
            if known and not a_pass.candidates:
                continue
            self._passes[number] = self._begin(number, replace(a_pass, watch=None) if known else a_pass)
            return

    def _begin(self, number: int, a_pass: Pass) -> _RunningPass:
        last = number == len(self._plan.passes) - 1
        start = self._given.get((number, START))
        if a_pass.start is not None and start is not None:
            a_pass = replace(a_pass, start=None, candidates=(Scattered(0, tuple(start.tolist())),))
        captures = self.captured.captures if last and self.captured is not None else ()
        asks = a_pass.watch is not None or (a_pass.stop_unfocused is not None and a_pass.starting_tokens > 0)
        stop = max([self._stop, *(capture.part.span.stop for capture in captures)])
        a_pass = clipped(a_pass, self._first, self._plan.prompt_tokens if asks else stop)
        decided = {layer: kept for (of, layer), kept in self._given.items() if of == number and layer != START}
        evidence = self._running.evidence if self._passes else None
        reads = any(rule.by is Evidence.READ_DEVIATION for rule in a_pass.keep_top)
        if not (asks or captures or reads or a_pass.hidden) or not (a_pass.required or a_pass.candidates):
            return StockPass(
                self._layers,
                self._table,
                self._cache,
                a_pass,
                self._ids,
                reused=self._reused,
                ranks=self._modules.ranks,
                evidence=evidence,
                recomputed=self._recomputed,
                decided=decided,
            )
        return LoopPass(
            self._modules,
            self._cache,
            self._plan,
            a_pass,
            self._ids,
            captures=captures,
            attention=self.captured.attention if captures and self.captured is not None else None,
            evidence=evidence,
            recomputed=self._recomputed,
            decided=decided,
        )


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


class LoopPass:
    """Runs the active tokens of one request, in blocks or not, by the code of the project's own engine.

    Its question has no answer here: vLLM computes it again, over what was woven. Owned by its weave.
    """

    def __init__(
        self,
        modules: LayerModules,
        cache: PagedCache,
        plan: Plan,
        a_pass: Pass,
        token_ids: torch.Tensor,
        *,
        captures: Sequence[PartCapture] = (),
        attention: AttentionCapture | None = None,
        evidence: torch.Tensor | None = None,
        recomputed: Sequence[Span] = (),
        decided: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """`token_ids` `[tokens]` is the whole prompt, on the device; `captures` take the KV of parts to be stored.

        `a_pass` is a pass of `plan`, or what is to be done of it. For the rest see `ActiveRows`.
        """
        self._plan = plan
        self._fixed = plan.computed_tokens_of(a_pass)
        self._rows = ActiveRows.of_pass(
            cache,
            token_ids,
            a_pass,
            dtype=modules.dtype,
            evidence=evidence,
            recomputed=recomputed,
            answers=False,
            decided=decided,
            ranks=modules.ranks,
        )
        self.started = self._rows.candidates
        if captures:
            self._rows.keep(captures, attention)
        self._run = PassRun(modules, [self._rows], attention=modules.attention)

    @property
    def layer(self) -> int:
        """How many layers were run."""
        return self._run.layer

    @property
    def done(self) -> bool:
        return self._run.done

    @property
    def active_tokens(self) -> int:
        """Tokens that enter the next layer."""
        return len(self._rows.positions)

    def next_layer(self) -> None:
        """Run one more layer; there must be one."""
        self._run.next_layer()

    @property
    def evidence(self) -> torch.Tensor | None:
        """What its question looked at, `[positions]`, if it was watched."""
        return self._rows.evidence

    @property
    def kept(self) -> Mapping[int, torch.Tensor]:
        """Positions of the candidates that each layer's rule kept."""
        return self._rows.kept

    @property
    def recomputed(self) -> list[int]:
        """Positions of reused chunks that are active now, ascending."""
        return self._plan.reused_among(self._rows.where)

    @property
    def recompute_work(self) -> int:
        """Reused-chunk tokens that were active, summed over the layers done."""
        return sum(layer.kept_tokens - self._fixed for layer in counted(self._rows.work))
