"""Contexts of chunks, one factor at a time: the study in docs/study.md. The product uses its resulting rule.

A way is written `SOURCE:COUNT` with settings after further colons: `nearest:4`, `random:8:tokens=1200`, `nearest:4:v`,
and `nearest:1:exact`, which is FusionRAG's (arXiv:2601.12904).
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from random import Random
from weakref import WeakKeyDictionary

import numpy as np
import torch

from chunkweave.calibration.fidelity import beside
from chunkweave.calibration.prompts import ContextCorpus, Warmth, cast_of, store_opening
from chunkweave.config import StoreConfig
from chunkweave.engine.engine import Engine
from chunkweave.engine.prefill import Prefilled
from chunkweave.errors import UsageError
from chunkweave.kv.segment import SegmentKV
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.adaptive_methods import ContextMethod
from chunkweave.planning.method import make_method
from chunkweave.prompt.contexts import ContextPool, ContextRule, dealt
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.settings import GIB
from chunkweave.store.records import SegmentRecord, all_read
from chunkweave.types import ChunkId
from chunkweave.weaving.means import mean_profile
from chunkweave.weaving.segments import segments_of

Computed = tuple[SegmentRecord, SegmentKV]


class Source(StrEnum):
    """The source of a chunk's contexts."""

    NEAREST = "nearest"
    RANDOM = "random"
    """Drawn for each chunk."""
    TYPICAL = "typical"
    """The chunks nearest to the corpus's mean vector, the same for all chunks."""
    MIXED = "mixed"
    """Half of the contexts are nearest, half random."""
    BUNDLED = "bundled"
    """Neutral passages, different in each context."""


_FLAGS = ("exact", "k", "v", "rescaled", "apart")


@dataclass(frozen=True, slots=True)
class ContextWarmth:
    """A way to fill the store, in addition to those of `calibration.prompts.Warmth`.

    Contexts are woven from a first pass behind neutral passages, or computed in full (`exact`). K and V are averaged,
    or only `k` or `v` (the other is the first context's). `rescaled` scales each mean key to the average length of its
    keys. `apart` stores one variant per context and uses the one whose context shares most with the text before the
    chunk.
    """

    source: Source
    rule: ContextRule
    flags: frozenset[str] = frozenset()
    queries: int = 0

    @classmethod
    def parse(cls, text: str) -> "ContextWarmth | Warmth":
        """Parse one of these ways, or of the usual ones.

        Raises:
            UsageError: it is neither.
        """
        name, *settings = text.split(":")
        if name not in list(Source):
            return Warmth.parse(text)
        tokens, flags, count = ContextRule().tokens, set(), 1
        for number, setting in enumerate(settings):
            if setting.isdecimal() and number == 0 and int(setting):
                count = int(setting)
            elif setting.startswith("tokens=") and setting[7:].isdecimal():
                tokens = int(setting[7:])
            elif setting in _FLAGS:
                flags.add(setting)
            else:
                raise UsageError(f"not a way to compute chunks: {text!r}; settings: tokens=N, {', '.join(_FLAGS)}")
        return cls(Source(name), ContextRule(count, tokens), frozenset(flags))

    def __str__(self) -> str:
        tokens = [] if self.rule.tokens == ContextRule().tokens else [f"tokens={self.rule.tokens}"]
        return ":".join((self.source, str(self.rule.count), *tokens, *sorted(self.flags)))

    @property
    def by(self) -> str:
        """The context of the first pass, as in `Warmth.by`."""
        return "neutral"

    def prepare(
        self, engine: Engine, prompt: Prompt, others: Sequence[Prompt] = (), corpus: ContextCorpus | None = None
    ) -> None:
        """Compute a prompt's missing chunks."""
        assert corpus is not None
        opening, own, *_ = cast_of(prompt, others)
        before: list[ChunkId] = []
        for part in own:
            assert part.id is not None
            kept = _APART.setdefault(engine, {})
            if "apart" in self.flags:
                if part.id not in kept:
                    kept[part.id] = self._computed(engine, prompt, opening, part, corpus)
                _forget_variants(engine, part)
                engine.store.insert(*max(kept[part.id], key=lambda one: len(one[0].sources & {*before})))
                before.append(part.id)
            elif not any(record.contexts for record in _stored(engine, part)):
                engine.store.insert(*self._mean(self._computed(engine, prompt, opening, part, corpus)))
        store_opening(engine, opening)

    def _computed(
        self, engine: Engine, prompt: Prompt, opening: Sequence[PromptPart], part: PromptPart, corpus: ContextCorpus
    ) -> list[Computed]:
        """The chunk's KV in each context. Computed once for all ways with the same contexts."""
        of_prompt, known = _LAST.setdefault(engine.loaded.model, (prompt, {}))
        if of_prompt is not prompt:
            known = {}
            _LAST[engine.loaded.model] = prompt, known
        key = part.id, self.source, self.rule, "exact" in self.flags
        if key not in known:
            known[key] = list(self._compute(engine, prompt, opening, part, corpus))
        return known[key]

    def _compute(
        self, engine: Engine, prompt: Prompt, opening: Sequence[PromptPart], part: PromptPart, corpus: ContextCorpus
    ) -> Iterator[Computed]:
        first = _first_pass(engine)
        for context in self._contexts(engine, prompt, part, corpus):
            if "exact" in self.flags or self.source is Source.BUNDLED:
                whole = Prompt((*opening, *context, part))
                yield _last(engine, engine.runner.prefill(whole, make_method("full"), asked=False, profiles=True))
                continue
            for one in context:
                for missing in first.preparer.beforehand(one, opening=opening):
                    first.compute(missing, profiles=False)
            whole = Prompt((*opening, *context, part))
            yield _last(first, first.runner.prefill(whole, ContextMethod(), asked=False, profiles=True))

    def _contexts(
        self, engine: Engine, prompt: Prompt, part: PromptPart, corpus: ContextCorpus
    ) -> list[tuple[PromptPart, ...]]:
        without = {one.id for one in prompt.parts} if corpus.grouped else {part.id}
        rule, pool, rng = self.rule, corpus.pool, Random(str(part.id))
        if self.source is Source.BUNDLED:
            return list(_bundled(engine, rule))
        random = [one for one in pool.parts if one.id not in without and one.id != part.id]
        rng.shuffle(random)
        if self.source is Source.RANDOM:
            return dealt(random, rule)
        if self.source is Source.TYPICAL:
            return dealt([one for one in typical(pool) if one.id not in without and one.id != part.id], rule)
        nearest = [one for one in pool.nearest(part) if one.id not in without]
        if self.source is Source.NEAREST:
            return dealt(nearest, rule)
        half = ContextRule(rule.count // 2, rule.tokens)
        return [*dealt(nearest, half), *dealt(random, ContextRule(rule.count - half.count, rule.tokens))]

    def _mean(self, computed: Sequence[Computed]) -> Computed:
        kv = torch.stack([one.kv.float() for _, one in computed])  # [contexts, layers, 2, tokens, heads, head_dim]
        mean = kv.mean(0)
        if "rescaled" in self.flags:
            keys = kv[:, :, 0].norm(dim=-1, keepdim=True).mean(0)
            mean[:, 0] *= keys / mean[:, 0].norm(dim=-1, keepdim=True).clamp_min(1e-12)
        if self.flags & {"k", "v"}:
            other = 1 if "k" in self.flags else 0
            mean[:, other] = kv[0, :, other]
        whole = SegmentKV(mean.to(computed[0][1].kv.dtype))
        record = computed[0][0].mean_over(
            [one.context for one, _ in computed],
            nbytes=whole.nbytes,
            attention=mean_profile([one.attention for one, _ in computed]),
            read=all_read(chain.from_iterable(one.sources for one, _ in computed)),
        )
        return record, whole


def typical(pool: ContextPool) -> list[PromptPart]:
    """The chunks of a pool, nearest to the mean of all first."""
    scores = pool.vectors @ pool.vectors.mean(axis=0)
    return [pool.parts[row] for row in np.argsort(-scores, kind="stable")]


_FIRST: WeakKeyDictionary[HuggingFaceModel, Engine] = WeakKeyDictionary()
_LAST: WeakKeyDictionary[HuggingFaceModel, tuple[Prompt, dict[Hashable, list[Computed]]]] = WeakKeyDictionary()
_APART: WeakKeyDictionary[Engine, dict[ChunkId, list[Computed]]] = WeakKeyDictionary()


def _first_pass(engine: Engine) -> Engine:
    """The engine that holds first-pass chunks of all ways; contexts are woven from these."""
    model = engine.loaded.model
    if model not in _FIRST:
        _FIRST[model] = beside(engine, StoreConfig(host_budget_bytes=4 * GIB))
    return _FIRST[model]


def _bundled(engine: Engine, rule: ContextRule) -> Iterator[tuple[PromptPart, ...]]:
    """Neutral passages, starting at a different one in each context."""
    passages = engine.preparer.passages
    for number in range(rule.count):
        start = number * len(passages) // rule.count
        yield engine.builder.neutral_parts([*passages[start:], *passages[:start]], rule.tokens)


def _forget_variants(engine: Engine, part: PromptPart) -> None:
    engine.store.remove_where(lambda record: record.chunk_id == part.id)


def _stored(engine: Engine, part: PromptPart) -> Sequence[SegmentRecord]:
    return engine.store.lookup(Prompt((part,))).parts[0].variants


def _last(engine: Engine, prefilled: Prefilled) -> Computed:
    """The computed KV of a prompt's last part."""
    found = segments_of(prefilled.prompt, prefilled.plan, prefilled.captures, prefilled.attention, store=engine.store)
    *_, last = found
    if prefilled.lease is not None:
        prefilled.lease.release()
    return last
