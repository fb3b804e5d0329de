"""Removes KV from every replica by commands to the plug-in. A replica that missed one gets it before any request.

Removals that a replica has not confirmed are kept; with a `data_dir` also across restarts of this server.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chunkweave.errors import NotRemovedError, UsageError
from chunkweave.planning.method_choice import FIELD
from chunkweave.store.shared_folder import replace_file, sync_folder
from chunkweave.types import ChunkId
from chunkweave.vllm.removal import Removed, removal_params
from chunkweave_server.errors import HttpError
from chunkweave_server.metrics import MetricSample
from chunkweave_server.threads import in_thread
from chunkweave_server.vllm_backend.fleet import Fleet, Replica
from chunkweave_server.vllm_backend.upstream import UpstreamLostError

logger = logging.getLogger(__name__)

JOURNAL_FILE = "removals.json"
_FORMAT = 1
MOST_TOKENS = 1 << 20
"""Most tokens of chunks in the pending removals of a replica (some megabytes); more become `EVERYTHING`."""

_MOST_ENTRIES = 4096
"""Most pending removals of a replica; more become `EVERYTHING`."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Chunks to remove, by token ids, that were stored under one cache salt; `chunks` None: everything of all salts.

    `start` are the token ids at the beginning of the prompts that they were computed in.
    """

    salt: str = ""
    chunks: tuple[tuple[int, ...], ...] | None = None
    start: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of its chunks."""
        return sum(map(len, self.chunks or ()))


EVERYTHING = Removal()


class RemovalJournal:
    """Pending removals by key of the replica. Used in one event loop only.

    They are stored in `<folder>/removals.json`, which is replaced atomically; without a folder only in memory. The file
    has token ids and no text. If it cannot be read, all replicas must remove everything.
    """

    def __init__(self, folder: Path | None, keys: Collection[str], *, most_tokens: int = MOST_TOKENS) -> None:
        """Reads the removals pending from earlier runs. `keys` are those of the current replicas."""
        self._path = None if folder is None else folder / JOURNAL_FILE
        self._most_tokens = most_tokens
        self._writing = asyncio.Lock()
        self._numbers = itertools.count()
        self._pending: dict[str, dict[int, Removal]] = {}
        self.lasting = self._path is not None
        """Whether pending removals survive this process."""
        if self._path is not None:
            try:
                self._pending = {key: self._numbered(removals) for key, removals in _read(self._path).items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.error("%s cannot be read (%s): all replicas remove everything", self._path, error)
                self._pending = {key: self._numbered([EVERYTHING]) for key in keys}

    def pending(self, key: str) -> Mapping[int, Removal]:
        """The pending removals of a replica by number, `EVERYTHING` first; a copy."""
        removals = self._pending.get(key, {})
        return dict(sorted(removals.items(), key=lambda numbered: numbered[1] != EVERYTHING))

    async def add(self, keys: Collection[str], removal: Removal) -> dict[str, int]:
        """Store a removal for these replicas, before any of them is asked; returns its number by key.

        Each entry has its own number, so that confirming one removal does not delete another equal one.
        """
        noted = {key: self._note(key, removal) for key in keys}
        await self._write()
        return noted

    async def done(self, confirmed: Mapping[str, Collection[int]]) -> None:
        """Delete confirmed removals, by key and number; unknown numbers are ignored."""
        for key, numbers in confirmed.items():
            remaining = {
                number: removal for number, removal in self._pending.get(key, {}).items() if number not in numbers
            }
            self._pending[key] = remaining
            if not remaining:
                del self._pending[key]
        await self._write()

    def _note(self, key: str, removal: Removal) -> int:
        pending_removals = self._pending.setdefault(key, {})
        tokens = sum(pending.tokens for pending in {*pending_removals.values(), removal})
        if len(pending_removals) >= _MOST_ENTRIES:
            pending_removals.clear()
            removal = EVERYTHING
        number = next(self._numbers)
        pending_removals[number] = removal if tokens <= self._most_tokens else EVERYTHING
        return number

    def _numbered(self, removals: Iterable[Removal]) -> dict[int, Removal]:
        return {next(self._numbers): removal for removal in removals}

    async def _write(self) -> None:
        if self._path is None:
            return
        path = self._path
        async with self._writing:
            pending = {key: list(dict.fromkeys(notes.values())) for key, notes in self._pending.items()}
            try:
                await in_thread(lambda: _replace(path, pending))
                self.lasting = True
            except OSError as error:
                logger.error("pending removals cannot be written to %s: %s", path, error)
                self.lasting = False


def _read(path: Path) -> dict[str, list[Removal]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']!r}")
    return {str(key): [_removal(fields) for fields in removals] for key, removals in data["pending"].items()}


def _removal(fields: Mapping[str, Any]) -> Removal:
    chunks = fields["chunks"]
    of_chunks = None if chunks is None else tuple(tuple(map(int, ids)) for ids in chunks)
    return Removal(str(fields["salt"]), of_chunks, tuple(map(int, fields["start"])))


def _replace(path: Path, pending: Mapping[str, Collection[Removal]]) -> None:
    """Replace the file atomically; delete it if nothing is pending.

    Raises:
        OSError: the file cannot be written.
    """
    if not pending:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = {key: [asdict(removal) for removal in removals] for key, removals in pending.items()}
    replace_file(path, json.dumps({"format": _FORMAT, "pending": data}), 0o600)
    sync_folder(path.parent)


_COMMAND_TOKENS = 1 << 15
"""Most tokens of chunks in one command: vLLM's scheduler hashes them between two steps."""


@dataclass(frozen=True, slots=True)
class RemovalTimes:
    """Seconds that a replica may take for a command, and the pause before a lost one is asked again."""

    answer_s: float = 60.0
    pause_s: float = 1.0


class FleetRemovals:
    """Sends removals to all replicas; a replica gets no requests until it has confirmed all. For one event loop.

    The watchers of servers report here instead of to the fleet: a server is `up` in the fleet only when it has nothing
    pending.
    """

    def __init__(
        self,
        fleet: Fleet,
        journal: RemovalJournal,
        key_of: Callable[[Replica], str],
        times: RemovalTimes | None = None,
    ) -> None:
        """`key_of` returns the journal's key of a replica."""
        self._fleet = fleet
        self._journal = journal
        self._key_of = key_of
        self._times = times or RemovalTimes()
        self._answering: set[str] = set()
        self._catching_up: dict[str, asyncio.Task[None]] = {}
        self._turns = {replica.name: asyncio.Lock() for replica in fleet.replicas}

    def answers(self, server: str, up: bool) -> None:
        """Note that a server is up or down."""
        (self.up if up else self.down)(server)

    def up(self, server: str) -> None:
        """Note that a server is up. It gets requests when it has no pending removals."""
        self._answering.add(server)
        if all(replica.up for replica in self._of(server)):
            return
        if not self._pending_at(server):
            self._fleet.up(server)
        elif server not in self._catching_up:
            self._catching_up[server] = asyncio.create_task(self._catch_up(server), name=f"removals at {server}")

    def down(self, server: str) -> None:
        """Note that a server is down."""
        self._answering.discard(server)
        if (task := self._catching_up.pop(server, None)) is not None:
            task.cancel()
        self._fleet.down(server)

    def samples(self) -> Iterator[MetricSample]:
        """Metrics: pending removals by replica."""
        pending = {
            replica.name: float(len(self._journal.pending(self._key_of(replica)))) for replica in self._fleet.replicas
        }
        meaning = "Removals that the replica must confirm before it gets requests."
        yield MetricSample("replica_removals_pending", meaning, pending, "replica")

    async def close(self) -> None:
        """Stop sending; pending removals stay in the journal."""
        tasks = list(self._catching_up.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def remove(self, removal: Removal, ids: Collection[ChunkId] = ()) -> int:
        """Remove segments from all replicas, and `ids` (for `EVERYTHING`: all) from what is assumed to be there.

        Returns the number of removed copies.

        Raises:
            NotRemovedError: a replica did not answer or still has copies; the others have removed theirs.
        """
        replicas = self._fleet.replicas
        noted = await self._journal.add([self._key_of(replica) for replica in replicas], removal)
        answers = await asyncio.gather(*(self._remove_at(replica, removal, ids) for replica in replicas))
        confirmed = {
            key: {noted[key]}
            for key, answer in zip(map(self._key_of, replicas), answers, strict=True)
            if answer is not None
        }
        if confirmed:
            await self._journal.done(confirmed)
        silent = [replica.name for replica, answer in zip(replicas, answers, strict=True) if answer is None]
        total = sum((answer for answer in answers if answer is not None), Removed())
        if total.left or total.unasked or silent:
            lasting = total.lasting and (self._journal.lasting or not silent)
            raise NotRemovedError(total.removed, total.left, total.unasked, silent=silent, lasting=lasting)
        return total.removed

    async def _remove_at(self, replica: Replica, removal: Removal, ids: Collection[ChunkId]) -> Removed | None:
        """A replica's answer; None if it is down, or goes down because it did not answer."""
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
        self._fleet.forget(replica, None if removal == EVERYTHING else ids)
        return removed

    async def _catch_up(self, server: str) -> None:
        """Send a server its pending removals, then mark it as up."""
        while self._pending_at(server):
            try:
                for replica in self._of(server):
                    await self._catch_up_at(replica)
            except (UpstreamLostError, TimeoutError) as error:
                logger.warning("%s has not confirmed a removal yet: %s", server, error)
                await asyncio.sleep(self._times.pause_s)
            except Exception:  # otherwise the server would never get requests again
                logger.exception("a removal at %s failed and will be retried", server)
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
        """Send a removal to a replica, for its model and each adapter; returns the sum of its answers.

        Raises:
            UpstreamLostError, TimeoutError: the replica did not answer.
        """
        total = Removed()
        if await replica.upstream.hides_ranks():
            logger.error("%s has several data-parallel ranks: give --data-parallel-size here too", replica.name)
            total = Removed(unasked=(f"other ranks of {replica.name}",))
        models = await replica.upstream.model_names()
        for model in models[:1] if removal == EVERYTHING else models:
            try:
                for chunks in [None] if removal.chunks is None else portions(removal.chunks):
                    total += await self._command(replica, model, removal, chunks)
            except (HttpError, UsageError) as error:  # it answers, but has no plug-in, or not this adapter's files
                logger.error("%s removes nothing of %s: %s", replica.name, model, error)
                total += Removed(unasked=(replica.name,))
        return total

    async def _command(
        self, replica: Replica, model: str, removal: Removal, chunks: Sequence[Sequence[int]] | None
    ) -> Removed:
        body = command_body(model, removal.salt, removal.start, removal_params(chunks, removal.start))
        async with (
            self._turns[replica.name],
            asyncio.timeout(self._times.answer_s),
        ):  # the time limit excludes waiting for the lock
            answer = await replica.upstream.complete_whole(body)
        params = answer.get("kv_transfer_params")
        return Removed.of(params.get(FIELD) if isinstance(params, Mapping) else None)

    def _pending_at(self, server: str) -> bool:
        return any(self._journal.pending(self._key_of(replica)) for replica in self._of(server))

    def _of(self, server: str) -> list[Replica]:
        return [replica for replica in self._fleet.replicas if replica.upstream.server == server]


def command_body(model: str, salt: str, start: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a command to the plug-in: a request of one token, about segments of a salt."""
    return {
        "model": model,
        "prompt": [*start[:1]] or [0],
        "max_tokens": 1,
        "temperature": 0,
        **({"cache_salt": salt} if salt else {}),
        "kv_transfer_params": {FIELD: params},
    }


def portions(chunks: Iterable[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Split chunks into lists of at most `_COMMAND_TOKENS` tokens, one for each command."""
    portion: list[Sequence[int]] = []
    tokens = 0
    for chunk in chunks:
        if portion and tokens + len(chunk) > _COMMAND_TOKENS:
            yield portion
            portion = []
            tokens = 0
        portion.append(chunk)
        tokens += len(chunk)
    if portion:
        yield portion
