"""The outcome of a plan: work and FLOPs of each layer, and an explanation of each part of the prompt."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan
from chunkweave.prompt.parts import PartKind
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, Geometry, SegmentId, Span


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Work of one layer of one pass.

    `entered_tokens` computed q, k, v; `kept_tokens` of them survived this layer's rule; `finished_tokens` of these ran
    attention and MLP (in the last layer only the one whose logits are needed). `visible_keys` sums the keys that the
    finished tokens see (position + 1); `evidence_keys` those of tokens whose attention was computed again for a rule.
    `captured_scores` counts (token, visible key, head) triples computed again for profiles of new segments.
    """

    entered_tokens: int
    kept_tokens: int
    finished_tokens: int
    visible_keys: int
    evidence_keys: int = 0
    captured_scores: int = 0


def layer_flops(geometry: Geometry, work: LayerWork) -> float:
    """FLOPs of one layer: two per weight and token in linear maps, four per head dimension, query and visible key.

    Evidence and captures cost half of that for queries times keys, and two more per head for the sum by parts.
    """
    g = geometry
    q_width, kv_width = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    qkv = 2 * g.hidden_size * (q_width + 2 * kv_width)
    rest = 2 * q_width * g.hidden_size + 2 * 3 * g.hidden_size * g.intermediate_size
    looked_at = work.evidence_keys * g.num_heads + work.captured_scores
    attention = work.visible_keys * 4 * q_width + looked_at * (2 * g.head_dim + 2)
    return float(work.entered_tokens * qkv + work.finished_tokens * rest + attention)


def prefill_flops(geometry: Geometry, layers: list[LayerWork]) -> float:
    """FLOPs of a prefill up to the first token's logits: all layers of all passes, and one row of the output head."""
    return sum(layer_flops(geometry, work) for work in layers) + 2.0 * geometry.hidden_size * geometry.vocab_size


def full_prefill_flops(geometry: Geometry, new_tokens: int, cached_tokens: int = 0) -> float:
    """FLOPs of computing `new_tokens` after `cached_tokens`; only the last token finishes the last layer."""
    new, tokens = new_tokens, cached_tokens + new_tokens
    last = geometry.num_layers - 1
    visible = {window: _visible(cached_tokens, tokens, window) for window in (None, *geometry.windows)}
    layers = [LayerWork(new, new, new, visible[geometry.window(layer)]) for layer in range(last)]
    seen_last = min(tokens, geometry.window(last) or tokens)
    return prefill_flops(geometry, [*layers, LayerWork(new, new, 1, seen_last)])


def recompute_fraction(plan: Plan, work: int, num_layers: int) -> float:
    """Share of reused tokens that was recomputed; `work` sums the recomputed tokens over all layers."""
    reused = plan.tokens(KVSource.REUSED)
    return work / (num_layers * reused) if reused else 0.0


def _visible(first: int, stop: int, window: int | None) -> int:
    """Number of keys that the tokens at positions `[first, stop)` see, summed."""
    edge = stop if window is None else min(max(first, window), stop)
    growing = (edge - first) * (first + edge + 1) // 2
    return growing + (stop - edge) * (window or 0)


def reasons_of(part: PartPlan) -> dict[str, float]:
    """Reasons for the recomputed share of a reused part, rounded for reports; empty if the method has no scores.

    `overlap` is beta' (Cache-Craft eq. 8), `cci` eq. 11, `cfo` eq. 12, `coverage` the share of the tokens before the
    part that were also before it when it was computed, `generation` that of the reused variant (0: computed whole).
    """
    score = part.score
    if score is None:
        return {}
    names = ("overlap", "cci", "cfo", "coverage")
    return {**{name: round(getattr(score, name), 3) for name in names}, "generation": score.generation}


def check_layers_of(plan: Plan) -> tuple[int, ...]:
    """Layers at which a plan's rules choose among the active tokens (CacheBlend §4.3), ascending."""
    return tuple(sorted({rule.layer for pass_ in plan.passes for rule in pass_.keep_top}))


_NEUTRAL = "neutral passages"
_SHOWN_ID = 8
"""Digits of an id shown for a chunk without a name in this prompt."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of recomputing unfocused chunks: from `layer` on, the tokens `dropped` were not active.

    `focused` are the spans of the chunks that were still recomputed.
    """

    layer: int
    focused: tuple[Span, ...]
    dropped: tuple[Span, ...]

    @property
    def layer_if_dropped(self) -> int | None:
        """`layer`, if any tokens were dropped; else None."""
        return self.layer if self.dropped else None


@dataclass(frozen=True, slots=True)
class PartExplanation:
    """One part of the prompt: the source of its KV, why, and which of its tokens were recomputed.

    Spans are relative to the part's start. `context` names the chunks before the variant when it was computed (None if
    unknown); for a mean, those of all its `contexts`. `alone`: only BOS was before it. `recomputed` tokens were active
    up to the last layer, `partly` only below `stopped_at_layer`. `cci`, `overlap` and `cfo` are the method's scores, if
    any (Cache-Craft §3.1-3.2).
    """

    kind: PartKind
    source: str
    start: int
    tokens: int
    kv_source: KVSource
    variant: SegmentId | None = None
    context: tuple[str, ...] | None = None
    alone: bool = False
    cci: float | None = None
    overlap: float | None = None
    cfo: float | None = None
    recomputed: tuple[Span, ...] = ()
    partly: tuple[Span, ...] = ()
    stopped_at_layer: int | None = None
    contexts: int = 0

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that were recomputed up to the last layer."""
        return sum(len(span) for span in self.recomputed)


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """All parts in order, and the passes in words."""

    method: str
    num_layers: int
    parts: tuple[PartExplanation, ...]
    passes: tuple[str, ...]
    stop: Stop | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-compatible values."""
        return asdict(self)


def explain_plan(
    plan: Plan,
    *,
    num_layers: int,
    recomputed: Sequence[Span],
    records: Mapping[SegmentId, SegmentRecord],
    stop: Stop | None = None,
) -> PlanExplanation:
    """Explain a plan and what was done.

    Args:
        plan: as the method made it.
        num_layers: of the model.
        recomputed: positions of reused parts that were active at the last layer.
        records: records of the plan's segments; a missing one has an unknown context.
        stop: where unfocused chunks were dropped, if they were.
    """
    names = {part.part.id: part.part.source or str(part.part.kind) for part in plan.parts}
    instructions = {part.part.id for part in plan.parts if part.part.kind is PartKind.SYSTEM}
    parts = []
    for part in plan.parts:
        record = records.get(part.segment) if part.segment is not None else None
        partly = _inside(part.span, stop.dropped) if stop is not None else ()
        score = part.score
        parts.append(
            PartExplanation(
                kind=part.part.kind,
                source=part.part.source or str(part.part.kind),
                start=part.span.start,
                tokens=len(part.span),
                kv_source=part.kv_source,
                variant=part.segment,
                context=None if record is None else _context(record, names, instructions),
                alone=record is not None and record.alone,
                cci=None if score is None else score.cci,
                overlap=None if score is None else score.overlap,
                cfo=None if score is None else score.cfo,
                recomputed=_inside(part.span, recomputed),
                partly=partly,
                stopped_at_layer=stop.layer if stop is not None and partly else None,
                contexts=0 if record is None else len(record.contexts),
            )
        )
    return PlanExplanation(plan.method, num_layers, tuple(parts), tuple(map(describe_pass, plan.passes)), stop)


def describe_pass(pass_: Pass) -> str:
    """A pass in words.

    >>> describe_pass(Pass((Span(0, 7),)))
    '7 tokens at every layer'
    """
    phrases = [f"{pass_.required_tokens} tokens at every layer"]
    if pass_.candidates:
        phrases.append(f"{pass_.starting_tokens} more from layer 0 on")
    if pass_.start is not None:
        phrases.append(f"those of {pass_.candidate_tokens} with the most question attention in the pass before")
    phrases += [
        f"of these the {rule.count} with the most {str(rule.by).replace('_', ' ')} from layer {rule.layer} on"
        for rule in pass_.keep_top
    ]
    if pass_.stop_unfocused is not None:
        phrases.append(f"only focused chunks continue once {pass_.stop_unfocused.window} layers agree which they are")
    if pass_.watch is not None:
        phrases.append("the question's attention is summed up for the next pass")
    return "; ".join(phrases)


def _context(
    record: SegmentRecord, names: Mapping[ChunkId | None, str], instructions: Collection[ChunkId | None]
) -> tuple[str, ...]:
    """Names of the chunks before a segment when it was computed; a chunk outside this prompt is named by its id's
    start.
    """
    if record.neutral:
        return (_NEUTRAL,)
    context: Sequence[ChunkId] = record.attention.chunks if record.attention is not None else record.context
    if record.contexts:
        read = context if record.attention is not None else chain(*record.contexts)
        context = tuple(dict.fromkeys(read))
    return tuple(names.get(chunk, chunk[:_SHOWN_ID]) for chunk in context if chunk not in instructions)


def _inside(part: Span, spans: Iterable[Span]) -> tuple[Span, ...]:
    """The intersection of `spans` with `part`, relative to its start."""
    cut = (span.within(part.start, part.stop) for span in spans)
    return tuple(Span(span.start - part.start, span.stop - part.start) for span in cut if span)
