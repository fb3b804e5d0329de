"""Methods for benchmarks only: the papers' baselines, and ablations of `cachecraft`.

Baselines are entry points of a group that only the laboratory reads. A variant is a method with settings after colons,
such as `cachecraft:no-cci` (`bench_method`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import ceil, log
from random import Random
from typing import Any

from chunkweave.calibration.contenders import make_contenders
from chunkweave.config import ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.planning.method import (
    RATIO_BUDGET,
    ReuseMethod,
    changed,
    exact_part,
    make_method,
    one_pass,
    prefer_mean,
    reuse_every_hit,
    reused_spans,
    settings_changes,
)
from chunkweave.planning.methods.cachecraft import CacheCraft, ChunkPrefix
from chunkweave.planning.plan import KVSource, PartPlan, Plan, StopUnfocused
from chunkweave.planning.scores import LEAST_CHUNKS, FindFocused, focused_by_gap
from chunkweave.plugins import METHODS
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, Geometry

BENCH_METHODS = replace(METHODS, groups=(*METHODS.groups, "chunkweave_lab.methods"))
"""The methods that benchmarks compare: all methods and the baselines."""


class RandomTokens:
    """`random`: recomputes random tokens of every chunk; the lower bound (Cache-Craft §5.1.4, Random-Recomp).

    Draws `ceil(recompute_ratio * tokens)` tokens of every reused chunk, uniformly, without replacement. The draw
    depends only on the seed and the prompt's ids, so a repeated request gives the same plan.
    """

    name = "random"
    budget = RATIO_BUDGET
    parameters = ("seed",)

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio
        self._seed = config.seed

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses, question and the tokens drawn."""
        parts = reuse_every_hit(lookup, prefer_mean)
        rng = Random(":".join([str(self._seed), *(part.part.id or "" for part in parts)]))
        drawn = [
            position
            for span in reused_spans(parts)
            for position in rng.sample(span.positions(), ceil(self._ratio * len(span)))
        ]
        return one_pass(self.name, parts, drawn)


class SetCache:
    """`set-cache`: the longest stored prefix whose chunks are all in this prompt, in any order (Cache-Craft §5.1.4).

    It is an exact prefix match that ignores order: segments are moved to their chunks' positions in this prompt. A
    chain is a sequence of exact segments, each computed behind all earlier ones, the first behind nothing. Among chains
    whose parts are all in this prompt, the one with the most tokens is reused without recomputation; ties go to the
    chain whose last part comes first. The exact prefix is reused as in every method; everything else is computed.
    """

    name = "set-cache"
    budget = None

    def __init__(self, _config: ReuseConfig) -> None:
        pass

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over what is in neither the exact prefix nor the chain."""
        left: dict[ChunkId, list[SegmentRecord]] = {}
        for link in max(_chains(lookup), key=lambda chain: sum(map(len, chain)), default=()):
            left.setdefault(link.chunk_id, []).append(link)
        parts: list[PartPlan] = []
        for entry in lookup.parts:
            chain = left.get(entry.part.id, []) if entry.part.id is not None else []
            record = chain.pop(0) if chain else None
            reused = record and PartPlan(
                entry.part, entry.span, KVSource.REUSED, record.id, contexts=len(record.contexts)
            )
            parts.append(exact_part(entry) or reused or PartPlan(entry.part, entry.span, KVSource.COMPUTED))
        return one_pass(self.name, parts)


def _chains(lookup: PromptLookup) -> Iterator[tuple[SegmentRecord, ...]]:
    """Every chain of exact segments over parts of this prompt."""
    there = Counter(entry.part.id for entry in lookup.parts if entry.part.id is not None)
    records = [record for entry in lookup.parts for record in entry.variants if record.exact]
    ends = {(*record.context, record.chunk_id): record for record in records}
    for path in ends:
        prefixes = [ends.get(path[:length]) for length in range(1, len(path) + 1)]
        chain = tuple(record for record in prefixes if record is not None)
        if len(chain) == len(path) and Counter(path) <= there:
            yield chain


def focused_as_printed(mass: Sequence[float]) -> frozenset[int]:
    """Indices of the focused chunks by Cache-Craft's Algorithm 1, lines 4-9, as printed; `mass` `[chunks]` is
    cumulative.

    Indices start at 1. With the masses in descending order, p_1..p_{k-1} are the shares of the gaps between neighbours,
    h_i is minus the sum of p_j log p_j up to i, i* in 1..k-2 has the greatest h_{i+1} - h_i (the first if several), and
    the i* greatest masses are focused. So the increment of gap i+1 selects one chunk fewer than are above that gap, the
    first gap is never chosen, and a gap with nearly all of the mass has little weight (-p log p is greatest at 1/e).
    Without a gap, or with fewer than three chunks, all are focused. Among equal masses the earlier chunk comes first.

    >>> sorted(focused_as_printed([0.1, 0.9, 0.5, 0.8]))  # gaps .1 .3 .4, -p log p of the last two .37 .35: i* = 1
    [1]
    """
    order = sorted(range(len(mass)), key=lambda index: (-mass[index], index))
    gaps = [mass[above] - mass[below] for above, below in pairwise(order)]
    total = sum(gaps)
    if len(mass) < LEAST_CHUNKS or not total:
        return frozenset(order)
    shares = [gap / total for gap in gaps[1:]]
    increments = [-share * log(share) if share else 0.0 for share in shares]
    return frozenset(order[: 1 + increments.index(max(increments))])


@dataclass(frozen=True, slots=True)
class CacheCraftAblation:
    """What a variant of `cachecraft` omits (the paper's Figure 26) or changes.

    Without `use_cci` the share to recompute does not depend on how much a chunk attends to others, and tokens are drawn
    at random. Without `use_overlap` a chunk is treated as if none of its old context were before it now. `focused`
    finds the chunks that the question attends to.
    """

    use_cci: bool = True
    use_overlap: bool = True
    focused: FindFocused = focused_by_gap


class CacheCraftVariant(CacheCraft):
    """`cachecraft` with an ablation."""

    def __init__(self, config: ReuseConfig, ablation: CacheCraftAblation) -> None:
        super().__init__(config)
        self.ablation = ablation

    def _bounds(self, record: SegmentRecord, prefix: ChunkPrefix) -> tuple[float, float]:
        cci, overlap = super()._bounds(record, prefix)
        return cci if self.ablation.use_cci else 1.0, overlap if self.ablation.use_overlap else 0.0

    def _ranking(self, record: SegmentRecord) -> tuple[int, ...]:
        if self.ablation.use_cci:
            return super()._ranking(record)
        return tuple(Random(f"{self._config.seed}:{record.id}").sample(range(len(record)), len(record)))

    def _focus(self, parts: Sequence[PartPlan]) -> tuple[StopUnfocused, ...]:
        return tuple(replace(rule, focused=self.ablation.focused) for rule in super()._focus(parts))


_ABLATIONS: dict[str, dict[str, Any]] = {
    "printed": {"focused": focused_as_printed},
    "no-cci": {"use_cci": False},
    "no-overlap": {"use_overlap": False},
}


def bench_method(name: str, settings: Sequence[str], reuse: ReuseConfig) -> ReuseMethod:
    """A method or baseline with settings, including ablations of `cachecraft`.

    Raises:
        UnknownMethodError: no such method.
        UsageError: the setting is unknown or of another method, or a value is out of range.
    """
    ablations = [setting for setting in settings if setting in _ABLATIONS]
    others = [setting for setting in settings if setting not in _ABLATIONS]
    spec = ":".join((name, *others))
    config = changed(reuse, settings_changes(spec, BENCH_METHODS, tuple(_ABLATIONS)))
    if not ablations:
        return make_method(name, config, BENCH_METHODS)
    if name != CacheCraft.name:
        raise UsageError(f"{name} does not take {', '.join(ablations)}")
    changes: dict[str, Any] = {}
    for setting in ablations:
        changes |= _ABLATIONS[setting]
    return CacheCraftVariant(config, CacheCraftAblation(**changes))


bench_contenders = partial(make_contenders, make=bench_method)
"""`make_contenders` with baselines and ablations."""
