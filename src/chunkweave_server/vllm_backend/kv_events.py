"""KV events of vLLM servers: what the plug-in in them announces to hold (`chunkweave.vllm.kv_events`).

So several of these servers, in front of the same vLLM servers, know what each other's requests stored.
"""

import asyncio
import hashlib
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

from chunkweave.errors import UsageError
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import Prompt
from chunkweave.scheduling.routing import ReplicaContents
from chunkweave.types import ChunkId

logger = logging.getLogger(__name__)

_MEDIUM = "CPU"
"""That of the plug-in's events. vLLM's own blocks have another one, and the plug-in is its only connector."""

_NUMBER_BYTES = 8
_END = -1
"""In place of a batch's number: the end of a replay."""

_LARGEST_BATCH_BYTES = 64 << 20
_REPLAY_S = 10.0

_Key = bytes
"""Digest of a cache salt and of all tokens from the first block of a chain to the end of one block."""


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """ZeroMQ endpoints of a vLLM server: of its events, and of its last ones, for late subscribers."""

    events: str
    replay: str | None = None

    @classmethod
    def parse(cls, given: str) -> Self:
        """Read `ENDPOINT[,REPLAY]`.

        Raises:
            UsageError: something else.
        """
        endpoints = given.split(",")
        if len(endpoints) > 2 or not all("://" in one for one in endpoints):
            usage = "ENDPOINT or ENDPOINT,REPLAY, such as tcp://host:5557,tcp://host:5558"
            raise UsageError(f"upstream events must be {usage}, not {given!r}")
        return cls(*endpoints)

    def of_rank(self, rank: int) -> Self:
        """Those of a data-parallel rank, as vLLM numbers them: the port plus the rank."""
        return type(self)(_of_rank(self.events, rank), self.replay and _of_rank(self.replay, rank))


def event_endpoints(given: Sequence[str]) -> list[EventEndpoints]:
    """The endpoints of each upstream.

    Raises:
        UsageError: one cannot be read, or what reads events is not installed.
    """
    endpoints = list(map(EventEndpoints.parse, given))
    if missing := [name for name in ("msgspec", "zmq") if endpoints and find_spec(name) is None]:
        raise UsageError(f"upstream_events needs {', '.join(missing)}: pip install 'chunkweave[events]'")
    return endpoints


def _of_rank(endpoint: str, rank: int) -> str:
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if rank and port.isdecimal() else endpoint


class AnnouncedBlocks:
    """The blocks that one replica announced, oldest first. Belongs to one thread."""

    def __init__(self, contents: ReplicaContents, most_tokens: int) -> None:
        """`contents` are the replica's assumed ones. Of more than `most_tokens` tokens, the oldest are dropped."""
        self.next_batch = 0
        """Number of the batch that is expected next."""
        self._contents = contents
        self._most_tokens = most_tokens
        self._tokens = 0
        self._block_tokens = 0
        """Tokens of a block; only a chunk shorter than that is announced with fewer."""
        self._blocks: OrderedDict[Any, tuple[_Key, int]] = OrderedDict()
        self._copies: Counter[_Key] = Counter()
        self._noted: dict[_Key, ChunkId] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget everything: the replica was restarted, or events were lost."""
        self.next_batch = self._tokens = 0
        for held in (self._blocks, self._copies, self._noted):
            held.clear()

    def apply(self, number: int, events: Sequence[Any]) -> None:
        """Apply the batch of this number; vLLM's own events and unknown ones have no effect."""
        self.next_batch = number + 1
        for event in events:
            if not isinstance(event, Mapping) or event.get("medium") != _MEDIUM:
                continue
            if event["type"] == "BlockStored":
                self._add(event)
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    self._drop(block)

    def note_in_contents(self, prompt: Prompt, salt: str, *, weaves: bool) -> None:
        """Add to the replica's assumed contents what it announced of a prompt that it may get."""
        if not self._blocks:
            return
        exact = self._exact_parts(prompt, salt)
        path: list[ChunkId] = []
        found: list[KVSource | None] = []
        for number, part in enumerate(prompt.parts):
            if part.id is None:
                continue
            path.append(part.id)
            key = self._chunk_key(part.token_ids, salt) if weaves and number >= exact else None
            if key is not None:
                self._noted[key] = part.id
            found.append(KVSource.EXACT if number < exact else None if key is None else KVSource.REUSED)
        sizes = [len(part) for part in prompt.parts if part.id is not None]
        self._contents.correct(path, sizes, found, weaves=weaves)

    def _exact_parts(self, prompt: Prompt, salt: str) -> int:
        """Number of leading parts whose blocks are announced; one without an end of a block counts with the next."""
        tokens = [token for part in prompt.parts for token in part.token_ids]
        size, stop, exact = self._block_tokens, 0, 0
        for key in _keys(_root(salt), tokens, size):
            if key not in self._copies:
                break
            stop += size
        for number, (part, span) in enumerate(zip(prompt.parts, prompt.spans(), strict=True)):
            if part.id is None:
                break
            if span.start < span.stop - span.stop % size <= stop:
                exact = number + 1
        return exact

    def _chunk_key(self, tokens: Sequence[int], salt: str) -> _Key | None:
        """The key of a chunk's last block if all of them are announced, else None."""
        keys = list(_keys(_root(salt), tokens, min(self._block_tokens, len(tokens))))
        return keys[-1] if all(key in self._copies for key in keys) else None

    def _add(self, event: Mapping[str, Any]) -> None:
        parent, size = event["parent_block_hash"], int(event["block_size"])
        if parent is not None and parent not in self._blocks:
            return
        before = _root(_salt_of(event)) if parent is None else self._blocks[parent][0]
        keys = list(_keys(before, event["token_ids"], size))
        self._block_tokens = max(self._block_tokens, size)
        for block, key in zip(event["block_hashes"], keys, strict=True):
            self._drop(block)
            self._blocks[block] = key, size
            self._copies[key] += 1
            self._tokens += size
        while self._tokens > self._most_tokens:
            self._drop(next(iter(self._blocks)))

    def _drop(self, block: Any) -> None:
        if block not in self._blocks:
            return
        key, size = self._blocks.pop(block)
        self._tokens -= size
        self._copies[key] -= 1
        if not self._copies[key]:
            del self._copies[key]
            if (noted := self._noted.pop(key, None)) is not None:
                self._contents.forget([noted])


def _root(salt: str) -> _Key:
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def _keys(before: _Key, tokens: Sequence[int], size: int) -> Iterator[_Key]:
    """The key of each whole block of `size` tokens in a chain that begins with `before`.

    Raises:
        ValueError: a size below 1.
    """
    for stop in range(size, len(tokens) + 1, size):
        before = hashlib.blake2b(before + array("I", tokens[stop - size : stop]).tobytes(), digest_size=16).digest()
        yield before


def _salt_of(event: Mapping[str, Any]) -> str:
    """The cache salt in an event; before it, the keys of a first block name the adapter, if any."""
    first = (event.get("extra_keys") or [None])[0] or ()
    rest = first[1:] if event["lora_name"] else first
    return str(rest[0]) if rest else ""


class EventSubscriber:
    """Follows one replica's events in the running event loop, until it is closed."""

    def __init__(self, endpoints: EventEndpoints, announced: AnnouncedBlocks, replica: str) -> None:
        """`replica` is its name, for the log.

        Raises:
            UsageError: no endpoint of ZeroMQ.
        """
        import msgspec
        import zmq.asyncio

        self._announced = announced
        self._replica = replica
        self._replay_endpoint = endpoints.replay
        self._decode = msgspec.msgpack.decode
        self._zmq = zmq
        self._context = zmq.asyncio.Context.instance()
        self._socket = self._connected(zmq.SUB, endpoints.events)
        self._socket.set(zmq.SUBSCRIBE, b"")
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop following."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(linger=0)

    def _connected(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.set(self._zmq.MAXMSGSIZE, _LARGEST_BATCH_BYTES)
        try:
            socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            socket.close(linger=0)
            raise UsageError(f"upstream events at {endpoint}: {error}") from error
        return socket

    async def _follow(self) -> None:
        announced = self._announced
        await self._replay()
        while True:
            number, batch = _frames(await self._socket.recv_multipart())
            if number > announced.next_batch:
                await self._replay()
            if number > announced.next_batch > 0:
                logger.warning("%s: KV events were lost, what it announced is forgotten", self._replica)
                announced.clear()
            if number >= announced.next_batch:  # others were replayed
                self._apply(number, batch)

    async def _replay(self) -> None:
        """Get the batches from the expected one on, as far as vLLM has kept them."""
        if self._replay_endpoint is None:
            return
        first = self._announced.next_batch
        socket = self._connected(self._zmq.DEALER, self._replay_endpoint)
        try:
            async with asyncio.timeout(_REPLAY_S):
                await socket.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])
                while (found := _frames(await socket.recv_multipart()))[0] != _END:
                    number, batch = found
                    if number > self._announced.next_batch > 0:
                        return
                    self._apply(number, batch)
        except TimeoutError:
            logger.warning("%s: no replay of KV events within %.3g s", self._replica, _REPLAY_S)
        finally:
            socket.close(linger=0)

    def _apply(self, number: int, batch: bytes) -> None:
        try:
            self._announced.apply(number, self._decode(batch)[1])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s: KV events that are not understood: %s", self._replica, error)
            self._announced.clear()
            self._announced.next_batch = number + 1


def _frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Number and content of a batch; a message of another form is an empty batch of number -1."""
    if len(frames) < 3:
        return -1, b""
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]
