"""Inventory of stored chunks by command: which have a mean, and which can be used as context. No torch here.

The command is a separate request with `kv_transfer_params = {"chunkweave": {"stored": ...}}`. Chunks are named by their
tokens, within the request's `cache_salt`. The scheduler answers from the workers' reports.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.planning.method_choice import refuse_unknown_keys
from chunkweave.store.records import Mark, marked
from chunkweave.types import ChunkId, SegmentId
from chunkweave.vllm.removal import chunks_params, named_chunks

STORED = "stored"
"""The request field of this command."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Indices, into a command's chunks, of those with a mean, and of those that contexts can be woven from."""

    means: frozenset[int] = frozenset()
    contexts: frozenset[int] = frozenset()

    @classmethod
    def of(cls, report: Any) -> "Inventory":
        """Parse an answer; empty if the plug-in does not know the command."""
        try:
            return cls(*(frozenset(map(int, report[name])) for name in ("means", "contexts")))
        except (KeyError, TypeError, ValueError):
            return cls()


def inventory_params(chunks: Iterable[Sequence[int]], start: Sequence[int]) -> dict[str, Any]:
    """The command for chunks with these tokens, in prompts that begin with `start`."""
    return {STORED: chunks_params(chunks, start)}


def asked_chunks(names: Any, *, fingerprint: str, salt: str, start: tuple[int, ...]) -> list[ChunkId]:
    """The chunks of a command; defaults are as in `request.from_wire`.

    Raises:
        UsageError: the message says which field is wrong.
    """
    if not isinstance(names, Mapping):
        raise UsageError(f"{STORED} must be an object such as {{'chunks': [[5, 6, 7]]}}")
    refuse_unknown_keys(names, {"chunks", "start"})
    return named_chunks(names, fingerprint=fingerprint, salt=salt, start=start)


def inventory_report(chunks: Sequence[ChunkId], stored: Callable[[ChunkId | SegmentId], bool]) -> dict[str, list[int]]:
    """The answer, given what is `stored` on all ranks."""

    def numbers(mark: Mark) -> list[int]:
        return [number for number, chunk in enumerate(chunks) if stored(marked(chunk, mark))]

    return {"means": numbers(Mark.MEAN), "contexts": numbers(Mark.CONTEXT)}
