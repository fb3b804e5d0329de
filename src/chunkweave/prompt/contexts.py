"""Which chunks of a corpus a chunk is computed behind before anybody asks: its nearest ones, in several contexts.

A chunk's KV depends on what is before it. What that will be in a prompt is not known, but it is of the same corpus, and
what is retrieved together with a chunk most often is what is near to it. So the mean of the KV over several such
contexts is a guess at what it will be. FusionRAG (arXiv:2601.12904) takes one context of the most similar chunks.
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
"""Of one mean."""

_COLUMNS = 1024
_SPREAD = 2654435761
"""Knuth's multiplicative hash: neighbouring token ids come to different columns."""


@dataclass(frozen=True, slots=True)
class ContextRule:
    """In how many contexts a chunk is computed, each of at least so many `tokens` as far as there are other chunks."""

    count: int = 4
    tokens: int = 400


def rule_of(capture: CaptureConfig) -> ContextRule | None:
    """In which contexts chunks are computed; None: behind neutral passages, once."""
    if capture.contexts is ContextSource.BUNDLED:
        return None
    return ContextRule(capture.context_count, capture.context_tokens)


@dataclass(frozen=True, slots=True)
class MeanShare:
    """What a prompt computes its last chunk for: one of so many contexts of the mean that `group` names.

    One that is computed `anew` takes the place of a mean that is stored. What was removed since `begun_s` (monotonic)
    is not to be read.
    """

    group: str
    of: int
    begun_s: float = field(default_factory=monotonic, compare=False)
    anew: bool = False


class ContextPool:
    """Chunks that may be computed behind each other: those of one corpus, or of one request, under one cache salt.

    Immutable. May be used by several threads.
    """

    def __init__(self, parts: Iterable[PromptPart]) -> None:
        """Take over chunks; one that comes twice counts once. Near are those that share rare tokens."""
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
        """The other chunks, the nearest first; equally near ones in the pool's order.

        Raises:
            UsageError: the chunk is not in the pool.
        """
        if part.id not in self._rows:
            raise UsageError(f"a chunk ({part.source or part.id}) is not among those that it is to be computed with")
        row = self._rows[part.id]
        order = np.argsort(-(self.vectors @ self.vectors[row]), kind="stable")
        return [self.parts[other] for other in order if other != row]

    def contexts(
        self, part: PromptPart, rule: ContextRule, *, without: Collection[ChunkId] = ()
    ) -> list[tuple[PromptPart, ...]]:
        """What a chunk is computed behind, none of it `without`: in each context the nearest last, next to the chunk.

        Raises:
            UsageError: the chunk is not in the pool.
        """
        return dealt([one for one in self.nearest(part) if one.id not in without], rule)


def dealt(ranked: Sequence[PromptPart], rule: ContextRule) -> list[tuple[PromptPart, ...]]:
    """Contexts of `ranked` chunks: context k has the ranks k, k + count, ... until it has the rule's tokens.

    The last rank comes first, so that the nearest is next to the chunk. With fewer chunks than contexts, as many
    contexts as there are chunks.
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
    """The last chunks of a context, the nearest ones, that have at most `room` tokens together."""
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
    """Contexts cut to what fits between an opening and a chunk: none where nothing does, equal ones once."""
    room = most_tokens - len(part) - 1 - sum(map(len, opening))
    return [one for one in dict.fromkeys(fitting(context, room) for context in contexts) if one]


def token_vectors(parts: Sequence[PromptPart]) -> NDArray[np.float32]:
    """Chunks as vectors of length 1, `[chunks, 1024]`: (1 + log n) log(N / df) of each token id, in hashed columns.

    It needs no embedder, and knows no language. Tokens that all chunks have count nothing.
    """
    found = [np.unique(np.asarray(part.token_ids, dtype=np.int64), return_counts=True) for part in parts]
    ids, with_it = np.unique(np.concatenate([one for one, _ in found] or [np.empty(0, np.int64)]), return_counts=True)
    rarity = np.log(max(1, len(parts)) / np.maximum(1, with_it))
    vectors = np.zeros((len(parts), _COLUMNS), dtype=np.float32)
    for row, (own, counts) in enumerate(found):
        weights = (1.0 + np.log(counts)) * rarity[np.searchsorted(ids, own)]
        hashed = own * _SPREAD & 0xFFFFFFFF
        signed = np.where(hashed & 1, -weights, weights)
        vectors[row] = np.bincount(hashed >> 22, weights=signed, minlength=_COLUMNS)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled
