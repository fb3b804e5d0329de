"""The commands of `/v1/cache` on vLLM: chunks are computed as separate prompts, and removed by commands."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.errors import QueueFullError
from chunkweave.prompt.contexts import ContextPool
from chunkweave.prompt.parts import PromptPart
from chunkweave.types import Chunk, ChunkId, Context
from chunkweave_server.backend import Forgotten, Warmings, context_pool, reads, storable_parts
from chunkweave_server.errors import HttpError
from chunkweave_server.improving import Improver
from chunkweave_server.settings import ImprovingSettings
from chunkweave_server.threads import TenantThreads, to_its_end
from chunkweave_server.vllm_backend.answer import TRIES, AnswerContext, compute_ahead
from chunkweave_server.vllm_backend.fleet import Replica
from chunkweave_server.vllm_backend.inventory import Commands
from chunkweave_server.vllm_backend.removal import EVERYTHING, FleetRemovals, Removal
from chunkweave_server.vllm_backend.upstream import UpstreamLostError

_POLL_S = 0.5


class VllmCache:
    """`CacheCommands` on a fleet. Used in the event loop's thread only, except for work in the tenants' threads."""

    def __init__(
        self,
        context: AnswerContext,
        removals: FleetRemovals,
        threads: TenantThreads,
        settings: ImprovingSettings,
        *,
        model: str,
    ) -> None:
        self.improving = Improver(settings, context.preparer, self)
        self._context = context
        self._removals = removals
        self._threads = threads
        self._model = model
        self._warmings = Warmings()

    async def warm(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Compute chunks one by one, each by requests of one token; returns how many were computed.

        Chunks with a mean on any replica are skipped. First passes are computed once on each replica that needs them,
        and removed at the end. Chunks that get no mean are always sent: for a stored one vLLM only looks it up. While
        the queue is full, this call waits.
        """
        preparer = self._context.preparer
        computed = 0
        pool = await context_pool(preparer, self._threads, tenant, chunks, salt)
        with self._warmings.begun() as gone:
            warming = _Warming(self._context, tenant, self._body(salt), self._commands(salt))
            if pool is not None:
                await warming.look(pool)
            try:
                for chunk in chunks:
                    begin = partial(preparer.prepare_beforehand, chunk, pool=pool, without=gone, cache_salt=salt)
                    computed_any, removed_count = False, -1
                    while removed_count != len(gone):  # starts again without chunks removed meanwhile
                        removed_count = len(gone)
                        warming.removed(gone)
                        work = await self._threads.run(tenant, partial(_all_of, begin))
                        computed_any = await warming.compute(work, gone) or computed_any
                    computed += computed_any
            finally:
                means = {chunk: mean for chunk, mean in warming.means.items() if chunk not in gone}
                parts = [part for part in (() if pool is None else pool.parts) if part.id in means]
                self.improving.warmed(tenant, salt, parts, means)
        if pool is not None:
            await warming.settle(pool)
        return computed

    @property
    def idle(self) -> bool:
        """Whether a vLLM server is up and no request runs or waits in this server."""
        fleet = self._context.fleet
        comparisons = self._context.comparisons
        handed = any(replica.handed_through for replica in fleet.replicas)
        comparing = comparisons is not None and comparisons.pending > 0
        return fleet.ready and not (fleet.running or fleet.waiting or handed or comparing or self._warmings)

    @property
    def most_tokens(self) -> int | None:
        """None: the model's context length."""
        return None

    def stored(self, part: PromptPart) -> Sequence[Context] | None:  # noqa: ARG002
        """None: only the plug-in knows."""
        return None

    async def compute(self, prepared: PreparedRequest, tenant: str, place: str) -> tuple[str, float]:
        """Compute a prompt on the replica named `place` if it is up; returns the replica's name and the seconds."""
        replica = next((replica for replica in self._context.fleet.replicas if replica.name == place), None)
        since_s = time.perf_counter()
        body = self._body(prepared.request.cache_salt)
        replica = await compute_ahead(self._context, prepared, body, tenant=tenant, at=replica)
        return replica.name, time.perf_counter() - since_s

    async def settle(self, salt: str, parts: Sequence[PromptPart]) -> None:
        """Remove first passes from all replicas that are up."""
        commands = self._commands(salt)
        up = [replica for replica in self._context.fleet.replicas if replica.up]
        await asyncio.gather(*(commands.drop_first_passes(replica, parts) for replica in up))

    async def _lost_means(self, salt: str) -> list[tuple[str, ChunkId]]:
        """The known means, by replica, that are no longer stored: removed with the chunks that they had read."""
        commands = self._commands(salt)
        lost = list[tuple[str, ChunkId]]()
        means = self.improving.means(salt)
        for replica in self._context.fleet.replicas:
            if parts := means.get(replica.name):
                stored = await commands.stored(replica, parts)
                lost += [
                    (replica.name, part.id) for part in parts if part.id is not None and part.id not in stored.means
                ]
        return lost

    def _commands(self, salt: str) -> Commands:
        return Commands(self._model, salt, tuple(self._context.preparer.builder.tokenizer.start_ids))

    def _body(self, salt: str) -> dict[str, Any]:
        """The fields `model` and `cache_salt` for vLLM."""
        return {"model": self._model, **({"cache_salt": salt} if salt else {})}

    async def forget(self, tenant: str, texts: Sequence[str], salt: str) -> Forgotten:
        """Remove chunks from the stores of every replica, and their salt's blocks from vLLM's own prefix cache."""
        preparer = self._context.preparer
        chunks = [Chunk(text) for text in texts]
        parts = await storable_parts(preparer, self._threads, tenant, chunks, salt)
        if not parts:
            return Forgotten()
        tokens = tuple(dict.fromkeys(part.token_ids for part in parts))
        removal = Removal(salt, tokens, tuple(preparer.builder.tokenizer.start_ids))
        ids = frozenset(part.id for part in parts if part.id is not None)
        self._warmings.removed(ids)
        await self.improving.removed(ids)
        await self._drop_comparisons()
        try:
            removed = await to_its_end(self._removals.remove(removal, ids))
        finally:
            queued = self.improving.queue(await self._lost_means(salt))
        return Forgotten(removed, queued)

    async def clear(self) -> int:
        """Remove everything of all tenants from all replicas; returns the number of removed segments."""
        await self.improving.cleared()
        await self._drop_comparisons()
        return await to_its_end(self._removals.remove(EVERYTHING))

    def stats(self) -> Mapping[str, Any]:
        """Statistics of the replicas, the last reported order of eviction in their workers, and why some are off."""
        inbox = self._context.inbox
        comparisons = self._context.comparisons
        return {
            "eviction": {} if inbox is None else dict(inbox.eviction),
            "off": {} if inbox is None else dict(inbox.off),
            "replicas": [
                {
                    "name": replica.name,
                    "up": replica.up,
                    "running": replica.running,
                    "waiting": len(replica.queue),
                    "outstanding_tokens": replica.outstanding_tokens,
                    "sent_tokens": replica.sent.tokens,
                    "answered": replica.served,
                }
                for replica in self._context.fleet.replicas
            ],
            **self.improving.stats(),
            **(
                {}
                if comparisons is None
                else {"learned": {**comparisons.evidence.shown(), "pending": comparisons.pending}}
            ),
        }

    async def _drop_comparisons(self) -> None:
        if self._context.comparisons is not None:
            await self._context.comparisons.drop_all()


class _Warming:
    """State of one call that warms chunks. Used in the event loop's thread only."""

    def __init__(self, context: AnswerContext, tenant: str, body: Mapping[str, Any], commands: Commands) -> None:
        """`body` has the fields `model` and `cache_salt` for vLLM."""
        self._context, self._tenant, self._body, self._commands = context, tenant, body, commands
        self._sent: set[tuple[str, ChunkId | None]] = set()
        """Replica and chunk, for chunks that contexts can be woven from there."""
        self._woven_at: set[str] = set()
        self._tokens: Counter[str] = Counter()
        """By replica, tokens of the chunks whose mean was assigned to it."""
        self.means: dict[ChunkId, tuple[str, list[Context]]] = {}
        """By chunk with a mean: its replica and the mean's contexts, empty if they are not known."""

    async def look(self, pool: ContextPool) -> set[ChunkId]:
        """Ask all replicas what they store; returns the chunks with a mean on any of them."""
        up = [replica for replica in self._context.fleet.replicas if replica.up]
        with_mean = set[ChunkId]()
        stored_at = await asyncio.gather(*(self._commands.stored(replica, pool.parts) for replica in up))
        for replica, stored in zip(up, stored_at, strict=True):
            with_mean |= stored.means
            self.means |= {chunk: (replica.name, []) for chunk in stored.means - self.means.keys()}
            self._sent |= {(replica.name, chunk) for chunk in stored.contexts}
        return with_mean

    def removed(self, gone: AbstractSet[ChunkId]) -> None:
        """Forget means that have read removed chunks."""
        self.means = {
            chunk: mean for chunk, mean in self.means.items() if all(gone.isdisjoint(context) for context in mean[1])
        }

    async def settle(self, pool: ContextPool) -> None:
        """Remove the first passes that this call computed, of chunks that have a mean now."""
        if not self._woven_at:
            return
        with_mean = await self.look(pool)
        parts = [part for part in pool.parts if part.id in with_mean]
        at = [replica for replica in self._context.fleet.replicas if replica.up and replica.name in self._woven_at]
        await asyncio.gather(*(self._commands.drop_first_passes(replica, parts) for replica in at))

    async def compute(self, work: Sequence[PreparedRequest], gone: AbstractSet[ChunkId]) -> bool:
        """Compute one chunk on one replica, since a mean must be at one place; on another one if that is lost.

        Stops if one of its contexts is `gone`, because the mean needs all contexts. Returns whether it was computed.

        Raises:
            HttpError: 502, two replicas were lost.
        """
        if not work or work[-1].prompt.parts[-1].id in self.means:
            return False
        failed: Replica | None = None
        tries = TRIES
        while True:
            try:
                replica = self._replica_for(work[-1], failed)
                await self._look_for_contexts(replica, work)
                for prepared in work:
                    if reads(prepared.prompt, gone):
                        return False
                    await self._compute_at(replica, prepared)
                contexts = [prepared.prompt.contexts()[-1] for prepared in work if prepared.mean is not None]
                if contexts and (chunk := work[-1].prompt.parts[-1].id) is not None:
                    self.means[chunk] = replica.name, contexts
                return True
            except UpstreamLostError as error:
                tries -= 1
                if not tries:
                    message = "the vLLM server that computed this is gone; see its log"
                    raise HttpError(502, message, code="replica_lost") from error
                failed = replica

    async def _look_for_contexts(self, replica: Replica, work: Sequence[PreparedRequest]) -> None:
        """Ask which chunks with a mean need no first pass on this replica: contexts can be woven from the mean."""
        firsts = (prepared.prompt.parts[-1] for prepared in work if prepared.mean is None)
        parts = [part for part in firsts if part.id in self.means and (replica.name, part.id) not in self._sent]
        if parts:
            stored = await self._commands.stored(replica, parts)
            self._sent |= {(replica.name, chunk) for chunk in stored.contexts}

    def _replica_for(self, prepared: PreparedRequest, failed: Replica | None) -> Replica:
        """The replica for a chunk; for a mean the one with the fewest tokens of means so far, to spread them.

        Chosen by cached tokens, all means would go to the replica of their contexts.
        """
        fleet = self._context.fleet
        up = [each for each in fleet.replicas if each.up]
        if prepared.mean is None or not up:
            return fleet.suited(prepared, avoid=failed)
        replica = min(up, key=lambda each: (each is failed, self._tokens[each.name], each.outstanding_tokens))
        self._tokens[replica.name] += len(prepared.prompt.parts[-1])
        return replica

    async def _compute_at(self, replica: Replica, prepared: PreparedRequest) -> None:
        """Compute one request on a replica; waits while the queue is full.

        Raises:
            UpstreamLostError: the replica was lost.
        """
        first_pass = replica.name, prepared.prompt.parts[-1].id
        if prepared.mean is None and first_pass in self._sent:
            return
        while True:
            try:
                used = await compute_ahead(self._context, prepared, self._body, tenant=self._tenant, at=replica)
                break
            except QueueFullError:
                await asyncio.sleep(_POLL_S)
        if used is not replica:
            raise UpstreamLostError(f"{replica.name} is gone")
        if prepared.mean is None:
            self._sent.add(first_pass)
            self._woven_at.add(replica.name)


def _all_of(begin: Callable[[], Iterator[PreparedRequest]]) -> list[PreparedRequest]:
    return list(begin())
