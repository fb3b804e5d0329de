"""Prompts of measurements, and the ways to fill the store before by earlier requests (warming)."""

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

    A passage is the same chunk in every question that has it: its tokens, filled up with those of the following
    passages of the data set, cut at `chunk_tokens`. Retrieved passages are not filled up. `chunk_tokens=0` keeps
    passages whole.
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
        """A maker for a data set; `instruction=None` means the template's.

        Chunks are those of the question or, `by_retrieval`, those that the corpus's embedder finds in the data set.

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
            raise UsageError(f"the data set has {len(self._passages)} passages, but {chunks} chunks are needed")

    def prompt(self, example: Example) -> Prompt:
        """START, SYSTEM, the configured number of chunks, QUESTION.

        The example's own passages come first; if there are too few, the following ones of the data set are added.

        Raises:
            UsageError: the data set's text is shorter than one chunk.
        """
        parts = list(self._builder.build(example.question, system=self._instruction).parts)
        question = parts.pop()
        return Prompt((*parts, *(self._chunk_part(chunk) for chunk in self._chosen(example)), question))

    def parts(self) -> list[PromptPart]:
        """The parts for all chunks of the data set."""
        return [self._chunk_part(chunk) for chunk in self._passages]

    def _chosen(self, example: Example) -> list[Chunk]:
        if self._embedder is not None:
            return self._retrieved(self._embedder, example.question)
        own_chunks = {chunk.text: chunk for chunk in example.chunks}
        candidates = (chunk for chunk in self._from(example.chunks[-1]) if chunk.text not in own_chunks)
        return list(islice(chain(own_chunks.values(), candidates), self._chunks))

    def _retrieved(self, embedder: HashedNgramEmbedder, question: str) -> list[Chunk]:
        """The passages of the whole data set that are nearest to a question, best first."""
        if self._index is None:
            self._index = FlatIndex(embedder.embed_documents([passage.text for passage in self._passages]))
        nearest = self._index.search(embedder.embed_query(question), self._chunks)
        return [self._passages[row] for row in nearest.rows]

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
        """All passages once, starting at `chunk` and wrapping around."""
        place = self._places[chunk.text]
        return self._passages[place:] + self._passages[:place]


def alone_prompts(prompt: Prompt, *, behind_instruction: bool = False) -> list[Prompt]:
    """For each stored part of `prompt` a prompt that computes it alone, directly after START.

    With `behind_instruction` chunks come after START and SYSTEM.
    """
    start = tuple(part for part in prompt.parts if part.kind is PartKind.START)
    stored = {part.id: part for part in prompt.parts if part.id is not None}
    system = [part for part in stored.values() if part.kind is PartKind.SYSTEM] if behind_instruction else []
    return [Prompt((*start, *(() if part in system else system), part)) for part in stored.values()]


class WarmBy(StrEnum):
    """The context in which chunks are computed; the instruction is always stored."""

    ALONE = "alone"
    """No context."""
    INSTRUCTION = "instruction"
    """The instruction."""
    NEUTRAL = "neutral"
    """The instruction and neutral passages, as `Engine.precompute` does with `contexts: bundled`."""
    CORPUS = "corpus"
    """The mean over several contexts of other chunks of the data set, as `Engine.precompute` does."""
    CONTEXTS = "contexts"
    """Each chunk was in `count` earlier requests with chunks of the same question and of other questions."""
    SOURCES = "sources"
    """The question's chunks were spread over `count` earlier requests, each chunk in one of them."""
    FIRST = "first"
    """An earlier request began with the first `count` chunks, so prefix caching works; another one had the rest."""
    QUERIES = "queries"
    """`count` earlier questions of the data set were asked; chunks that none of them had are new."""

    @property
    def counted(self) -> bool:
        """Whether it has a count."""
        return self not in (WarmBy.ALONE, WarmBy.INSTRUCTION, WarmBy.NEUTRAL, WarmBy.CORPUS)


class Warming(Protocol):
    """A way to fill the store before a prompt is measured: `Warmth`, or one of the laboratory's."""

    @property
    def by(self) -> str:
        """The kind of context of chunks."""

    @property
    def queries(self) -> int:
        """Number of questions of the data set that only fill the store."""

    def prepare(
        self,
        engine: Engine,
        prompt: Prompt,
        other_prompts: Sequence[Prompt] = (),
        corpus: "ContextCorpus | None" = None,
    ) -> None:
        """Compute the missing parts of the prompt that is measured next."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """Warms the store by earlier requests, prefilled in full; each part is stored in the context of its request."""

    by: WarmBy = WarmBy.ALONE
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> "Warmth":
        """Parse `alone`, `instruction`, `neutral`, `corpus`, `contexts:N`, `sources:N`, `first:N` or `queries:N`.

        Raises:
            UsageError: it is none of these.
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
        """Number of questions of the data set that only fill the store."""
        return self.count if self.by is WarmBy.QUERIES else 0

    def prepare(
        self,
        engine: Engine,
        prompt: Prompt,
        other_prompts: Sequence[Prompt] = (),
        corpus: "ContextCorpus | None" = None,
    ) -> None:
        """Compute the missing parts of the prompt that is measured next; stored parts are leased meanwhile.

        Does nothing if earlier questions of the data set fill the store. `other_prompts` supply chunks of other
        questions, `corpus` the contexts of chunks.
        """
        if self.by is WarmBy.QUERIES:
            return
        if self.by is WarmBy.CORPUS:
            compute_in_contexts(engine, prompt, corpus)
            return
        with engine.store.lease(engine.store.lookup(prompt)):
            for request in self._requests(engine, prompt, other_prompts):
                wanted = zip(request.parts, request.contexts(), strict=True)
                if any(part.id and segment_id(part.id, context) not in engine.store for part, context in wanted):
                    prefill_and_store(engine, request)

    def _requests(self, engine: Engine, prompt: Prompt, other_prompts: Sequence[Prompt]) -> list[Prompt]:
        if self.by is WarmBy.FIRST:
            return list(_beginning_alike(prompt, other_prompts, self.count))
        if self.by is WarmBy.CONTEXTS:
            return list(_in_company(prompt, other_prompts, requests=2, rounds=self.count))
        if self.by is WarmBy.SOURCES:
            return list(_in_company(prompt, other_prompts, requests=self.count))
        if self.by is WarmBy.NEUTRAL:
            opening, prompt_chunks, *_ = cast_of(prompt, ())
            preamble = engine.preparer.preamble(opening)
            return [Prompt(tuple(opening)), *(Prompt((*preamble, part)) for part in prompt_chunks)]
        return alone_prompts(prompt, behind_instruction=self.by is WarmBy.INSTRUCTION)


@dataclass(eq=False)
class ContextCorpus:
    """The chunks of a data set. With `grouped`, chunks of the prompt itself are not used as contexts.

    In such data sets they are grouped with the question by construction, not by retrieval.
    """

    maker: PromptMaker
    grouped: bool = False

    @cached_property
    def pool(self) -> ContextPool:
        """The pool of all chunks, made at first use."""
        return ContextPool(self.maker.parts())

    def contexts(self, part: PromptPart, prompt: Prompt, rule: ContextRule) -> list[tuple[PromptPart, ...]]:
        """The contexts of a chunk of the prompt."""
        own_ids = [part.id for part in prompt.parts if part.id is not None] if self.grouped else []
        return self.pool.contexts(part, rule, without=own_ids)


def compute_in_contexts(engine: Engine, prompt: Prompt, corpus: ContextCorpus | None) -> None:
    """Compute a prompt's missing chunks as `Engine.precompute` computes a corpus's."""
    opening, prompt_chunks, *_ = cast_of(prompt, ())
    rule = engine.preparer.rule or ContextRule()
    if corpus is None:
        raise UsageError("these questions have no corpus for the contexts of chunks")
    store_opening(engine, opening)
    for part in prompt_chunks:
        for prepared in engine.preparer.beforehand(part, corpus.contexts(part, prompt, rule), opening=opening):
            engine.compute(prepared, profiles=True)


def company_of(questions: Sequence[T], index: int) -> list[T]:
    """The next two questions, wrapping around: their chunks accompany its chunks in earlier requests."""
    return [questions[(index + step) % len(questions)] for step in (1, 2)]


def _in_company(prompt: Prompt, other_prompts: Sequence[Prompt], *, requests: int, rounds: int = 1) -> Iterator[Prompt]:
    """`requests` shuffled requests per round that split the chunks of `prompt`, filled up from `other_prompts`.

    The random numbers are seeded by the chunks, so every call gives the same requests.
    """
    opening, prompt_chunks, strangers, rng = cast_of(prompt, other_prompts)
    cuts = [-(-place * len(prompt_chunks) // requests) for place in range(requests + 1)]
    for _ in range(rounds):
        rng.shuffle(prompt_chunks)
        for first, behind in pairwise(cuts):
            own_chunks = prompt_chunks[first:behind]
            request = own_chunks + rng.sample(strangers, min(len(strangers), len(prompt_chunks) - len(own_chunks)))
            rng.shuffle(request)
            if own_chunks:
                yield Prompt((*opening, *request))


def _beginning_alike(prompt: Prompt, other_prompts: Sequence[Prompt], first: int) -> Iterator[Prompt]:
    """A request with the first chunks of `prompt` followed by others' chunks, and one with the rest."""
    opening, prompt_chunks, strangers, rng = cast_of(prompt, other_prompts)
    same = prompt_chunks[:first]
    rest = prompt_chunks[first:]
    yield Prompt((*opening, *same, *rng.sample(strangers, min(len(strangers), len(rest)))))
    if rest:
        request = rest + rng.sample(strangers, min(len(strangers), len(same)))
        rng.shuffle(request)
        yield Prompt((*opening, *request))


def cast_of(
    prompt: Prompt, other_prompts: Sequence[Prompt]
) -> tuple[list[PromptPart], list[PromptPart], list[PromptPart], Random]:
    """A prompt's opening parts, its chunks, chunks that only `other_prompts` have, and a seeded random generator."""
    opening = [part for part in prompt.parts if part.kind in (PartKind.START, PartKind.SYSTEM)]
    own_chunks = list({part.id: part for part in prompt.parts if part.kind is PartKind.CHUNK}.values())
    company = {
        part.id: part for other_prompt in other_prompts for part in other_prompt.parts if part.kind is PartKind.CHUNK
    }
    strangers = [part for key, part in company.items() if key not in {part.id for part in own_chunks}]
    return opening, own_chunks, strangers, Random(" ".join(str(part.id) for part in own_chunks))


def store_opening(engine: Engine, opening: Sequence[PromptPart]) -> None:
    """Compute and store the instruction if it is missing."""
    if opening and opening[-1].id is not None and not engine.store.lookup(Prompt((*opening,))).parts[-1].variants:
        prefill_and_store(engine, Prompt((*opening,)))


def prefill_and_store(engine: Engine, prompt: Prompt) -> None:
    """Prefill in full and store every part, with attention profiles for contenders that read them."""
    engine.runner.store_new(engine.runner.prefill(prompt, make_method("prefix"), profiles=True))
