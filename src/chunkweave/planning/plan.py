"""A plan: what happens to each part of one prompt, as plain data that any layer loop can execute.

A method makes the plan, a loop executes it; the loop knows rules, not methods. Within a layer the order is: q, k, v of
the active tokens -> evidence on KV, refine -> K and V of the survivors are written over the cached ones -> attention
and the rest of the layer. Tokens that a rule drops keep their cached KV from that layer on.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import compress, pairwise
from math import ceil

from chunkweave.config import Combine
from chunkweave.errors import UsageError
from chunkweave.planning.scores import FOCUS_WINDOW, FindFocused, focused_by_gap
from chunkweave.prompt.parts import PromptPart
from chunkweave.types import Scattered, SegmentId, Span, joined


class KVSource(StrEnum):
    """The source of a part's KV."""

    EXACT = "prefix-exact"
    """Read from the store unchanged: equal to full prefill's KV."""
    REUSED = "reused"
    """Read from the store, shifted in position, and recomputed as the passes say."""
    COMPUTED = "computed"
    """Not in the store (or never stored): every token is active at every layer."""


class Evidence(StrEnum):
    """The ranking of tokens when a rule keeps the highest."""

    KV_DEVIATION = "kv_deviation"
    """L2 norm over heads and dims of fresh minus cached (K, V), both before RoPE (CacheBlend §4.1)."""
    READ_DEVIATION = "deviation_times_question_attention"
    """KV deviation times the question's attention to the token in the pass before: what deviates and is read."""


@dataclass(frozen=True, slots=True)
class KeepTop:
    """At `layer`, the `count` candidates with the most evidence stay active; ties go to the earlier position."""

    layer: int
    count: int
    by: Evidence = Evidence.KV_DEVIATION


@dataclass(frozen=True, slots=True)
class StopUnfocused:
    """Once the question's focused chunks are stable, candidates in all other chunks are dropped.

    After each layer the attention mass of the `question` on each of `chunks` is added up. When `focused` has found the
    same chunks for `window` layers, candidates in the others are dropped from the next layer on, once (Cache-Craft
    §3.2.2). Candidates outside `chunks` stay. With fewer than three chunks nothing is dropped.
    """

    chunks: tuple[Span, ...]
    question: Span
    window: int = FOCUS_WINDOW
    focused: FindFocused = field(default=focused_by_gap, repr=False)
    """Not in the `repr`, which ranks compare: a function's `repr` differs between processes."""


Rule = KeepTop | StopUnfocused


@dataclass(frozen=True, slots=True)
class TopBy:
    """Only the `count` candidates of a pass that the question attended to most start active.

    The attention is that of the pass before (its `Watch`), multiplied by `weights`, one per candidate token in the
    order of the candidates (empty: all 1). Ties go to the earlier position. Tokens that an earlier pass recomputed are
    excluded.
    """

    count: int
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Watch:
    """The part of a question's attention that a pass records, for the start of the next one (ProphetKV).

    In each of `layers` (ascending) the attention weights of the tokens of `question` (all of it, or its end), softmax
    over all visible keys, are combined to one number per position: over heads, then tokens, then layers.
    """

    question: Span
    layers: tuple[int, ...]
    over_heads: Combine = Combine.SUM
    over_tokens: Combine = Combine.SUM
    over_layers: Combine = Combine.SUM


@dataclass(frozen=True, slots=True)
class RecomputeScore:
    """How much of a reused part to recompute, and why (Cache-Craft §3.1-3.2)."""

    cci: float
    """Cache context impact: how much the part attended to the chunks before it, 0.5 to 1 (eq. 11)."""
    overlap: float
    """Adjusted prefix overlap beta': how much of that is before it again, in order, 0 to 1 (eq. 8)."""
    cfo: float
    """Cache fix overhead: the share of its tokens to recompute, 0 to 1 (eq. 12)."""
    tokens: int
    """The number of tokens to recompute."""
    coverage: float = 1.0
    """Share of the tokens before the part that were also before it when it was computed, 0 to 1."""
    generation: int = 0
    """Generation of the reused variant (`SegmentRecord.generation`)."""

    @property
    def impact(self) -> float:
        """`cci (1 - overlap)`: the overhead without scale or clamp, by which variants are compared (§3.3)."""
        return self.cci * (1.0 - self.overlap)


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part of the prompt with the source of its KV and, if it is read from the store, the segment.

    `score` says how the tokens to recompute were chosen, if the method scores segments. A computed part is stored
    afterwards if `kept`. `contexts` is the number of contexts that the segment is a mean over; 0 if it is no mean.
    """

    part: PromptPart
    span: Span
    kv_source: KVSource
    segment: SegmentId | None = None
    score: RecomputeScore | None = None
    kept: bool = True
    contexts: int = 0

    def __post_init__(self) -> None:
        if (self.segment is None) != (self.kv_source is KVSource.COMPUTED):
            raise ValueError(f"a {self.kv_source} part {'needs' if self.segment is None else 'has no'} segment")
        if self.score is not None and self.kv_source is not KVSource.REUSED:
            raise ValueError(f"a {self.kv_source} part needs no score")


@dataclass(frozen=True, slots=True)
class Pass:
    """One run over the layers.

    `required` positions are active at every layer. `candidates` (tokens of reused chunks, without duplicates) are
    active from layer 0 on, all or those that `start` picks, until a rule drops them. `watch` says what of a question's
    attention is recorded for the next pass. A pass before the last gives no logits and may end after `depth` layers
    (None: all). No token sees the `hidden` spans: chunks that only a later pass computes.
    """

    required: tuple[Span, ...]
    candidates: tuple[Span | Scattered, ...] = ()
    rules: tuple[Rule, ...] = ()
    start: TopBy | None = None
    watch: Watch | None = None
    depth: int | None = None
    hidden: tuple[Span, ...] = ()

    @property
    def keep_top(self) -> tuple[KeepTop, ...]:
        """The rules at layers known in advance, by decreasing count."""
        return tuple(rule for rule in self.rules if isinstance(rule, KeepTop))

    @property
    def stop_unfocused(self) -> StopUnfocused | None:
        """The rule that acts when the question's attention is stable, if there is one."""
        return next((rule for rule in self.rules if isinstance(rule, StopUnfocused)), None)

    def candidates_at(self, layer: int) -> int:
        """Most candidates that are active at a layer: those that `start` picks, less those dropped by `KeepTop`."""
        counts = (rule.count for rule in self.keep_top if rule.layer <= layer)
        return min(counts, default=self.starting_tokens)

    @property
    def starting_tokens(self) -> int:
        """Candidates that are active at layer 0."""
        return self.candidate_tokens if self.start is None else min(self.start.count, self.candidate_tokens)

    @property
    def required_tokens(self) -> int:
        return sum(len(span) for span in self.required)

    @property
    def candidate_tokens(self) -> int:
        return sum(map(len, self.candidates))


@dataclass(frozen=True, slots=True)
class Expected:
    """What two ways to one prompt's KV are expected to cost: `woven`, and computed after its `exact` prefix.

    `stored` is the cost if the KV of all its stored parts were exact, which ends with the segment `path`. Costs are in
    seconds if `measured`, else in tokens (`planning.cost.PrefillCosts`).
    """

    woven: float
    exact: float
    stored: float
    path: SegmentId
    measured: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The KV sources of all parts, and the passes that complete the prompt's KV cache.

    `raised_to` is the method's budget if the loading controller raised it above the configured value. `expected` is set
    if the plan was the cheaper of two.
    """

    method: str
    parts: tuple[PartPlan, ...]
    passes: tuple[Pass, ...]
    raised_to: float | None = None
    expected: Expected | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.parts[-1].span.stop if self.parts else 0

    @property
    def gave_way(self) -> bool:
        """Whether it is exact in place of one that weaves."""
        return self.expected is not None and not self.spans(KVSource.REUSED)

    def head_share(self, num_layers: int) -> float:
        """Share of the layers that must be loaded and watched before the recomputing pass can start."""
        first = self.passes[0]
        return 0.0 if first.depth is None else first.depth / num_layers

    def tokens_behind_loading(self, num_layers: int) -> float:
        """Tokens, counted through all layers, whose computation can hide loading.

        Passes after the first one through all layers are not counted: by then all layers are loaded.
        """
        tokens = 0.0
        for pass_ in self.passes:
            depth = num_layers if pass_.depth is None else pass_.depth
            active = sum(map(pass_.candidates_at, range(depth)))
            tokens += (pass_.required_tokens * depth + active) / num_layers
            if depth == num_layers:
                break
        return tokens

    def segments(self) -> tuple[SegmentId, ...]:
        """Every segment that the plan reads, without duplicates, in prompt order."""
        return tuple(dict.fromkeys(part.segment for part in self.parts if part.segment is not None))

    def saved(self) -> dict[SegmentId, float]:
        """This reuse's addition to each segment's f_r: 1 / max(CCI (1 - beta'), 1/|C|), by part (Cache-Craft §3.3).

        An exact part has beta' = 1, so it adds its number of tokens. A part without a score has no CFO: it adds 1, the
        minimum for a reuse.
        """
        saved: dict[SegmentId, float] = {}
        for part in self.parts:
            if part.segment is not None:
                impact = 0.0 if part.kv_source is KVSource.EXACT else 1.0 if part.score is None else part.score.impact
                saved[part.segment] = saved.get(part.segment, 0.0) + 1.0 / max(impact, 1.0 / len(part.span))
        return saved

    def unseen_layers(self, part: PartPlan, windows: Sequence[int | None]) -> frozenset[int]:
        """Layers at which no token looks at a stored part, so that its KV there need not be loaded.

        `windows` are those of the layers (`Geometry.windows`; empty: every layer sees all). A windowed layer looks at a
        part if one of its tokens may be computed, or if the nearest computed token after it sees its last token; that
        is the first new token if none before may be computed.
        """
        if part.segment is None or not any(windows):
            return frozenset()
        start = part.span.start
        stop = part.span.stop
        nearest = self.prompt_tokens
        for pass_ in self.passes:
            for some in (*pass_.required, *pass_.candidates):
                if len(some):
                    span = some.hull() if isinstance(some, Scattered) else some
                    if span.start < stop and start < span.stop:
                        return frozenset()
                    if span.start >= stop:
                        nearest = min(nearest, span.start)
        distance = nearest - (stop - 1)
        return frozenset(layer for layer, window in enumerate(windows) if window is not None and window <= distance)

    def loaded_fraction(self, windows: Sequence[int | None]) -> float:
        """Share of the stored parts' KV that some layer looks at; 1 without windows."""
        taken = [part for part in self.parts if part.segment is not None]
        if not any(windows) or not taken:
            return 1.0
        unseen = sum(len(part.span) * len(self.unseen_layers(part, windows)) for part in taken)
        return 1.0 - unseen / (len(windows) * sum(len(part.span) for part in taken))

    def spans(self, kv_source: KVSource) -> tuple[Span, ...]:
        """The spans of all parts with that KV source, in prompt order."""
        return tuple(part.span for part in self.parts if part.kv_source is kv_source)

    def tokens(self, kv_source: KVSource) -> int:
        """Tokens in parts with that KV source."""
        return sum(len(span) for span in self.spans(kv_source))

    def reused_among(self, positions: Iterable[int]) -> list[int]:
        """Those of `positions` that are in reused parts, in the given order."""
        reused = {position for span in self.spans(KVSource.REUSED) for position in span.positions()}
        return [position for position in positions if position in reused]

    def computed_tokens_of(self, pass_: Pass) -> int:
        """Required tokens of a pass outside reused parts: active at all its layers, and not a recomputation."""
        required = {position for span in pass_.required for position in span.positions()}
        return len(required) - len(self.reused_among(required))

    def validate(self, num_layers: int) -> None:
        """Check the plan against the model that will execute it.

        Raises:
            UsageError: a rule names a layer that the model does not have.
            ValueError: the plan contradicts itself (a bug of the method).
        """
        last = Span(self.prompt_tokens - 1, self.prompt_tokens)
        if not self.passes or not _cover(self.passes[-1].required, last):
            raise ValueError(f"{self.method}: the last token must be computed by the last pass")
        reused = self.spans(KVSource.REUSED)
        _validate_watches(self.method, self.passes, num_layers)
        for pass_ in self.passes:
            if not _cover(self.spans(KVSource.COMPUTED), *pass_.hidden):
                raise ValueError(f"{self.method}: only parts that a later pass computes can be hidden")
            tokens = (span.hull() if isinstance(span, Scattered) else span for span in pass_.candidates if len(span))
            if not _cover(reused, *tokens):
                raise ValueError(f"{self.method}: only tokens of reused chunks can be candidates")
            _validate_rules(self.method, pass_, num_layers)
        if not _cover([span for pass_ in self.passes for span in pass_.required], *self.spans(KVSource.COMPUTED)):
            raise ValueError(f"{self.method}: tokens that are not stored must be required by some pass")


def _validate_watches(method: str, passes: Sequence[Pass], num_layers: int) -> None:
    if passes[-1].depth is not None or passes[-1].hidden or passes[-1].watch is not None:
        raise ValueError(f"{method}: the last pass sees everything, runs all layers, and watches for no other")
    watched = False
    for pass_ in passes:
        if pass_.start is not None and not watched:
            raise ValueError(f"{method}: what starts a pass must have been watched in the one before")
        if pass_.start is not None and len(pass_.start.weights) not in (0, pass_.candidate_tokens):
            raise ValueError(f"{method}: a start needs one weight for each candidate token, or none")
        watch = pass_.watch
        depth = num_layers if pass_.depth is None else pass_.depth
        watched = watch is not None
        if watch is None:
            continue
        if not (watch.question and _cover(pass_.required, watch.question)):
            raise ValueError(f"{method}: the question that is watched must be required")
        if not 0 <= watch.layers[-1] < num_layers:
            raise UsageError(f"{method}: the watch has layer {watch.layers[-1]}, but the model has {num_layers} layers")
        if watch.layers[-1] >= depth:
            raise ValueError(f"{method}: a watched layer is after the last layer of its pass")


def _validate_rules(method: str, pass_: Pass, num_layers: int) -> None:
    layers = [rule.layer for rule in pass_.keep_top]
    counts = [pass_.starting_tokens, *(rule.count for rule in pass_.keep_top)]
    if layers != sorted(set(layers)) or counts != sorted(counts, reverse=True):
        raise ValueError(f"{method}: rules must go up in layers and down in counts")
    if layers and not 0 <= layers[-1] < num_layers:
        raise UsageError(f"{method}: a rule checks layer {layers[-1]}, but the model has {num_layers} layers")
    if pass_.start is None and any(rule.by is Evidence.READ_DEVIATION for rule in pass_.keep_top):
        raise ValueError(f"{method}: a rule needs what the question read, but the pass does not start by it")
    if len(pass_.rules) > len(layers) + 1:
        raise ValueError(f"{method}: only one rule may stop unfocused chunks")
    if pass_.stop_unfocused is not None:
        _validate_focus(method, pass_.stop_unfocused, pass_)


def _validate_focus(method: str, rule: StopUnfocused, pass_: Pass) -> None:
    spans = (*rule.chunks, rule.question)
    if rule.window < 1 or any(earlier.stop > after.start for earlier, after in pairwise(spans)):
        raise ValueError(f"{method}: focus needs a window, and chunks in order before the question")
    if not rule.question or not _cover(pass_.required, rule.question):
        raise ValueError(f"{method}: the question whose attention is followed must be required")


def _cover(outer: Iterable[Span], *inner: Span) -> bool:
    """Whether every position of `inner` is in `outer`."""
    runs = joined(outer)
    starts = [run.start for run in runs]
    places = [(span, bisect(starts, span.start) - 1) for span in inner]
    return all(place >= 0 and span.stop <= runs[place].stop for span, place in places)


def can_be_cut(pass_: Pass) -> bool:
    """Whether the tokens of a pass depend on each other only by causal attention.

    Then lower positions may run through all layers first. Rules, a start by evidence and a watched question need all
    active tokens of a layer together; so such a pass runs whole, as does one that ends early or hides keys.
    """
    looks_around = pass_.candidates or pass_.rules or pass_.start or pass_.watch
    return not looks_around and pass_.depth is None and not pass_.hidden


def cut(pass_: Pass, tokens: int) -> tuple[Pass, Pass | None]:
    """The first `tokens` (at least 1) positions of a pass that can be cut, and the rest, None if empty."""
    head: list[Span] = []
    tail: list[Span] = []
    tokens_left = tokens
    for span in joined(pass_.required):
        middle = min(span.stop, span.start + tokens_left)
        tokens_left -= middle - span.start
        head += [Span(span.start, middle)] if middle > span.start else []
        tail += [Span(middle, span.stop)] if span.stop > middle else []
    return replace(pass_, required=tuple(head)), replace(pass_, required=tuple(tail)) if tail else None


def clipped(pass_: Pass, first: int, stop: int) -> Pass:
    """The pass restricted to positions in `[first, stop)`.

    Counts of rules and start shrink to this range's share of the candidates, rounded up. A watched or followed question
    must be within the range.
    """
    required = tuple(inside for span in pass_.required if (inside := span.within(first, stop)))
    flags = [first <= position < stop for span in pass_.candidates for position in span.positions()]
    if all(flags):
        return replace(pass_, required=required)
    share = sum(flags) / len(flags)
    return replace(
        pass_,
        required=required,
        candidates=tuple(part for span in pass_.candidates if (part := _candidates(span, first, stop))),
        rules=(
            *(replace(rule, count=ceil(rule.count * share)) for rule in pass_.keep_top),
            *([pass_.stop_unfocused] if pass_.stop_unfocused is not None else []),
        ),
        start=pass_.start
        and replace(
            pass_.start,
            count=ceil(pass_.start.count * share),
            weights=tuple(compress(pass_.start.weights, flags)),
        ),
    )


def _candidates(span: Span | Scattered, first: int, stop: int) -> Span | Scattered | None:
    if isinstance(span, Span):
        return span.within(first, stop) or None
    offsets = tuple(offset for offset in span.offsets if first <= span.start + offset < stop)
    return replace(span, offsets=offsets) if offsets else None
