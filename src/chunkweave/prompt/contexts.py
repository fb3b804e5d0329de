"""The contexts in which a chunk is computed ahead of requests: its nearest chunks of the corpus, in several groups.

A chunk's KV depends on the text before it. The text before it in a future prompt is unknown, but it is from the same
corpus, and the chunks retrieved together with a chunk are mostly near to it. So the mean of its KV over several such
contexts estimates its KV in that prompt. FusionRAG (arXiv:2601.12904) uses one context of the most similar chunks.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from chunkweave.config import CaptureConfig, ContextSource
from chunkweave.errors import UsageError
from chunkweave.prompt.parts import PromptPart
from chunkweave.types import ChunkId

MOST_CONTEXTS = 32
"""Maximum number of contexts of one mean."""

_COLUMNS = 1024
_SPREAD = 2654435761
"""Knuth's multiplicative hash: neighbouring token ids map to different columns."""


@dataclass(frozen=True, slots=True)
class ContextRule:
    """The number (`count`) of contexts of a chunk, each of at least `tokens` tokens if there are enough chunks."""

    count: int = 4
    tokens: int = 400


def rule_of(capture: CaptureConfig) -> ContextRule | None:
    """The rule for contexts in a configuration; None: chunks are computed once, behind neutral passages."""
    if capture.contexts == ContextSource.BUNDLED:
        return None
    return ContextRule(capture.context_count, capture.context_tokens)


@dataclass(frozen=True, slots=True)
class MeanShare:
    """Marks a prompt whose last chunk is computed for one of the contexts of a mean.

    `group` names the mean, `of` is its number of contexts. With `anew` it replaces a stored mean. Chunks removed since
    `begun_s` (monotonic seconds) must not be read.

    Over vLLM a mean takes these requests, each with `max_tokens` 1 and `counts_as_request` false:

    1. For each chunk that is in some context, and each chunk without others: `[*instruction, *passages, *chunk]`, with
       method `prefix` and `neutral`, the number of passages.
    2. For each chunk and each of its contexts: `[*instruction, *other chunks, *chunk]`, with method `full-reuse` and
       `"mean": {"group": NAME, "of": N, "anew": false}`. Other chunks are woven from step 1 or from means; the last
       chunk is computed, whatever is stored of it. When the last share is computed the mean is stored, and nothing
       else of the prompt.
    3. `{"forget": {"chunks": [...], "start": [...], "first_passes": true}}` removes the results of step 1 for chunks
       that have a mean.

    All shares of a mean must go to one engine, whose workers hold sums in float32 of at most 32 unfinished chunks; the
    oldest of more is dropped. A repeated share counts once; a share that failed or was cancelled must be sent again.
    `{"stored": {"chunks": [...], "start": [...]}}` asks which of these chunks, by number, have a mean on all workers
    and which contexts can be woven: `{"means": [0, 2], "contexts": [0, 1, 2]}`.
    """

    group: str
    of: int
    begun_s: float = field(default_factory=monotonic, compare=False)
    anew: bool = False


class ContextPool:
    """Chunks that may serve as contexts of each other: those of one corpus or one request, under one cache salt.

    Immutable and thread-safe.
    """

    def __init__(self, parts: Iterable[PromptPart]) -> None:
        """A pool of `parts` without duplicates. Chunks that share rare tokens are near."""
        by_id: dict[ChunkId | None, PromptPart] = {}
        for part in parts:
            by_id.setdefault(part.id, part)
        self.parts = tuple(by_id.values())
        self._rows = {part.id: row for row, part in enumerate(self.parts)}
        self.vectors = token_vectors(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._rows

    def nearest(self, part: PromptPart) -> list[PromptPart]:
        """The other chunks, nearest first; ties in the pool's order.

        Raises:
            UsageError: the chunk is not in the pool.
        """
        if part.id not in self._rows:
            raise UsageError(f"the chunk {part.source or part.id} is not in the pool of its contexts")
        row = self._rows[part.id]
        order = np.argsort(-(self.vectors @ self.vectors[row]), kind="stable")
        return [self.parts[index] for index in order if index != row]

    def contexts(
        self, part: PromptPart, rule: ContextRule, *, without: Collection[ChunkId] = ()
    ) -> list[tuple[PromptPart, ...]]:
        """The contexts of a chunk, excluding chunks in `without`; in each the nearest chunk is last, next to `part`.

        Raises:
            UsageError: the chunk is not in the pool.
        """
        return dealt([neighbour for neighbour in self.nearest(part) if neighbour.id not in without], rule)


def dealt(ranked: Sequence[PromptPart], rule: ContextRule) -> list[tuple[PromptPart, ...]]:
    """Deal `ranked` chunks into contexts: context k gets ranks k, k + count, ... until it has the rule's tokens.

    Ranks are in reverse, so that the nearest chunk is next to the computed one. With fewer chunks than contexts, each
    chunk makes one context.
    """
    contexts = []
    for first in range(min(rule.count, len(ranked))):
        taken: list[PromptPart] = []
        tokens = 0
        for part in ranked[first :: rule.count]:
            if tokens >= rule.tokens:
                break
            taken.append(part)
            tokens += len(part)
        contexts.append(tuple(reversed(taken)))
    return contexts


def fitting(context: Sequence[PromptPart], room: int) -> tuple[PromptPart, ...]:
    """The last (nearest) chunks of a context with at most `room` tokens in all."""
    taken: list[PromptPart] = []
    for part in reversed(context):
        room -= len(part)
        if room < 0:
            break
        taken.append(part)
    return tuple(reversed(taken))


def fitted(
    part: PromptPart, contexts: Iterable[Sequence[PromptPart]], *, opening: Iterable[PromptPart], most_tokens: int
) -> list[tuple[PromptPart, ...]]:
    """Contexts cut to fit between an opening and a chunk, without empty and duplicate ones."""
    room = most_tokens - len(part) - 1 - sum(map(len, opening))
    return [shortened for shortened in dict.fromkeys(fitting(context, room) for context in contexts) if shortened]


def token_vectors(parts: Sequence[PromptPart]) -> NDArray[np.float32]:
    """Chunks as unit vectors, `[chunks, 1024]`: (1 + log n) log(N / df) of each token id, in hashed columns.

    Needs no embedder and is independent of the language. Tokens that occur in all chunks have weight 0.
    """
    token_counts = [np.unique(np.asarray(part.token_ids, dtype=np.int64), return_counts=True) for part in parts]
    ids, with_it = np.unique(
        np.concatenate([token_ids for token_ids, _ in token_counts] or [np.empty(0, np.int64)]), return_counts=True
    )
    rarity = np.log(max(1, len(parts)) / np.maximum(1, with_it))
    vectors = np.zeros((len(parts), _COLUMNS), dtype=np.float32)
    for row, (own_ids, counts) in enumerate(token_counts):
        weights = (1.0 + np.log(counts)) * rarity[np.searchsorted(ids, own_ids)]
        hashed = own_ids * _SPREAD & 0xFFFFFFFF
        signed = np.where(hashed & 1, -weights, weights)
        vectors[row] = np.bincount(hashed >> 22, weights=signed, minlength=_COLUMNS)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled
