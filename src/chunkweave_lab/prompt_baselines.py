"""Baselines that change the prompt instead of reusing KV: MapReduce, MapRerank (CacheBlend §7.1) and compression.

They are not reuse methods: the model gets another prompt than full prefill, so they are compared by answers, likelihood
of the right answer, and time. Each gets the same prompt as all contenders, as token ids.

Work that recurs with chunks is done ahead, by `warm`: MapReduce and MapRerank compute the KV of each chunk behind their
instruction (where each chunk is a prefix, "prefix caching works well", CacheBlend §2), compression finds the tokens of
a chunk that it keeps. All other work before the first token counts in its time, including every map call to its end.
Their segments are in the engine's store under separate salts, so no reuse method finds them.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import fmean
from typing import Protocol

import torch

from chunkweave.calibration.contenders import label_of, value_of
from chunkweave.calibration.fidelity import Decoded, answer_text, decode_greedily
from chunkweave.calibration.summaries import normalize
from chunkweave.config import DEFAULT_RECOMPUTE_RATIO
from chunkweave.engine.engine import Engine
from chunkweave.engine.prefill import PrefillOptions
from chunkweave.engine.runner import Prefilled
from chunkweave.errors import UsageError
from chunkweave.kv.segment import SegmentLost
from chunkweave.metrics import ReuseReport
from chunkweave.planning.method import make_method
from chunkweave.planning.outcome import full_prefill_flops, prefill_flops
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.store.records import segment_id
from chunkweave.types import SegmentId
from chunkweave_lab.summaries import PROMPT_BASELINES
from chunkweave_lab.worlds.records import NOT_STATED

MAP_INSTRUCTION = (
    "Write down what the passage below says that helps to answer the question. Be short and exact. "
    "If the passage does not hold the answer, say that it is not stated."
)
"""The instruction of MapReduce's map calls; its reduce call and MapRerank use the prompt's own instruction."""

MAP_TOKENS = 64
"""Default maximum of tokens that a map call of MapReduce generates (`map-reduce@32` sets another)."""


@dataclass(frozen=True, slots=True)
class BaselineAnswer:
    """One baseline's answer to one question.

    `token_ids` are the answer's, with a stop token last if there is one. `final_prompt` is the prefill that the answer
    was decoded from; the likelihood of other answers can be computed from it. In `report`, tokens and FLOPs are those
    of all calls up to the answer's first token, including output of map calls; `ttft_s` is the time of all of them, and
    `full_prefill_flops` are those of the given prompt. Its `recompute_fraction` is meaningless.
    """

    text: str
    token_ids: tuple[int, ...]
    final_prompt: Prompt
    report: ReuseReport


class PromptBaseline(Protocol):
    """A way to answer a question over chunks from another prompt than the given one."""

    @property
    def follows_full(self) -> bool:
        """Whether the final prompt asks the same question about the same passages.

        If so, full prefill's continuation can be fed to it and next-token distributions compared; otherwise divergence
        and agreement are undefined.
        """

    def warm(self, engine: Engine, prompt: Prompt) -> None:
        """Do the work that recurs with the prompt's chunks."""

    def answer(self, engine: Engine, prompt: Prompt, max_new_tokens: int) -> BaselineAnswer:
        """Answer greedily. Nothing is stored.

        Raises:
            UsageError: the prompt has no chunk or no question, or turns of a conversation.
            PromptTooLongError: a derived prompt does not fit into the model's context.
        """


@dataclass(frozen=True, slots=True)
class MapReduce:
    """Summarizes every chunk for the question, in one batch, and answers from the summaries.

    From CacheBlend §7.1, which takes it from LangChain. Summaries replace the chunks; empty ones are omitted.
    `map_tokens` limits each.
    """

    map_tokens: int = MAP_TOKENS
    follows_full = False

    def __post_init__(self) -> None:
        if self.map_tokens < 1:
            raise UsageError(f"map_tokens must be at least 1, not {self.map_tokens}")

    def warm(self, engine: Engine, prompt: Prompt) -> None:
        """Store every chunk behind the map instruction, and the prompt's own instruction."""
        parts = _parts(engine, prompt, "map-reduce")
        _store(engine, [*self._map_prompts(engine, parts), Prompt((*parts.opening, parts.question))])

    def answer(self, engine: Engine, prompt: Prompt, max_new_tokens: int) -> BaselineAnswer:
        """Map, then reduce."""
        parts = _parts(engine, prompt, "map-reduce")
        prompts = self._map_prompts(engine, parts)
        started = time.perf_counter()
        mapped = _prefill_together(engine, prompts, room := _room(engine, prompts, self.map_tokens))
        summaries = decode_greedily(engine, mapped, room)
        texts = [answer_text(engine, summary.token_ids) for summary in summaries]
        chunks = engine.builder.chunk_parts([text for text in texts if text], cache_salt=parts.salt)
        final = Prompt((*parts.opening, *chunks, parts.question))
        [reduced] = _prefill_together(engine, [final], room := _room(engine, [final], max_new_tokens))
        reduced.logits.argmax().item()
        first_token = time.perf_counter()
        [decoded] = decode_greedily(engine, [reduced], room)
        ended = time.perf_counter()
        tally = _Tally(engine)
        for call, summary in zip(mapped, summaries, strict=True):
            tally.add(call, summary)
        tally.add(reduced)
        report = tally.report("map-reduce", prompt, first_token - started, ended - first_token, decoded)
        return BaselineAnswer(answer_text(engine, decoded.token_ids), decoded.token_ids, final, report)

    def _map_prompts(self, engine: Engine, parts: "_Parts") -> list[Prompt]:
        opening = engine.builder.opening(system=MAP_INSTRUCTION, cache_salt=parts.salt)
        return [Prompt((*opening, chunk, parts.question)) for chunk in parts.chunks]


@dataclass(frozen=True, slots=True)
class MapRerank:
    """Answers from each chunk separately, in one batch, and returns the answer with the highest score.

    From CacheBlend §7.1, which takes it from LangChain. There the model generates a score after its answer, which is
    hard for a small model; here the score is the mean log-probability of the answer's tokens, including its end.
    Answers that say that the answer is not stated rank last, like those that LangChain's prompt scores 0. The first
    token is available only after every answer has ended.
    """

    follows_full = False

    def warm(self, engine: Engine, prompt: Prompt) -> None:
        """Store every chunk behind the instruction."""
        _store(engine, self._map_prompts(_parts(engine, prompt, "map-rerank")))

    def answer(self, engine: Engine, prompt: Prompt, max_new_tokens: int) -> BaselineAnswer:
        """Answer from each chunk and choose."""
        prompts = self._map_prompts(_parts(engine, prompt, "map-rerank"))
        room = _room(engine, prompts, max_new_tokens)
        started = time.perf_counter()
        mapped = _prefill_together(engine, prompts, room)
        answers = decode_greedily(engine, mapped, room)
        texts = [answer_text(engine, answer.token_ids) for answer in answers]
        surest = max(range(len(texts)), key=lambda i: (not _abstains(texts[i]), fmean(answers[i].log_probs or (0.0,))))
        first_token = time.perf_counter()
        tally = _Tally(engine)
        for call, answer in zip(mapped, answers, strict=True):
            tally.add(call, answer)
        report = tally.report("map-rerank", prompt, first_token - started, 0.0, answers[surest])
        return BaselineAnswer(texts[surest], answers[surest].token_ids, prompts[surest], report)

    def _map_prompts(self, parts: "_Parts") -> list[Prompt]:
        return [Prompt((*parts.opening, chunk, parts.question)) for chunk in parts.chunks]


@dataclass(frozen=True, slots=True, eq=False)
class LikelyTokensDropped:
    """Keeps the least expected tokens of every chunk, and prefills that prompt in full.

    It uses the idea of LLMLingua (Jiang et al., 2023) without a second model, a budget over demonstrations, or
    iteration over compressed segments. The same model reads the chunk once behind the instruction; `share` of its
    tokens (rounded up) are kept, including the last one, which separates it from the next chunk. The choice does not
    depend on the question, so it can be made ahead.
    """

    share: float
    scores: dict[SegmentId, list[float]] = field(default_factory=dict, repr=False)
    """Likelihood of each token by chunk. Independent of the share, so instances can share it."""
    follows_full = True

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise UsageError(f"the kept share of a chunk's tokens must be above 0 and at most 1, not {self.share}")

    def warm(self, engine: Engine, prompt: Prompt) -> None:
        """Find the kept tokens of every chunk."""
        parts = _parts(engine, prompt, "compress")
        for chunk in parts.chunks:
            self._places(engine, parts, chunk)

    def answer(self, engine: Engine, prompt: Prompt, max_new_tokens: int) -> BaselineAnswer:
        """Prefill the kept tokens in full, and decode."""
        parts = _parts(engine, prompt, "compress")
        started = time.perf_counter()
        chunks = []
        for chunk in parts.chunks:
            ids = [chunk.token_ids[place] for place in self._places(engine, parts, chunk)]
            chunks.append(_stored(engine, PartKind.CHUNK, ids, parts.salt, chunk.source))
        final = Prompt((*parts.opening, *chunks, parts.question))
        room = _room(engine, [final], max_new_tokens)
        prefilled = engine.runner.prefill(final, make_method("full"), new_tokens=room, capture=False)
        prefilled.logits.argmax().item()
        first_token = time.perf_counter()
        [decoded] = decode_greedily(engine, [prefilled], room)
        ended = time.perf_counter()
        tally = _Tally(engine)
        tally.add(prefilled)
        report = tally.report("compress", prompt, first_token - started, ended - first_token, decoded)
        return BaselineAnswer(answer_text(engine, decoded.token_ids), decoded.token_ids, final, report)

    def _places(self, engine: Engine, parts: "_Parts", chunk: PromptPart) -> tuple[int, ...]:
        """Indices of the kept tokens of a chunk, ascending."""
        behind = Prompt((*parts.opening, chunk))
        key = _segment_of(behind)
        if key not in self.scores:
            self.scores[key] = log_probs_of_last_part(engine, behind)
        expected = self.scores[key]
        ranked = sorted(range(len(chunk) - 1), key=lambda place: expected[place])
        stay = ceil(self.share * len(chunk)) - 1
        return (*sorted(ranked[:stay]), len(chunk) - 1)


def split_baselines(
    specs: Sequence[str], shares: Sequence[float] = (DEFAULT_RECOMPUTE_RATIO,)
) -> tuple[tuple[str, ...], dict[str, PromptBaseline]]:
    """Split specifications into those of reuse methods and prompt baselines by name of their rows.

    `compress` runs at all `shares`, unless it has a value.

    Raises:
        UsageError: a value is out of range or not a number, or given to a baseline without a parameter.

    >>> split_baselines(("query@0.05", "map-rerank", "compress"), shares=(0.05, 0.5))[0]
    ('query@0.05',)
    """
    methods: list[str] = []
    baselines: dict[str, PromptBaseline] = {}
    scores: dict[SegmentId, list[float]] = {}
    for spec in specs:
        name, at, _ = spec.partition("@")
        if name not in PROMPT_BASELINES:
            methods.append(spec)
        elif name == "compress":
            for share in (value_of(spec),) if at else shares:
                baselines[label_of(name, share)] = LikelyTokensDropped(share, scores)
        elif name == "map-reduce":
            baselines[spec] = MapReduce(_whole(spec)) if at else MapReduce()
        elif at:
            raise UsageError(f"{name} takes no value: write {name} instead of {spec}")
        else:
            baselines[spec] = MapRerank()
    return tuple(methods), baselines


@torch.inference_mode()
def log_probs_of_last_part(engine: Engine, prompt: Prompt) -> list[float]:
    """Log-likelihood of each token of the last part, in nats, by the model's own forward.

    The first token of a prompt follows nothing and counts as unexpected.
    """
    model, own = engine.loaded.model, prompt.spans()[-1]
    ids = torch.tensor([prompt.token_ids], device=model.device)
    logits = model.model(input_ids=ids, use_cache=False, logits_to_keep=len(own) + 1).logits[0, :-1].float()
    wanted = ids[0, -len(logits) :]
    found: list[float] = torch.log_softmax(logits, -1).gather(1, wanted[:, None])[:, 0].tolist()
    return found if own.start else [-inf, *found]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of prompts; stored parts have ids of this `salt`."""

    salt: str
    opening: tuple[PromptPart, ...]
    chunks: tuple[PromptPart, ...]
    question: PromptPart


def _parts(engine: Engine, prompt: Prompt, salt: str) -> _Parts:
    kinds = [part.kind for part in prompt.parts]
    if PartKind.CHUNK not in kinds or PartKind.TURN in kinds or kinds[-1] is not PartKind.QUESTION:
        raise UsageError("MapReduce, MapRerank and compression support one question over chunks without earlier turns")
    own = [
        part if part.id is None else _stored(engine, part.kind, part.token_ids, salt, part.source)
        for part in prompt.parts
    ]
    opening = tuple(part for part in own if part.kind in (PartKind.START, PartKind.SYSTEM))
    return _Parts(salt, opening, tuple(part for part in own if part.kind is PartKind.CHUNK), own[-1])


def _stored(engine: Engine, kind: PartKind, token_ids: Sequence[int], salt: str, source: str) -> PromptPart:
    return PromptPart(kind, tuple(token_ids), chunk_id(engine.loaded.fingerprint, salt, token_ids), source)


def _segment_of(prompt: Prompt) -> SegmentId:
    """The segment of the prompt's last part in its context."""
    last = prompt.parts[-1].id
    assert last is not None, "a question has no segment"
    return segment_id(last, prompt.contexts()[-1])


def _store(engine: Engine, prompts: Sequence[Prompt]) -> None:
    """Compute and store the missing parts of the prompts before their questions."""
    for prompt in prompts:
        before = Prompt(prompt.parts[:-1])
        if before.parts and before.parts[-1].id is not None and _segment_of(before) not in engine.store:
            engine.runner.store_new(engine.runner.prefill(before, make_method("prefix")))


def _room(engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    return min(max_new_tokens, *(engine.runner.room_for_new_tokens(prompt) for prompt in prompts))


@torch.inference_mode()
def _prefill_together(engine: Engine, prompts: Sequence[Prompt], new_tokens: int) -> list[Prefilled]:
    """Prefill with exact prefixes from the store, in one flat batch except prompts whose segments are not in memory."""
    runner, method, options = engine.runner, make_method("prefix"), PrefillOptions(new_tokens, capture=False)
    with ExitStack() as opened:
        jobs = [opened.enter_context(runner.start(prompt, method, options)) for prompt in prompts]
        ready = [job for job in jobs if not job.loading and job.lost is None]
        if ready:
            runner.step([], [(job, None) for job in ready])
        done: list[Prefilled] = []
        for job in jobs:
            while job.prefilled is None:
                try:
                    runner.step([], [(job, None)])
                except SegmentLost as lost:
                    job.plan_without(lost)
            done.append(job.prefilled)
        return done


def _abstains(text: str) -> bool:
    return not text or normalize(NOT_STATED) in normalize(text)


def _whole(spec: str) -> int:
    value = value_of(spec)
    if not value.is_integer():
        raise UsageError(f"not a number of tokens after the @ of {spec!r}; write for example map-reduce@{MAP_TOKENS}")
    return int(value)


class _Tally:
    """Sums the work of an answer's calls up to its first token."""

    def __init__(self, engine: Engine) -> None:
        self._geometry = engine.loaded.model.geometry
        self._exact = self._computed = self._lost = 0
        self._flops = self._lookup_s = self._load_s = self._weave_s = 0.0

    def add(self, call: Prefilled, written: Decoded | None = None) -> None:
        """Add one call, with its output before the answer's first token."""
        self._exact += call.plan.tokens(KVSource.EXACT)
        self._computed += call.plan.tokens(KVSource.COMPUTED)
        self._flops += prefill_flops(self._geometry, list(call.work))
        self._lookup_s += call.lookup_s
        self._load_s += call.load_s
        self._weave_s += call.weave_s
        self._lost += call.lost_segments
        for behind in range(0 if written is None else len(written.token_ids) - 1):  # the last one is not computed
            self._computed += 1
            self._flops += full_prefill_flops(self._geometry, 1, len(call.prompt) + behind)

    def report(self, name: str, given: Prompt, ttft_s: float, decode_s: float, decoded: Decoded) -> ReuseReport:
        """The report of an answer to the `given` prompt."""
        return ReuseReport(
            method=name,
            prompt_tokens=self._exact + self._computed,
            prefix_exact_tokens=self._exact,
            reused_tokens=0,
            recomputed_tokens=0,
            computed_tokens=self._computed,
            recompute_fraction=0.0,
            queue_s=0.0,
            lookup_s=self._lookup_s,
            load_s=self._load_s,
            weave_s=self._weave_s,
            ttft_s=ttft_s,
            decode_s=decode_s,
            new_tokens=len(decoded.token_ids),
            prefill_flops=self._flops,
            full_prefill_flops=full_prefill_flops(self._geometry, len(given)),
            lost_segments=self._lost,
        )
