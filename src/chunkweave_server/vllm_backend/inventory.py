"""Commands to the plug-in before and after warming: list stored means, and remove first passes."""

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
"""Seconds; the same as for a removal."""

Command = Callable[[Sequence[Sequence[int]]], Mapping[str, Any]]
"""Makes a command about chunks, given by their token ids."""


@dataclass(frozen=True, slots=True)
class StoredChunks:
    """Chunks with a mean on a replica, and chunks from which it can weave contexts of means."""

    means: AbstractSet[ChunkId] = frozenset()
    contexts: AbstractSet[ChunkId] = frozenset()


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands about segments of a `model` under a `salt`, of prompts that begin with the token ids `start`.

    A command that fails is logged and counts as nothing stored: this costs only time.
    """

    model: str
    salt: str
    start: tuple[int, ...]

    async def stored(self, replica: Replica, parts: Sequence[PromptPart]) -> StoredChunks:
        """What a replica stores of these chunks."""
        remaining = list(parts)
        means = set[ChunkId]()
        contexts = set[ChunkId]()
        async for count, report in self._answers(replica, parts, lambda chunks: inventory_params(chunks, self.start)):
            inventory = Inventory.of(report)
            ids = [part.id for part in remaining[:count]]
            for found, numbers in ((means, inventory.means), (contexts, inventory.contexts)):
                found.update(chunk for number in numbers if number < count and (chunk := ids[number]) is not None)
            remaining = remaining[count:]
        return StoredChunks(means, contexts)

    async def drop_first_passes(self, replica: Replica, parts: Sequence[PromptPart]) -> None:
        """Remove first passes from a replica, of chunks that have a mean on any replica."""

        def command(chunks: Sequence[Sequence[int]]) -> Mapping[str, Any]:
            return removal_params(chunks, self.start, first_passes=True)

        async for _ in self._answers(replica, parts, command):
            pass

    async def _answers(
        self, replica: Replica, parts: Iterable[PromptPart], command: Command
    ) -> AsyncIterator[tuple[int, Any]]:
        """For each command: its number of chunks, and its answer."""
        for chunks in portions(part.token_ids for part in parts):
            body = command_body(self.model, self.salt, self.start, command(chunks))
            try:
                async with asyncio.timeout(_ANSWER_S):
                    answer = await replica.upstream.complete_whole(body)
            except (UpstreamLostError, TimeoutError, HttpError) as error:
                logger.warning("%s did not answer a command about stored chunks: %s", replica.name, error)
                return
            params = answer.get("kv_transfer_params")
            yield len(chunks), params.get(FIELD) if isinstance(params, Mapping) else None
