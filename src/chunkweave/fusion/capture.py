"""What a prefill records besides its result: KV of parts to store, and attention mass."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from chunkweave.config import CaptureConfig, Combine
from chunkweave.kv.request_cache import segment_memory
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.models.attention import ALONE, AttentionMeter, KeyParts, Measured, Ranks
from chunkweave.planning.plan import PartPlan, StopUnfocused, Watch
from chunkweave.planning.scores import FocusTracker
from chunkweave.prompt.parts import PartKind
from chunkweave.store.records import AttentionProfile
from chunkweave.types import ChunkId, Geometry, ScoreRule


@dataclass(frozen=True, slots=True, eq=False)
class WovenFrom:
    """The segment that a reused part was read from: the KV of tokens that are not recomputed.

    `attention` is what its tokens attended to, `generation` its record's. At least `least_tokens` must be recomputed
    through the last layer, or the woven part is not worth storing.
    """

    segment: SegmentSource
    attention: AttentionProfile | None
    least_tokens: int
    generation: int = 0


class PartCapture:
    """Collects keys before RoPE and values of one part, layer by layer, on the compute device.

    They move to the host when they are stored, after the first token: a copy per layer would delay the next layer.

    Tokens of a computed part are active at every layer of one pass, those of a reused part as long as the rules keep
    them; in both cases the part's rows are contiguous among the active rows. Where a token is not active, a reused part
    keeps its segment's KV. Over several passes, a token's last KV counts. A pass may run in slices of rows, each
    through all layers; whether enough tokens were captured is known after the last slice.
    """

    def __init__(
        self,
        part: PartPlan,
        geometry: Geometry,
        dtype: torch.dtype,
        *,
        device: torch.device,
        woven_from: WovenFrom | None = None,
    ) -> None:
        self.part = part
        self.woven_from = woven_from
        self._tokens = len(part.span)
        self._least = self._tokens if woven_from is None else woven_from.least_tokens
        shape = (geometry.num_layers, 2, self._tokens, geometry.num_kv_heads, geometry.head_dim)
        self._device = device
        on_host = device.type == "cpu"
        kv = segment_memory(shape, dtype) if on_host else torch.empty(shape, dtype=dtype, device=device)
        self._kv: torch.Tensor | None = kv
        self._offsets = torch.arange(0)
        self._rows = torch.empty(0, dtype=torch.long, device=device)
        self._fresh = torch.zeros(geometry.num_layers, self._tokens, dtype=torch.bool)
        self._layer = 0
        self._in_slices = False

    def start(self, *, in_slices: bool = False) -> None:
        """Begin a pass, or a slice of one: the next layer is the first, with its own active tokens."""
        self._layer = 0
        self._in_slices = in_slices
        self._offsets, self._rows = torch.arange(0), self._rows[:0]

    def follow(self, offsets: Sequence[int]) -> bool:
        """Set the part's tokens that are active from the next layer on: ascending offsets, 0 is its first token.

        Returns False, and stays False, if they are too few for the part to be stored; never for a slice.
        """
        if len(offsets) < self._least and not self._in_slices:
            self._kv = None
        elif len(offsets) != len(self._offsets):
            self._offsets = torch.tensor(offsets, dtype=torch.long)
            self._rows = self._offsets.to(self._device)
        return self._kv is not None

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy one layer's fresh `keys` and `values` of the part's active tokens, `[rows, kv_heads, head_dim]`."""
        assert self._kv is not None, "a dropped part is not followed"
        layer = self._kv[self._layer]
        for buffer, fresh in zip(layer, (keys, values), strict=True):
            if len(self._offsets) == self._tokens:
                buffer.copy_(fresh)
            elif len(self._offsets):
                buffer.index_copy_(0, self._rows, fresh)
        self._fresh[self._layer, self._offsets] = True
        self._layer += 1

    @property
    def complete(self) -> bool:
        """Whether enough tokens were captured at all layers, so that the part can be stored."""
        return self._kv is not None and int(self._fresh[-1].sum()) >= self._least

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Offsets of tokens active at the last layer (all of a computed part), ascending; 0 is the first token."""
        return tuple(torch.nonzero(self._fresh[-1]).squeeze(1).tolist())

    @property
    def changed(self) -> bool:
        """Whether any token was active above layer 0, where KV depends on more than the token itself."""
        return bool(self._fresh[1:].any())

    @property
    def nbytes(self) -> int:
        """Bytes of the finished segment."""
        assert self._kv is not None, "a dropped part has no segment"
        return self._kv.nbytes

    @property
    def generation(self) -> int:
        """Generation of the finished segment: 0 if all its KV is fresh, else one more than its source's."""
        return 0 if self.woven_from is None or self._fresh.all() else self.woven_from.generation + 1

    @property
    def attention_before(self) -> AttentionProfile | None:
        """Attention profile of the source segment of a reused part, if known."""
        return None if self.woven_from is None else self.woven_from.attention

    @torch.inference_mode()
    def segment(self) -> SegmentKV:
        """The finished segment; call it once, after the last layer."""
        assert self.complete, "some layers of the part were not captured"
        assert self._kv is not None
        if self.woven_from is not None:
            for layer, (kv, fresh) in enumerate(zip(self._kv, self._fresh, strict=True)):
                cached = ~fresh
                kv[:, cached] = self.woven_from.segment.layer(layer).to(kv.device)[:, cached]
        return SegmentKV(self._kv)


class AttentionCapture:
    """Attention mass of one prompt's tokens on its parts, summed over the captured layers.

    Owned by the request. `ActiveRows` sets the tokens to follow and passes queries and keys layer by layer; profiles
    are made from the sums at the end. All layers, heads and tokens have equal weight.
    """

    def __init__(
        self,
        parts: Sequence[PartPlan],
        geometry: Geometry,
        config: CaptureConfig,
        *,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """`parts` are all parts of the prompt. This rank reads its own share of the captured heads.

        The last layer is never captured: only one token completes it.
        """
        self._parts = tuple(parts)
        below_last = geometry.num_layers - 1
        self._layers = frozenset(evenly_spread(config.layers, below_last))
        own_heads = ranks.own_heads(geometry.num_heads)
        captured = evenly_spread(config.heads, geometry.num_heads)
        heads = tuple(head - own_heads.start for head in captured if head in own_heads)
        self._heads = None if len(heads) == len(own_heads) else heads  # None: all heads, without a copy of their keys
        self._num_heads = len(heads)
        self._ranks = ranks
        self._weight = geometry.num_heads / len(own_heads) * len(heads) / len(captured)
        self._tokens = parts[-1].span.stop
        self._by_part = torch.zeros(self._tokens, len(self._parts), device=device)
        self._layers_read: set[int] = set()
        self._totals: torch.Tensor | None = None
        self._rows = self._positions = torch.empty(0, dtype=torch.long, device=device)
        self._where: list[int] = []
        self._key_parts: KeyParts | None = None
        self._geometry = geometry
        self._meters: dict[int | None, AttentionMeter] = {}
        self._scores: dict[int | None, int] = {}
        self._marked = self._by_part

    def mark(self) -> None:
        """Save the sums for `undo`."""
        self._marked = self._by_part.clone()

    def undo(self) -> None:
        """Restore the sums at `mark`: the same tokens will be read again."""
        self._by_part = self._marked
        self._totals = None

    def wants(self, layer: int) -> bool:
        """Whether this layer is captured and any row is followed."""
        return layer in self._layers and len(self._rows) > 0

    def follow(self, rows: Sequence[int], where: Sequence[int]) -> None:
        """Capture these `rows` of the active ones from now on; `where` has the positions of all active rows."""
        positions = [where[row] for row in rows]
        if positions != self._where:
            self._meters, self._scores = {}, {}
            self._where = positions
            self._positions = torch.tensor(positions, dtype=torch.long, device=self._by_part.device)
        self._rows = torch.tensor(rows, dtype=torch.long, device=self._by_part.device)

    def scores(self, layer: int) -> int:
        """Number of attention weights that a `read` of this layer computes: followed tokens x visible keys x heads."""
        window = self._geometry.window(layer)
        if window not in self._scores:
            self._scores[window] = sum(min(at + 1, window or at + 1) for at in self._where) * self._num_heads
        return self._scores[window]

    def read(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, measured: Measured | None = None) -> None:
        """Add one layer of the followed tokens.

        `queries` `[active rows, heads, head_dim]` and `keys` `[positions, kv_heads, head_dim]` are after RoPE; key i is
        at position i. `measured` are sums that the attention kernel already made of the active rows' weights; None:
        compute the weights here.
        """
        self._layers_read.add(layer)
        self._totals = None
        if not self._num_heads:
            return
        window = self._geometry.window(layer)
        if window not in self._meters:
            spans = [part.span for part in self._parts]
            self._meters[window] = AttentionMeter(
                self._positions, spans, heads=self._heads, where=self._where, window=window
            )
        meter = self._meters[window]
        rows = self._rows
        scores = self._geometry.scores(layer)
        mass = meter.read(queries[rows], keys, scores) if measured is None else meter.of_kernel(measured.by_part[rows])
        self._by_part.index_add_(0, self._positions, mass)

    @property
    def key_parts(self) -> KeyParts:
        """The part of every key of the prompt, for kernels that sum by part."""
        if self._key_parts is None:
            table = torch.full((self._tokens,), -1, dtype=torch.int32)
            for index, part in enumerate(self._parts):
                table[part.span.start : part.span.stop] = index
            self._key_parts = KeyParts(table.to(self._by_part.device), len(self._parts))
        return self._key_parts

    def profile(
        self, part: PartPlan, recomputed: Sequence[int], stored: AttentionProfile | None = None
    ) -> AttentionProfile | None:
        """The profile of a part whose tokens were followed through all layers.

        None if no layer was captured or the model's attention is not finite. Only the tokens `recomputed` (offsets, 0
        is the part's first) have fresh attention; for the others it is carried over from `before`, the profile of their
        source segment.
        """
        if not self._layers_read:
            return None
        number = self._parts.index(part)
        earlier = range(number)
        chunks = [index for index in earlier if self._parts[index].part.kind in (PartKind.CHUNK, PartKind.TURN)]
        instructions = [index for index in earlier if index not in chunks]
        rows = slice(part.span.start, part.span.stop)
        mass = torch.zeros(len(part.span), len(self._parts), dtype=torch.float64)
        mass[list(recomputed)] = (self.over_ranks()[rows].double() / len(self._layers_read)).cpu()[list(recomputed)]
        if not mass.isfinite().all():
            return None
        fresh = AttentionProfile(
            chunks=tuple(_id_of(self._parts[index]) for index in chunks),
            lengths=tuple(len(self._parts[index].span) for index in chunks),
            inter=tuple(mass[:, chunks].sum(0).tolist()),
            intra=float(mass[:, number].sum()),
            sink=float(mass[:, instructions].sum()),
            outward=tuple(mass[:, chunks].sum(1).tolist()),
        )
        return woven_profile(fresh, stored, recomputed)

    def over_ranks(self) -> torch.Tensor:
        """The sums over captured heads of all ranks, by part `[tokens, parts]`.

        The first call after the last layer exchanges them; every rank makes it at the same point.
        """
        if self._totals is None:
            self._totals = self._ranks.mean(self._by_part * self._weight)
        return self._totals


def evenly_spread(count: int | None, total: int) -> tuple[int, ...]:
    """`count` of the numbers below `total`, at the centers of equal intervals; all if `count` is None or too large.

    >>> evenly_spread(4, 14)
    (1, 5, 8, 12)
    """
    if count is None or count >= total:
        return tuple(range(total))
    return tuple((2 * i + 1) * total // (2 * count) for i in range(count))


def _id_of(part: PartPlan) -> ChunkId:
    assert part.part.id is not None, "chunks have ids"
    return part.part.id


def woven_profile(
    fresh: AttentionProfile, stored: AttentionProfile | None, recomputed: Collection[int]
) -> AttentionProfile:
    """The profile of a variant: `fresh` for the tokens `recomputed`, estimated from `before` for the others.

    A stored profile has the mass by chunk and by token but not by both, so each token is assumed to spread its mass
    over chunks as the whole segment did. Mass on chunks that precede it again is carried over. Mass on other chunks
    moves to the chunks that are new here, in proportion to the recomputed tokens' mass on them: a token that attends to
    other chunks is assumed to do so in this context too. Otherwise CCI would fall with every generation (§3.1: it is
    what the chunk's tokens attend to in this context). If no chunk is new, that mass is dropped. Intra and
    sink mass are not stored by token, and are carried over by the share of tokens that were not recomputed.

    Without mass on earlier chunks (the segment was computed alone, or has no profile) the other tokens are assumed to
    attend like the average recomputed token; they rank after these.

    >>> old = AttentionProfile((ChunkId("a"), ChunkId("b")), (2, 2), (1.0, 3.0), 2.0, 0.4, (1.0, 3.0))
    >>> new = AttentionProfile((ChunkId("b"),), (2,), (0.5,), 0.3, 0.1, (0.5, 0.0))
    >>> woven = woven_profile(new, old, {0})  # the second token had 3/4 of the mass, and 3/4 of it was on b
    >>> woven.inter, woven.outward, woven.intra
    ((2.75,), (0.5, 2.25), 1.3)
    """
    recomputed_tokens = frozenset(recomputed)
    kept_tokens = [token for token in range(fresh.tokens) if token not in recomputed_tokens]
    if not kept_tokens or not (recomputed_tokens or stored):
        return fresh
    share = len(kept_tokens) / fresh.tokens
    rest = _times(fresh, 1.0 / (1.0 - share)) if stored is None else stored
    looked_out = sum(rest.outward) if stored is not None else 0.0
    if looked_out:
        carried, carried_share = _carried(fresh, rest)
        by_others = sum(rest.outward[token] for token in kept_tokens) / looked_out
    else:
        carried = list(fresh.inter)
        carried_share = 0.0
        by_others = share / (1.0 - share) if recomputed_tokens else 0.0
    return AttentionProfile(
        chunks=fresh.chunks,
        lengths=fresh.lengths,
        inter=tuple(new + by_others * old for new, old in zip(fresh.inter, carried, strict=True)),
        intra=fresh.intra + share * rest.intra,
        sink=fresh.sink + share * rest.sink,
        outward=tuple(
            new if token in recomputed_tokens else carried_share * old
            for token, (new, old) in enumerate(zip(fresh.outward, rest.outward, strict=True))
        ),
    )


def _times(profile: AttentionProfile, factor: float) -> AttentionProfile:
    """The profile with intra and sink mass multiplied by `factor`."""
    return replace(profile, intra=factor * profile.intra, sink=factor * profile.sink)


def _carried(fresh: AttentionProfile, stored: AttentionProfile) -> tuple[list[float], float]:
    """The mass of `before` by the chunks of `fresh`, as in `woven_profile`, and its share of the total."""
    stored_mass = _mass_on(stored, fresh.chunks)
    stored_chunks = frozenset(stored.chunks)
    new = [chunk not in stored_chunks for chunk in fresh.chunks]
    weights = [mass if is_new else 0.0 for mass, is_new in zip(fresh.inter, new, strict=True)]
    if not sum(weights):
        weights = [length if is_new else 0.0 for length, is_new in zip(fresh.lengths, new, strict=True)]
    total = sum(stored.inter)
    moved = max(0.0, total - sum(stored_mass)) / sum(weights) if any(new) else 0.0
    carried = [mass + moved * weight for mass, weight in zip(stored_mass, weights, strict=True)]
    return carried, sum(carried) / total if total else 0.0


def _mass_on(profile: AttentionProfile, chunks: Sequence[ChunkId]) -> list[float]:
    """The profile's mass on each of `chunks`; duplicates in the profile are matched in order, each once."""
    remaining = list(zip(profile.chunks, profile.inter, strict=True))
    masses: list[float] = []
    for chunk in chunks:
        match = next((entry for entry in remaining if entry[0] == chunk), None)
        masses.append(0.0 if match is None else match[1])
        if match is not None:
            remaining.remove(match)
    return masses


class QuestionWatch:
    """Combines the attention of a question's tokens to every position, layer by layer, in float32."""

    def __init__(
        self, watch: Watch, device: torch.device, *, hidden: torch.Tensor | None = None, ranks: Ranks = ALONE
    ) -> None:
        """`hidden` `[positions]` flags the positions that the question does not see."""
        self._ranks = ranks
        question = watch.question
        self.watch = watch
        positions = torch.arange(question.start, question.stop, device=device)
        self._meter = cache(
            lambda window: AttentionMeter(positions, (), hidden=hidden, where=question.positions(), window=window)
        )
        self.attention = torch.zeros(question.stop, device=device)

    def look(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None, scores: ScoreRule) -> None:
        """Add one layer: `queries` `[question tokens, heads, head_dim]`, `keys` `[positions, kv_heads, head_dim]`.

        Both are after RoPE; a query sees the `window` keys up to its own (None: all). `scores` is the layer's rule.
        """
        watch = self.watch
        layer_attention = self._meter(window).combined(
            queries,
            keys,
            over_heads=watch.over_heads,
            over_queries=watch.over_tokens,
            scores=scores,
            ranks=self._ranks,
        )
        if watch.over_layers is Combine.MAX:
            self.attention = torch.maximum(self.attention, layer_attention)
        else:
            self.attention += layer_attention


class FocusWatch:
    """Passes the question's attention to the tracker, layer by layer, until the focused chunks are known.

    The question has few tokens, so all heads are read.
    """

    def __init__(self, rule: StopUnfocused, device: torch.device, *, ranks: Ranks = ALONE) -> None:
        self.rule = rule
        self._ranks = ranks
        self._tracker = FocusTracker(rule.window, rule.focused)
        question = torch.arange(rule.question.start, rule.question.stop, device=device)
        self._meter = cache(
            lambda window: AttentionMeter(question, rule.chunks, where=rule.question.positions(), window=window)
        )

    def look(
        self, queries: torch.Tensor, keys: torch.Tensor, window: int | None, scores: ScoreRule
    ) -> frozenset[int] | None:
        """Indices of the focused chunks once known; None until then.

        `queries` `[question tokens, heads, head_dim]` and `keys` `[positions, kv_heads, head_dim]` are those of the
        next layer, after RoPE; a query sees the `window` keys up to its own (None: all). `scores` is the layer's rule.
        """
        mass = self._ranks.mean(self._meter(window).read(queries, keys, scores).sum(0))
        return self._tracker.update(mass.tolist())
