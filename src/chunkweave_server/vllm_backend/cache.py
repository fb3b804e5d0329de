"""What `/v1/cache` does over vLLM: chunks are computed as prompts of their own, and removed by commands."""

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
    """Belongs to the event loop's thread, but for what it hands to the tenants' threads."""

    pins = False

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
        """Have chunks computed, one after the other and each as requests of one token; returns how many.

        Those that have a mean somewhere are left out; what contexts are woven from is sent once to each replica, and
        removed there at the end. Chunks that need none are sent, stored or not: what is stored costs a lookup. While as
        many requests wait as may, it waits too.
        """
        preparer, computed = self._context.preparer, 0
        pool = await context_pool(preparer, self._threads, tenant, chunks, salt)
        with self._warmings.begun() as gone:
            warming = _Warming(self._context, tenant, self._body(salt), self._commands(salt))
            if pool is not None:
                await warming.look(pool)
            try:
                for chunk in chunks:
                    begin = partial(preparer.prepare_beforehand, chunk, pool=pool, without=gone, cache_salt=salt)
                    found, before = False, -1
                    while before != len(gone):  # begun anew without what was removed meanwhile
                        before = len(gone)
                        warming.removed(gone)
                        work = await self._threads.run(tenant, partial(_all_of, begin))
                        found = await warming.compute(work, gone) or found
                    computed += found
            finally:
                means = {chunk: mean for chunk, mean in warming.means.items() if chunk not in gone}
                parts = [part for part in (() if pool is None else pool.parts) if part.id in means]
                self.improving.warmed(tenant, salt, parts, means)
        if pool is not None:
            await warming.settle(pool)
        return computed

    @property
    def idle(self) -> bool:
        """Whether a vLLM server is up, and no request runs or waits, as far as this server sees."""
        fleet, shadow = self._context.fleet, self._context.shadow
        handed = any(replica.handed_through for replica in fleet.replicas)
        checking = shadow is not None and shadow.busy
        return fleet.ready and not (fleet.running or fleet.waiting or handed or checking or self._warmings)

    @property
    def most_tokens(self) -> int | None:
        """As many as the model's context."""
        return None

    def stored(self, part: PromptPart) -> Sequence[Context] | None:  # noqa: ARG002
        """Only the plug-in knows."""
        return None

    def keeps(self, part: PromptPart) -> bool:  # noqa: ARG002
        """Nothing is pinned."""
        return False

    async def compute(self, prepared: PreparedRequest, tenant: str, place: str) -> tuple[str, float]:
        """Have it computed, by the replica of that name if it is up; returns which one did, and the seconds."""
        replica = next((one for one in self._context.fleet.replicas if one.name == place), None)
        since_s = time.perf_counter()
        body = self._body(prepared.request.cache_salt)
        placed = await compute_ahead(self._context, prepared, body, tenant=tenant, at=replica)
        return placed.replica.name, time.perf_counter() - since_s

    async def settle(self, salt: str, parts: Sequence[PromptPart]) -> None:
        """Have what contexts were woven from removed everywhere."""
        commands, up = self._commands(salt), [one for one in self._context.fleet.replicas if one.up]
        await asyncio.gather(*(commands.drop_first_passes(replica, parts) for replica in up))

    async def _lost_means(self, salt: str) -> list[tuple[str, ChunkId]]:
        """The means that there were, by replica, and that are removed: with what they had read, and what these had."""
        commands, lost = self._commands(salt), list[tuple[str, ChunkId]]()
        means = self.improving.means(salt)
        for replica in self._context.fleet.replicas:
            if parts := means.get(replica.name):
                left = await commands.stored(replica, parts)
                lost += [(replica.name, part.id) for part in parts if part.id is not None and part.id not in left.means]
        return lost

    def _commands(self, salt: str) -> Commands:
        return Commands(self._model, salt, tuple(self._context.preparer.builder.tokenizer.start_ids))

    def _body(self, salt: str) -> dict[str, Any]:
        """The fields of vLLM's that say whose a request is."""
        return {"model": self._model, **({"cache_salt": salt} if salt else {})}

    async def pin(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:  # noqa: ARG002
        """Refused: vLLM's cache pins nothing."""
        raise HttpError(501, "this needs --backend engine: vLLM's cache pins nothing", code="needs_engine")

    unpin = pin

    async def forget(self, tenant: str, texts: Sequence[str], salt: str) -> Forgotten:
        """Have every replica remove chunks from its stores, and what vLLM's own prefix cache has of their salt."""
        preparer, chunks = self._context.preparer, [Chunk(text) for text in texts]
        parts = await storable_parts(preparer, self._threads, tenant, chunks, salt)
        if not parts:
            return Forgotten()
        tokens = tuple(dict.fromkeys(part.token_ids for part in parts))
        removal = Removal(salt, tokens, tuple(preparer.builder.tokenizer.start_ids))
        ids = frozenset(part.id for part in parts if part.id is not None)
        self._warmings.removed(ids)
        await self.improving.removed(ids)
        try:
            removed = await to_its_end(self._removals.remove(removal, ids))
        finally:
            queued = self.improving.queue(await self._lost_means(salt))
        return Forgotten(removed, queued)

    async def clear(self) -> int:
        """Remove everything of all tenants from all replicas; returns how many segments there were."""
        await self.improving.cleared()
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
            **self.improving.stats(),
        }


class _Warming:
    """One call that has chunks computed. Belongs to the event loop's thread."""

    def __init__(self, context: AnswerContext, tenant: str, body: Mapping[str, Any], commands: Commands) -> None:
        """`body` has vLLM's fields that say whose it is."""
        self._context, self._tenant, self._body, self._commands = context, tenant, body, commands
        self._sent: set[tuple[str, ChunkId | None]] = set()
        """By replica, chunks that contexts can be woven from there."""
        self._woven_at: set[str] = set()
        self._tokens: Counter[str] = Counter()
        """By replica, of the chunks whose mean it was to compute."""
        self.means: dict[ChunkId, tuple[str, list[Context]]] = {}
        """Of which chunks a mean is stored, where, and over which contexts; none if that is not known."""

    async def look(self, pool: ContextPool) -> set[ChunkId]:
        """Ask all replicas what they store; returns which chunks have a mean somewhere."""
        up, with_mean = [replica for replica in self._context.fleet.replicas if replica.up], set[ChunkId]()
        found = await asyncio.gather(*(self._commands.stored(replica, pool.parts) for replica in up))
        for replica, stored in zip(up, found, strict=True):
            with_mean |= stored.means
            self.means |= {chunk: (replica.name, []) for chunk in stored.means - self.means.keys()}
            self._sent |= {(replica.name, chunk) for chunk in stored.contexts}
        return with_mean

    def removed(self, gone: AbstractSet[ChunkId]) -> None:
        """Means that have read what is gone are removed."""
        self.means = {
            chunk: mean for chunk, mean in self.means.items() if all(gone.isdisjoint(context) for context in mean[1])
        }

    async def settle(self, pool: ContextPool) -> None:
        """Have what contexts were woven from removed where it was sent, of the chunks that have a mean now."""
        if not self._woven_at:
            return
        with_mean = await self.look(pool)
        parts = [part for part in pool.parts if part.id in with_mean]
        at = [replica for replica in self._context.fleet.replicas if replica.up and replica.name in self._woven_at]
        await asyncio.gather(*(self._commands.drop_first_passes(replica, parts) for replica in at))

    async def compute(self, work: Sequence[PreparedRequest], gone: AbstractSet[ChunkId]) -> bool:
        """Have one chunk computed by one replica, where its mean comes together; if that goes, by another one.

        Nothing more of it once one of its contexts is `gone`: without that there is no mean. Returns whether it was
        computed now.
        """
        if not work or work[-1].prompt.parts[-1].id in self.means:
            return False
        failed: Replica | None = None
        tries = TRIES
        while True:
            try:
                replica = self._replica_for(work[-1], failed)
                await self._look_for_contexts(replica, work)
                for one in work:
                    if reads(one.prompt, gone):
                        return False
                    await self._compute_at(replica, one)
                contexts = [one.prompt.contexts()[-1] for one in work if one.mean is not None]
                if contexts and (chunk := work[-1].prompt.parts[-1].id) is not None:
                    self.means[chunk] = replica.name, contexts
                return True
            except UpstreamLostError as error:
                tries -= 1
                if not tries:
                    message = "the vLLM server that computed this went away; its log says why"
                    raise HttpError(502, message, code="replica_lost") from error
                failed = replica

    async def _look_for_contexts(self, replica: Replica, work: Sequence[PreparedRequest]) -> None:
        """Ask which of the chunks that have a mean need no first pass there: contexts may be woven from the mean."""
        firsts = (one.prompt.parts[-1] for one in work if one.mean is None)
        asked = [part for part in firsts if part.id in self.means and (replica.name, part.id) not in self._sent]
        if asked:
            stored = await self._commands.stored(replica, asked)
            self._sent |= {(replica.name, chunk) for chunk in stored.contexts}

    def _replica_for(self, one: PreparedRequest, failed: Replica | None) -> Replica:
        """Where a chunk is computed: a mean where the fewest tokens of means were, so that they are spread.

        By what replicas hold they would all follow their contexts to one of them.
        """
        fleet = self._context.fleet
        up = [each for each in fleet.replicas if each.up]
        if one.mean is None or not up:
            return fleet.suited(one, avoid=failed)
        replica = min(up, key=lambda each: (each is failed, self._tokens[each.name], each.outstanding_tokens))
        self._tokens[replica.name] += len(one.prompt.parts[-1])
        return replica

    async def _compute_at(self, replica: Replica, one: PreparedRequest) -> None:
        """Have one request computed, once there is room in the queue.

        Raises:
            UpstreamLostError: the replica went away.
        """
        first_pass = replica.name, one.prompt.parts[-1].id
        if one.mean is None and first_pass in self._sent:
            return
        while True:
            try:
                placed = await compute_ahead(self._context, one, self._body, tenant=self._tenant, at=replica)
                break
            except QueueFullError:
                await asyncio.sleep(_POLL_S)
        if placed.replica is not replica:
            raise UpstreamLostError(f"{replica.name} is gone")
        if one.mean is None:
            self._sent.add(first_pass)
            self._woven_at.add(replica.name)


def _all_of(begin: Callable[[], Iterator[PreparedRequest]]) -> list[PreparedRequest]:
    return list(begin())
