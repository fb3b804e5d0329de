"""`query`: recompute the tokens that this question reads (query-aware weaving, DESIGN §5.6; ProphetKV's idea)."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean

from chunkweave.config import DeviationFactor, QueryConfig, ReuseConfig
from chunkweave.planning.method import (
    RATIO_BUDGET,
    one_pass,
    prefer_neutral,
    required_spans,
    reuse_every_hit,
    stale_offsets,
    stale_spans,
)
from chunkweave.planning.plan import Evidence, KeepTop, KVSource, PartPlan, Pass, Plan, TopBy, Watch
from chunkweave.prompt.parts import PartKind
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import AttentionProfile
from chunkweave.types import Geometry, Span, joined

_LATER = (PartKind.CHUNK, PartKind.TURN)
"""Parts that, where they are not stored, are computed after the first pass."""


class QueryAware:
    """Two passes: the question alone over the reused KV, then the question and the tokens that it read most.

    KV that deviates and is never read cannot change the answer. The first pass computes the question only, up to the
    last watched layer, so it costs next to nothing, and no dense layer is needed. The budget, `ceil(recompute_ratio *
    reused tokens)`, is shared by the whole prompt; tokens that an earlier turn recomputed are not counted. Missing
    chunks are computed after the first pass and hidden in it; the question is computed in every pass. `QueryConfig` has
    what else can count as evidence.
    """

    name = "query"
    budget = RATIO_BUDGET
    reads_question = True

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio
        self._query = config.query
        self._check_layer = config.check_layers[0]

    @property
    def needs_profiles(self) -> bool:
        """Where dependence on the old context counts as evidence."""
        return self._query.factor is DeviationFactor.STORED or self._query.mixed_share > 0.0

    @property
    def asks_again(self) -> bool:
        """With two rounds."""
        return self._query.rounds > 1

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """A pass that watches the question, and one or two over what it read; one in all where nothing is chosen."""
        parts = reuse_every_hit(lookup, prefer_neutral)
        candidates = stale_spans(parts)
        total = sum(len(span) for span in candidates)
        budget = ceil(self._ratio * total)
        question = parts[-1]
        if not budget or question.part.kind is not PartKind.QUESTION:
            return one_pass(self.name, parts)
        if budget == total:
            return Plan(self.name, parts, (Pass(joined([*required_spans(parts), *candidates])),))
        profiles = _profiles(parts, lookup)
        always = _always(parts, profiles, self._query, budget)
        last = Pass(required_spans(parts, always))
        if len(always) == budget:
            return Plan(self.name, parts, (last,))
        query = self._query
        tail = len(question.span) if query.tail is None else min(query.tail, len(question.span))
        watch = Watch(
            Span(question.span.stop - tail, question.span.stop),
            query.watched(geometry.num_layers),
            over_heads=query.over_heads,
            over_tokens=query.over_tokens,
            over_layers=query.over_layers,
        )
        missing = tuple(p.span for p in parts if p.kv_source is KVSource.COMPUTED and p.part.kind in _LATER)
        seen = tuple(p.span for p in parts if p.kv_source is KVSource.COMPUTED and p.part.kind not in _LATER)
        watching = Pass(joined(seen), watch=watch, depth=watch.layers[-1] + 1, hidden=missing)
        weights = _weights(parts, profiles) if query.factor is DeviationFactor.STORED else ()
        stop = ceil(query.until * geometry.num_layers)
        base = replace(last, candidates=candidates, rules=(KeepTop(stop, 0),) if stop < geometry.num_layers else ())
        rounds = self._rounds(base, budget - len(always), weights, watch)
        return Plan(self.name, parts, (watching, *rounds))

    def _rounds(self, base: Pass, budget: int, weights: tuple[float, ...], watch: Watch) -> tuple[Pass, ...]:
        """`base` with its share of the budget; where there are two rounds the first watches for the second."""
        second = budget // self._query.rounds if self._query.rounds > 1 else 0
        first = self._choosing(base, budget - second, weights)
        if not second:
            return (first,)
        return replace(first, watch=watch), self._choosing(base, second, weights)

    def _choosing(self, base: Pass, count: int, weights: tuple[float, ...]) -> Pass:
        """`base` that starts with the `count` best candidates, or with more of which a check layer leaves as many."""
        if self._query.factor is not DeviationFactor.MEASURED:
            return replace(base, start=TopBy(count, weights=weights))
        wide = min(base.candidate_tokens, ceil(self._query.widen * count))
        rule = KeepTop(self._check_layer, count, Evidence.READ_DEVIATION)
        return replace(base, start=TopBy(wide, weights=weights), rules=(rule, *base.rules))


def _profiles(parts: Sequence[PartPlan], lookup: PromptLookup) -> dict[Span, AttentionProfile]:
    """What the tokens of reused parts looked at in some context: the taken variant's profile, else another one's."""
    found = {}
    for part, entry in zip(parts, lookup.parts, strict=True):
        records = sorted(entry.variants, key=lambda record: record.id != part.segment)
        profiles = (record.attention for record in records if record.attention and record.attention.inter_total)
        profile = next(profiles, None)
        if part.kv_source is KVSource.REUSED and profile is not None:
            found[part.span] = profile
    return found


def _weights(parts: Sequence[PartPlan], profiles: dict[Span, AttentionProfile]) -> tuple[float, ...]:
    """Each candidate's attention on earlier chunks when it was stored; where that is not known, the others' mean."""
    known = [mass for profile in profiles.values() for mass in profile.outward]
    unknown = fmean(known) if known else 1.0
    return tuple(
        profiles[part.span].outward[offset] if part.span in profiles else unknown
        for part in parts
        for offset in stale_offsets(part)
    )


def _always(
    parts: Sequence[PartPlan], profiles: dict[Span, AttentionProfile], query: QueryConfig, budget: int
) -> list[int]:
    """Positions that are recomputed whatever the question reads: first tokens, and the share that is mixed in."""
    stale = {part.span: stale_offsets(part) for part in parts}
    first = sorted((o, span.start + o) for span, offsets in stale.items() for o in offsets if o < query.first_tokens)
    chosen = dict.fromkeys(position for _, position in first[:budget])
    if query.mixed_share:
        room = max(0, min(ceil(query.mixed_share * budget), budget - len(chosen)))
        ranked = sorted(
            (rank / len(span), span.start + offset)
            for span, offsets in stale.items()
            for rank, offset in enumerate(profiles[span].by_outward if span in profiles else range(len(span)))
            if offset in offsets
        )
        others = [position for _, position in ranked if position not in chosen]
        chosen |= dict.fromkeys(others[:room])
    return sorted(chosen)


METHOD = QueryAware
