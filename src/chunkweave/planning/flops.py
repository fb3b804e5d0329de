"""Floating-point operations of a prefill: the limit that a measured time is held against."""

from dataclasses import dataclass

from chunkweave.types import Geometry


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one layer of one pass computed.

    `entered_tokens` had q, k, v computed; `kept_tokens` of them survived this layer's rule, so that their K and V
    count; `finished_tokens` of these went through attention and MLP (in the last layer only the one whose logits are
    asked for); `visible_keys` is the sum over the finished tokens of the keys that each may see (position + 1).
    `evidence_keys` is that sum over the tokens whose attention, of all heads, was looked at once more for a rule, and
    `captured_scores` the number of pairs of a token, a key that it sees and a head that were looked at once more for
    the profiles of new segments.
    """

    entered_tokens: int
    kept_tokens: int
    finished_tokens: int
    visible_keys: int
    evidence_keys: int = 0
    captured_scores: int = 0


def layer_flops(geometry: Geometry, work: LayerWork) -> float:
    """FLOPs of one layer: two per weight and token in the linear maps, four per head dim, query and visible key.

    Evidence and captures take half of that for queries times keys, and two more a head for the sum by parts.
    """
    g = geometry
    q_width, kv_width = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    qkv = 2 * g.hidden_size * (q_width + 2 * kv_width)
    rest = 2 * q_width * g.hidden_size + 2 * 3 * g.hidden_size * g.intermediate_size
    looked_at = work.evidence_keys * g.num_heads + work.captured_scores
    attention = work.visible_keys * 4 * q_width + looked_at * (2 * g.head_dim + 2)
    return float(work.entered_tokens * qkv + work.finished_tokens * rest + attention)


def prefill_flops(geometry: Geometry, layers: list[LayerWork]) -> float:
    """FLOPs of a prefill to the first token's logits: all layers of all passes and one row of the output head."""
    return sum(layer_flops(geometry, work) for work in layers) + 2.0 * geometry.hidden_size * geometry.vocab_size


def full_prefill_flops(geometry: Geometry, prompt_tokens: int) -> float:
    """FLOPs of computing every token of a prompt at every layer; the last layer is finished for the last token only."""
    n = prompt_tokens
    layers = [LayerWork(n, n, n, n * (n + 1) // 2)] * (geometry.num_layers - 1)
    return prefill_flops(geometry, [*layers, LayerWork(n, n, 1, n)])
