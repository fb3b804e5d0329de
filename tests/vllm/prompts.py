"""Prompts of random chunks: no two tests share one, so that tests may share a server."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from chunkweave.planning.method import RATIO, method_named, parameter_of
from tests.vllm.checkpoints import BOS, FIRST_TOKEN, VOCAB
from tests.vllm.reference import Piece, Reference
from tests.vllm.serving import Ask, Served

_rng = Random(20240607)


def tokens(count: int) -> tuple[int, ...]:
    """Ids that nobody has drawn before, as far as chance goes."""
    return tuple(_rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(count))


@dataclass(frozen=True)
class Given:
    """A prompt: BOS, a system part, chunks, a question."""

    chunks: Sequence[tuple[int, ...]]
    question: tuple[int, ...] = field(default_factory=lambda: tokens(9))
    system: tuple[int, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [BOS, *self.system, *(token for chunk in self.chunks for token in chunk), *self.question]

    @property
    def spans(self) -> list[list[int]]:
        spans, at = [], 1 + len(self.system)
        for chunk in self.chunks:
            spans.append([at, at + len(chunk)])
            at += len(chunk)
        return spans

    def ask(self, method: str = "prefix", ratio: float | None = None, new_tokens: int = 1, **more: Any) -> Ask:
        """The request that has this prompt woven; the ratio is left out where the method takes none."""
        return Ask(self.ids, {"chunks": self.spans, "method": at_ratio(method, ratio), **more}, new_tokens)

    def plain(self, new_tokens: int = 1) -> Ask:
        """The same tokens, without a word about chunks."""
        return Ask(self.ids, None, new_tokens)


def alone(chunk: tuple[int, ...]) -> Given:
    """A prompt that computes one chunk with nothing but BOS before it."""
    return Given([chunk], question=())


def at_ratio(method: str, ratio: float | None) -> str:
    """The method with a ratio; unchanged if it takes none."""
    takes_ratio = ratio is not None and parameter_of(method_named(method)) == RATIO
    return f"{method}:ratio={ratio}" if takes_ratio else method


@dataclass
class Scenario:
    """A prompt, the requests that leave its chunks in the store, and the same for the reference.

    `seen` maps a chunk to the prompt it was first computed in; chunks not in it are missing.
    """

    prompt: Given
    seen: dict[tuple[int, ...], Given]
    exact: frozenset[tuple[int, ...]] = frozenset()

    @property
    def first_prompts(self) -> list[Given]:
        return list({id(prompt): prompt for prompt in self.seen.values()}.values())

    def precompute(self, served: Served, **more: Any) -> None:
        """One after the other: what a request stores, the next one may find. `more` is what requests say besides."""
        for prompt in self.first_prompts:
            served.answer(replace(prompt.ask("prefix", **more), top=None))

    def pieces(self, reference: Reference) -> list[Piece]:
        pieces = [Piece((BOS,))]
        for chunk in (self.prompt.system, *self.prompt.chunks):
            if not chunk:
                continue
            if chunk not in self.seen:
                pieces.append(Piece(chunk))
                continue
            first = self.seen[chunk]
            start = 1 if chunk == first.system else first.spans[first.chunks.index(chunk)][0]
            stored = reference.stored(first.ids, start, start + len(chunk))
            pieces.append(Piece(chunk, stored, chunk in self.exact))
        return [*pieces, Piece(self.prompt.question)] if self.prompt.question else pieces


def computed_alone() -> Scenario:
    """Every chunk alone; what stands first is exact as it is."""
    chunks = [tokens(count) for count in (43, 30, 61, 33)]
    order = [chunks[2], chunks[0], chunks[3], chunks[1]]
    return Scenario(Given(order), {chunk: alone(chunk) for chunk in chunks}, frozenset({order[0]}))


def computed_in_context() -> Scenario:
    """Chunks seen once, in another order, behind an instruction that this prompt has not."""
    chunks = [tokens(count) for count in (38, 52, 33)]
    first = Given(chunks, system=tokens(11))
    return Scenario(Given([chunks[2], chunks[0], chunks[1]]), dict.fromkeys(chunks, first))


def behind_an_instruction() -> Scenario:
    """An instruction that was seen before, as exact prefix, and chunks computed alone."""
    system, other = tokens(21), tokens(14)
    chunks = [tokens(count) for count in (35, 47, 28)]
    seen = {chunk: alone(chunk) for chunk in chunks}
    return Scenario(Given(chunks, system=system), {system: Given([other], system=system), **seen}, frozenset({system}))


def question_as_chunks() -> Scenario:
    """Two chunks that equal the question, behind another one."""
    chunk, question = tokens(41), tokens(27)
    seen = {one: alone(one) for one in (chunk, question)}
    return Scenario(Given([chunk, question, question], question), seen, frozenset({chunk}))


def one_missing(place: int) -> Scenario:
    """Of four chunks computed alone, the one at `place` is not."""
    chunks = [tokens(count) for count in (37, 29, 45, 40)]
    seen = {chunk: alone(chunk) for index, chunk in enumerate(chunks) if index != place}
    return Scenario(Given(chunks), seen, frozenset(chunks[:1]) if place else frozenset())
