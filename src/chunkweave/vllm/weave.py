"""One request's plan, executed pass by pass over vLLM's layers, in slices of layers.

Per layer the order is the project's own (`planning.plan`): fresh K and V of the active tokens, evidence, refine; cached
KV of all others; then attention and the rest of the layer for the survivors. A pass that looks at K and V alone runs
through vLLM's whole layers (`StockPass`), one that looks at attention or hides keys through the project's layer loop
(`LoopPass`); so does every one where layers with a window have no blocks for what has left it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch

from chunkweave.config import CaptureConfig
from chunkweave.engine.prefill import parts_to_keep, segments_of
from chunkweave.fusion.capture import AttentionCapture, PartCapture
from chunkweave.fusion.loop import PassRun
from chunkweave.fusion.rows import ActiveRows, flags_of
from chunkweave.kv.request_cache import Placement, before_rope
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.planning.plan import Evidence, KVSource, Pass, Plan, clipped
from chunkweave.prompt.parts import Prompt
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.types import Scattered, Span, joined, spans_of
from chunkweave.vllm.paged_kv import PagedCache, RequestBlocks
from chunkweave.vllm.scheduler import PLACED_PER_COMPUTED
from chunkweave.vllm.stock_layers import StockLayers

START = -1
"""In place of a layer's number: what a pass started with."""

Choices = Mapping[tuple[int, int], torch.Tensor]
"""Positions that evidence chose, by pass and layer."""


@dataclass(frozen=True, slots=True, eq=False)
class WeaveInput:
    """What all passes of one weave share: the layers, the request's KV, and its prompt.

    `token_ids` `[tokens]` is the whole prompt, on the device; `reused` flags the tokens of reused parts, on the host.
    """

    layers: StockLayers
    blocks: RequestBlocks
    cache: PagedCache
    token_ids: torch.Tensor
    reused: torch.Tensor


class RunningPass:
    """A pass that is run layer by layer. Owned by its weave.

    `rows` are the active tokens; `started` the positions of the candidates at the beginning; `layer` the number of
    layers that were run.
    """

    def __init__(self, weave: WeaveInput, rows: ActiveRows, a_pass: Pass) -> None:
        self._weave = weave
        self.rows = rows
        self.started = rows.candidates
        self.layer = 0
        self._depth = weave.layers.num_layers if a_pass.depth is None else a_pass.depth
        self._computed = len(rows) - len(self.recomputed)

    @property
    def done(self) -> bool:
        return self.layer == self._depth

    @property
    def active_tokens(self) -> int:
        """Tokens that enter the next layer."""
        return len(self.rows)

    @property
    def recomputed(self) -> list[int]:
        """Positions of reused chunks that are active now, ascending."""
        positions = self.rows.positions.cpu()
        found: list[int] = positions[self._weave.reused[positions]].tolist()
        return found

    @property
    def recompute_work(self) -> int:
        """Reused-chunk tokens that were active, summed over the layers done."""
        return sum(work.kept_tokens - self._computed for work, _ in self.rows.work)

    def next_layer(self) -> None:
        """Run one more layer; there must be one."""
        self._run(self.layer)
        self.layer += 1

    def _run(self, layer: int) -> None:
        raise NotImplementedError


class StockPass(RunningPass):
    """A pass through vLLM's own layers and kernels: it looks at nothing but keys and values; all tokens have blocks."""

    def __init__(self, weave: WeaveInput, rows: ActiveRows, a_pass: Pass, decided: Mapping[int, torch.Tensor]) -> None:
        """Where it was `decided` before which positions a layer's rule keeps, no evidence is needed."""
        super().__init__(weave, rows, a_pass)
        self._rules = {rule.layer for rule in a_pass.keep_top}
        self._decided = decided.keys()
        self._hidden = weave.layers.embed(rows.token_ids) if len(rows) else None
        self._residual: torch.Tensor | None = None
        self._activate()

    def _run(self, layer: int) -> None:
        layers, rows = self._weave.layers, self.rows
        if layer in self._rules and self._hidden is not None:
            self._hidden = self._refined(layer, self._hidden)
        self._weave.cache.fill(layer, self._passive)
        rows.record(len(rows))
        if self._hidden is None or not len(rows):
            return
        if layer < self._depth - 1:
            self._hidden, self._residual = layers.run(layer, self._active, self._hidden, self._residual)
            return
        # Nobody reads hidden states of these tokens behind the last layer: their K and V are all that is left to do.
        keys, values = layers.keys_values(layer, self._hidden, self._residual)
        slots = self._weave.blocks.of(layer).slots(rows.positions)
        layers.paged.write(layer, slots, layers.rotate_keys(layer, keys, rows.positions), values)

    def _refined(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states of the rows that the layer's rule keeps; only these are active from now on."""
        keys = values = hidden
        if layer not in self._decided:
            keys, values = self._weave.layers.keys_values(layer, hidden, self._residual)
        kept = self.rows.refine(layer, keys, values)
        self._residual = None if self._residual is None else self._residual[kept]
        self._activate()
        return hidden[kept]

    def _activate(self) -> None:
        """What follows from the active positions is worked out once, here."""
        positions, cached = self.rows.positions, self._weave.cache.cached
        self._active = self._weave.layers.activate(positions, self._weave.blocks)
        self._passive = torch.nonzero(~torch.isin(cached, positions)).squeeze(1)


class LoopPass(RunningPass):
    """A pass through the project's layer loop over vLLM's modules: attention is looked at, or keys are hidden.

    Its question has no answer here: vLLM computes it again, over what was woven.
    """

    def __init__(self, weave: WeaveInput, rows: ActiveRows, a_pass: Pass) -> None:
        super().__init__(weave, rows, a_pass)
        self._loop = PassRun(weave.layers, [rows], attention=weave.layers.attention)

    def _run(self, layer: int) -> None:
        assert layer == self._loop.layer
        self._loop.next_layer()


class CapturedParts:
    """The parts of one prompt that are captured while it is woven: this rank's heads of them. Owned by the weave.

    `captures` take the KV, `attention` what the parts' tokens attend to.
    """

    def __init__(
        self,
        layers: StockLayers,
        prompt: Prompt,
        plan: Plan,
        placements: Sequence[Placement],
        store: TieredStore[SegmentSource],
        config: CaptureConfig,
        *,
        first: int,
        before: int | None = None,
    ) -> None:
        """Parts that begin before `first` are in vLLM's blocks already, and not looked at.

        Only the KV of parts that begin `before`, and are computed, is kept; None: of all, with their attention.
        """
        self._prompt, self._plan = prompt, plan
        woven_fraction = config.woven_fraction if before is None else None
        sources = before_rope(placements, layers.rotations.inverse, layers.device)
        parts = parts_to_keep(prompt, plan, sources, store, woven_fraction=woven_fraction)
        self.captures = tuple(
            PartCapture(part, layers.own_geometry, layers.dtype, device=layers.device, woven_from=origin)
            for part, origin in parts
            if part.span.start >= first and (before is None or part.span.start < before)
        )
        self.attention: AttentionCapture | None = None
        if self.captures and before is None:
            self.attention = AttentionCapture(
                plan.parts, layers.geometry, config, device=layers.device, ranks=layers.ranks
            )

    def segments(self, exact_to: int) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
        """What is to be stored, after the weave: exact are only parts that end at `exact_to` or before."""
        complete = [capture for capture in self.captures if capture.complete]
        ends = sorted(capture.part.span.stop for capture in complete)  # segments come in prompt order
        found = segments_of(self._prompt, self._plan, complete, self.attention)
        for end, (record, kv) in zip(ends, found, strict=True):
            yield replace(record, exact=record.exact and end <= exact_to), SegmentKV(kv.kv.cpu())

    @property
    def spans(self) -> frozenset[Span]:
        """The spans of the parts that were captured whole."""
        return frozenset(capture.part.span for capture in self.captures if capture.complete)


class WeaveJob:
    """Brings positions `first` to `stop` of one prompt into its blocks. Owned by one worker, run a few layers a step.

    What lies before `first` is in the blocks already; what lies from `stop` on, vLLM computes afterwards. Both are left
    out of the plan's active sets, which changes nothing for the rest: attention is causal. Only a question whose
    attention is read, and tokens of parts that are captured, are computed here too, beside the blocks.
    """

    def __init__(
        self,
        layers: StockLayers,
        blocks: RequestBlocks,
        plan: Plan,
        placements: Sequence[Placement],
        token_ids: Sequence[int],
        *,
        first: int,
        stop: int,
        captured: CapturedParts | None = None,
        chosen: Choices | None = None,
    ) -> None:
        """`placements` are the segments of the plan with the spans that they go to.

        `captured` are parts that the last pass keeps for the store. `chosen` is what another job of the same chunks and
        method chose, where this one begins behind what that wove: it takes the same, so that an answer does not depend
        on what vLLM's own cache held.
        """
        self._plan, self._first, self._stop = plan, first, stop
        reused = flags_of(plan.spans(KVSource.REUSED), plan.prompt_tokens)
        cache = PagedCache(layers, blocks, placements, first=first, stop=stop, capacity=plan.prompt_tokens)
        ids = torch.tensor(token_ids[: plan.prompt_tokens], dtype=torch.long, device=layers.device)
        self._input = WeaveInput(layers, blocks, cache, ids, reused)
        self.captured = captured
        self._decided: Choices = chosen or {}
        self._passes: dict[int, RunningPass] = {}
        self._next_pass()

    @property
    def done(self) -> bool:
        return self._running.done and self._last_begun

    @property
    def layer(self) -> int:
        """The layer that is run next: the number of those that were, in the current pass."""
        return 0 if self._running.done and not self._last_begun else self._running.layer

    @property
    def chosen(self) -> Choices:
        """Positions of the candidates that starts and rules kept so far, ascending."""
        starts = {(n, START): p.started for n, p in self._passes.items() if self._plan.passes[n].start is not None}
        return starts | {(n, layer): kept for n, p in self._passes.items() for layer, kept in p.rows.kept.items()}

    @property
    def recomputed(self) -> list[int]:
        """Positions of reused chunks that were computed again, or are being, ascending."""
        return [position for span in self._recomputed for position in span.positions()]

    @property
    def recompute_work(self) -> int:
        """Reused-chunk tokens that were active, summed over the layers done."""
        return sum(one.recompute_work for one in self._passes.values())

    def run(self, layers: float = inf, work: float = inf) -> int:
        """The next layers of the current pass and of those after it: at most `layers`, until `work` is done or more.

        Returns:
            The work done: tokens computed, summed over layers. A layer that computes few counts as those that it
            would take as long to compute as it takes to place what is stored.
        """
        done = 0
        while layers > 0 and done < work and not self.done:
            if self._running.done:
                self._next_pass()
            done += max(self._running.active_tokens, (self._stop - self._first) // PLACED_PER_COMPUTED, 1)
            self._running.next_layer()
            layers -= 1
        return done

    @property
    def _running(self) -> RunningPass:
        return self._passes[max(self._passes)]

    @property
    def _last_begun(self) -> bool:
        return len(self._plan.passes) - 1 in self._passes

    @property
    def _recomputed(self) -> tuple[Span, ...]:
        whole = (one for number, one in self._passes.items() if self._plan.passes[number].depth is None)
        return joined(span for one in whole for span in spans_of(one.recomputed))

    def _next_pass(self) -> None:
        """Begin the first pass that was not begun, but for those that only read what is known already."""
        for number in range(max(self._passes, default=-1) + 1, len(self._plan.passes)):
            a_pass = self._plan.passes[number]
            known = a_pass.watch is not None and (number + 1, START) in self._decided
            if known and not a_pass.candidates:
                continue
            self._passes[number] = self._begin(number, replace(a_pass, watch=None) if known else a_pass)
            return

    def _begin(self, number: int, a_pass: Pass) -> RunningPass:
        self._input.cache.last_pass = last = number == len(self._plan.passes) - 1
        start = self._decided.get((number, START))
        if a_pass.start is not None and start is not None:
            a_pass = replace(a_pass, start=None, candidates=(Scattered(0, tuple(start.tolist())),))
        captures = self.captured.captures if last and self.captured is not None else ()
        reads_question = a_pass.watch is not None or (a_pass.stop_unfocused is not None and a_pass.starting_tokens > 0)
        stop = max([self._stop, *(capture.part.span.stop for capture in captures)])
        a_pass = clipped(a_pass, self._first, self._plan.prompt_tokens if reads_question else stop)
        decided = {layer: kept for (of, layer), kept in self._decided.items() if of == number and layer != START}
        rows = ActiveRows.of_pass(
            self._input.cache,
            self._input.token_ids,
            a_pass,
            dtype=self._input.layers.dtype,
            evidence=self._running.rows.evidence if self._passes else None,
            recomputed=self._recomputed,
            answers=False,
            decided=decided,
            ranks=self._input.layers.ranks,
        )
        reads = any(rule.by is Evidence.READ_DEVIATION for rule in a_pass.keep_top)
        by_row = reads_question or captures or reads or a_pass.hidden or not self._input.blocks.whole
        if not by_row or not (a_pass.required or a_pass.candidates):
            return StockPass(self._input, rows, a_pass, decided)
        if captures and self.captured is not None:
            rows.keep(captures, self.captured.attention)
        return LoopPass(self._input, rows, a_pass)
