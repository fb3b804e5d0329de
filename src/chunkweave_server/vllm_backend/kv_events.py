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
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave.scheduling.routing import NOTHING, Announced

logger = logging.getLogger(__name__)

_MEDIUM = "CPU"
"""That of the plug-in's events. vLLM's own blocks have another one, and the plug-in is its only connector."""

_NUMBER_BYTES = 8
_END = -1
"""In place of a batch's number: the end of a replay."""

_LARGEST_BATCH_BYTES = 16 << 20
_LEAST_BLOCK_TOKENS = 8
_REPLAY_S = 10.0
_PAUSE_S = 1.0

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
        raise UsageError(f"upstream_events needs {', '.join(missing)}: pip install msgspec pyzmq")
    return endpoints


def _of_rank(endpoint: str, rank: int) -> str:
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if rank and port.isdecimal() else endpoint


@dataclass(frozen=True, slots=True)
class _Block:
    key: _Key
    tokens: int
    parent: Any


class AnnouncedBlocks:
    """The blocks that one replica announced; those of an adapter count for the model's other requests, too.

    Belongs to one thread.
    """

    def __init__(self, most_tokens: int) -> None:
        """Of more than `most_tokens` tokens the oldest are dropped, the end of a chain before its beginning."""
        self.next_batch = 0
        """Number of the batch that is expected next."""
        self._most_tokens = most_tokens
        self._tokens = 0
        self._block_tokens = 0
        """Tokens of a block; only a chunk shorter than that is announced with fewer."""
        self._blocks: OrderedDict[Any, _Block] = OrderedDict()
        self._copies: Counter[_Key] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget everything: the replica was restarted, or events were lost."""
        self.next_batch = self._tokens = self._block_tokens = 0
        self._blocks.clear()
        self._copies.clear()

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

    def of(self, prompt: Prompt, salt: str, *, weaves: bool) -> Announced:
        """What was announced of a prompt that the replica may get; chunks only if it `weaves`."""
        if not self._blocks:
            return NOTHING
        exact = self._exact_parts(prompt, salt)
        stored = [part for part in prompt.parts if part.id is not None][exact:] if weaves else ()
        return Announced(exact, {part.id for part in stored if part.id and self._holds(part.token_ids, salt)})

    def _exact_parts(self, prompt: Prompt, salt: str) -> int:
        """Number of leading parts with an id whose blocks are announced; one in which no block ends counts with the
        next.
        """
        tokens = [token for part in prompt.parts for token in part.token_ids]
        size, stop, number, exact = self._block_tokens, 0, 0, 0
        for key in _keys(_root(salt), tokens, size):
            if key not in self._copies:
                break
            stop += size
        for part, span in zip(prompt.parts, prompt.spans(), strict=True):
            if part.id is None:
                if part.kind is PartKind.START:
                    continue
                break
            number += 1
            if span.start < span.stop - span.stop % size <= stop:
                exact = number
        return exact

    def _holds(self, tokens: Sequence[int], salt: str) -> bool:
        """Whether all whole blocks of a chunk are announced."""
        return all(key in self._copies for key in _keys(_root(salt), tokens, min(self._block_tokens, len(tokens))))

    def _add(self, event: Mapping[str, Any]) -> None:
        parent, size, blocks = event["parent_block_hash"], int(event["block_size"]), event["block_hashes"]
        if parent is not None and parent not in self._blocks:
            return
        if len(event["token_ids"]) > self._most_tokens or (size < _LEAST_BLOCK_TOKENS and len(blocks) > 1):
            raise ValueError(f"an event with {len(event['token_ids'])} tokens in {len(blocks)} blocks")
        before = _root(_salt_of(event)) if parent is None else self._blocks[parent].key
        above = parent
        for block, key in zip(blocks, list(_keys(before, event["token_ids"], size)), strict=True):
            self._drop(block)
            self._blocks[block] = _Block(key, size, parent)
            self._copies[key] += 1
            self._tokens += size
            self._block_tokens, parent = max(self._block_tokens, size), block
        for block in reversed(blocks):
            self._blocks.move_to_end(block)
        while above in self._blocks:
            self._blocks.move_to_end(above)
            above = self._blocks[above].parent
        while self._tokens > self._most_tokens:
            self._drop(next(iter(self._blocks)))

    def _drop(self, block: Any) -> None:
        if (dropped := self._blocks.pop(block, None)) is None:
            return
        self._tokens -= dropped.tokens
        self._copies[dropped.key] -= 1
        if not self._copies[dropped.key]:
            del self._copies[dropped.key]


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
        self._latest = -1
        """Number of the latest batch that was not replayed."""
        if endpoints.replay is not None:  # so that a wrong one is refused now
            self._connected(zmq.DEALER, endpoints.replay).close(linger=0)
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
        socket.set(self._zmq.RCVHWM, 0)  # else a replay is cut off without a word
        try:
            socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            socket.close(linger=0)
            raise UsageError(f"upstream events at {endpoint}: {error}") from error
        return socket

    async def _follow(self) -> None:
        step = self._replay
        while True:
            try:
                await step()
                step = self._next
            except Exception:  # routing by what was announced is a gain, and no request depends on it
                logger.exception("%s: KV events cannot be followed, what it announced is forgotten", self._replica)
                self._announced.clear()
                await asyncio.sleep(_PAUSE_S)

    async def _next(self) -> None:
        """Wait for a batch and apply it, behind those that are missing."""
        announced = self._announced
        number, batch = _frames(await self._socket.recv_multipart())
        if number < 0:
            return
        if number <= self._latest:
            logger.info("%s starts its KV events anew", self._replica)
            announced.clear()
        self._latest = number
        if number > announced.next_batch:
            await self._replay()
        if number > announced.next_batch > 0:
            logger.warning("%s: KV events were lost, what it announced is forgotten", self._replica)
            announced.clear()
        if number >= announced.next_batch:  # others were replayed
            await self._apply(number, batch)

    async def _replay(self) -> None:
        """Get the batches from the expected one on, as far as vLLM has kept them; again while some are left out."""
        announced, first = self._announced, -1
        while self._replay_endpoint is not None and first < announced.next_batch:
            first = announced.next_batch
            socket = self._connected(self._zmq.DEALER, self._replay_endpoint)
            try:
                async with asyncio.timeout(_REPLAY_S):
                    await socket.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])
                    if await self._replayed(socket):
                        return
            except TimeoutError:
                logger.warning("%s: no whole replay of KV events within %.3g s", self._replica, _REPLAY_S)
            finally:
                socket.close(linger=0)

    async def _replayed(self, socket: Any) -> bool:
        """Apply the batches of one replay, up to one that is left out; returns whether none was."""
        announced, begun = self._announced, False
        whole = True
        while (found := _frames(await socket.recv_multipart()))[0] != _END:
            number, batch = found
            if number > announced.next_batch and begun:
                whole = False
            elif number > announced.next_batch > 0:  # vLLM has not kept what is between
                announced.clear()
            if number >= announced.next_batch and whole:
                await self._apply(number, batch)
            begun = True
        return whole

    async def _apply(self, number: int, batch: bytes) -> None:
        try:
            self._announced.apply(number, self._decode(batch)[1])
        except Exception as error:  # noqa: BLE001  (whatever a foreign sender may send)
            logger.warning("%s: KV events that are not understood: %r", self._replica, error)
            self._announced.clear()
            self._announced.next_batch = number + 1
        await asyncio.sleep(0)  # a socket with messages does not let others run


def _frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Number and content of a batch; a message of another form is an empty batch of number -1."""
    if len(frames) < 3:
        return -1, b""
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]
