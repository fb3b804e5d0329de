"""Whether a request waits for parts that another request's prefill computes, in both backends. Imports no torch.

A part becomes visible in the store when its last layer is done, so a prefill that begins while another one computes the
same part would compute it again. It waits instead, where that gives its first token sooner.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chunkweave.store.prefix_trie import PathMatch
from chunkweave.types import ChunkId, Context


@dataclass(frozen=True, slots=True)
class PartInProgress:
    """A part that a running prefill computes and will store.

    `context` are the parts before it. `exact` says whether it will be equal to what full prefill computes there.
    `tokens_left` are to be computed, its own among them, until it is stored.
    """

    chunk: ChunkId
    context: Context
    exact: bool
    tokens_left: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a waiting request could take from the store: its storable parts in prompt order, and their tokens.

    Of a request that weaves, the share `woven` of each chunk's tokens need not be computed if the chunk is stored in
    any context; None if it takes exact prefixes only. `prompt_tokens` are all that it has.
    """

    chunks: Sequence[ChunkId]
    tokens: Sequence[int]
    prompt_tokens: int
    woven: float | None = None


@dataclass(frozen=True, slots=True)
class Saving:
    """What a request need not compute if it waits for some parts: `tokens` of its own, after `tokens_left` of others'.

    `work_tokens` are what it computes if it does not wait.
    """

    chunks: frozenset[ChunkId] = field(default=frozenset())
    tokens: float = 0.0
    tokens_left: int = 0
    work_tokens: float = 0.0

    def sooner(self, owner_tokens: int, *, beside: int | None = None) -> bool:
        """Whether waiting gives the first token sooner than computing beside the owner, which has so many tokens left.

        Beside each other both are slowed down by the other's tokens, as long as both compute. So the request computes
        for `work + min(owner, work)`, or waits for `tokens_left` and then computes for `work - tokens`. The time that a
        token takes is the same in both, and so are the tokens of other requests beside them. Where a step is shared
        otherwise, `beside` are those of the owner's tokens that would slow down the request.
        """
        beside_tokens = min(owner_tokens, self.work_tokens) if beside is None else beside
        return self.tokens > 0 and self.tokens_left - self.tokens <= beside_tokens


class Paths(Protocol):
    """Stored exact paths."""

    def match(self, keys: Iterable[ChunkId]) -> PathMatch:
        """How far a path is stored."""


class Stored(Protocol):
    """What is stored: exact paths, and chunks in any context."""

    @property
    def tree(self) -> Paths:
        """The exact paths."""

    def chunk_tokens(self, chunk: ChunkId) -> int:
        """Not 0 if a segment of a chunk is stored in any context."""


def saving_of(
    wanted: Wanted, store: Stored, parts: Iterable[PartInProgress], *, without: Collection[ChunkId] = ()
) -> Saving:
    """What a request saves if it waits until the `parts` that it can take are stored; `without` some chunks.

    Exact parts count as far as they continue the exact prefix that is stored. A request that weaves can also take each
    chunk that is not stored in any context.
    """
    usable = [part for part in parts if part.chunk not in without]
    behind = {(*part.context, part.chunk): part.tokens_left for part in usable if part.exact}
    anywhere = {part.chunk: part.tokens_left for part in usable}
    stored = store.tree.match(wanted.chunks)
    cached, saved, left, chunks = float(stored.tokens), 0.0, 0, set[ChunkId]()
    path, exact = tuple(wanted.chunks[: stored.nodes]), True
    for chunk, tokens in zip(wanted.chunks[stored.nodes :], wanted.tokens[stored.nodes :], strict=True):
        path = (*path, chunk)
        exact = exact and path in behind
        woven = (wanted.woven or 0.0) * tokens
        now = woven if woven and store.chunk_tokens(chunk) else 0.0
        later = tokens if exact else woven if chunk in anywhere else 0.0
        cached += now
        if later > now:
            saved += later - now
            left = max(left, behind[path] if exact else anywhere[chunk])
            chunks.add(chunk)
    return Saving(frozenset(chunks), saved, left, wanted.prompt_tokens - cached)
