"""One request's plan, executed pass by pass over vLLM's layers, in slices of layers.

Per layer the order is the project's own (`planning.plan`): fresh K and V of the active tokens, evidence, refine; cached
KV of all others; then attention and the rest of the layer for the survivors. A pass that looks at K and V alone runs
through vLLM's whole layers (`StockPass`), one that looks at attention or hides keys through the project's layer loop
(`LoopPass`); so does every one where layers with a window have no blocks for what has left it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import torch

from chunkweave.config import CaptureConfig
from chunkweave.fusion.capture import AttentionCapture
from chunkweave.fusion.loop import PassRun
from chunkweave.fusion.rows import ActiveRows, flags_of
from chunkweave.kv.request_cache import Placement, Rotate, before_rope
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.planning.plan import Evidence, KVSource, Pass, Plan, clipped
from chunkweave.prompt.parts import Prompt
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.types import Scattered, Span, joined, spans_of
from chunkweave.vllm.orders import PLACED_PER_COMPUTED
from chunkweave.vllm.paged_kv import RequestBlocks
from chunkweave.vllm.rotation import BEFORE_ROPE
from chunkweave.vllm.stock_layers import StockLayers
from chunkweave.weaving.segments import new_captures, parts_to_keep, segments_of

START = -1
"""In place of a layer's number: what a pass started with."""

Choices = Mapping[tuple[int, int], torch.Tensor]
"""Positions that evidence chose, by pass and layer."""


_MOST_PASSIVE = 0.75
"""Where a larger share of a segment's tokens is passive, all of them are brought."""


@dataclass(frozen=True, slots=True, eq=False)
class _Fill:
    """What the segments bring to one group of layers, where `passive` tokens need it: worked out once for all of them.

    `rows` are those with blocks, `slots` theirs; their keys are stored as `at` positions and go `to` others. They are
    places in a row where the others are few, whose KV is overwritten behind it: to pick rows out costs a copy.
    """

    passive: torch.Tensor
    rows: torch.Tensor | slice
    at: torch.Tensor
    to: torch.Tensor
    slots: torch.Tensor


class PagedCache:
    """A `PassCache` whose positions from `first` to `stop` are to be brought into the request's blocks.

    What lies before `first` is in the blocks already. What lies from `stop` on has no blocks yet: a question whose
    attention is read beforehand; its KV is held for one layer at a time. For attention that is not vLLM's, keys and
    values of the current layer are laid out in a row, `[2, capacity, kv_heads, head_dim]`; other passes fill the blocks
    alone. Owned by one weave.

    Where a layer's blocks begin later than the prompt, `first` is 0, and passes need the row: what lies before is laid
    out from the segments for each of them, and what all but the last computed there is held on the host.
    """

    kept_from: int | None = None
    last_pass = False
    """Nothing is to be held for another one."""

    def __init__(
        self,
        layers: StockLayers,
        blocks: RequestBlocks,
        placements: Sequence[Placement],
        *,
        first: int,
        stop: int,
        capacity: int,
    ) -> None:
        """`placements` are segments with the spans that they go to, ascending; `capacity` is the prompt's tokens."""
        self.capacity, self.geometry = capacity, layers.geometry
        assert blocks.whole or not first, "what has left a window cannot be read back"
        self._paged, self._blocks = layers.paged, blocks
        self._rotations = layers.rotations
        placed = [one for one in placements if one.span.stop > first]
        self._sources = [(one.segment, slice(max(0, first - one.span.start), len(one.span))) for one in placed]
        inside = [Span(max(first, one.span.start), one.span.stop) for one in placed]
        assert all(one.stop <= other.start for one, other in pairwise(inside))
        positions = [position for span in inside for position in span.positions()]
        self.cached = torch.tensor(positions, dtype=torch.long, device=layers.device)
        """Positions of what the segments bring, ascending."""
        keys_at = [position for segment, rows in self._sources for position in _keys_at(segment, rows)]
        self._keys_at = torch.tensor(keys_at, dtype=torch.long, device=layers.device)
        self._turned, self._rotated = keys_at != positions, set(keys_at) != {BEFORE_ROPE}
        self._where = positions
        self._turns: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._fills: dict[int, _Fill] = {}
        self._below = torch.arange(stop, device=layers.device)
        self._first = first
        self._held: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._loaded = [False] * layers.num_layers
        self._row: torch.Tensor | None = None
        self._at = -1
        self._raw: tuple[int, torch.Tensor] | None = None
        self._written: dict[int, tuple[torch.Tensor, slice, torch.Tensor]] = {}

    def fill(self, layer: int, passive: torch.Tensor) -> None:
        """Bring the segments' KV of a layer into the blocks, once; `passive` are the places in `cached` that need it.

        The KV of the others is about to be computed.
        """
        if self._loaded[layer]:
            return
        self._loaded[layer] = True
        group = self._paged.groups[layer]
        if group not in self._fills or self._fills[group].passive is not passive:
            inside = self._inside(layer, self.cached)
            picked = passive[(passive >= inside.start) & (passive < inside.stop)]
            most = len(picked) > _MOST_PASSIVE * (inside.stop - inside.start)
            rows = inside if most else picked
            to = self.cached[rows]
            self._fills[group] = _Fill(passive, rows, self._keys_at[rows], to, self._blocks.of(layer).slots(to))
        fill = self._fills[group]
        if len(fill.slots):
            keys, values = self._gather(layer)[:, fill.rows]
            self._paged.write(layer, fill.slots, self._moved(layer, keys, fill.at, fill.to), values)

    def load_layer(self, layer: int, rotate: Rotate) -> None:  # noqa: ARG002  (the protocol has it)
        """Lay the KV of a layer out in a row: what is in the blocks, and what segments bring, which goes there too."""
        self._at, loaded = layer, self._loaded[layer]
        self._loaded[layer] = True
        row, table, inside = self._row_of(layer), self._blocks.of(layer), self._inside(layer, self.cached)
        known = self._below[table.begins :] if loaded else self._below[: self._first]
        if len(known):
            row[:, table.begins : table.begins + len(known)] = self._paged.read(layer, table.slots(known))
        self._place(layer, slice(0, inside.start if loaded else inside.stop))
        self._place(layer, slice(inside.stop, len(self.cached)))
        for positions, held in self._held.get(layer, ()):
            row[:, positions] = held.to(row.device, non_blocking=True)
        if not loaded and inside.stop > inside.start:
            keys, values = row[:, self._rows(inside)]
            self._paged.write(layer, table.slots(self.cached[inside]), keys, values)

    def cached_before_rope(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Segments' KV at `positions` (all of them `cached`), `[2, tokens, kv_heads, head_dim]`, before RoPE."""
        places = torch.searchsorted(self.cached, positions)
        found = self._gather(layer)[:, places]
        if not self._rotated:
            return found
        nowhere = torch.full_like(places, BEFORE_ROPE)
        return torch.stack((self._rotations.turn(layer, found[0], self._keys_at[places], nowhere), found[1]))

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows at `positions` `[tokens]`, ascending, with rotated `keys` and `values`, in row and blocks."""
        row = self._row_of(layer)
        row[0].index_copy_(0, positions, keys)
        row[1].index_copy_(0, positions, values)
        inside, slots = self._slots_of(layer, positions)
        if len(slots):
            self._paged.write(layer, slots, keys[inside], values[inside])
        if inside.start and not self.last_pass:
            held = torch.stack((keys[: inside.start], values[: inside.start])).cpu()
            self._held.setdefault(layer, []).append((positions[: inside.start], held))

    def keep(self, layer: int, positions: torch.Tensor, keys: torch.Tensor) -> None:
        """Never called: the question's KV is vLLM's to compute and to keep."""
        raise AssertionError(f"{len(keys)} keys of layer {layer} at {positions} have no place")

    def clear(self, layer: int, hidden: torch.Tensor) -> None:
        """Make the rows at the positions `hidden` finite; a later pass writes them into the blocks."""
        self._row_of(layer).index_fill_(1, hidden, 0)

    def view(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values of positions below `stop` in the current layer, `[stop, kv_heads, head_dim]`."""
        row = self._row_of(layer)
        return row[0, :stop], row[1, :stop]

    def _row_of(self, layer: int) -> torch.Tensor:
        assert layer == self._at, "a layer is loaded before it is used"
        if self._row is None:
            shape = (2, self.capacity, *self._paged.shape)
            self._row = torch.zeros(shape, dtype=self._paged.dtype, device=self._paged.device)
        return self._row

    def _place(self, layer: int, places: slice) -> None:
        """Lay out what the segments bring to those places in `cached`."""
        if places.stop <= places.start:
            return
        row, where = self._row_of(layer), self._rows(places)
        run = (places.start, places.stop)
        if run not in self._turns:
            self._turns[run] = self._keys_at[places], self.cached[places]
        keys, values = self._gather(layer)[:, places]
        row[0, where] = self._moved(layer, keys, *self._turns[run])
        row[1, where] = values

    def _rows(self, places: slice) -> slice | torch.Tensor:
        """The positions of those places in `cached`: as a slice, which costs a copy less, where they are one run."""
        first, stop = self._where[places.start], self._where[places.stop - 1] + 1
        return slice(first, stop) if stop - first == places.stop - places.start else self.cached[places]

    def _moved(self, layer: int, keys: torch.Tensor, at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Keys that are as `at` positions, as they are `to` others: untouched if all segments were computed there."""
        return self._rotations.turn(layer, keys, at, to) if self._turned else keys

    def _inside(self, layer: int, positions: torch.Tensor) -> slice:
        """Those of the `positions`, ascending, that have blocks in a layer."""
        begins = self._blocks.of(layer).begins
        return slice(int((positions < begins).sum()) if begins else 0, int((positions < len(self._below)).sum()))

    def _slots_of(self, layer: int, positions: torch.Tensor) -> tuple[slice, torch.Tensor]:
        """Those of the positions that have blocks, and their slots; worked out once for the rows of many layers."""
        group = self._paged.groups[layer]
        if group not in self._written or self._written[group][0] is not positions:
            inside = self._inside(layer, positions)
            self._written[group] = positions, inside, self._blocks.of(layer).slots(positions[inside])
        return self._written[group][1:]

    def _gather(self, layer: int) -> torch.Tensor:
        """Keys as they are stored and values of all `cached` positions, `[2, tokens, kv_heads, head_dim]`."""
        if self._raw is None or self._raw[0] != layer:
            parts = [source.layer(layer)[:, rows] for source, rows in self._sources]
            device, dtype = self._paged.device, self._paged.dtype
            self._raw = (layer, torch.cat([part.to(device, dtype, non_blocking=True) for part in parts], dim=1))
        return self._raw[1]


def _keys_at(segment: SegmentSource, rows: slice) -> Sequence[int]:
    """The positions that the keys of some rows of a segment are stored for."""
    count = rows.stop - rows.start
    if segment.keys_at is None:
        return [BEFORE_ROPE] * count
    return range(segment.keys_at + rows.start, segment.keys_at + rows.stop)


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
        config: CaptureConfig | None,
        *,
        first: int,
        before: int | None = None,
    ) -> None:
        """Parts that begin before `first` are in vLLM's blocks already, and not looked at.

        Only the KV of parts that begin `before`, and are computed, is kept; None: of all, and with a `config` their
        attention.
        """
        self._prompt, self._plan, self._store = prompt, plan, store
        fraction = config.variant_fraction if before is None and config is not None else None
        sources = before_rope(placements, layers.rotations.inverse, layers.device)
        parts = parts_to_keep(prompt, plan, sources, store, variant_fraction=fraction)
        stop = plan.prompt_tokens if before is None else before
        here = ((part, origin) for part, origin in parts if first <= part.span.start < stop)
        self.captures = new_captures(here, layers.own_geometry, layers.dtype, layers.device)
        self.attention: AttentionCapture | None = None
        if self.captures and before is None and config is not None:
            self.attention = AttentionCapture(
                plan.parts, layers.geometry, config, device=layers.device, ranks=layers.ranks
            )

    def segments(self, exact_to: int) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
        """What is to be stored, after the weave: exact are only parts that end at `exact_to` or before."""
        complete = [capture for capture in self.captures if capture.complete]
        found = segments_of(self._prompt, self._plan, complete, self.attention, store=self._store, exact_to=exact_to)
        for record, kv in found:
            yield record, SegmentKV(kv.kv.cpu())

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
        self.first = self._first = first
        self._plan, self._stop = plan, stop
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
    def stopped_at_layer(self) -> int | None:
        """From which layer on unfocused chunks are not computed any more; None: no token was dropped."""
        stops = (one.rows.stop for one in self._passes.values())
        return next((stop.layer_if_dropped for stop in stops if stop is not None), None)

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
