"""Contexts of chunks, one factor at a time: the study in docs/study.md. The product uses its resulting rule.

A way is written `SOURCE:COUNT` with settings after further colons: `nearest:4`, `random:8:tokens=1200`, and
`nearest:1:exact`, which is FusionRAG's (arXiv:2601.12904).
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from random import Random
from weakref import WeakKeyDictionary

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
from chunkweave.prompt.contexts import ContextRule, dealt
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.settings import GIB
from chunkweave.store.records import SegmentRecord, all_read
from chunkweave.weaving.means import mean_profile
from chunkweave.weaving.segments import segments_of

Computed = tuple[SegmentRecord, SegmentKV]


class Source(StrEnum):
    """The source of a chunk's contexts."""

    NEAREST = "nearest"
    RANDOM = "random"
    """Drawn for each chunk."""
    MIXED = "mixed"
    """Half of the contexts are nearest, half random."""


@dataclass(frozen=True, slots=True)
class ContextWarmth:
    """A way to fill the store, in addition to those of `calibration.prompts.Warmth`.

    Contexts are woven from a first pass behind neutral passages, or computed in full (`exact`), and averaged.
    """

    source: Source
    rule: ContextRule
    exact: bool = False
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
        tokens, exact, count = ContextRule().tokens, False, 1
        for number, setting in enumerate(settings):
            if setting.isdecimal() and number == 0 and int(setting):
                count = int(setting)
            elif setting.startswith("tokens=") and setting[7:].isdecimal():
                tokens = int(setting[7:])
            elif setting == "exact":
                exact = True
            else:
                raise UsageError(f"not a way to compute chunks: {text!r}; settings: tokens=N, exact")
        return cls(Source(name), ContextRule(count, tokens), exact)

    def __str__(self) -> str:
        tokens = [] if self.rule.tokens == ContextRule().tokens else [f"tokens={self.rule.tokens}"]
        return ":".join((self.source, str(self.rule.count), *tokens, *(["exact"] if self.exact else [])))

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
        for part in own:
            if not any(record.contexts for record in _stored(engine, part)):
                engine.store.insert(*_mean(self._computed(engine, prompt, opening, part, corpus)))
        store_opening(engine, opening)

    def _computed(
        self, engine: Engine, prompt: Prompt, opening: Sequence[PromptPart], part: PromptPart, corpus: ContextCorpus
    ) -> list[Computed]:
        """The chunk's KV in each context. Computed once for all ways with the same contexts."""
        of_prompt, known = _LAST.setdefault(engine.loaded.model, (prompt, {}))
        if of_prompt is not prompt:
            known = {}
            _LAST[engine.loaded.model] = prompt, known
        key = part.id, self.source, self.rule, self.exact
        if key not in known:
            known[key] = list(self._compute(engine, prompt, opening, part, corpus))
        return known[key]

    def _compute(
        self, engine: Engine, prompt: Prompt, opening: Sequence[PromptPart], part: PromptPart, corpus: ContextCorpus
    ) -> Iterator[Computed]:
        first = _first_pass(engine)
        for context in self._contexts(prompt, part, corpus):
            if self.exact:
                whole = Prompt((*opening, *context, part))
                yield _last(
                    engine, engine.runner.prefill(whole, make_method("full"), counts_as_request=False, profiles=True)
                )
                continue
            for one in context:
                for missing in first.preparer.beforehand(one, opening=opening):
                    first.compute(missing, profiles=False)
            whole = Prompt((*opening, *context, part))
            yield _last(first, first.runner.prefill(whole, ContextMethod(), counts_as_request=False, profiles=True))

    def _contexts(self, prompt: Prompt, part: PromptPart, corpus: ContextCorpus) -> list[tuple[PromptPart, ...]]:
        without = {one.id for one in prompt.parts} if corpus.grouped else {part.id}
        rule, pool, rng = self.rule, corpus.pool, Random(str(part.id))
        random = [one for one in pool.parts if one.id not in without and one.id != part.id]
        rng.shuffle(random)
        if self.source is Source.RANDOM:
            return dealt(random, rule)
        nearest = [one for one in pool.nearest(part) if one.id not in without]
        if self.source is Source.NEAREST:
            return dealt(nearest, rule)
        half = ContextRule(rule.count // 2, rule.tokens)
        return [*dealt(nearest, half), *dealt(random, ContextRule(rule.count - half.count, rule.tokens))]


def _mean(computed: Sequence[Computed]) -> Computed:
    """The mean over a chunk's contexts."""
    kv = torch.stack([one.kv.float() for _, one in computed])  # [contexts, layers, 2, tokens, heads, head_dim]
    whole = SegmentKV(kv.mean(0).to(computed[0][1].kv.dtype))
    record = computed[0][0].mean_over(
        [one.context for one, _ in computed],
        nbytes=whole.nbytes,
        attention=mean_profile([one.attention for one, _ in computed]),
        read=all_read(chain.from_iterable(one.sources for one, _ in computed)),
    )
    return record, whole


_FIRST: WeakKeyDictionary[HuggingFaceModel, Engine] = WeakKeyDictionary()
_LAST: WeakKeyDictionary[HuggingFaceModel, tuple[Prompt, dict[Hashable, list[Computed]]]] = WeakKeyDictionary()


def _first_pass(engine: Engine) -> Engine:
    """The engine that holds first-pass chunks of all ways; contexts are woven from these."""
    model = engine.loaded.model
    if model not in _FIRST:
        _FIRST[model] = beside(engine, StoreConfig(host_budget_bytes=4 * GIB))
    return _FIRST[model]


def _stored(engine: Engine, part: PromptPart) -> Sequence[SegmentRecord]:
    return engine.store.lookup(Prompt((part,))).parts[0].variants


def _last(engine: Engine, prefilled: Prefilled) -> Computed:
    """The computed KV of a prompt's last part."""
    found = segments_of(prefilled.prompt, prefilled.plan, prefilled.captures, prefilled.attention, store=engine.store)
    *_, last = found
    if prefilled.lease is not None:
        prefilled.lease.release()
    return last
