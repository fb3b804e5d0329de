"""One request's plan, executed pass by pass over vLLM's layers, in slices of layers.

The order within a layer is that of `planning.plan`: fresh K and V of the active tokens, evidence, refine; cached KV of
all others; then attention and the rest of the layer for the survivors. A pass that reads only K and V runs through
vLLM's whole layers (`StockPass`). These run through our layer loop (`LoopPass`): a pass that reads attention or hides
keys, on a GPU a pass whose tokens are scattered (`too_scattered`), and every pass if windowed layers have no blocks for
what has left the window.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from chunkweave.models.attention import FlatResult, OwnQueries, ScatteredQueries
from chunkweave.planning.plan import Evidence, KVSource, Pass, Plan, clipped
from chunkweave.prompt.parts import Prompt
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.tiers.device import HostMemory
from chunkweave.types import Geometry, Scattered, Span, joined, spans_of
from chunkweave.vllm.orders import PLACED_PER_COMPUTED
from chunkweave.vllm.paged_kv import PagedKV, RequestBlocks
from chunkweave.vllm.rotation import BEFORE_ROPE
from chunkweave.vllm.stock_layers import ActiveSet, StockLayers
from chunkweave.weaving.segments import new_captures, parts_to_keep, segments_of

START = -1
"""Pseudo layer number of what a pass started with."""

Choices = Mapping[tuple[int, int], torch.Tensor]
"""Positions chosen by evidence, by pass and layer."""


_MOST_PASSIVE = 0.75
"""If a larger share of a segment's tokens is passive, the whole segment is loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class _Fill:
    """What segments load into one group of layers for the `passive` tokens; computed once for all layers.

    `rows` are those with blocks, `slots` their slots. Their keys are stored `at` positions and rotated `to` others. If
    few tokens are not passive, `rows` is a slice: these are overwritten afterwards, because picking rows costs a copy.
    """

    passive: torch.Tensor
    rows: torch.Tensor | slice
    at: torch.Tensor
    to: torch.Tensor
    slots: torch.Tensor


class PagedCache:
    """A `PassCache` that loads positions `[first, stop)` into the request's blocks.

    KV before `first` is in the blocks already. Positions from `stop` on have no blocks yet (a question whose attention
    is read in advance); their KV is kept for one layer at a time. For attention other than vLLM's, the current layer's
    keys and values are laid out in a row, `[2, capacity, kv_heads, head_dim]`; other passes only fill the blocks. Owned
    by one weave.

    If a layer's blocks begin later than the prompt, `first` is 0 and passes need the row: earlier positions are laid
    out from the segments for each pass, and what passes before the last compute there is kept on the host.
    """

    kept_from: int | None = None
    last_pass = False
    """With True, nothing is kept for another pass."""

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
        """`placements` are segments with their spans in the prompt, ascending; `capacity` is the prompt's tokens."""
        self.capacity, self.geometry = capacity, layers.geometry
        assert blocks.whole or not first, "what has left a window cannot be read back"
        self._paged, self._blocks = layers.paged, blocks
        self._rotations = layers.rotations
        placed = [placement for placement in placements if placement.span.stop > first]
        self._sources = [
            (placement.segment, slice(max(0, first - placement.span.start), len(placement.span)))
            for placement in placed
        ]
        inside = [Span(max(first, placement.span.start), placement.span.stop) for placement in placed]
        assert all(span.stop <= next_span.start for span, next_span in pairwise(inside))
        positions = [position for span in inside for position in span.positions()]
        self.cached = torch.tensor(positions, dtype=torch.long, device=layers.device)
        """Positions that the segments load, ascending."""
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
        """Load the segments' KV of a layer into the blocks, once; `passive` indexes the entries of `cached` that need
        it.

        The KV of the other entries is about to be computed.
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
            self._paged.place(layer, fill.slots, self._moved(layer, keys, fill.at, fill.to), values)

    def load_layer(self, layer: int, rotate: Rotate) -> None:  # noqa: ARG002  (the protocol has it)
        """Lay out a layer's KV in a row: from the blocks, and from segments, whose KV is also written to the blocks."""
        self._at, loaded = layer, self._loaded[layer]
        self._loaded[layer] = True
        row = self._row_of(layer)
        table = self._blocks.of(layer)
        inside = self._inside(layer, self.cached)
        below = self._below[table.begins :] if loaded else self._below[: self._first]
        if len(below):
            row[:, table.begins : table.begins + len(below)] = self._paged.read(layer, table.slots(below))
        self._place(layer, slice(0, inside.start if loaded else inside.stop))
        self._place(layer, slice(inside.stop, len(self.cached)))
        for positions, held in self._held.get(layer, ()):
            row[:, positions] = held.to(row.device, non_blocking=True)
        if not loaded and inside.stop > inside.start:
            keys, values = row[:, self._rows(inside)]
            self._paged.place(layer, table.slots(self.cached[inside]), keys, values)

    def cached_before_rope(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Segments' KV at `positions` (all of them `cached`), `[2, tokens, kv_heads, head_dim]`, before RoPE."""
        places = torch.searchsorted(self.cached, positions)  # indices into `cached`, not positions
        gathered = self._gather(layer)[:, places]
        if not self._rotated:
            return gathered
        nowhere = torch.full_like(places, BEFORE_ROPE)
        return torch.stack((self._rotations.turn(layer, gathered[0], self._keys_at[places], nowhere), gathered[1]))

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rotated `keys` and `values` at `positions` `[tokens]`, ascending, in the row and the blocks."""
        row = self._row_of(layer)
        row[0].index_copy_(0, positions, keys)
        row[1].index_copy_(0, positions, values)
        inside, slots = self._slots_of(layer, positions)
        if len(slots):
            self._paged.write(layer, slots, keys[inside], values[inside])
            if self._paged.quantized:  # attention sees what the cache keeps
                row[:, positions[inside]] = self._paged.read(layer, slots)
        if inside.start and not self.last_pass:
            held = torch.stack((keys[: inside.start], values[: inside.start])).cpu()
            self._held.setdefault(layer, []).append((positions[: inside.start], held))

    def keep(self, layer: int, positions: torch.Tensor, keys: torch.Tensor) -> None:
        """Never called: vLLM computes and keeps the question's KV."""
        raise AssertionError(f"{len(keys)} keys of layer {layer} at {positions} cannot be kept")

    def clear(self, layer: int, hidden: torch.Tensor) -> None:
        """Set the rows at positions `hidden` to 0, so that they are finite; a later pass writes them to the blocks."""
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
        """Lay out what the segments load for a slice of `cached`."""
        if places.stop <= places.start:
            return
        row = self._row_of(layer)
        where = self._rows(places)
        run = (places.start, places.stop)
        if run not in self._turns:
            self._turns[run] = self._keys_at[places], self.cached[places]
        keys, values = self._gather(layer)[:, places]
        row[0, where] = self._moved(layer, keys, *self._turns[run])
        row[1, where] = values

    def _rows(self, places: slice) -> slice | torch.Tensor:
        """The positions of a slice of `cached`; a slice, which avoids a copy, if they are consecutive."""
        first = self._where[places.start]
        stop = self._where[places.stop - 1] + 1
        return slice(first, stop) if stop - first == places.stop - places.start else self.cached[places]

    def _moved(self, layer: int, keys: torch.Tensor, at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Rotate keys from `at` to `to`; unchanged if all segments were computed at their positions.

        For a quantized cache in float32, so that they are rounded once.
        """
        if not self._turned:
            return keys
        wide = keys.float() if self._paged.quantized else keys
        return self._paged.rounded(layer, self._rotations.turn(layer, wide, at, to))

    def _inside(self, layer: int, positions: torch.Tensor) -> slice:
        """The slice of `positions` (ascending) that have blocks in a layer."""
        begins = self._blocks.of(layer).begins
        return slice(int((positions < begins).sum()) if begins else 0, int((positions < len(self._below)).sum()))

    def _slots_of(self, layer: int, positions: torch.Tensor) -> tuple[slice, torch.Tensor]:
        """The slice of `positions` with blocks, and their slots; cached for rows that many layers share."""
        group = self._paged.groups[layer]
        if group not in self._written or self._written[group][0] is not positions:
            inside = self._inside(layer, positions)
            self._written[group] = positions, inside, self._blocks.of(layer).slots(positions[inside])
        return self._written[group][1:]

    def _gather(self, layer: int) -> torch.Tensor:
        """Keys as stored, and values, of all `cached` positions, `[2, tokens, kv_heads, head_dim]`."""
        if self._raw is None or self._raw[0] != layer:
            parts = (source.layer(layer)[:, rows] for source, rows in self._sources)
            self._raw = (layer, torch.cat([self._paged.opened(layer, part) for part in parts], dim=1))
        return self._raw[1]


def _keys_at(segment: SegmentSource, rows: slice) -> Sequence[int]:
    """The positions for which keys of some rows of a segment are stored."""
    count = rows.stop - rows.start
    if segment.keys_at is None:
        return [BEFORE_ROPE] * count
    return range(segment.keys_at + rows.start, segment.keys_at + rows.stop)


@dataclass(frozen=True, slots=True, eq=False)
class WeaveInput:
    """What all passes of one weave share: the layers, the request's KV, and its prompt.

    `token_ids` `[tokens]` is the whole prompt, on the device; `reused` flags tokens of reused parts, on the host.
    """

    layers: StockLayers
    blocks: RequestBlocks
    cache: PagedCache
    token_ids: torch.Tensor
    reused: torch.Tensor


class RunningPass:
    """A pass that is run layer by layer. Owned by its weave.

    `rows` are the active tokens, `started` the positions of the candidates at the start, `layer` the number of layers
    run.
    """

    def __init__(self, weave: WeaveInput, rows: ActiveRows, pass_: Pass) -> None:
        self._weave = weave
        self.rows = rows
        self.started = rows.candidates
        self.layer = 0
        self._depth = weave.layers.num_layers if pass_.depth is None else pass_.depth
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
        reused: list[int] = positions[self._weave.reused[positions]].tolist()
        return reused

    @property
    def recompute_work(self) -> int:
        """Active tokens of reused chunks, summed over the layers done."""
        return sum(work.kept_tokens - self._computed for work, _ in self.rows.work)

    def next_layer(self) -> None:
        """Run one more layer; at least one must be left."""
        self._run(self.layer)
        self.layer += 1

    def _run(self, layer: int) -> None:
        raise NotImplementedError


class StockPass(RunningPass):
    """A pass through vLLM's own layers and kernels: it reads only keys and values, and all tokens have blocks."""

    def __init__(self, weave: WeaveInput, rows: ActiveRows, pass_: Pass, decided: Mapping[int, torch.Tensor]) -> None:
        """With `decided`, the positions that a layer's rule keeps, no evidence is computed."""
        super().__init__(weave, rows, pass_)
        self._rules = {rule.layer for rule in pass_.keep_top}
        self._decided = decided.keys()
        self._hidden: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None
        self._activate()

    def _run(self, layer: int) -> None:
        layers = self._weave.layers
        rows = self.rows
        if not layer and len(rows):  # not earlier: the ranks sum embeddings, and have agreed by now
            self._hidden = layers.embed(rows.token_ids)
        if layer in self._rules and self._hidden is not None:
            self._hidden = self._refined(layer, self._hidden)
        self._weave.cache.fill(layer, self._passive)
        rows.record(len(rows))
        if self._hidden is None or not len(rows):
            return
        if layer < self._depth - 1:
            self._hidden, self._residual = layers.run(layer, self._active, self._hidden, self._residual)
            return
        # The last layer's output is not read for these tokens, so only their K and V are computed.
        keys, values = layers.keys_values(layer, self._hidden, self._residual)
        slots = self._weave.blocks.of(layer).slots(rows.positions)
        layers.paged.write(layer, slots, layers.rotate_keys(layer, keys, rows.positions), values)

    def _refined(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states of the rows that the layer's rule keeps; only these are active from now on."""
        keys = values = hidden
        if layer not in self._decided:
            keys, values = self._weave.layers.keys_values(layer, hidden, self._residual)
        kept_rows = self.rows.refine(layer, keys, values)
        self._residual = None if self._residual is None else self._residual[kept_rows]
        self._activate()
        return hidden[kept_rows]

    def _activate(self) -> None:
        """Compute everything that derives from the active positions, once."""
        positions = self.rows.positions
        cached = self._weave.cache.cached
        self._active = self._weave.layers.activate(positions, self._weave.blocks)
        self._passive = torch.nonzero(~torch.isin(cached, positions)).squeeze(1)


class PagedAttention:
    """`FlatAttention` of one request by vLLM's kernel, which reads its blocks; no key is hidden.

    Rows from position `stop` on have no blocks: our kernel attends for them. `layer` is the current one, set by the
    loop.
    """

    def __init__(self, weave: WeaveInput, stop: int) -> None:
        self._layers, self._blocks, self._stop = weave.layers, weave.blocks, stop
        self._positions: torch.Tensor | None = None
        self._active: ActiveSet | None = None
        self._behind: dict[int | None, ScatteredQueries] = {}
        self.layer = 0

    def attend(self, queries: torch.Tensor, owners: Sequence[OwnQueries]) -> FlatResult:
        """Attend the queries of the single owner; the backend's metadata for its rows is computed once."""
        (owner,) = owners
        positions = owner.queries.positions
        keys = owner.keys
        values = owner.values
        if self._active is None or self._positions is not positions:
            self._positions, self._behind = positions, {}
            inside = positions[: int((positions < self._stop).sum())]
            self._active = self._layers.activate(inside, self._blocks)
        at = self._active.positions
        states = queries[:0].flatten(1)
        if len(at):
            states = self._layers.attend(self.layer, self._active, queries[: len(at)], keys[at], values[at])
        if len(at) < len(positions):
            window = owner.queries.window
            if window not in self._behind:
                self._behind[window] = ScatteredQueries(positions[len(at) :], keys.dtype, window=window)
            rest = replace(owner, queries=self._behind[window])
            states = torch.cat((states, self._layers.attention.attend(queries[len(at) :], [rest]).states))
        return FlatResult(states, [None])


class LoopPass(RunningPass):
    """A pass through our layer loop over vLLM's modules: attention is read, keys are hidden, or tokens are scattered.

    Its question gets no answer here: vLLM computes it again over the woven KV. If no key is hidden and all positions
    before `stop` have blocks, vLLM's kernel attends for these on a CPU; on a GPU our kernel also measures attention.
    """

    def __init__(self, weave: WeaveInput, rows: ActiveRows, pass_: Pass, stop: int) -> None:
        super().__init__(weave, rows, pass_)
        paged = weave.layers.device.type == "cpu" and weave.blocks.whole and not pass_.hidden
        self._paged = PagedAttention(weave, stop) if paged else None
        self._loop: PassRun | None = None

    def _run(self, layer: int) -> None:
        if self._loop is None:  # see `StockPass`
            layers = self._weave.layers
            self._loop = PassRun(layers, [self.rows], attention=self._paged or layers.attention)
        assert layer == self._loop.layer
        if self._paged is not None:
            self._paged.layer = layer
        self._loop.next_layer()


_TILE_QUERIES = 128
"""Queries of one request for which vLLM's kernel reads the keys once."""

_MOST_READS = 4.0
"""A guess until a GPU measures it. Too low costs a few kernel launches per layer, too high many times a full prefill's
attention.
"""


def keys_read(runs: Iterable[Span]) -> int:
    """Keys that vLLM's kernel reads, per layer and key head, for runs of active positions.

    Each run `[start, stop)` is a request. Its queries are cut into tiles of T = 128, and a tile reads all keys up to
    its last query's: sum over runs and over i = 1 .. ceil((stop - start) / T) of min(start + i T, stop).
    """
    tile = _TILE_QUERIES
    return sum(min(first + tile, run.stop) for run in runs for first in range(run.start, run.stop, tile))


def too_scattered(pass_: Pass, whole: Span) -> bool:
    """Whether vLLM's kernel reads more than `_MOST_READS` times the keys for a pass that it reads to prefill `whole`.

    The positions that a start or a rule will pick are not known yet; as many are assumed, evenly spread over the
    candidates. Windows are left out, since they shorten both.
    """
    candidates = [position for span in pass_.candidates for position in span.positions()]
    tokens_left = min((rule.count for rule in pass_.keep_top), default=pass_.starting_tokens)
    spread = (candidates[n * len(candidates) // tokens_left] for n in range(tokens_left))
    return keys_read(joined((*pass_.required, *spans_of(spread)))) > _MOST_READS * keys_read([whole])


class OpenedSegment:
    """A segment of a quantized cache, read in the model's dtype; a `SegmentSource`."""

    def __init__(self, source: SegmentSource, paged: PagedKV) -> None:
        self._source, self._paged = source, paged
        self.tokens, self.nbytes, self.keys_at = source.tokens, source.nbytes, source.keys_at

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]`. Raises as the source."""
        return self._paged.opened(index, self._source.layer(index, scratch))


class CapturedParts:
    """The parts of one prompt that are captured while it is woven: this rank's heads. Owned by the weave.

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
        """Parts that begin before `first` are in vLLM's blocks already, and are skipped.

        With `before`, only computed parts that begin before it are captured, without attention; None: all parts, and
        with a `config` their attention.
        """
        self._prompt, self._plan, self._store = prompt, plan, store
        fraction = config.variant_fraction if before is None and config is not None else None
        opened = [
            replace(placement, segment=OpenedSegment(placement.segment, layers.paged)) for placement in placements
        ]
        sources = before_rope(opened if layers.paged.quantized else placements, layers.rotations.inverse, layers.device)
        parts = parts_to_keep(prompt, plan, sources, store, variant_fraction=fraction)
        stop = plan.prompt_tokens if before is None else before
        placed = ((part, origin) for part, origin in parts if first <= part.span.start < stop)
        self.captures = new_captures(placed, layers.own_geometry, layers.dtype, layers.device)
        self.attention: AttentionCapture | None = None
        if self.captures and before is None and config is not None:
            self.attention = AttentionCapture(
                plan.parts, layers.geometry, config, device=layers.device, ranks=layers.ranks
            )

    def segments(self, exact_to: int, memory: HostMemory) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
        """The segments to store after the weave, in `memory`; only parts that end at or before `exact_to` are exact."""
        complete = [capture for capture in self.captures if capture.complete]
        new_segments = segments_of(
            self._prompt, self._plan, complete, self.attention, store=self._store, exact_to=exact_to
        )
        for record, kv in new_segments:
            yield record, SegmentKV(memory.empty(kv.kv.shape, kv.kv.dtype).copy_(kv.kv))

    def exchange(self) -> None:
        """Sum attention over the ranks; call it once, after the last layer, on all ranks."""
        if self.attention is not None:
            self.attention.over_ranks()

    @property
    def spans(self) -> frozenset[Span]:
        """Spans of the parts that were captured completely."""
        return frozenset(capture.part.span for capture in self.captures if capture.complete)


def scratch_bytes(geometry: Geometry, itemsize: int, *, tokens: int, active: int) -> int:
    """Device memory of a weave's own tensors, without captures: an upper bound, counted and not measured.

    It has one layer's KV of all `tokens` of the prompt four times: received, joined, rotated, and in a row. Of `active`
    tokens it has the stream and its residual before and after a layer, and queries, keys, values and states three
    times. Index tensors take 80 bytes per token. What vLLM's modules allocate is in vLLM's budget, because no call has
    more tokens than vLLM was sized for.
    """
    kv = 2 * geometry.num_kv_heads * geometry.head_dim
    states = 4 * geometry.hidden_size + 3 * (geometry.num_heads * geometry.head_dim + kv)
    return itemsize * (4 * tokens * kv + active * states) + 80 * tokens


class WeaveJob:
    """Computes positions `[first, stop)` of one prompt into its blocks. Owned by one worker; runs a few layers per
    step.

    What can fail on one rank alone is done when it is made: before `run`, no collective has begun.

    KV before `first` is in the blocks already; vLLM computes positions from `stop` on afterwards. Both are left out of
    the plan's active sets, which does not change the rest, because attention is causal. Only a question whose attention
    is read, and tokens of captured parts, are also computed here, outside the blocks.
    """

    captured: CapturedParts | None = None

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
        """`placements` are the plan's segments with their spans in the prompt.

        `captured` are parts that the last pass captures for the store. `chosen` are the choices of another job with the
        same chunks and method, if this one begins after what that job wove: it makes the same choices, so that an
        answer does not depend on the contents of vLLM's own cache.
        """
        self.first = self._first = first
        self._plan, self._stop = plan, stop
        passes = [clipped(pass_, first, plan.prompt_tokens) for pass_ in plan.passes]
        active = max(pass_.required_tokens + pass_.starting_tokens for pass_ in passes)
        itemsize = layers.dtype.itemsize
        captures = () if captured is None else captured.captures
        self.scratch_bytes = scratch_bytes(layers.own_geometry, itemsize, tokens=plan.prompt_tokens, active=active)
        self.device_bytes = self.scratch_bytes + sum(capture.nbytes for capture in captures)
        """Device memory that it may take until it is done."""
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
        """Index of the next layer in the current pass; 0 between passes."""
        return 0 if self._running.done and not self._last_begun else self._running.layer

    @property
    def chosen(self) -> Choices:
        """Positions of the candidates that starts and rules have kept so far, ascending."""
        starts = {(n, START): p.started for n, p in self._passes.items() if self._plan.passes[n].start is not None}
        return starts | {(n, layer): rows for n, p in self._passes.items() for layer, rows in p.rows.kept.items()}

    @property
    def outline(self) -> tuple[object, ...]:
        """What decides which collectives it runs; equal on all ranks. Call it before `run`."""
        captured = self.captured
        captures = [] if captured is None else [capture.part.span for capture in captured.captures]
        attention = captured is not None and captured.attention is not None
        return self.first, captures, attention, sorted(self._decided)

    @property
    def recomputed(self) -> list[int]:
        """Positions of reused chunks that were recomputed, or are being recomputed, ascending."""
        return [position for span in self._recomputed for position in span.positions()]

    @property
    def stopped_at_layer(self) -> int | None:
        """The layer from which unfocused chunks were not computed any more; None: no token was dropped."""
        stops = (running.rows.stop for running in self._passes.values())
        return next((stop.layer_if_dropped for stop in stops if stop is not None), None)

    @property
    def recompute_work(self) -> int:
        """Active tokens of reused chunks, summed over the layers done."""
        return sum(running.recompute_work for running in self._passes.values())

    def run(self, layers: float = inf, work: float = inf) -> int:
        """Run the next layers of the current and later passes: at most `layers`, and until `work` is done.

        Returns:
            The work done: tokens computed, summed over layers. A layer that computes few tokens counts at least as much
            as placing the stored tokens costs.
        """
        done = 0
        while layers > 0 and done < work and not self.done:
            if self._running.done:
                self._next_pass()
            done += max(self._running.active_tokens, (self._stop - self._first) // PLACED_PER_COMPUTED, 1)
            self._running.next_layer()
            layers -= 1
        if self.done and self.captured is not None:
            self.captured.exchange()
        return done

    @property
    def _running(self) -> RunningPass:
        return self._passes[max(self._passes)]

    @property
    def _last_begun(self) -> bool:
        return len(self._plan.passes) - 1 in self._passes

    @property
    def _recomputed(self) -> tuple[Span, ...]:
        whole = (running for number, running in self._passes.items() if self._plan.passes[number].depth is None)
        return joined(span for running in whole for span in spans_of(running.recomputed))

    def _next_pass(self) -> None:
        """Start the next pass, skipping passes that would only read what is already known."""
        for number in range(max(self._passes, default=-1) + 1, len(self._plan.passes)):
            pass_ = self._plan.passes[number]
            is_decided = pass_.watch is not None and (number + 1, START) in self._decided
            if is_decided and not pass_.candidates:
                continue
            self._passes[number] = self._begin(number, replace(pass_, watch=None) if is_decided else pass_)
            return

    def _begin(self, number: int, pass_: Pass) -> RunningPass:
        self._input.cache.last_pass = last = number == len(self._plan.passes) - 1
        start = self._decided.get((number, START))
        if pass_.start is not None and start is not None:
            pass_ = replace(pass_, start=None, candidates=(Scattered(0, tuple(start.tolist())),))
        captures = self.captured.captures if last and self.captured is not None else ()
        reads_question = pass_.watch is not None or (pass_.stop_unfocused is not None and pass_.starting_tokens > 0)
        stop = max([self._stop, *(capture.part.span.stop for capture in captures)])
        pass_ = clipped(pass_, self._first, self._plan.prompt_tokens if reads_question else stop)
        decided = {
            layer: kept_positions
            for (of, layer), kept_positions in self._decided.items()
            if of == number and layer != START
        }
        rows = ActiveRows.of_pass(
            self._input.cache,
            self._input.token_ids,
            pass_,
            dtype=self._input.layers.dtype,
            evidence=self._running.rows.evidence if self._passes else None,
            recomputed=self._recomputed,
            answers=False,
            decided=decided,
            ranks=self._input.layers.ranks,
        )
        reads = any(rule.by is Evidence.READ_DEVIATION for rule in pass_.keep_top)
        by_row = reads_question or captures or reads or pass_.hidden or not self._input.blocks.whole
        if self._input.layers.device.type == "cuda":
            by_row = by_row or too_scattered(pass_, Span(self._first, self._stop))
        if not by_row or not (pass_.required or pass_.candidates):
            return StockPass(self._input, rows, pass_, decided)
        if captures and self.captured is not None:
            rows.keep(captures, self.captured.attention)
        return LoopPass(self._input, rows, pass_, self._stop)
