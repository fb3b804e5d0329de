"""Idle-time work: computes means of chunks that have none or an outdated one.

A chunk of a request was computed in the context of that request. The mean over contexts of its nearest chunks, all of
the same cache salt, is closer to its KV in other prompts (docs/methods.md). The server knows chunks from answered
prompts and from calls that warm them.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

from chunkweave.conversation.answer import AnswerEnd
from chunkweave.conversation.prepare import PreparedRequest, RequestPreparer
from chunkweave.errors import ChunkweaveError, RequestAbortedError
from chunkweave.planning.method_choice import EXACT_METHODS
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.contexts import ContextPool, fitted
from chunkweave.prompt.parts import PartKind, PromptPart
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, Context
from chunkweave_server.errors import HttpError
from chunkweave_server.metrics import MetricSample
from chunkweave_server.settings import ImprovingSettings
from chunkweave_server.threads import TenantThreads

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 20
"""Most tokens of all known chunks; about 40 bytes each. Above it, the least recently requested are forgotten."""

LEAST_SHARED = 0.5
"""A mean is outdated if its contexts share less than this with the contexts that it would get now."""

_POOL_GROWTH = 0.1
"""A pool is rebuilt when the chunks changed since are more than this share of it."""

_COMPARED_AT_A_TIME = 16
"""Means whose contexts are compared in one piece of work."""

_LOOK_S = 0.1
"""Seconds between two checks whether a busy backend is idle."""

_MOST_TRIES = 3
"""A chunk is given up after this many computed means that no request found: the store has no room for them."""

_THREADS = 2


class MeanComputer(Protocol):
    """What `Improver` needs from a backend. Used in the event loop's thread only."""

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits, and no call warms chunks."""

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a prompt; None: the model's context length."""

    def stored(self, part: PromptPart) -> Sequence[Context] | None:
        """The contexts of a chunk's stored mean, empty if it has none; None if this is not known."""

    async def compute(self, prepared: PreparedRequest, tenant: str, place: str) -> tuple[str, float]:
        """Compute and store a prompt with lower priority than requests, at `place` if possible.

        Returns the actual place and the seconds.

        Raises:
            ChunkweaveError, HttpError: it was not computed.
        """

    async def settle(self, salt: str, parts: Sequence[PromptPart]) -> None:
        """Remove the first passes of `parts`, which have a mean. Called when no chunk of the salt is queued."""


@dataclass(slots=True, eq=False)
class KnownChunk:
    """A chunk at one `place` (a replica, or empty), with the number of requests for it there (`asked`).

    `mean`: the chunks in the contexts of its mean; None without a mean, empty if they are unknown. `outdated`: the mean
    is to be computed again. `failed`: skipped until the next request for it; permanently after several `tries` whose
    mean no request found. `compared`: the salt's number of changes when its contexts were last compared. `first_pass`:
    it was computed behind neutral passages.
    """

    part: PromptPart
    salt: str
    tenant: str
    place: str
    asked: int = 0
    mean: frozenset[ChunkId] | None = None
    outdated: bool = False
    failed: bool = False
    tries: int = 0
    first_pass: bool = False
    compared: int = -1

    @property
    def id(self) -> ChunkId:
        """The chunk's id."""
        assert self.part.id is not None, "a chunk has an id"
        return self.part.id


class KnownChunks:
    """The known chunks, by cache salt: chunks are contexts only of chunks of the same salt.

    Used in the event loop's thread; other threads may read the counts.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._tokens = 0
        self._chunks: OrderedDict[tuple[str, ChunkId], KnownChunk] = OrderedDict()
        self._salts: dict[str, Counter[ChunkId]] = {}
        self._changes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def queued(self) -> int:
        """Number of chunks whose mean is to be computed."""
        return sum(map(self.is_queued, tuple(self._chunks.values())))

    def is_queued(self, chunk: KnownChunk) -> bool:
        """Whether a chunk's mean is to be computed: it has none or an outdated one, and the salt has other chunks."""
        company = len(self._salts.get(chunk.salt, ())) > 1
        return company and not chunk.failed and (chunk.mean is None or chunk.outdated)

    def get(self, place: str, chunk: ChunkId | None) -> KnownChunk | None:
        """A chunk at a place; None if it is not known there."""
        return None if chunk is None else self._chunks.get((place, chunk))

    def at_all_places(self, chunks: Collection[ChunkId]) -> list[KnownChunk]:
        """The entries of `chunks` at all places; unknown chunks are skipped."""
        return [chunk for chunk in self._chunks.values() if chunk.id in chunks]

    def means(self, salt: str) -> dict[str, list[PromptPart]]:
        """The chunks of a salt with a mean, by place."""
        parts_at: dict[str, list[PromptPart]] = {}
        for chunk in self._chunks.values():
            if chunk.salt == salt and chunk.mean is not None:
                parts_at.setdefault(chunk.place, []).append(chunk.part)
        return parts_at

    def add(self, part: PromptPart, salt: str, tenant: str, place: str) -> KnownChunk:
        """Add a chunk and mark it as the most recently requested. Forgets the oldest above `most_tokens`."""
        assert part.id is not None, "a chunk has an id"
        key = place, part.id
        if key not in self._chunks:
            self._chunks[key] = KnownChunk(part, salt, tenant, place)
            self._tokens += len(part)
            counts = self._salts.setdefault(salt, Counter())
            self._changes[salt] += part.id not in counts
            counts[part.id] += 1
        self._chunks.move_to_end(key)
        known_chunk = self._chunks[key]
        while self._tokens > self._most_tokens and len(self._chunks) > 1:
            self._forget(next(iter(self._chunks.values())))
        return known_chunk

    def remove(self, chunks: Collection[ChunkId]) -> None:
        """Forget chunks, at all places."""
        for chunk in self.at_all_places(chunks):
            self._forget(chunk)

    def clear(self) -> None:
        """Forget all chunks."""
        for chunk in list(self._chunks.values()):
            self._forget(chunk)

    def forget_first_passes(self, salt: str) -> None:
        """Note that the first passes of a salt are removed."""
        for chunk in self._chunks.values():
            if chunk.salt == salt:
                chunk.first_pass = False

    def parts(self, salt: str) -> list[PromptPart]:
        """The chunks of a salt, each once."""
        return list({chunk.id: chunk.part for chunk in self._chunks.values() if chunk.salt == salt}.values())

    def has(self, salt: str, chunk: ChunkId | None) -> bool:
        """Whether a salt has a chunk."""
        return chunk in self._salts.get(salt, ())

    def changes(self, salt: str) -> int:
        """How many chunks were added to a salt or removed from it."""
        return self._changes[salt]

    def hottest(self) -> KnownChunk | None:
        """The chunk to compute next: chunks without a mean come first, then the most requested.

        Among equals, the least recently requested. None if no chunk is queued.
        """
        queued = (chunk for chunk in self._chunks.values() if self.is_queued(chunk))
        return max(queued, key=lambda chunk: (chunk.mean is None, chunk.asked), default=None)

    def to_compare(self) -> list[KnownChunk]:
        """The most requested means of one salt whose contexts may have changed since the last comparison."""
        changed = [
            chunk for chunk in self._chunks.values() if chunk.mean and chunk.compared != self._changes[chunk.salt]
        ]
        changed.sort(key=lambda chunk: -chunk.asked)
        return [chunk for chunk in changed if chunk.salt == changed[0].salt][:_COMPARED_AT_A_TIME]

    def _forget(self, chunk: KnownChunk) -> None:
        del self._chunks[chunk.place, chunk.id]
        self._tokens -= len(chunk.part)
        counts = self._salts[chunk.salt]
        counts[chunk.id] -= 1
        if counts[chunk.id]:
            return
        del counts[chunk.id]
        self._changes[chunk.salt] += 1
        if not counts:
            del self._salts[chunk.salt], self._changes[chunk.salt]


@dataclass(slots=True, eq=False)
class _Work:
    """The chunk whose mean is being computed, the chunks in its contexts, and the remaining `requests`.

    `shares` counts the contexts of the mean computed so far.
    """

    chunk: KnownChunk
    behind: frozenset[ChunkId]
    requests: Iterator[PreparedRequest]
    shares: int = 0

    @property
    def reads(self) -> frozenset[ChunkId]:
        return self.behind | {self.chunk.id}


class Improver:
    """Computes means of chunks while its backend is idle, the most requested first. Event loop's thread only.

    It computes one request at a time, and pauses for t (1 - share) / share after t seconds of work. With a share of 0
    it does nothing and tracks nothing.
    """

    def __init__(
        self,
        settings: ImprovingSettings,
        preparer: RequestPreparer,
        computer: MeanComputer,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        known: KnownChunks | None = None,
    ) -> None:
        self.improved = 0
        """Number of computed means."""
        self.spent_s = 0.0
        """Seconds of work so far."""
        self._share = 0.0 if preparer.rule is None else settings.improve_share
        self.on = self._share > 0
        """Whether the share is above 0 and contexts come from other chunks."""
        self._preparer = preparer
        self._computer = computer
        self._clock = clock
        self._sleep = sleep
        self._known = KnownChunks() if known is None else known
        self._changed = asyncio.Event()
        self._pool: tuple[str, int, ContextPool] | None = None
        self._work: _Work | None = None
        self._computing: asyncio.Task[tuple[str, float]] | None = None
        self._waited_s = 0.0
        self._threads: TenantThreads | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the background task, if it is on."""
        if self.on:
            self._threads = TenantThreads(_THREADS, behind=True)
            self._running = asyncio.create_task(self._run(), name="compute means")

    async def close(self) -> None:
        """Stop the background task and its running request. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await self._end_work()
        if self._threads is not None:
            self._threads.close()

    def served(self, tenant: str, salt: str, end: AnswerEnd) -> None:
        """Count the chunks of an answered request, and note which have a mean, as its report says.

        Requests with exact methods are ignored: they reuse no means.
        """
        if not self.on or end.prompt is None or end.report.method in EXACT_METHODS:
            return
        parts = {part.id: part for part in end.prompt.parts if part.kind is PartKind.CHUNK}
        for chunk in end.report.chunks:
            if chunk.rank is None or chunk.id not in parts:
                continue
            entry = self._known.add(parts[chunk.id], salt, tenant, str(end.shown.get("replica", "")))
            entry.asked += 1
            entry.tries = 0 if chunk.contexts else entry.tries
            entry.failed = entry.tries >= _MOST_TRIES
            if chunk.contexts:
                entry.mean = entry.mean or frozenset()
            elif chunk.kv_source == KVSource.COMPUTED or (chunk.kv_source == KVSource.REUSED and not chunk.reasons):
                # With `reasons` the method chose by score: it may have preferred a variant to the mean.
                entry.mean = None
        self._changed.set()

    def warmed(
        self,
        tenant: str,
        salt: str,
        parts: Iterable[PromptPart],
        means: Mapping[ChunkId, tuple[str, Iterable[Context]]],
    ) -> None:
        """Add chunks that a call has warmed. `means`: by chunk, the place of its stored mean and the contexts."""
        if not self.on:
            return
        for part in parts:
            assert part.id is not None, "a chunk has an id"
            place, contexts = means.get(part.id, ("", ()))
            chunk = self._known.add(part, salt, tenant, place)
            chunk.mean = self._read(salt, contexts) if part.id in means else None
        self._changed.set()

    async def removed(self, chunks: Collection[ChunkId]) -> None:
        """Forget chunks that will be removed; returns when no running work reads one of them."""
        self._known.remove(chunks)
        if self._work is not None and not self._work.reads.isdisjoint(chunks):
            await self._end_work()

    async def cleared(self) -> None:
        """Forget all chunks, before everything is removed; returns when no work is running."""
        self._known.clear()
        await self._end_work()

    def has_mean(self, tenant: str, salt: str, place: str, record: SegmentRecord) -> None:
        """Add the chunk of a stored mean, which may be from an earlier process."""
        if self.on and self._known.get(place, record.chunk_id) is None:
            part = PromptPart(PartKind.CHUNK, record.token_ids, record.chunk_id, record.source)
            self._known.add(part, salt, tenant, place).mean = self._read(salt, record.contexts)

    def means(self, salt: str) -> Mapping[str, Sequence[PromptPart]]:
        """The chunks of a salt with a mean, by place."""
        return self._known.means(salt)

    def queue(self, lost: Iterable[tuple[str, ChunkId]]) -> int | None:
        """Queue chunks, by place, whose means were removed because they had read removed chunks.

        Returns the number of queued chunks; None if idle-time work is off.
        """
        if not self.on:
            return None
        queued = set()
        for place, chunk in lost:
            entry = self._known.get(place, chunk)
            if entry is not None and not self._computer.stored(entry.part):
                entry.mean, entry.outdated, entry.failed, entry.tries = None, False, False, 0
                queued |= {chunk} if self._known.is_queued(entry) else set()
        self._changed.set()
        return len(queued)

    def samples(self) -> Iterator[MetricSample]:
        """Metrics of idle-time work. Called in a thread."""
        yield MetricSample(
            "improved_chunks", "Chunks whose mean was computed in idle time.", {"": self.improved}, counter=True
        )
        yield MetricSample(
            "improving_seconds", "Seconds of computing means in idle time.", {"": self.spent_s}, counter=True
        )
        yield MetricSample(
            "chunks_to_improve", "Chunks whose mean is to be computed in idle time.", {"": self._known.queued}
        )

    def stats(self) -> dict[str, Any]:
        """Statistics for admins; empty if it is off. Called in a thread."""
        if not self.on:
            return {}
        counts = {"queued": self._known.queued, "known": len(self._known), "improved": self.improved}
        return {"improving": {**counts, "spent_s": round(self.spent_s, 3)}}

    async def _run(self) -> None:
        while True:
            while not self._computer.idle:
                await self._sleep(_LOOK_S)
            self._changed.clear()
            since_s, self._waited_s = self._clock(), 0.0
            try:
                worked = await self._step()
            except RequestAbortedError:
                return  # the server stops
            spent_s = max(0.0, self._clock() - since_s - self._waited_s)
            if not worked:
                await self._changed.wait()
                continue
            self.spent_s += spent_s
            await self._sleep(spent_s * (1 - self._share) / self._share)

    async def _step(self) -> bool:
        """One piece of work; returns whether there was any."""
        try:
            if self._work is None:
                return await self._begin_work() or await self._compare()
            await self._continue_work(self._work)
        except RequestAbortedError:
            raise
        except (ChunkweaveError, HttpError) as error:
            self._fail(error)
        except Exception as error:  # answers are not affected
            logger.exception("the mean of a chunk could not be computed")
            self._fail(error)
        return True

    async def _begin_work(self) -> bool:
        """Choose a chunk and its contexts; returns whether there was one."""
        while (chunk := self._known.hottest()) is not None:
            stored = self._computer.stored(chunk.part)
            if stored and chunk.mean is None:
                chunk.mean = self._read(chunk.salt, stored)
                continue
            if stored is not None and not stored and chunk.mean is not None:
                chunk.mean, chunk.outdated = None, False
            try:
                contexts = (await self._contexts([chunk]))[0]
            except Exception:
                chunk.failed = True
                raise
            if not self._known.is_queued(chunk) or self._known.get(chunk.place, chunk.id) is not chunk:
                continue  # removed during the await
            behind = _ids(contexts)
            if not all(self._known.has(chunk.salt, behind_id) for behind_id in behind):
                continue
            anew = chunk.mean is not None
            requests = self._preparer.beforehand(
                chunk.part, contexts, cache_salt=chunk.salt, most_tokens=self._computer.most_tokens, anew=anew
            )
            self._work = _Work(chunk, behind, requests)
            return True
        if self._pool is not None:
            salt, self._pool = self._pool[0], None
            self._known.forget_first_passes(salt)
            with_mean = {part.id: part for parts in self._known.means(salt).values() for part in parts}
            if with_mean:
                await self._computer.settle(salt, list(with_mean.values()))
        return False

    async def _continue_work(self, work: _Work) -> None:
        """Compute the next request of a chunk, or finish the chunk."""
        chunk = work.chunk
        threads = self._threads
        assert threads is not None, "it has started"
        prepared = await threads.run(chunk.tenant, partial(next, work.requests, None))
        if self._work is not work:
            return
        if prepared is None:
            self._work = None
            self._done(work)
            return
        first = self._known.get(chunk.place, prepared.prompt.parts[-1].id) if prepared.mean is None else None
        if first is not None and self._serves(first):
            return
        since_s = self._clock()
        place = chunk.place
        self._computing = asyncio.ensure_future(self._computer.compute(prepared, chunk.tenant, place))
        try:
            await asyncio.wait([self._computing])
        except asyncio.CancelledError:
            self._computing.cancel()
            raise
        if self._computing.cancelled():
            return
        computed_at, seconds = self._computing.result()
        self._waited_s = self._clock() - since_s - seconds
        if prepared.mean is not None:
            work.shares += 1
            if computed_at != place:  # contexts computed at two places make no mean
                chunk.failed, self._work = True, None
        elif first is not None:
            first.first_pass = True

    def _serves(self, chunk: KnownChunk) -> bool:
        """Whether a chunk needs no first pass. Only for backends that do not know what is stored."""
        return self._computer.stored(chunk.part) is None and (chunk.first_pass or chunk.mean is not None)

    def _done(self, work: _Work) -> None:
        chunk = work.chunk
        stored = self._computer.stored(work.chunk.part)
        chunk.outdated = False
        chunk.tries += 1
        if stored is not None and not stored:
            chunk.mean, chunk.failed = None, True  # the store had no room for the mean
            return
        chunk.mean = work.behind if stored is None else self._read(chunk.salt, stored)
        chunk.compared = self._known.changes(chunk.salt)
        self.improved += bool(work.shares)

    def _fail(self, error: Exception) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.chunk.failed, work.chunk.outdated = True, False
            logger.warning("the mean of a chunk could not be computed: %s", error)

    async def _end_work(self) -> None:
        """Give up the chunk that is being computed; returns when its running request has ended."""
        computing, self._work = self._computing, None
        if computing is not None and not computing.done():
            computing.cancel()
            await asyncio.wait([computing])

    async def _compare(self) -> bool:
        """Check a few means for outdated contexts; returns whether there were any to check."""
        chunks = self._known.to_compare()
        if not chunks:
            return False
        for chunk in chunks:
            chunk.compared = self._known.changes(chunk.salt)
        for chunk, contexts in zip(chunks, await self._contexts(chunks), strict=True):
            now = _ids(contexts)
            shared = len(now & (chunk.mean or frozenset())) / max(1, len(now), len(chunk.mean or ()))
            chunk.outdated = bool(chunk.mean) and shared < LEAST_SHARED
        return True

    async def _contexts(self, chunks: Sequence[KnownChunk]) -> list[list[tuple[PromptPart, ...]]]:
        """The contexts that chunks of one salt would get now."""
        salt = chunks[0].salt
        tenant = chunks[0].tenant
        threads = self._threads
        rule = self._preparer.rule
        assert threads is not None, "it has started"
        assert rule is not None, "it is on"
        changes = self._known.changes(salt)
        held = self._pool
        grown = held is None or held[0] != salt or changes - held[1] > _POOL_GROWTH * len(held[2])
        if held is None or grown or any(chunk.id not in held[2] for chunk in chunks):
            held = salt, changes, await threads.run(tenant, partial(ContextPool, self._known.parts(salt)))
            self._pool = held
        pool = held[2]
        gone = {part.id for part in pool.parts if part.id is not None and not self._known.has(salt, part.id)}

        opening = self._preparer.builder.opening(cache_salt=salt)
        most = self._computer.most_tokens or self._preparer.context_tokens

        def contexts() -> list[list[tuple[PromptPart, ...]]]:
            with_contexts = [(chunk.part, pool.contexts(chunk.part, rule, without=gone)) for chunk in chunks]
            return [fitted(part, behind, opening=opening, most_tokens=most) for part, behind in with_contexts]

        return await threads.run(tenant, contexts)

    def _read(self, salt: str, contexts: Iterable[Context]) -> frozenset[ChunkId]:
        """The chunks in contexts, without START and instruction."""
        opening = {part.id for part in self._preparer.builder.opening(cache_salt=salt)}
        return frozenset(chain.from_iterable(contexts)) - opening


def _ids(contexts: Iterable[Iterable[PromptPart]]) -> frozenset[ChunkId]:
    return frozenset(part.id for context in contexts for part in context if part.id is not None)
