"""Removing stored KV by command: the request, the workers' orders, and their results.

The command is a separate request with `kv_transfer_params = {"chunkweave": {"forget": ...}}`, which waits until all
workers have removed what it names. Chunks are named by their tokens, within the request's `cache_salt`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from chunkweave.errors import NotRemovedError, UsageError
from chunkweave.planning.method_choice import checked_whole, refuse_unknown_keys
from chunkweave.prompt.parts import chunk_id, chunk_salt
from chunkweave.store.records import RemovedTexts, SegmentRecord
from chunkweave.types import ChunkId

logger = logging.getLogger("vllm.chunkweave")

FORGET = "forget"
"""The request field of this command. Its value is `{"chunks": ..., "start": ...}` or `EVERYTHING`."""

EVERYTHING = "everything"
FIRST_PASSES = "first_passes"
_TOKEN_BITS = 32


@dataclass(frozen=True, slots=True)
class RemovalOrder:
    """Scheduler to workers: remove what is stored of `chunks` (None: everything), on every tier.

    With `texts` what holds one of them is removed too. From now on nothing computed by the running `requests` is
    stored, because they use what is removed. With `first_passes` only segments computed after neutral passages are
    removed.
    """

    request_id: str
    chunks: frozenset[ChunkId] | None
    requests: frozenset[str] = frozenset()
    first_passes: bool = False
    texts: RemovedTexts | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """The result of a removal, as in `NotRemovedError`."""

    removed: int = 0
    left: int = 0
    unasked: tuple[str, ...] = ()
    lasting: bool = True

    def __add__(self, other: "Removed") -> "Removed":
        """The combined result of two workers or two commands."""
        unasked = tuple(dict.fromkeys((*self.unasked, *other.unasked)))
        lasting = self.lasting and other.lasting
        return Removed(self.removed + other.removed, self.left + other.left, unasked, lasting)

    @property
    def report(self) -> dict[str, Any]:
        """The result as part of the command's answer."""
        unasked = list(self.unasked)
        return {"removed": self.removed, "left": self.left, "unasked": unasked, "lasting": self.lasting}

    @classmethod
    def of(cls, report: Any) -> "Removed":
        """Parse a command's answer.

        Raises:
            UsageError: the answer has no result, or says that the command was wrong.
        """
        try:
            unasked = tuple(str(name) for name in report["unasked"])
            return cls(int(report["removed"]), int(report["left"]), unasked, bool(report["lasting"]))
        except (KeyError, TypeError, ValueError) as error:
            error_text = report.get("error") if isinstance(report, Mapping) else None
            raise UsageError(str(error_text or "the plug-in has not answered")) from error


def removal_params(
    chunks: Iterable[Sequence[int]] | None, start: Sequence[int], *, first_passes: bool = False
) -> dict[str, Any]:
    """The command that removes chunks with these tokens (None: everything), in prompts that begin with `start`.

    `first_passes` is as in `RemovalOrder`.
    """
    if chunks is None:
        return {FORGET: {EVERYTHING: True}}
    return {FORGET: {**chunks_params(chunks, start), **({FIRST_PASSES: True} if first_passes else {})}}


def chunks_params(chunks: Iterable[Sequence[int]], start: Sequence[int]) -> dict[str, Any]:
    """The fields that name chunks by their tokens in a command."""
    return {"chunks": [list(ids) for ids in chunks], "start": list(start)}


def removed_chunks(value: Any, *, fingerprint: str, salt: str, start: tuple[int, ...]) -> frozenset[ChunkId] | None:
    """The chunks that a command names, None for everything; defaults are as in `request.from_wire`.

    Raises:
        UsageError: the message says which field is wrong.
    """
    if not isinstance(value, Mapping):
        raise UsageError(f"{FORGET} must be an object such as {{'chunks': [[5, 6, 7]]}}")
    refuse_unknown_keys(value, {"chunks", "start", EVERYTHING, FIRST_PASSES})
    if EVERYTHING in value:
        if value != {EVERYTHING: True}:
            raise UsageError(f"{EVERYTHING} must be true, and alone")
        return None
    return frozenset(named_chunks(value, fingerprint=fingerprint, salt=salt, start=start))


def named_chunks(value: Mapping[str, Any], *, fingerprint: str, salt: str, start: tuple[int, ...]) -> list[ChunkId]:
    """The chunks that a command names by their tokens.

    Raises:
        UsageError: the message says which field is wrong.
    """
    ids_of_chunks = _chunk_ids(value)
    first = _tokens(value["start"], "start") if "start" in value else start
    salt = chunk_salt(salt, first, start)
    return [chunk_id(fingerprint, salt, ids) for ids in ids_of_chunks]


def removed_texts(
    value: Mapping[str, Any], *, fingerprints: Iterable[str], salt: str, start: tuple[int, ...]
) -> RemovedTexts:
    """What recognizes the chunks that a command names within parts of prompts that no client named.

    Raises:
        UsageError: the message says which field is wrong.
    """
    salts = tuple(chunk_salt(salt, first, start) for first in (start, ()))
    return RemovedTexts(tuple(_chunk_ids(value)), tuple(fingerprints), salts)


def _chunk_ids(value: Mapping[str, Any]) -> list[tuple[int, ...]]:
    chunks = value.get("chunks")
    if not isinstance(chunks, list | tuple) or not chunks:
        raise UsageError("chunks must be a list of lists of token ids")
    return [_tokens(ids, "chunks") for ids in chunks]


def _tokens(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name} must hold token ids, not {value!r}"[:200])
    tokens = tuple(checked_whole(token, name) for token in value)
    if any(not 0 <= token < 1 << _TOKEN_BITS for token in tokens):
        raise UsageError(f"{name} must hold token ids")
    return tokens


class RemovalAnswers:
    """The scheduler's side: commands that wait for workers. Called from one thread."""

    def __init__(self) -> None:
        self._awaited: dict[str, int] = {}
        self._done: dict[str, Removed] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is such a command."""
        return request_id in self._done

    def begin(self, request_id: str, ranks: int, already_removed: Removed) -> None:
        """Add a command sent to `ranks` workers; its answer starts with `known`."""
        self._awaited[request_id], self._done[request_id] = ranks, already_removed

    def waits(self, request_id: str) -> bool:
        """Whether a worker has not answered yet."""
        return self._awaited[request_id] > 0

    def note(self, answers: Mapping[str, Sequence[Removed]]) -> None:
        """Add workers' answers; those of ended commands are ignored."""
        for request_id in answers.keys() & self._done.keys():
            for answer in answers[request_id]:
                self._done[request_id] += answer
                self._awaited[request_id] -= 1

    def finish(self, request_id: str) -> Removed:
        """Remove an ended command and return its answer, which lacks some workers' results if it was aborted."""
        late = self._awaited.pop(request_id) > 0
        return self._done.pop(request_id) + (Removed(unasked=("a worker",)) if late else Removed())


class RemovableStore(Protocol):
    """The part of a store that removal uses."""

    def __len__(self) -> int:
        """Number of stored segments."""

    def forget_chunks(self, chunks: Iterable[ChunkId], texts: RemovedTexts | None = None) -> int:
        """See `TieredStore`."""

    def remove_where(self, doomed: Callable[[SegmentRecord], bool]) -> int:
        """See `TieredStore`."""

    def clear(self) -> None:
        """See `TieredStore`."""


class StoreRemovals:
    """A worker's side: removes from its store, in any thread, and keeps the answers for the next step."""

    def __init__(
        self, store: RemovableStore, forget_pending: Callable[[frozenset[ChunkId] | None], None] = lambda _: None
    ) -> None:
        """`forget_pending` drops KV that is not in the store yet; None: all of it."""
        self._store = store
        self._forget_pending = forget_pending
        self._done: SimpleQueue[tuple[str, Removed]] = SimpleQueue()

    def run(self, order: RemovalOrder) -> None:
        """Run an order; errors become part of the answer."""
        self._done.put((order.request_id, self._removed(lambda: self._remove(order))))

    def take(self) -> dict[str, Removed]:
        """Answers by request, each once. Called from one thread."""
        taken: dict[str, Removed] = {}
        while not self._done.empty():
            request_id, removed = self._done.get()
            taken[request_id] = removed
        return taken

    def _remove(self, order: RemovalOrder) -> int:
        chunks = order.chunks
        if order.first_passes and chunks is not None:
            return self._store.remove_where(lambda record: record.neutral and record.chunk_id in chunks)
        self._forget_pending(chunks)
        if chunks is not None:
            return self._store.forget_chunks(chunks, order.texts)
        segments_before = len(self._store)
        self._store.clear()
        return segments_before

    @staticmethod
    def _removed(remove: Callable[[], int]) -> Removed:
        try:
            return Removed(remove())
        except NotRemovedError as error:
            return Removed(error.removed, error.left, error.unasked, error.lasting)
        except Exception:  # a store error must not end the engine
            logger.exception("a removal failed; KV that should be removed may still exist")
            return Removed(unasked=("the store of a worker",), lasting=False)
