"""Decides whether a request waits for parts that another prefill computes, in both backends. No torch here.

A part becomes visible in the store when its last layer is done. A prefill that starts earlier would compute the same
part again. It waits instead, if that gives its first token sooner.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chunkweave.store.prefix_trie import PathMatch
from chunkweave.types import ChunkId, Context


@dataclass(frozen=True, slots=True)
class PartInProgress:
    """A part that a running prefill computes and will store.

    `context` are the parts before it. `exact`: it will equal full prefill's KV. `tokens_left` must be computed until it
    is stored, its own included.
    """

    chunk: ChunkId
    context: Context
    exact: bool
    tokens_left: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a pending request could read from the store: its cacheable parts in prompt order, and their tokens.

    If the request weaves, the share `woven` of each chunk's tokens is saved if the chunk is stored in any context;
    None: it reuses exact prefixes only. `prompt_tokens` is its total.
    """

    chunks: Sequence[ChunkId]
    tokens: Sequence[int]
    prompt_tokens: int
    woven: float | None = None


@dataclass(frozen=True, slots=True)
class Saving:
    """What a request saves by waiting for some parts: `tokens` of its own, after `tokens_left` tokens of others.

    `work_tokens` is what it computes if it does not wait.
    """

    chunks: frozenset[ChunkId] = field(default=frozenset())
    tokens: float = 0.0
    tokens_left: int = 0
    work_tokens: float = 0.0

    def sooner(self, owner_tokens: int, *, beside: int | None = None) -> bool:
        """Whether waiting gives the first token sooner than computing beside the owner, which has `owner_tokens` left.

        Computing side by side, each slows the other down while both compute: the request takes `work + min(owner,
        work)`. Waiting takes `tokens_left`, then `work - tokens`. Time per token and other requests' tokens are the
        same in both cases. If steps are shared differently, `beside` is the number of owner tokens that would slow the
        request down.
        """
        beside_tokens = min(owner_tokens, self.work_tokens) if beside is None else beside
        return self.tokens > 0 and self.tokens_left - self.tokens <= beside_tokens


class Paths(Protocol):
    """Stored exact paths."""

    def match(self, keys: Iterable[ChunkId]) -> PathMatch:
        """The length of the stored part of a path."""


class Stored(Protocol):
    """Stored exact paths, and stored chunks in any context."""

    @property
    def tree(self) -> Paths:
        """The exact paths."""

    def chunk_tokens(self, chunk: ChunkId) -> int:
        """Above 0 if a segment of the chunk is stored in any context."""


def saving_of(
    wanted: Wanted, store: Stored, parts: Iterable[PartInProgress], *, without: Collection[ChunkId] = ()
) -> Saving:
    """What a request saves by waiting until its usable `parts` are stored, excluding the chunks `without`.

    Exact parts count if they continue the stored exact prefix. A weaving request also counts each chunk that is not
    stored in any context.
    """
    usable = [part for part in parts if part.chunk not in without]
    behind = {(*part.context, part.chunk): part.tokens_left for part in usable if part.exact}
    anywhere = {part.chunk: part.tokens_left for part in usable}
    stored = store.tree.match(wanted.chunks)
    cached = float(stored.tokens)
    saved = 0.0
    tokens_left = 0
    chunks = set[ChunkId]()
    path = tuple(wanted.chunks[: stored.nodes])
    exact = True
    for chunk, tokens in zip(wanted.chunks[stored.nodes :], wanted.tokens[stored.nodes :], strict=True):
        path = (*path, chunk)
        exact = exact and path in behind
        woven = (wanted.woven or 0.0) * tokens
        now = woven if woven and store.chunk_tokens(chunk) else 0.0
        later = tokens if exact else woven if chunk in anywhere else 0.0
        cached += now
        if later > now:
            saved += later - now
            tokens_left = max(tokens_left, behind[path] if exact else anywhere[chunk])
            chunks.add(chunk)
    return Saving(frozenset(chunks), saved, tokens_left, wanted.prompt_tokens - cached)
