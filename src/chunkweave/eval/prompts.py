"""Prompts of a given size out of a data set, so that "6 x 512" means six chunks of 512 tokens."""

from collections.abc import Sequence
from itertools import chain, islice

from chunkweave.chunking.builder import PromptBuilder
from chunkweave.chunking.identity import chunk_id
from chunkweave.chunking.prompt import PartKind, Prompt, PromptPart
from chunkweave.errors import UsageError
from chunkweave.eval.datasets import Example
from chunkweave.types import Chunk


class PromptMaker:
    """Builds the prompts of a benchmark over one data set.

    A passage becomes the same chunk in every question that has it: its tokens, then those of the passages that
    follow it in the data set while it is short, cut at `chunk_tokens`. `chunk_tokens=0` leaves passages as they are.
    """

    def __init__(
        self, examples: Sequence[Example], builder: PromptBuilder, fingerprint: str, *, chunks: int, chunk_tokens: int
    ) -> None:
        """Take over a data set.

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
        self._passages = list({chunk.text: chunk for example in examples for chunk in example.chunks}.values())
        self._places = {chunk.text: place for place, chunk in enumerate(self._passages)}
        if len(self._passages) < chunks:
            raise UsageError(f"the data set has {len(self._passages)} passages, but {chunks} chunks are asked for")

    def prompt(self, example: Example) -> Prompt:
        """START, SYSTEM, exactly the asked number of chunks, QUESTION.

        The example's own passages come first; where it has too few, those that follow in the data set.

        Raises:
            UsageError: the data set's text is shorter than one chunk.
        """
        parts = list(self._builder.build(example.question).parts)
        question = parts.pop()
        return Prompt((*parts, *(self._chunk_part(chunk) for chunk in self._chosen(example)), question))

    def _chosen(self, example: Example) -> list[Chunk]:
        own = {chunk.text: chunk for chunk in example.chunks}
        others = (chunk for chunk in self._from(example.chunks[-1]) if chunk.text not in own)
        return list(islice(chain(own.values(), others), self._chunks))

    def _chunk_part(self, chunk: Chunk) -> PromptPart:
        if not self._chunk_tokens:
            return self._builder.chunk_part(chunk)
        token_ids: list[int] = []
        for passage in self._from(chunk):
            token_ids += self._builder.chunk_part(passage).token_ids
            if len(token_ids) >= self._chunk_tokens:
                cut = tuple(token_ids[: self._chunk_tokens])
                return PromptPart(PartKind.CHUNK, cut, chunk_id(self._fingerprint, "", cut), chunk.source)
        raise UsageError(f"the data set has {len(token_ids)} tokens of text, less than a chunk of {self._chunk_tokens}")

    def _from(self, chunk: Chunk) -> list[Chunk]:
        """All passages once, beginning with `chunk`, around the end of the data set."""
        place = self._places[chunk.text]
        return self._passages[place:] + self._passages[:place]


def alone_prompts(prompt: Prompt) -> list[Prompt]:
    """For each stored part of `prompt` the prompt that computes it alone: after START, with nothing before it."""
    start = tuple(part for part in prompt.parts if part.kind is PartKind.START)
    stored = {part.id: part for part in prompt.parts if part.id is not None}
    return [Prompt((*start, part)) for part in stored.values()]
