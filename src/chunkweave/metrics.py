"""Metrics of one request: tokens by KV source and time by phase."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from chunkweave.types import ChunkId, SegmentId, Span


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """KV source of one part of the prompt: a chunk, the system part, or an earlier turn.

    `kv_source` is `prefix-exact`, `reused` or `computed`; `variant` is the id of the reused segment and `tier` the tier
    it was read from (both unknown over vLLM). `recomputed` are the prompt positions of this part that were active at
    the last layer. `rank` is the chunk's index in the caller's order, from 0, independent of its order in the prompt;
    the system part has none. `start` is the prompt position of its first token. `reasons` explain how much of it a
    scoring method recomputed (`planning.outcome.reasons_of`); empty for other methods. `contexts` is the number of
    contexts that the reused variant is a mean over; 0 if it is no mean.
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
    """A value of `ReuseReport.parameters` as display text.

    >>> parameter_text(0.15), parameter_text(True), parameter_text([1, 2]), parameter_text({"tail": None, "top": 1})
    ('0.15', 'on', '1 2', 'tail all, top 1')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {parameter_text(field_value)}" for name, field_value in value.items())
    if isinstance(value, list):
        return " ".join(map(parameter_text, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "all"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


TOKEN_SOURCES = ("prefix-exact", "reused", "recomputed", "computed")
"""Possible KV sources of a prompt token, in display order."""


def effective_method(method: str, *, prefix_exact: int, reused: int) -> str:
    """`full` if nothing was reused, `prefix` if only exact prefixes were, else `method` itself.

    `reused` counts the tokens of reused chunks, recomputed ones included.

    >>> effective_method("cacheblend", prefix_exact=128, reused=0)
    'prefix'
    """
    if reused:
        return method
    return "prefix" if prefix_exact else "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseReport:
    """Tokens by KV source and time by phase of one answer; every answer has one.

    `method` is the requested or chosen one, `effective_method` what it amounted to (see that function). `why` says how
    it was chosen (`exact`, `calibrated`, `no gain`, `path recurs`, `target not reached`, `asked for`, `switched off`),
    `parameters` holds all its parameters; the recompute ratio is the loading controller's if that raised it.

    `prefix_exact_tokens + reused_tokens + recomputed_tokens + computed_tokens == prompt_tokens`. `engine_cached_tokens`
    of the first were in vLLM's own prefix cache; 0 in our engine. `recompute_fraction` is the sum over layers of
    recomputed tokens of reused chunks, over (layers x tokens of reused chunks), dense first layers included; 0 if
    nothing was reused.

    Times are in seconds. `ttft_s` runs from the call to the first token and contains the four times before it.

    `lost_segments` were broken, gone or late when they were read; the prompt was planned again without them. `order` is
    the ordering of the chunks; `original` is the caller's. `loaded_fraction` is the share of the prompt's stored KV
    that was loaded: less than 1 if sliding-window layers see no token of a chunk.

    `looked_up_tokens` are tokens of parts that can be stored: instructions, chunks, turns. `hits` are those found, by
    tier; `vllm` is vLLM's own prefix cache.

    `check_layers` are the layers that chose which tokens are computed further. From `stopped_at_layer` on, chunks that
    the question does not attend to were not recomputed (None: no token was left out).

    In a conversation, `history_tokens` are tokens of earlier turns. `chunks_not_sent` (`tokens_not_sent`) were already
    in the context.

    `expected_s` are the seconds that `woven` and `exact` were expected to take (`weave_s` is the actual time), if the
    cheaper one was chosen and times are known.

    Of `draft_tokens` (prompt lookup decoding, our engine only) `accepted_tokens` are in the answer; each saved a step.

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
    recompute_fraction: float = 0.0
    queue_s: float
    lookup_s: float = 0.0
    load_s: float = 0.0
    weave_s: float = 0.0
    ttft_s: float
    decode_s: float
    new_tokens: int
    prefill_flops: float = 0.0
    full_prefill_flops: float = 0.0
    chunks: tuple[ChunkReport, ...] = ()
    why: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    order: str = "original"
    history_tokens: int = 0
    chunks_not_sent: int = 0
    tokens_not_sent: int = 0
    lost_segments: int = 0
    loaded_fraction: float = 1.0
    looked_up_tokens: int = 0
    engine_cached_tokens: int = 0
    hits: Mapping[str, int] = field(default_factory=dict)
    check_layers: tuple[int, ...] = ()
    stopped_at_layer: int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    expected_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """The prompt's tokens by `TOKEN_SOURCES`; the values sum to `prompt_tokens`."""
        return {source: getattr(self, f"{source.replace('-', '_')}_tokens") for source in TOKEN_SOURCES}

    @property
    def tokens_not_computed(self) -> int:
        """Tokens of the prompt whose KV was taken as it was stored."""
        return self.prefix_exact_tokens + self.reused_tokens

    @property
    def effective_method(self) -> str:
        """What the method amounted to, by the tokens that it reused (see the function)."""
        reused = self.reused_tokens + self.recomputed_tokens
        return effective_method(self.method, prefix_exact=self.prefix_exact_tokens, reused=reused)

    @property
    def flops_limit(self) -> float:
        """Upper bound of the speed-up of the first token: full prefill's FLOPs over this prefill's."""
        return self.full_prefill_flops / self.prefill_flops if self.prefill_flops else 1.0

    @property
    def phases(self) -> tuple[tuple[str, float, float], ...]:
        """(name, start, end) of each phase before the first token, in seconds after arrival.

        Phases are laid end to end, although loading and weaving alternate layer by layer.
        """
        phases = []
        at = 0.0
        for name in ("queue", "lookup", "load", "weave"):
            until = min(at + getattr(self, f"{name}_s"), self.ttft_s)
            phases.append((name, at, until))
            at = until
        return tuple(phases)

    def as_dict(self) -> dict[str, Any]:
        """JSON-compatible values, with `effective_method` and `flops_limit`."""
        return {**asdict(self), "effective_method": self.effective_method, "flops_limit": self.flops_limit}


_LATEST = 9
_MOSTLY = 0.8
"""Share of full prefill's work from which a prefill says what full prefill takes."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds by which a first token came sooner than with full prefill, which would have taken `full_s`."""

    seconds: float
    full_s: float

    @property
    def share(self) -> float:
        """The saved share of full prefill's time; negative if reuse was later."""
        return self.seconds / self.full_s if self.full_s else 0.0

    def as_dict(self) -> dict[str, float]:
        """As JSON values, for reports."""
        return {"saved_s": round(self.seconds, 4), "saved_share": round(self.share, 4)}


@dataclass(slots=True)
class Savings:
    """What reuse saves against the same backend without stored KV, by the times of prompts that were mostly computed.

    Full prefill's rate is the median of their latest seconds per unit of work, after the queue. Work is counted in
    FLOPs; where these are not known (over vLLM), in computed tokens, without those in vLLM's own prefix cache.
    """

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def add(self, report: ReuseReport) -> Saved | None:
        """Count one answer; returns what it saved, nothing if it reused nothing. None while the rate is unknown."""
        work, full_work = _work(report)
        prefill_s = report.ttft_s - report.queue_s
        if full_work and work >= _MOSTLY * full_work:
            self.rates.append(prefill_s / work)
        if not self.rates:
            return None
        full_s = median(self.rates) * full_work
        return Saved(full_s - prefill_s if work < full_work else 0.0, full_s)


def _work(report: ReuseReport) -> tuple[float, float]:
    """Of a prefill as it was, and of full prefill."""
    if report.full_prefill_flops:
        return report.prefill_flops, report.full_prefill_flops
    tokens = report.prompt_tokens - report.engine_cached_tokens
    return float(report.computed_tokens + report.recomputed_tokens), float(tokens)
