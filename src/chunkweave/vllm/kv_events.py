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
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from chunkweave.conversation.weave_request import StoredPart
from chunkweave.types import ChunkId, SegmentId

_MOST_UNSTORED_TOKENS = 4_000_000
"""Most tokens of parts that are kept until they are stored, 4 bytes each; then the oldest are dropped."""

_Id = ChunkId | SegmentId


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Consecutive blocks of one part: what an event says of them."""

    hashes: Sequence[bytes]
    tokens: "array[int]"
    parent: bytes | None
    adapter: Any
    salt: str | None

    def event(self) -> BlockStored:
        """The event; the salt is a key of a first block, as in vLLM."""
        named = () if self.adapter is None else (self.adapter.name,)
        first = (*named, self.salt) if self.parent is None and self.salt else named
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in self.hashes],
            parent_block_hash=None if self.parent is None else maybe_convert_block_hash(self.parent),
            token_ids=self.tokens.tolist(),
            block_size=len(self.tokens) // len(self.hashes),
            lora_id=None if self.adapter is None else self.adapter.adapter_id,
            medium=MEDIUM_CPU,
            lora_name=None if self.adapter is None else self.adapter.name,
            extra_keys=[first or None, *[named or None] * (len(self.hashes) - 1)],
        )


class KVEvents:
    """Events that wait to be published. Called from the scheduler's thread only."""

    def __init__(self, stored: Callable[[_Id], bool], *, enabled: bool) -> None:
        """`stored` returns whether all ranks hold a chunk or an exact segment. `enabled`: whether vLLM publishes."""
        self._stored = stored
        self._enabled = enabled
        self._waiting: OrderedDict[_Id, _Blocks] = OrderedDict()
        """Parts that are not stored, or whose parent block is not published."""
        self._waiting_tokens = 0
        self._published: dict[_Id, Sequence[bytes]] = {}
        self._copies: Counter[bytes] = Counter()
        """How many published parts have a block: a prompt may be cut into parts in several ways."""
        self._events: list[KVCacheEvent] = []

    def add(self, request: Any, parts: Sequence[StoredPart], segments: Sequence[SegmentId], block_tokens: int) -> None:
        """Note the parts of a new request, and publish those that are stored already.

        Args:
            request: vLLM's request, whose block hashes are still the client's.
            parts: its parts that can be stored, in prompt order.
            segments: their ids if they are exact.
            block_tokens: tokens of one hash of the request.
        """
        if not self._enabled:
            return
        hashes = request.block_hashes
        ids = request.prompt_token_ids
        for part, segment in zip(parts, segments, strict=True):
            first = part.span.start // block_tokens
            stop = min(part.span.stop // block_tokens, len(hashes))
            if first < stop:
                tokens = array("I", ids[first * block_tokens : stop * block_tokens])
                self._note(request, segment, hashes[first:stop], tokens, hashes[first - 1] if first else None)
            if part.span.start:  # a prompt's first part is a prefix, and no chunk
                whole = len(part.token_ids) // block_tokens
                tokens = array("I", part.token_ids[: whole * block_tokens] or part.token_ids)
                self._note(request, part.id, [_block_hash(part.id, number) for number in range(max(1, whole))], tokens)
        self._publish_stored()

    def changed(self, ids: Iterable[_Id]) -> None:
        """Publish which of these are stored now, or no longer; blocks never before their parent."""
        come = False
        for key in ids:
            if key in self._published and not self._stored(key):
                self._remove(key)
            come |= key in self._waiting
        if come:
            self._publish_stored()

    def clear(self) -> None:
        """Publish that nothing is held any more."""
        for key in list(self._published):
            self._remove(key)
        self._waiting.clear()
        self._waiting_tokens = 0

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def _note(
        self, request: Any, key: _Id, hashes: Sequence[bytes], tokens: "array[int]", parent: bytes | None = None
    ) -> None:
        if key in self._published:
            return
        self._forget(key)
        self._waiting[key] = _Blocks(hashes, tokens, parent, request.lora_request, request.cache_salt)
        self._waiting_tokens += len(tokens)
        while self._waiting_tokens > _MOST_UNSTORED_TOKENS:
            self._forget(next(iter(self._waiting)))

    def _publish_stored(self) -> None:
        """Publish what is stored and has a published parent, until there is no more."""
        ready = [(key, blocks) for key, blocks in self._waiting.items() if self._stored(key)]
        while now := [(key, blocks) for key, blocks in ready if blocks.parent is None or blocks.parent in self._copies]:
            for key, blocks in now:
                self._forget(key)
                self._published[key] = blocks.hashes
                self._copies.update(blocks.hashes)
                self._events.append(blocks.event())
            ready = [(key, blocks) for key, blocks in ready if key in self._waiting]

    def _forget(self, key: _Id) -> None:
        if (blocks := self._waiting.pop(key, None)) is not None:
            self._waiting_tokens -= len(blocks.tokens)

    def _remove(self, key: _Id) -> None:
        hashes = self._published.pop(key)
        self._copies.subtract(hashes)
        gone = [block for block in hashes if not self._copies[block]]
        for block in gone:
            del self._copies[block]
        if gone:
            self._events.append(
                BlockRemoved(block_hashes=[maybe_convert_block_hash(block) for block in gone], medium=MEDIUM_CPU)
            )


def _block_hash(chunk: ChunkId, number: int) -> bytes:
    return hashlib.blake2b(f"{chunk}:{number}".encode(), digest_size=32).digest()
