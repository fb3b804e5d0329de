"""What one request asked of the store, as eviction policies hear of it."""

from dataclasses import dataclass

from chunkweave.store.lookup import PromptLookup
from chunkweave.store.records import segment_id
from chunkweave.types import ChunkId, SegmentId


@dataclass(frozen=True, slots=True)
class PathRequest:
    """The path that a request asked for: the segments of it that are stored, then those that are not.

    `cached_tokens` and `new_tokens` are alpha and beta of RAGCache's Algorithm 1: tokens of the prompt that the stored
    exact prefix covers, and all the others, the question's among them.
    """

    stored: tuple[SegmentId, ...]
    missing: tuple[SegmentId, ...]
    cached_tokens: int
    new_tokens: int


def path_request_of(lookup: PromptLookup) -> PathRequest:
    """What a lookup asked for, as a path of exact segments."""
    stored: list[SegmentId] = []
    missing: list[SegmentId] = []
    context: tuple[ChunkId, ...] = ()
    cached_tokens = 0
    for found in lookup.parts:
        if found.part.id is None:
            continue
        if found.exact is not None:
            stored.append(found.exact.id)
            cached_tokens += len(found.part.token_ids)
        else:
            missing.append(segment_id(found.part.id, context))
        context = (*context, found.part.id)
    return PathRequest(tuple(stored), tuple(missing), cached_tokens, lookup.prompt_tokens - cached_tokens)
