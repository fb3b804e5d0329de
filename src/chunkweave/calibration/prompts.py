"""Prompts that are measured, and how the store is filled before: by earlier requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain, islice, pairwise
from random import Random
from typing import Protocol, TypeVar

from chunkweave.calibration.questions import Example
from chunkweave.engine.engine import Engine
from chunkweave.errors import UsageError
from chunkweave.planning.method import make_method
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.contexts import ContextPool, ContextRule
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.retrieval.embedders import HashedNgramEmbedder
from chunkweave.retrieval.indexes import FlatIndex
from chunkweave.store.records import segment_id
from chunkweave.types import Chunk

T = TypeVar("T")


class PromptMaker:
    """Builds the prompts of a benchmark over one data set.

    A passage becomes the same chunk in every question that has it: its tokens, then those of the passages that
    follow it in the data set while it is short, cut at `chunk_tokens`; what is searched for is never filled up.
    `chunk_tokens=0` leaves passages as they are.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        builder: PromptBuilder,
        fingerprint: str,
        *,
        chunks: int,
        chunk_tokens: int,
        instruction: str | None = None,
        by_retrieval: bool = False,
    ) -> None:
        """Take over a data set; `instruction=None` is the template's own.

        Chunks are those of the question, or `by_retrieval` what the corpus's embedder finds in all of the data set.

        Raises:
            UsageError: `chunks` or `chunk_tokens` is negative, or the data set has fewer distinct passages than
                `chunks`.
        """
        if chunks < 1 or chunk_tokens < 0:
            raise UsageError(f"chunks must be at least 1 and chunk_tokens not negative: {chunks}, {chunk_tokens}")
        self._builder = builder
        self._fingerprint = fingerprint
        self._chunks = chunks
        self._chunk_tokens = chunk_tokens
        self._instruction = instruction
        self._passages = list({chunk.text: chunk for example in examples for chunk in example.chunks}.values())
        self._places = {chunk.text: place for place, chunk in enumerate(self._passages)}
        self._embedder = HashedNgramEmbedder() if by_retrieval else None
        self._index: FlatIndex | None = None
        if len(self._passages) < chunks:
            raise UsageError(f"the data set has {len(self._passages)} passages, but {chunks} chunks are asked for")

    def prompt(self, example: Example) -> Prompt:
        """START, SYSTEM, the configured number of chunks, QUESTION.

        The example's own passages come first; where it has too few, those that follow in the data set.

        Raises:
            UsageError: the data set's text is shorter than one chunk.
        """
        parts = list(self._builder.build(example.question, system=self._instruction).parts)
        question = parts.pop()
        return Prompt((*parts, *(self._chunk_part(chunk) for chunk in self._chosen(example)), question))

    def parts(self) -> list[PromptPart]:
        """All chunks of the data set, as they are in prompts."""
        return [self._chunk_part(chunk) for chunk in self._passages]

    def _chosen(self, example: Example) -> list[Chunk]:
        if self._embedder is not None:
            return self._retrieved(self._embedder, example.question)
        own = {chunk.text: chunk for chunk in example.chunks}
        others = (chunk for chunk in self._from(example.chunks[-1]) if chunk.text not in own)
        return list(islice(chain(own.values(), others), self._chunks))

    def _retrieved(self, embedder: HashedNgramEmbedder, question: str) -> list[Chunk]:
        """The passages of the whole data set that are nearest to a question, the best first."""
        if self._index is None:
            self._index = FlatIndex(embedder.dimension)
            self._index.add(embedder.embed_documents([passage.text for passage in self._passages]))
        found = self._index.search(embedder.embed_query(question), self._chunks)
        return [self._passages[row] for row in found.rows]

    def _chunk_part(self, chunk: Chunk) -> PromptPart:
        if not self._chunk_tokens:
            return self._builder.chunk_part(chunk)
        token_ids: list[int] = []
        for passage in self._from(chunk):
            token_ids += self._builder.chunk_part(passage).token_ids
            if len(token_ids) >= self._chunk_tokens or self._embedder is not None:
                cut = tuple(token_ids[: self._chunk_tokens])
                return PromptPart(PartKind.CHUNK, cut, chunk_id(self._fingerprint, "", cut), chunk.source)
        raise UsageError(f"the data set has {len(token_ids)} tokens of text, less than a chunk of {self._chunk_tokens}")

    def _from(self, chunk: Chunk) -> list[Chunk]:
        """All passages once, beginning with `chunk`, around the end of the data set."""
        place = self._places[chunk.text]
        return self._passages[place:] + self._passages[:place]


def alone_prompts(prompt: Prompt, *, behind_instruction: bool = False) -> list[Prompt]:
    """For each stored part of `prompt` the prompt that computes it alone: after START, with nothing before it.

    With `behind_instruction` a chunk comes after START and SYSTEM.
    """
    start = tuple(part for part in prompt.parts if part.kind is PartKind.START)
    stored = {part.id: part for part in prompt.parts if part.id is not None}
    system = [part for part in stored.values() if part.kind is PartKind.SYSTEM] if behind_instruction else []
    return [Prompt((*start, *(() if part in system else system), part)) for part in stored.values()]


class WarmBy(StrEnum):
    """What a chunk was computed behind; the instruction is always in the store."""

    ALONE = "alone"
    """Nothing."""
    INSTRUCTION = "instruction"
    """The instruction."""
    NEUTRAL = "neutral"
    """The instruction and neutral passages, as `Engine.precompute` does with `contexts: bundled`."""
    CORPUS = "corpus"
    """Other chunks of the data set, the mean over several contexts, as `Engine.precompute` does."""
    CONTEXTS = "contexts"
    """Others: each chunk was in `count` earlier requests with chunks of the same question and of other questions."""
    SOURCES = "sources"
    """Others: `count` earlier requests had the question's chunks between them, each chunk in one of them."""
    FIRST = "first"
    """The first `count` chunks began an earlier request, where prefix caching works; another request had the rest."""
    QUERIES = "queries"
    """What `count` earlier questions of the data set had before it; chunks that none of them had are new."""

    @property
    def counted(self) -> bool:
        """Whether a number belongs to it."""
        return self not in (WarmBy.ALONE, WarmBy.INSTRUCTION, WarmBy.NEUTRAL, WarmBy.CORPUS)


class Warming(Protocol):
    """A way to fill the store before a prompt is measured: `Warmth`, or another one of the laboratory's."""

    @property
    def by(self) -> str:
        """What a chunk was computed behind."""

    @property
    def queries(self) -> int:
        """Questions of the data set that are asked before, to fill the store, and not measured."""

    def prepare(
        self, engine: Engine, prompt: Prompt, others: Sequence[Prompt] = (), corpus: "ContextCorpus | None" = None
    ) -> None:
        """Compute those parts of a prompt that is measured next and are not stored."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """Earlier requests, prefilled in full, whose parts are stored as each was computed: in its own context."""

    by: WarmBy = WarmBy.ALONE
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> "Warmth":
        """From `alone`, `instruction`, `neutral`, `corpus`, `contexts:N`, `sources:N`, `first:N` or `queries:N`.

        Raises:
            UsageError: none of them.
        """
        name, colon, count = text.partition(":")
        if name in list(WarmBy):
            by = WarmBy(name)
            if by.counted and count.isdecimal() and int(count) > 0:
                return cls(by, int(count))
            if not by.counted and not colon:
                return cls(by)
        ways = ", ".join(f"{by}:N" if by.counted else by for by in WarmBy)
        raise UsageError(f"not a way to warm the store: {text!r}; write one of {ways}, with N from 1 on")

    def __str__(self) -> str:
        return f"{self.by}:{self.count}" if self.by.counted else self.by

    @property
    def queries(self) -> int:
        """Questions of the data set that are asked before, to fill the store, and not measured."""
        return self.count if self.by is WarmBy.QUERIES else 0

    def prepare(
        self, engine: Engine, prompt: Prompt, others: Sequence[Prompt] = (), corpus: "ContextCorpus | None" = None
    ) -> None:
        """Compute those parts of a prompt that is measured next and are not stored; the others stay meanwhile.

        Nothing where earlier questions of the data set fill the store. Chunks of other questions are those of `others`,
        those that chunks are computed behind come from the `corpus`.
        """
        if self.by is WarmBy.QUERIES:
            return
        if self.by is WarmBy.CORPUS:
            compute_in_contexts(engine, prompt, corpus)
            return
        with engine.store.lease(engine.store.lookup(prompt)):
            for request in self._requests(engine, prompt, others):
                wanted = zip(request.parts, request.contexts(), strict=True)
                if any(part.id and segment_id(part.id, context) not in engine.store for part, context in wanted):
                    prefill_and_store(engine, request)

    def _requests(self, engine: Engine, prompt: Prompt, others: Sequence[Prompt]) -> list[Prompt]:
        if self.by is WarmBy.FIRST:
            return list(_beginning_alike(prompt, others, self.count))
        if self.by is WarmBy.CONTEXTS:
            return list(_in_company(prompt, others, requests=2, rounds=self.count))
        if self.by is WarmBy.SOURCES:
            return list(_in_company(prompt, others, requests=self.count))
        if self.by is WarmBy.NEUTRAL:
            opening, own, *_ = cast_of(prompt, ())
            preamble = engine.preparer.preamble(opening)
            return [Prompt(tuple(opening)), *(Prompt((*preamble, part)) for part in own)]
        return alone_prompts(prompt, behind_instruction=self.by is WarmBy.INSTRUCTION)


@dataclass(eq=False)
class ContextCorpus:
    """The chunks of a data set. Those of the prompt itself are no contexts where a question was `grouped` with them.

    They would be the prompt's own neighbours by the data set's making, not by retrieval.
    """

    maker: PromptMaker
    grouped: bool = False

    @cached_property
    def pool(self) -> ContextPool:
        """All chunks, made when they are first asked for."""
        return ContextPool(self.maker.parts())

    def contexts(self, part: PromptPart, prompt: Prompt, rule: ContextRule) -> list[tuple[PromptPart, ...]]:
        """What a chunk of the prompt is computed behind."""
        own = [one.id for one in prompt.parts if one.id is not None] if self.grouped else []
        return self.pool.contexts(part, rule, without=own)


def compute_in_contexts(engine: Engine, prompt: Prompt, corpus: ContextCorpus | None) -> None:
    """Compute a prompt's chunks as `Engine.precompute` computes a corpus's, as far as they are not stored."""
    opening, own, *_ = cast_of(prompt, ())
    rule = engine.preparer.rule or ContextRule()
    if corpus is None:
        raise UsageError("these questions have no corpus to compute chunks behind")
    store_opening(engine, opening)
    for part in own:
        for one in engine.preparer.beforehand(part, corpus.contexts(part, prompt, rule), opening=opening):
            engine.compute(one, profiles=True)


def company_of(questions: Sequence[T], index: int) -> list[T]:
    """The two questions behind one, around the end: their chunks are its company in earlier requests."""
    return [questions[(index + step) % len(questions)] for step in (1, 2)]


def _in_company(prompt: Prompt, others: Sequence[Prompt], *, requests: int, rounds: int = 1) -> Iterator[Prompt]:
    """In each round so many requests that share the chunks of `prompt`, filled up with those of `others`, all shuffled.

    Drawn with what the chunks are, so the same in every call.
    """
    opening, own, strangers, rng = cast_of(prompt, others)
    cuts = [-(-place * len(own) // requests) for place in range(requests + 1)]
    for _ in range(rounds):
        rng.shuffle(own)
        for first, behind in pairwise(cuts):
            mine = own[first:behind]
            request = mine + rng.sample(strangers, min(len(strangers), len(own) - len(mine)))
            rng.shuffle(request)
            if mine:
                yield Prompt((*opening, *request))


def _beginning_alike(prompt: Prompt, others: Sequence[Prompt], first: int) -> Iterator[Prompt]:
    """A request that begins with the first chunks of `prompt` and goes on with others', and one with the rest."""
    opening, own, strangers, rng = cast_of(prompt, others)
    same, rest = own[:first], own[first:]
    yield Prompt((*opening, *same, *rng.sample(strangers, min(len(strangers), len(rest)))))
    if rest:
        request = rest + rng.sample(strangers, min(len(strangers), len(same)))
        rng.shuffle(request)
        yield Prompt((*opening, *request))


def cast_of(
    prompt: Prompt, others: Sequence[Prompt]
) -> tuple[list[PromptPart], list[PromptPart], list[PromptPart], Random]:
    """What opens a prompt, its chunks in order, chunks of others that it has not, and what to draw with."""
    opening = [part for part in prompt.parts if part.kind in (PartKind.START, PartKind.SYSTEM)]
    own = list({part.id: part for part in prompt.parts if part.kind is PartKind.CHUNK}.values())
    company = {part.id: part for other in others for part in other.parts if part.kind is PartKind.CHUNK}
    strangers = [part for key, part in company.items() if key not in {part.id for part in own}]
    return opening, own, strangers, Random(" ".join(str(part.id) for part in own))


def store_opening(engine: Engine, opening: Sequence[PromptPart]) -> None:
    """Keep the instruction, unless it is stored."""
    if opening and opening[-1].id is not None and not engine.store.lookup(Prompt((*opening,))).parts[-1].variants:
        prefill_and_store(engine, Prompt((*opening,)))


def prefill_and_store(engine: Engine, prompt: Prompt) -> None:
    """Keep every part as full prefill computes it, and what it attended to for contenders that read that."""
    engine.runner.store_new(engine.runner.prefill(prompt, make_method("prefix"), profiles=True))
