"""What happened to one request: tokens by KV source and time by phase."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from chunkweave.types import ChunkId, SegmentId, Span


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """Where the KV of one part of the prompt (a chunk, the system part, or an earlier turn) came from.

    `kv_source` is `prefix-exact`, `reused` or `computed`; `variant` names the segment that was reused and `tier` where
    it came from. `recomputed` are the prompt positions of this chunk that were active at the last layer. `rank` is the
    chunk's place in the caller's order, 0 the first, wherever it stood in the prompt; the system part has none. `start`
    is the prompt position of its first token. Over vLLM `variant` and `tier` are not known. `reasons` say why a method
    that scores segments recomputed so much of it (`planning.outcome.reasons_of`); empty for others. `contexts` is over
    how many the reused variant is a mean; 0: it is none.
    """

    id: ChunkId
    source: str
    kv_source: str
    variant: SegmentId | None
    tier: str | None
    tokens: int
    recomputed_tokens: int
    recomputed: tuple[Span, ...] = ()
    rank: int | None = None
    start: int = 0
    reasons: Mapping[str, float] = field(default_factory=dict)
    contexts: int = 0


def parameter_text(value: Any) -> str:
    """A value of `ReuseReport.parameters` as it is shown.

    >>> parameter_text(0.15), parameter_text(True), parameter_text([1, 2]), parameter_text({"tail": None, "rounds": 1})
    ('0.15', 'on', '1 2', 'tail all, rounds 1')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {parameter_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return " ".join(map(parameter_text, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "all"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


TOKEN_SOURCES = ("prefix-exact", "reused", "recomputed", "computed")
"""Where the KV of a prompt's token can be from, in the order in which they are drawn."""


def effective_method(method: str, *, prefix_exact: int, reused: int) -> str:
    """What a method came to: `full` if it reused nothing, `prefix` if it reused exact prefixes alone, else itself.

    `reused` counts tokens of reused chunks, those that were computed again included.

    >>> effective_method("cacheblend", prefix_exact=128, reused=0)
    'prefix'
    """
    if reused:
        return method
    return "prefix" if prefix_exact else "full"


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """Tokens by KV source and time by phase of one answer; every answer carries one.

    `method` is the one that was requested or chosen, `effective_method` what it came to (see the function).

    `prefix_exact_tokens + reused_tokens + recomputed_tokens + computed_tokens == prompt_tokens`.
    `engine_cached_tokens` of the first were in vLLM's own prefix cache; 0 in our engine. `recompute_fraction` is the
    sum over layers of recomputed reused-chunk tokens, over (layers x reused-chunk tokens), dense first layers included;
    0 where nothing was reused. Times are in seconds; `ttft_s` runs from the call to the first token and contains the
    four before it. `why` says why this method (`exact`, `calibrated`, `target not reached`, `asked for`,
    `switched off`), `parameters` all that the method takes and the values, that of the loading controller if it raised
    one. `lost_segments` were broken, gone or late when they were read, so that the prompt was planned again without
    them. `order` is the ordering of the chunks; `original` is the caller's.

    `loaded_fraction` is the share of the stored KV in the prompt that was brought in: less than 1 where layers with a
    sliding window look at none of a chunk.

    `looked_up_tokens` are those of the parts that can be stored: instructions, chunks, turns. Of these, `hits` were
    found, by tier; `vllm` is vLLM's own prefix cache.

    `check_layers` are those at which it was chosen what is computed further. From `stopped_at_layer` on, chunks that
    the question does not attend to were not computed any more (None: no token was left out).

    In a conversation, `history_tokens` are those of earlier turns: exact, or `reused` and never recomputed.
    `chunks_not_sent` (`tokens_not_sent`) were in the context already; `turns_cut` were cut off for lack of room.

    >>> from chunkweave import Chunk, Engine
    >>> choir = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
    >>> with Engine.load("reader", method="full-reuse") as engine:
    ...     engine.precompute([choir])
    ...     report = engine.generate("Who leads the Selmond Choir?", [choir]).report
    1
    >>> report.method, [(chunk.source, chunk.kv_source) for chunk in report.chunks][-1]
    ('full-reuse', ('choir', 'reused'))
    """

    method: str
    prompt_tokens: int
    prefix_exact_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    recompute_fraction: float
    queue_s: float
    lookup_s: float
    load_s: float
    weave_s: float
    ttft_s: float
    decode_s: float
    new_tokens: int
    prefill_flops: float
    full_prefill_flops: float
    chunks: tuple[ChunkReport, ...] = ()
    why: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    order: str = "original"
    history_tokens: int = 0
    chunks_not_sent: int = 0
    tokens_not_sent: int = 0
    turns_cut: int = 0
    lost_segments: int = 0
    loaded_fraction: float = 1.0
    looked_up_tokens: int = 0
    engine_cached_tokens: int = 0
    hits: Mapping[str, int] = field(default_factory=dict)
    check_layers: tuple[int, ...] = ()
    stopped_at_layer: int | None = None

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """The prompt's tokens by `TOKEN_SOURCES`; they sum to the prompt."""
        return {source: getattr(self, f"{source.replace('-', '_')}_tokens") for source in TOKEN_SOURCES}

    @property
    def effective_method(self) -> str:
        """What the method came to, by the tokens that it reused."""
        reused = self.reused_tokens + self.recomputed_tokens
        return effective_method(self.method, prefix_exact=self.prefix_exact_tokens, reused=reused)

    @property
    def flops_limit(self) -> float:
        """How many times sooner than full prefill the first token could be if time were FLOPs."""
        return self.full_prefill_flops / self.prefill_flops if self.prefill_flops else 1.0

    @property
    def phases(self) -> tuple[tuple[str, float, float], ...]:
        """Name, beginning and end of what came before the first token, in seconds after the arrival.

        They are laid one behind the other, though loading and weaving took turns layer by layer.
        """
        found, at = [], 0.0
        for name in ("queue", "lookup", "load", "weave"):
            until = min(at + getattr(self, f"{name}_s"), self.ttft_s)
            found.append((name, at, until))
            at = until
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-able values, `effective_method` and `flops_limit` included."""
        return {**asdict(self), "effective_method": self.effective_method, "flops_limit": self.flops_limit}
