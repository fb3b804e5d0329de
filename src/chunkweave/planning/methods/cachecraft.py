"""`cachecraft`: choose the most reusable stored variant and recompute just enough of it (Cache-Craft §3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import ALPHA_BUDGET, exact_part, required_spans
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan, RecomputeScore, StopUnfocused
from chunkweave.planning.scores import LEAST_CHUNKS, coverage, order_penalty, prefix_overlap, recompute_share
from chunkweave.prompt.parts import PartKind
from chunkweave.store.index import PartLookup, PromptLookup
from chunkweave.store.records import LEAST_CCI, SegmentRecord
from chunkweave.types import ChunkId, Geometry, Scattered


@dataclass(slots=True)
class ChunkPrefix:
    """The distinct chunks, and turns of a conversation, before a part: index of first occurrence, and tokens."""

    places: dict[ChunkId, int]
    tokens: dict[ChunkId, int]

    def add(self, entry: PartLookup) -> None:
        if entry.part.kind in (PartKind.CHUNK, PartKind.TURN) and entry.part.id is not None:
            self.places.setdefault(entry.part.id, len(self.places))
            self.tokens[entry.part.id] = len(entry.part)


class CacheCraft:
    """Reuses the stored variant that fits best, and computes tokens again that depended on other passages.

    The exact prefix is reused unchanged. Of every other chunk's variants, the one with the lowest CCI (1 - beta') is
    reused (§3.3); ties are broken by generation, then by id, so that a plan depends only on its inputs. N = ceil(CFO
    |C|) of its tokens start active, those with the most attention on the old prefix (eq. 12, 14). With `focus`,
    recomputation stops in chunks that the question does not attend to (§3.2.2). The instruction is scored like a chunk
    without chunks before it.

    The result of recomputation becomes a variant for this context (`CaptureConfig`). If a variant was derived from
    another variant `variant_generations` times in a row, all its tokens start active where CFO is above 0. The paper
    sets no such limit.

    Not specified in the paper: a variant computed alone has CCI 0.5, and overlap 0 unless it is the first chunk now;
    one without attention profile has CCI 1 and overlap 0. For both, the first tokens are recomputed, where attention
    sinks form. One computed after neutral passages depends on none of its context, so it has CCI 0.5 and overlap 0 too.
    For a mean, CCI and beta are those of its mean masses (`weaving.means.mean_profile`); it has no order, so gamma is
    0.
    """

    name = "cachecraft"
    budget = ALPHA_BUDGET
    parameters = ("focus",)
    needs_profiles = True

    def __init__(self, config: ReuseConfig) -> None:
        self._config = config

    @property
    def reads_question(self) -> bool:
        """True if recomputation stops in chunks that the question does not attend to."""
        return self._config.focus

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """One pass over misses, question and the chosen tokens, which may stop in chunks that the question does not
        read.
        """
        prefix = ChunkPrefix({}, {})
        parts: list[PartPlan] = []
        candidates: list[Scattered] = []
        for entry in lookup.parts:
            part = exact_part(entry)
            if part is None and entry.variants and entry.part.id is not None:
                record, score = self._choose(entry.variants, prefix)
                contexts = len(record.contexts)
                part = PartPlan(entry.part, entry.span, KVSource.REUSED, record.id, score, contexts=contexts)
                if score.tokens:
                    chosen = self._ranking(record)[: score.tokens]
                    candidates.append(Scattered(entry.span.start, chosen, len(entry.span)))
            parts.append(part or PartPlan(entry.part, entry.span, KVSource.COMPUTED))
            prefix.add(entry)
        rules = self._focus(parts) if candidates and self._config.focus else ()
        return Plan(self.name, tuple(parts), (Pass(required_spans(parts), tuple(candidates), rules),))

    def _choose(self, variants: Sequence[SegmentRecord], prefix: ChunkPrefix) -> tuple[SegmentRecord, RecomputeScore]:
        """The variant with the lowest impact, and its score; ties are broken by generation, then by id."""
        best = variants[0]
        least = inf
        scores = (1.0, 0.0)
        for record in variants:
            cci, overlap = self._bounds(record, prefix)
            if cci * (1.0 - overlap) > least:
                continue  # the order penalty can only lower the overlap
            overlap = self._overlap(record, overlap, prefix)
            if (cci * (1.0 - overlap), record.generation, record.id) < (least, best.generation, best.id):
                best = record
                least = cci * (1.0 - overlap)
                scores = (cci, overlap)
        cfo = recompute_share(self._config.alpha, least)
        limit = self._config.capture.variant_generations
        if cfo and limit is not None and best.generation >= limit:
            cfo = 1.0
        covered = coverage(best.sources, prefix.tokens)
        return best, RecomputeScore(*scores, cfo, ceil(cfo * len(best)), covered, best.generation)

    def _bounds(self, record: SegmentRecord, prefix: ChunkPrefix) -> tuple[float, float]:
        """CCI of a variant, and beta, the upper bound of its overlap."""
        profile = record.attention
        if record.neutral or (record.contexts and profile is None):
            cci = LEAST_CCI
            overlap = 0.0
        elif profile is not None:
            cci = profile.cci
            overlap = prefix_overlap(profile, prefix.places)
        elif record.alone:
            cci = LEAST_CCI
            overlap = float(not prefix.places)
        else:
            cci = 1.0
            overlap = 0.0
        return cci, overlap

    def _overlap(self, record: SegmentRecord, overlap: float, prefix: ChunkPrefix) -> float:
        """The overlap after the order penalty."""
        if overlap and record.attention is not None and not record.contexts:
            overlap *= 1.0 - order_penalty(record.attention.mass_on, prefix.places)
        return overlap

    def _ranking(self, record: SegmentRecord) -> tuple[int, ...]:
        """All token offsets of a segment, those to recompute first in front."""
        if record.alone or record.attention is None:
            return tuple(range(len(record)))
        return record.attention.by_outward

    def _focus(self, parts: Sequence[PartPlan]) -> tuple[StopUnfocused, ...]:
        """The rule that stops unfocused chunks, if there are enough chunks and a question."""
        chunks = tuple(part.span for part in parts if part.part.kind is PartKind.CHUNK)
        if len(chunks) < LEAST_CHUNKS or parts[-1].part.kind is not PartKind.QUESTION:
            return ()
        return (StopUnfocused(chunks, parts[-1].span),)
