"""`query`: recompute the tokens that this question reads (query-aware weaving, after ProphetKV's idea)."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean
from typing import ClassVar

from chunkweave.config import Combine, DeviationFactor, QueryConfig, ReuseConfig, WatchedLayers
from chunkweave.planning.method import (
    RATIO_BUDGET,
    MethodSettings,
    one_pass,
    prefer_mean,
    required_spans,
    reuse_every_hit,
    reused_spans,
)
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan, TopBy, Watch
from chunkweave.prompt.parts import PartKind
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import AttentionProfile
from chunkweave.types import Geometry, Span, joined

_LATER = (PartKind.CHUNK, PartKind.TURN)
"""Kinds of parts that are computed after the first pass if they are not stored."""


class QueryAware:
    """Reuses every stored passage and computes those tokens again that the question attends to most.

    Two passes: the question alone over the reused KV, then the question and the tokens that it read most. Deviating KV
    that is never read cannot change the answer. The first pass computes the question only, up to the last watched
    layer, so it is cheap, and no dense layer is needed. The budget, `ceil(recompute_ratio * reused tokens)`, is shared
    by the whole prompt; tokens that an earlier turn recomputed are not counted. Missing chunks are hidden in the first
    pass and computed after it; the question is computed in every pass. `QueryConfig` lists what else can be evidence.
    """

    name = "query"
    budget = RATIO_BUDGET
    parameters: tuple[str, ...] = ("query",)
    settings: ClassVar[MethodSettings] = {
        "last": {"query": {"tail": 1}},
        "whole": {"query": {"tail": None}},
        "tail=": {"query": {"tail": int}},
        "all-layers": {"query": {"layers": WatchedLayers.ALL}},
        "late": {"query": {"layers": WatchedLayers.LATE}},
        "third": {"query": {"layers": WatchedLayers.FIRST_THIRD}},
        "no-factor": {"query": {"factor": DeviationFactor.NONE}},
        "stored": {"query": {"factor": DeviationFactor.STORED}},
    }
    reads_question = True

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio
        self._query = config.query

    @property
    def needs_profiles(self) -> bool:
        """True if attention to the old context is part of the evidence."""
        return self._query.factor is DeviationFactor.STORED

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """A pass that watches the question, and one over what it read; a single pass if there is no choice."""
        parts = reuse_every_hit(lookup, prefer_mean)
        candidates = reused_spans(parts)
        total = sum(len(span) for span in candidates)
        budget = ceil(self._ratio * total)
        question = parts[-1]
        if not budget or question.part.kind is not PartKind.QUESTION:
            return one_pass(self.name, parts)
        if budget == total:
            return Plan(self.name, parts, (Pass(joined([*required_spans(parts), *candidates])),))
        tail = len(question.span) if self._query.tail is None else min(self._query.tail, len(question.span))
        layers = self._query.layers.of(geometry.num_layers)
        watch = Watch(Span(question.span.stop - tail, question.span.stop), layers, over_heads=Combine.MAX)
        missing = tuple(p.span for p in parts if p.kv_source is KVSource.COMPUTED and p.part.kind in _LATER)
        seen = tuple(p.span for p in parts if p.kv_source is KVSource.COMPUTED and p.part.kind not in _LATER)
        watching = Pass(joined(seen), watch=watch, depth=layers[-1] + 1, hidden=missing)
        weights = _weights(parts, _profiles(parts, lookup)) if self.needs_profiles else ()
        return Plan(self.name, parts, (watching, Pass(required_spans(parts), candidates, start=TopBy(budget, weights))))


class QueryWhole(QueryAware):
    """Like query, chosen by the whole question at late layers: closest to full prefill.

    Another name of `query:whole:late:stored`, the configuration with the best results. The whole question is watched in
    the last half of the layers. Its attention to a token is multiplied by the token's attention to earlier chunks when
    it was stored.
    """

    name = "query-whole"
    parameters = ()
    settings: ClassVar[MethodSettings] = {}

    def __init__(self, config: ReuseConfig) -> None:
        whole = QueryConfig(tail=None, layers=WatchedLayers.LATE, factor=DeviationFactor.STORED)
        super().__init__(replace(config, query=whole))


def _profiles(parts: Sequence[PartPlan], lookup: PromptLookup) -> dict[Span, AttentionProfile]:
    """Attention profiles of reused parts: the reused variant's, else another variant's."""
    masses = {}
    for part, entry in zip(parts, lookup.parts, strict=True):
        records = sorted(entry.variants, key=lambda record: record.id != part.segment)
        profiles = (record.attention for record in records if record.attention and record.attention.inter_total)
        profile = next(profiles, None)
        if part.kv_source is KVSource.REUSED and profile is not None:
            masses[part.span] = profile
    return masses


def _weights(parts: Sequence[PartPlan], profiles: dict[Span, AttentionProfile]) -> tuple[float, ...]:
    """Each candidate's attention to earlier chunks when it was stored; if unknown, the mean of the known ones."""
    outward = [mass for profile in profiles.values() for mass in profile.outward]
    unknown = fmean(outward) if outward else 1.0
    return tuple(
        profiles[part.span].outward[offset] if part.span in profiles else unknown
        for part in parts
        if part.kv_source is KVSource.REUSED
        for offset in range(len(part.span))
    )
