"""The outcome of a plan: work and FLOPs of each layer, and why tokens were recomputed."""

from dataclasses import dataclass

from chunkweave.planning.plan import KVSource, PartPlan, Plan
from chunkweave.types import Geometry, Span


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
    q_width = g.num_heads * g.head_dim
    kv_width = g.num_kv_heads * g.head_dim
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
    new = new_tokens
    tokens = cached_tokens + new_tokens
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
