"""vLLM's KV events about the stores: which exact prefixes and which chunks this server holds beside vLLM's own blocks.

vLLM publishes them with its own events (`--kv-events-config`), in whole blocks:

- an exact segment as the blocks that end in it, with the hashes that vLLM gives the same tokens: routers that look for
  the longest prefix need nothing else;
- a chunk, in any context, as a prefix of its own: its tokens, without a parent. Its block hashes derive from its id, so
  they never equal those of vLLM's blocks. A chunk below one block is a single block of its length.

The medium is `CPU` for all tiers, and `ownership` is left out: Dynamo drops events with an owner that it does not know.
Only tokens of requests are known: what a tier holds from an earlier process is announced once a request names it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from chunkweave.types import ChunkId, SegmentId
from chunkweave.vllm.request import StoredPart

_MOST_UNSTORED = 1024
"""Most events kept for parts that are not stored yet; the oldest are dropped."""

_Id = ChunkId | SegmentId


class KVEvents:
    """Events that wait to be published. Called from the scheduler's thread only."""

    def __init__(self, stored: Callable[[_Id], bool], *, enabled: bool) -> None:
        """`stored` returns whether all ranks hold a chunk or an exact segment. `enabled`: whether vLLM publishes."""
        self._stored = stored
        self._enabled = enabled
        self._unstored: OrderedDict[_Id, BlockStored] = OrderedDict()
        self._published: dict[_Id, list[Any]] = {}
        self._events: list[KVCacheEvent] = []

    def add(self, request: Any, parts: Sequence[StoredPart], segments: Sequence[SegmentId], block_tokens: int) -> None:
        """Note the parts of a new request, and publish those that are stored already.

        Args:
            request: vLLM's request, whose block hashes are still the client's.
            parts: its parts that can be stored, in prompt order, the first at position 0.
            segments: their ids if they are exact.
            block_tokens: tokens of one hash of the request.
        """
        if not self._enabled:
            return
        hashes = request.block_hashes
        for part, segment in zip(parts, segments, strict=True):
            first, stop = part.span.start // block_tokens, min(part.span.stop // block_tokens, len(hashes))
            if first < stop:
                tokens = request.prompt_token_ids[first * block_tokens : stop * block_tokens]
                parent = hashes[first - 1] if first else None
                self._note(segment, _event(request, hashes[first:stop], tokens, parent))
            if part.span.start:  # a prompt's first part is a prefix, and no chunk
                whole = len(part.token_ids) // block_tokens
                tokens = part.token_ids[: whole * block_tokens] or part.token_ids
                named = [_block_hash(part.id, number) for number in range(max(1, whole))]
                self._note(part.id, _event(request, named, tokens))

    def changed(self, ids: Iterable[_Id]) -> None:
        """Publish which of these are stored now, or no longer; a segment after the one before it."""
        come = set[_Id]()
        for one in ids:
            if one in self._unstored and self._stored(one):
                come.add(one)
            elif one in self._published and not self._stored(one):
                self._remove(one)
        for one in [one for one in self._unstored if one in come] if come else ():
            self._publish(one, self._unstored.pop(one))

    def clear(self) -> None:
        """Publish that nothing is held any more."""
        for one in list(self._published):
            self._remove(one)
        self._unstored.clear()

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def _note(self, one: _Id, event: BlockStored) -> None:
        if one in self._published:
            return
        if self._stored(one):
            self._publish(one, event)
            return
        self._unstored[one] = event
        self._unstored.move_to_end(one)
        if len(self._unstored) > _MOST_UNSTORED:
            self._unstored.popitem(last=False)

    def _publish(self, one: _Id, event: BlockStored) -> None:
        self._published[one] = event.block_hashes
        self._events.append(event)

    def _remove(self, one: _Id) -> None:
        self._events.append(BlockRemoved(block_hashes=self._published.pop(one), medium=MEDIUM_CPU))


def _block_hash(chunk: ChunkId, number: int) -> bytes:
    return hashlib.blake2b(f"{chunk}:{number}".encode(), digest_size=32).digest()


def _event(request: Any, hashes: Sequence[bytes], tokens: Sequence[int], parent: bytes | None = None) -> BlockStored:
    """The event of blocks with these hashes and tokens; the salt is a key of a first block, as in vLLM."""
    adapter = request.lora_request
    named = () if adapter is None else (adapter.name,)
    salted = (*named, request.cache_salt) if parent is None and request.cache_salt else named
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(one) for one in hashes],
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=list(tokens),
        block_size=len(tokens) // len(hashes),
        lora_id=None if adapter is None else adapter.adapter_id,
        medium=MEDIUM_CPU,
        lora_name=None if adapter is None else adapter.name,
        extra_keys=[salted or None, *[named or None] * (len(hashes) - 1)],
    )
