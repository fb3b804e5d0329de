"""A plan: what is to happen to each part of one prompt, as plain data that any layer loop can execute.

A method makes the plan, a loop executes it; the loop knows rules, not methods. Within a layer the order is: q, k, v of
the active tokens -> evidence on KV, refine -> K and V of the survivors are written over the cached ones -> attention
and the rest of the layer. What a rule drops keeps its cached KV from that layer on.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from chunkweave.chunking.prompt import PartKind, PromptPart
from chunkweave.errors import UsageError
from chunkweave.types import SegmentId, Span


class Fate(StrEnum):
    """What happens to a part's KV."""

    EXACT = "prefix-exact"
    """Taken from the store as it is: equal to what full prefill would give."""
    REUSED = "reused"
    """Taken from the store, position-shifted, and recomputed as far as the passes say."""
    COMPUTED = "computed"
    """Not in the store (or not stored at all): every token is active at every layer."""


class Evidence(StrEnum):
    """By what tokens are ranked when a rule keeps the best of them."""

    KV_DEVIATION = "kv_deviation"
    """L2 norm over heads and dims of fresh minus cached (K, V), both before RoPE (CacheBlend §4.1)."""


@dataclass(frozen=True, slots=True)
class KeepTop:
    """At `layer`, the `count` candidates with the most evidence stay active; ties go to the earlier position."""

    layer: int
    count: int
    by: Evidence = Evidence.KV_DEVIATION


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part of the prompt with its fate and, if it is taken from the store, the segment."""

    part: PromptPart
    span: Span
    fate: Fate
    segment: SegmentId | None = None

    def __post_init__(self) -> None:
        if (self.segment is None) != (self.fate is Fate.COMPUTED):
            raise ValueError(f"a {self.fate} part {'needs' if self.segment is None else 'has no'} segment")


@dataclass(frozen=True, slots=True)
class Pass:
    """One run over the layers.

    `required` positions are active at every layer. `candidates` (reused-chunk tokens) are active from layer 0 on until
    a rule drops them; rules only ever shrink the active set.
    """

    required: tuple[Span, ...]
    candidates: tuple[Span, ...] = ()
    rules: tuple[KeepTop, ...] = ()

    @property
    def required_tokens(self) -> int:
        return sum(len(span) for span in self.required)

    @property
    def candidate_tokens(self) -> int:
        return sum(len(span) for span in self.candidates)


@dataclass(frozen=True, slots=True)
class Plan:
    """The fates of all parts and the passes that finish the prompt's KV cache."""

    method: str
    parts: tuple[PartPlan, ...]
    passes: tuple[Pass, ...]

    @property
    def prompt_tokens(self) -> int:
        return self.parts[-1].span.stop if self.parts else 0

    def segments(self) -> tuple[SegmentId, ...]:
        """Every segment that the plan takes from the store, each once, in prompt order."""
        return tuple(dict.fromkeys(part.segment for part in self.parts if part.segment is not None))

    def spans(self, fate: Fate) -> tuple[Span, ...]:
        """The spans of all parts of that fate, in prompt order."""
        return tuple(part.span for part in self.parts if part.fate is fate)

    def tokens(self, fate: Fate) -> int:
        """Tokens in parts of that fate."""
        return sum(len(span) for span in self.spans(fate))

    def reused_among(self, positions: Iterable[int]) -> list[int]:
        """Those of `positions` that lie in reused parts, in the order given."""
        reused = _positions(self.spans(Fate.REUSED))
        return [position for position in positions if position in reused]

    def computed_tokens_of(self, a_pass: Pass) -> int:
        """Required tokens of a pass outside reused parts: active at all its layers, and no recomputation."""
        required = _positions(a_pass.required)
        return len(required) - len(self.reused_among(required))

    def validate(self, num_layers: int) -> None:
        """Check the rules against the model that is to execute them.

        Raises:
            UsageError: a rule names a layer that the model does not have.
            ValueError: the plan contradicts itself (a bug of the method).
        """
        if not self.passes or self.parts[-1].span.stop - 1 not in _positions(self.passes[-1].required):
            raise ValueError(f"{self.method}: the last token must be computed by the last pass")
        missing = _positions(self.spans(Fate.COMPUTED))
        reused = _positions(self.spans(Fate.REUSED))
        for a_pass in self.passes:
            if not _positions(a_pass.candidates) <= reused:
                raise ValueError(f"{self.method}: only tokens of reused chunks can be candidates")
            _validate_rules(self.method, a_pass, num_layers)
        if not missing <= set().union(*(_positions(a_pass.required) for a_pass in self.passes)):
            raise ValueError(f"{self.method}: tokens that are not stored must be required by some pass")


def _validate_rules(method: str, a_pass: Pass, num_layers: int) -> None:
    layers = [rule.layer for rule in a_pass.rules]
    counts = [a_pass.candidate_tokens, *(rule.count for rule in a_pass.rules)]
    if layers != sorted(set(layers)) or counts != sorted(counts, reverse=True):
        raise ValueError(f"{method}: rules must go up in layers and down in counts")
    if layers and not 0 <= layers[-1] < num_layers:
        raise UsageError(f"{method}: layer {layers[-1]} is to be checked, but the model has {num_layers} layers")


def _positions(spans: tuple[Span, ...]) -> set[int]:
    return {position for span in spans for position in span.positions()}


def is_computed_always(part: PromptPart) -> bool:
    """START and QUESTION parts are never stored."""
    return part.kind in (PartKind.START, PartKind.QUESTION)
