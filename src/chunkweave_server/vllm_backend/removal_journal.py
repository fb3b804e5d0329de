"""Removals that a replica has not confirmed: kept until it has, beyond the end of this server too."""

import asyncio
import itertools
import json
import logging
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chunkweave.store.shared_folder import sync_folder
from chunkweave_server.threads import in_thread

logger = logging.getLogger(__name__)

JOURNAL_FILE = "removals.json"
_FORMAT = 1
MOST_TOKENS = 1 << 20
"""Tokens of the chunks that are kept for one replica: some megabytes. What is more becomes `EVERYTHING`."""

_MOST_ENTRIES = 4096
"""Removals that are pending for one replica; more become `EVERYTHING` too."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Chunks to be removed, by their tokens, that were stored under one cache salt; None means all of all salts.

    The prompts that they were computed in began with `start`.
    """

    salt: str = ""
    chunks: tuple[tuple[int, ...], ...] | None = None
    start: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """How many its chunks have."""
        return sum(map(len, self.chunks or ()))


EVERYTHING = Removal()


class RemovalJournal:
    """Pending removals by the key of a replica. Belongs to one event loop.

    In `<folder>/removals.json`, which is replaced whole; without a folder in memory alone. It holds token ids, and no
    text. From a file that cannot be read nothing can be concluded but that everything is to be removed.
    """

    def __init__(self, folder: Path | None, keys: Collection[str], *, most_tokens: int = MOST_TOKENS) -> None:
        """What is pending from earlier on; `keys` are those of the replicas that there are now."""
        self._path = None if folder is None else folder / JOURNAL_FILE
        self._most_tokens = most_tokens
        self._writing = asyncio.Lock()
        self._numbers = itertools.count()
        self._pending: dict[str, dict[int, Removal]] = {}
        self.lasting = self._path is not None
        """Whether what is pending now outlives this process."""
        if self._path is not None:
            try:
                self._pending = {key: self._numbered(removals) for key, removals in _read(self._path).items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.error("%s cannot be read (%s): all replicas remove everything", self._path, error)
                self._pending = {key: self._numbered([EVERYTHING]) for key in keys}

    def pending(self, key: str) -> Mapping[int, Removal]:
        """What a replica has to remove, by the number of each note, `EVERYTHING` first; a copy."""
        found = self._pending.get(key, {})
        return dict(sorted(found.items(), key=lambda one: one[1] != EVERYTHING))

    async def add(self, keys: Collection[str], removal: Removal) -> dict[str, int]:
        """Note a removal for these replicas, before any of them is asked; returns the number of each note.

        A note has a number of its own: what one removal confirms takes no other's note away, be it equal.
        """
        noted = {key: self._note(key, removal) for key in keys}
        await self._write()
        return noted

    async def done(self, confirmed: Mapping[str, Collection[int]]) -> None:
        """Replicas have confirmed what these notes say; a note that is gone already is passed over."""
        for key, numbers in confirmed.items():
            left = {number: one for number, one in self._pending.get(key, {}).items() if number not in numbers}
            self._pending[key] = left
            if not left:
                del self._pending[key]
        await self._write()

    def _note(self, key: str, removal: Removal) -> int:
        found = self._pending.setdefault(key, {})
        tokens = sum(one.tokens for one in {*found.values(), removal})
        if len(found) >= _MOST_ENTRIES:
            found.clear()
            removal = EVERYTHING
        number = next(self._numbers)
        found[number] = removal if tokens <= self._most_tokens else EVERYTHING
        return number

    def _numbered(self, removals: Iterable[Removal]) -> dict[int, Removal]:
        return {next(self._numbers): one for one in removals}

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
                logger.error("removals that are pending cannot be noted in %s: %s", path, error)
                self.lasting = False


def _read(path: Path) -> dict[str, list[Removal]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']!r}")
    return {str(key): [_removal(one) for one in removals] for key, removals in data["pending"].items()}


def _removal(given: Mapping[str, Any]) -> Removal:
    chunks = given["chunks"]
    of_chunks = None if chunks is None else tuple(tuple(map(int, ids)) for ids in chunks)
    return Removal(str(given["salt"]), of_chunks, tuple(map(int, given["start"])))


def _replace(path: Path, pending: Mapping[str, Collection[Removal]]) -> None:
    """Replace the file whole; without anything that is pending there is none.

    Raises:
        OSError: it cannot be written.
    """
    if not pending:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = {key: [asdict(one) for one in removals] for key, removals in pending.items()}
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            json.dump({"format": _FORMAT, "pending": data}, stream)
            stream.flush()
            os.fsync(file)
        partial.replace(path)
        sync_folder(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
