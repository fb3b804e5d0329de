"""One request's plan, executed pass by pass over vLLM's layers, in slices of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

import torch

from chunkweave.kv.segment import SegmentSource
from chunkweave.planning.clipping import clipped
from chunkweave.planning.plan import Evidence, KVSource, Pass, Plan
from chunkweave.types import Scattered, Span, joined, spans_of
from chunkweave.vllm.layer_modules import LayerModules
from chunkweave.vllm.loop_pass import LoopPass
from chunkweave.vllm.paged_cache import PagedCache
from chunkweave.vllm.stock_layers import BlockTable
from chunkweave.vllm.stock_pass import StockPass
from chunkweave.vllm.worker import CapturedParts

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
