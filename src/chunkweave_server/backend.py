"""Protocols of a backend and its cache: our own engine (`engine_backend`) or vLLM (`vllm_backend`)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from chunkweave.conversation.answer import AnswerEnd, Choice, PendingAnswer
from chunkweave.conversation.prepare import RequestPreparer
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.prompt.contexts import ContextPool
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.prompt.request import Request as EngineRequest
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.types import Chunk, ChunkId
from chunkweave_server.improving import Improver
from chunkweave_server.metrics import MetricSample
from chunkweave_server.requests import CompletionBody
from chunkweave_server.threads import TenantThreads


class Stage(StrEnum):
    """Stages of a server's lifecycle."""

    LOADING_MODEL = "loading the model"
    STARTING_VLLM = "starting vLLM"
    OPENING_CORPORA = "opening corpora"
    READY = "ready"
    FAILED = "failed to start"
    STOPPING = "stopping"


class Event(Protocol):
    """Pieces of the choices of one answer, possibly none; the last event has the answer's end."""

    @property
    def choices(self) -> Sequence[Choice]:
        """The pieces."""

    @property
    def end(self) -> AnswerEnd | None:
        """The answer's end; None before the last event."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A checked request with its `body`. The request's salt is already the tenant's own."""

    request: EngineRequest
    method_request: MethodRequest
    body: CompletionBody
    arrived_s: float
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class BackendParts:
    """Properties of a started backend."""

    tokenizer: TextTokenizer
    calibrated: bool
    """Whether a request may name a quality."""
    most_tokens: int
    """Most tokens of a prompt."""
    max_prefill_batch: int = 1
    """A speculative prefill starts only while fewer requests wait for or run prefill."""
    speculate: bool = False
    """Whether to prefill the preliminary result of a search."""
    order: ChunkOrder = ChunkOrder.FIXED
    """Order of chunks for requests that give none."""
    reads_worlds_only: bool = False
    """Whether the model is the bundled `reader`, which can read only text of its own kind."""
    reorders: bool = False
    """Whether requests of free order with the same chunks in different sequences get the same prompt."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Numbers of removed segment copies, and of chunks computed from them that are `queued` for recomputation.

    `queued` is None if nothing is computed in idle time.
    """

    segments: int = 0
    queued: int | None = None

    def as_dict(self) -> dict[str, int]:
        """Fields of the response."""
        queued = {} if self.queued is None else {"chunks_queued": self.queued}
        return {"segments_removed": self.segments, **queued}


class CacheCommands(Protocol):
    """The commands of `/v1/cache` on a backend's stored chunks. Chunks of different salts are separate."""

    async def warm(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Compute chunks ahead of requests, with lower priority than all requests; returns how many were computed.

        Raises:
            ChunkweaveError, HttpError: a chunk is too long or was not computed; chunks before it are computed.
        """

    @property
    def improving(self) -> Improver:
        """Computes means of chunks in idle time."""

    async def forget(self, tenant: str, texts: Sequence[str], salt: str) -> Forgotten:
        """Remove the KV of chunks from every tier.

        It takes one turn of `tenant` in the threads, and delays no running answer.

        Raises:
            NotRemovedError: some copies could not be removed; all others are removed.
        """

    async def clear(self) -> int:
        """Remove everything of all tenants; returns the number of removed segments.

        Raises:
            NotRemovedError: some copies could not be removed.
        """

    def stats(self) -> Mapping[str, Any]:
        """The statistics that `/v1/cache` shows to admins. Called in a thread."""


class Passthrough(Protocol):
    """Forwards requests unchanged to the servers behind a backend."""

    @property
    def router(self) -> APIRouter:
        """Routes of the forwarded paths."""

    async def plain(self, request: Request) -> Response | None:
        """Answer a completion request without documents; None if the request has documents.

        Raises:
            HttpError: 400, the body has too many values.
        """


class Backend(Protocol):
    """Computes answers. Used in the event loop's thread only; requests and metrics only while it is started."""

    @property
    def name(self) -> str:
        """The model's name for clients; never a path."""

    @property
    def first_stage(self) -> Stage:
        """The stage during `start`."""

    @property
    def passthrough(self) -> Passthrough | None:
        """Forwards requests without documents and other paths to the backend's servers; None if it has none."""

    @property
    def unavailable(self) -> str | None:
        """Why no request can be answered now; None if requests are answered."""

    @property
    def cache(self) -> CacheCommands:
        """Commands on the stored chunks; available after `start`."""

    async def start(self, threads: TenantThreads) -> BackendParts:
        """Load or start everything. Requests are tokenized in `threads`.

        Raises:
            ChunkweaveError: the backend cannot start; the caller calls `stop`.
        """

    async def stop(self) -> None:
        """Abort what runs, finish pending writes, and close everything. Does nothing if the backend was not started."""

    def check(self, body: CompletionBody) -> None:
        """Refuse a request that this backend does not support.

        Raises:
            HttpError: an unsupported field, an unknown model, or the backend is not ready.
        """

    async def submit(self, submission: Submission, *, speculative: bool = False) -> PendingAnswer[Event]:
        """Tokenize a request and queue it. A `speculative` request delays no other until it is confirmed.

        Raises:
            ChunkweaveError: the request is invalid, or the queue is full.
        """

    def samples(self) -> Iterator[MetricSample]:
        """Current values of its metrics. Called in a thread."""

    async def metrics(self) -> bytes:
        """Metrics of the backend's other processes in Prometheus's text format; empty if there are none."""


_AT_A_TIME = 16
"""Chunks that are tokenized in one turn of a tenant."""


class Warmings:
    """The running calls that compute chunks, and for each the chunks removed since it began.

    A removed chunk must not be a context of others any more. Used in the event loop's thread only.
    """

    def __init__(self) -> None:
        self._gone: list[set[ChunkId]] = []

    def __bool__(self) -> bool:
        """Whether a call is running."""
        return bool(self._gone)

    @contextmanager
    def begun(self) -> Iterator[AbstractSet[ChunkId]]:
        """Register a call; yields the set of chunks removed during the call, which `removed` extends."""
        gone: set[ChunkId] = set()
        self._gone.append(gone)
        try:
            yield gone
        finally:
            self._gone = [removed_ids for removed_ids in self._gone if removed_ids is not gone]

    def removed(self, chunks: Iterable[ChunkId]) -> None:
        """Add chunks to the sets of all running calls."""
        chunks = tuple(chunks)
        for gone in self._gone:
            gone.update(chunks)


def reads(prompt: Prompt, gone: AbstractSet[ChunkId]) -> bool:
    """Whether a prompt contains a removed chunk."""
    return not gone.isdisjoint(part.id for part in prompt.parts if part.id is not None)


async def context_pool(
    preparer: RequestPreparer, threads: TenantThreads, tenant: str, chunks: Sequence[Chunk], salt: str
) -> ContextPool | None:
    """A pool of chunks that serve as contexts of each other; None if contexts are neutral passages (`bundled`)."""
    if preparer.rule is None:
        return None
    parts = await storable_parts(preparer, threads, tenant, chunks, salt)
    return await threads.run(tenant, partial(ContextPool, parts))


async def storable_parts(
    preparer: RequestPreparer, threads: TenantThreads, tenant: str, chunks: Sequence[Chunk], salt: str
) -> list[PromptPart]:
    """The prompt parts of chunks, tokenized in turns of the tenant, without chunks that fit no context."""
    parts: list[PromptPart] = []
    for start in range(0, len(chunks), _AT_A_TIME):
        some = chunks[start : start + _AT_A_TIME]
        parts += await threads.run(tenant, partial(preparer.storable_parts, some, cache_salt=salt))
    return parts
