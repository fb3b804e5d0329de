"""Removing KV from every replica: by commands to the plug-in, and before a replica that missed one answers again."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chunkweave.errors import NotRemovedError, UsageError
from chunkweave.planning.method_choice import FIELD
from chunkweave.types import ChunkId
from chunkweave.vllm.removal import Removed, removal_params
from chunkweave_server.errors import HttpError
from chunkweave_server.metrics import MetricSample
from chunkweave_server.vllm_backend.fleet import Fleet, Replica
from chunkweave_server.vllm_backend.removal_journal import EVERYTHING, Removal, RemovalJournal
from chunkweave_server.vllm_backend.upstream import UpstreamLostError

logger = logging.getLogger(__name__)

_COMMAND_TOKENS = 1 << 15
"""Tokens of the chunks in one command: vLLM's scheduler hashes them between two steps."""


@dataclass(frozen=True, slots=True)
class RemovalTimes:
    """How long a replica may take for a command, and after which pause one that was lost is asked again."""

    answer_s: float = 60.0
    pause_s: float = 1.0


class FleetRemovals:
    """Sends removals to all replicas; one that has not confirmed all gets no requests. Belongs to one event loop.

    What watches the servers reports here, not to the fleet: a server that answers is `up` there once nothing is pending
    for it.
    """

    def __init__(
        self,
        fleet: Fleet,
        journal: RemovalJournal,
        key_of: Callable[[Replica], str],
        times: RemovalTimes | None = None,
    ) -> None:
        """`key_of` names a replica in the journal."""
        self._fleet = fleet
        self._journal = journal
        self._key_of = key_of
        self._times = times or RemovalTimes()
        self._answering: set[str] = set()
        self._catching_up: dict[str, asyncio.Task[None]] = {}
        self._turns = {replica.name: asyncio.Lock() for replica in fleet.replicas}

    def up(self, server: str) -> None:
        """A server answers: it gets requests at once, or when it has removed what is pending."""
        self._answering.add(server)
        if all(replica.up for replica in self._of(server)):
            return
        if not self._pending_at(server):
            self._fleet.up(server)
        elif server not in self._catching_up:
            self._catching_up[server] = asyncio.create_task(self._catch_up(server), name=f"removals at {server}")

    def down(self, server: str) -> None:
        """A server answers no more."""
        self._answering.discard(server)
        if (task := self._catching_up.pop(server, None)) is not None:
            task.cancel()
        self._fleet.down(server)

    def samples(self) -> Iterator[MetricSample]:
        """What is pending, by replica."""
        pending = {one.name: float(len(self._journal.pending(self._key_of(one)))) for one in self._fleet.replicas}
        meaning = "Removals that it has to confirm before it gets requests."
        yield MetricSample("replica_removals_pending", meaning, pending, "replica")

    async def close(self) -> None:
        """Stop asking; what is pending stays noted."""
        tasks = list(self._catching_up.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def remove(self, removal: Removal, ids: Collection[ChunkId] = ()) -> int:
        """Remove from all replicas what they store, and their guesses here of it (`ids`; none for everything).

        Returns how many copies of segments there were.

        Raises:
            NotRemovedError: a replica did not answer, or has copies yet. Those that could have removed theirs.
        """
        replicas = self._fleet.replicas
        noted = await self._journal.add([self._key_of(one) for one in replicas], removal)
        answers = await asyncio.gather(*(self._remove_at(one, removal, ids) for one in replicas))
        confirmed = {
            key: {noted[key]}
            for key, answer in zip(map(self._key_of, replicas), answers, strict=True)
            if answer is not None
        }
        if confirmed:
            await self._journal.done(confirmed)
        silent = [one.name for one, answer in zip(replicas, answers, strict=True) if answer is None]
        total = sum((answer for answer in answers if answer is not None), Removed())
        if total.left or total.unasked or silent:
            lasting = total.lasting and (self._journal.lasting or not silent)
            raise NotRemovedError(total.removed, total.left, total.unasked, silent=silent, lasting=lasting)
        return total.removed

    async def _remove_at(self, replica: Replica, removal: Removal, ids: Collection[ChunkId]) -> Removed | None:
        """A replica's answer; None if it is down, or was lost and is now."""
        if not replica.up:
            return None
        try:
            removed = await self._send(replica, removal)
        except (UpstreamLostError, TimeoutError) as error:
            server = replica.upstream.server
            logger.warning("%s has not confirmed a removal and gets no requests until it has: %s", replica.name, error)
            self._fleet.down(server)
            if server in self._answering:
                self.up(server)
            return None
        if removal == EVERYTHING:
            replica.contents.clear()
        else:
            replica.contents.forget(list(ids))
        return removed

    async def _catch_up(self, server: str) -> None:
        """Have a server remove what is pending, then let it have requests."""
        while self._pending_at(server):
            try:
                for replica in self._of(server):
                    await self._catch_up_at(replica)
            except (UpstreamLostError, TimeoutError) as error:
                logger.warning("%s has not confirmed a removal yet: %s", server, error)
                await asyncio.sleep(self._times.pause_s)
            except Exception:  # or the server would get no request any more
                logger.exception("a removal at %s failed, and is tried again", server)
                await asyncio.sleep(self._times.pause_s)
        del self._catching_up[server]
        self._fleet.up(server)

    async def _catch_up_at(self, replica: Replica) -> None:
        key = self._key_of(replica)
        while pending := self._journal.pending(key):
            number, removal = next(iter(pending.items()))
            removed = await self._send(replica, removal)
            if removed.left or removed.unasked:
                logger.error("%s could not remove everything that was pending: %s", replica.name, removed.report)
            await self._journal.done({key: pending.keys() if removal == EVERYTHING else {number}})

    async def _send(self, replica: Replica, removal: Removal) -> Removed:
        """What a replica says of a removal, for the model and each adapter that it serves.

        Raises:
            UpstreamLostError, TimeoutError: it did not answer.
        """
        total = Removed()
        if await replica.upstream.hides_ranks():
            logger.error("%s has several data-parallel ranks: give --data-parallel-size here too", replica.name)
            total = Removed(unasked=(f"other ranks of {replica.name}",))
        models = await replica.upstream.model_names()
        for model in models[:1] if removal == EVERYTHING else models:
            try:
                for chunks in _portions(removal):
                    total += await self._command(replica, model, removal, chunks)
            except (HttpError, UsageError) as error:  # it answers, but without the plug-in, or this adapter's files
                logger.error("%s removes nothing of %s: %s", replica.name, model, error)
                total += Removed(unasked=(replica.name,))
        return total

    async def _command(
        self, replica: Replica, model: str, removal: Removal, chunks: Sequence[Sequence[int]] | None
    ) -> Removed:
        body = {
            "model": model,
            "prompt": [*removal.start[:1]] or [0],
            "max_tokens": 1,
            "temperature": 0,
            **({"cache_salt": removal.salt} if removal.salt else {}),
            "kv_transfer_params": {FIELD: removal_params(chunks, removal.start)},
        }
        async with self._turns[replica.name], asyncio.timeout(self._times.answer_s):  # waiting for a turn is no silence
            answer = await replica.upstream.complete_whole(body)
        params = answer.get("kv_transfer_params")
        return Removed.of(params.get(FIELD) if isinstance(params, Mapping) else None)

    def _pending_at(self, server: str) -> bool:
        return any(self._journal.pending(self._key_of(replica)) for replica in self._of(server))

    def _of(self, server: str) -> list[Replica]:
        return [replica for replica in self._fleet.replicas if replica.upstream.server == server]


def _portions(removal: Removal) -> Iterator[Sequence[Sequence[int]] | None]:
    """Chunks of one command each; None for everything."""
    if removal.chunks is None:
        yield None
        return
    portion: list[Sequence[int]] = []
    tokens = 0
    for chunk in removal.chunks:
        if portion and tokens + len(chunk) > _COMMAND_TOKENS:
            yield portion
            portion, tokens = [], 0
        portion.append(chunk)
        tokens += len(chunk)
    if portion:
        yield portion
