"""What `/v1/cache` does over vLLM: chunks are computed as prompts of their own, and removed by commands."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.errors import QueueFullError
from chunkweave.types import Chunk
from chunkweave_server.backend import storable_parts
from chunkweave_server.errors import HttpError
from chunkweave_server.threads import TenantThreads, to_its_end
from chunkweave_server.vllm_backend.answer import TRIES, AnswerContext, compute_ahead
from chunkweave_server.vllm_backend.removal import EVERYTHING, FleetRemovals, Removal
from chunkweave_server.vllm_backend.upstream import UpstreamLostError

_POLL_S = 0.5


class VllmCache:
    """Belongs to the event loop's thread, but for what it hands to the tenants' threads."""

    pins = False

    def __init__(self, context: AnswerContext, removals: FleetRemovals, threads: TenantThreads, *, model: str) -> None:
        self._context = context
        self._removals = removals
        self._threads = threads
        self._model = model

    async def warm(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Have chunks computed, one after the other and each as a request of one token; returns how many.

        Each is sent, stored or not: only the plug-in knows what is. What is stored costs it a lookup. While as many
        requests wait as may, it waits too.
        """
        preparer, body = self._context.preparer, {"model": self._model, **({"cache_salt": salt} if salt else {})}
        for chunk in chunks:
            prepare = partial(preparer.prepare_beforehand, chunk, cache_salt=salt)
            prepared = await self._threads.run(tenant, prepare)
            assert prepared is not None, "a preparer without a store takes nothing for stored"
            await self._compute(prepared, body, tenant)
        return len(chunks)

    async def _compute(self, prepared: PreparedRequest, body: Mapping[str, Any], tenant: str) -> None:
        """Have a prompt computed, on another replica if one goes, and once there is room in the queues."""
        while True:
            try:
                await compute_ahead(self._context, prepared, body, tenant=tenant, tries=TRIES)
                return
            except QueueFullError:
                await asyncio.sleep(_POLL_S)
            except UpstreamLostError as error:
                message = "the vLLM server that computed this went away; its log says why"
                raise HttpError(502, message, code="replica_lost") from error

    async def pin(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:  # noqa: ARG002
        """Refused: vLLM's cache pins nothing."""
        raise HttpError(501, "this needs --backend engine: vLLM's cache pins nothing", code="needs_engine")

    unpin = pin

    async def forget(self, tenant: str, texts: Sequence[str], salt: str) -> int:
        """Have every replica remove chunks from its stores, and what vLLM's own prefix cache has of their salt."""
        preparer, chunks = self._context.preparer, [Chunk(text) for text in texts]
        parts = await storable_parts(preparer, self._threads, tenant, chunks, salt)
        if not parts:
            return 0
        tokens = tuple(dict.fromkeys(part.token_ids for part in parts))
        removal = Removal(salt, tokens, tuple(preparer.builder.tokenizer.start_ids))
        ids = frozenset(part.id for part in parts if part.id is not None)
        return await to_its_end(self._removals.remove(removal, ids))

    async def clear(self) -> int:
        """Remove everything of all tenants from all replicas; returns how many segments there were."""
        return await to_its_end(self._removals.remove(EVERYTHING))

    def stats(self) -> Mapping[str, Any]:
        """The replicas as the server sees them, and what their workers said last of what they evict first."""
        inbox = self._context.inbox
        return {
            "eviction": {} if inbox is None else dict(inbox.eviction),
            "replicas": [
                {
                    "name": one.name,
                    "up": one.up,
                    "running": one.running,
                    "waiting": len(one.queue),
                    "outstanding_tokens": one.outstanding_tokens,
                    "mirror_tokens": one.contents.tokens,
                    "mirror_budget_tokens": one.contents.budget_tokens,
                    "prompt_tokens": one.prompt_tokens,
                    "expected_tokens": one.expected_tokens,
                    "found_tokens": one.found_tokens,
                    "answered": one.served,
                }
                for one in self._context.fleet.replicas
            ],
        }
