"""What the plug-in says is stored of chunks, and what it need not store any more: asked before and after warming."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from chunkweave.planning.method_choice import FIELD
from chunkweave.prompt.parts import PromptPart
from chunkweave.types import ChunkId
from chunkweave.vllm.inventory import Inventory, inventory_params
from chunkweave.vllm.removal import removal_params
from chunkweave_server.errors import HttpError
from chunkweave_server.vllm_backend.fleet import Replica
from chunkweave_server.vllm_backend.removal import command_body, portions
from chunkweave_server.vllm_backend.upstream import UpstreamLostError

logger = logging.getLogger(__name__)

_ANSWER_S = 60.0
"""As long as a removal may take."""

Command = Callable[[Sequence[Sequence[int]]], Mapping[str, Any]]
"""A command about chunks, which are named by their tokens."""


@dataclass(frozen=True, slots=True)
class StoredChunks:
    """Chunks of which a replica stores a mean, and those from which it can weave contexts of means."""

    means: AbstractSet[ChunkId] = frozenset()
    contexts: AbstractSet[ChunkId] = frozenset()


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands about what a `model` has stored under a `salt`, of prompts that begin with `start`.

    One that is not answered costs time alone: it is logged, and taken for nothing stored.
    """

    model: str
    salt: str
    start: tuple[int, ...]

    async def stored(self, replica: Replica, parts: Sequence[PromptPart]) -> StoredChunks:
        """What a replica stores of chunks."""
        left, means, contexts = list(parts), set[ChunkId](), set[ChunkId]()
        async for count, report in self._answers(replica, parts, lambda chunks: inventory_params(chunks, self.start)):
            said, ids = Inventory.of(report), [part.id for part in left[:count]]
            for found, numbers in ((means, said.means), (contexts, said.contexts)):
                found.update(one for number in numbers if number < count and (one := ids[number]) is not None)
            left = left[count:]
        return StoredChunks(means, contexts)

    async def drop_first_passes(self, replica: Replica, parts: Sequence[PromptPart]) -> None:
        """Have a replica remove what contexts were woven from, of chunks that have a mean there or elsewhere."""

        def command(chunks: Sequence[Sequence[int]]) -> Mapping[str, Any]:
            return removal_params(chunks, self.start, first_passes=True)

        async for _ in self._answers(replica, parts, command):
            pass

    async def _answers(
        self, replica: Replica, parts: Iterable[PromptPart], command: Command
    ) -> AsyncIterator[tuple[int, Any]]:
        """How many of the chunks each command was about, and its answer."""
        for chunks in portions(part.token_ids for part in parts):
            body = command_body(self.model, self.salt, self.start, command(chunks))
            try:
                async with asyncio.timeout(_ANSWER_S):
                    answer = await replica.upstream.complete_whole(body)
            except (UpstreamLostError, TimeoutError, HttpError) as error:
                logger.warning("%s does not say what it stores: %s", replica.name, error)
                return
            params = answer.get("kv_transfer_params")
            yield len(chunks), params.get(FIELD) if isinstance(params, Mapping) else None
