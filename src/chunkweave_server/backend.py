"""What computes answers, as the server sees it: our own engine (`engine_backend`) or vLLM (`vllm_backend`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from chunkweave.metrics import ReuseReport
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.prompt.request import Request as EngineRequest
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.scheduling.shadow import ShadowMonitor
from chunkweave.types import Chunk
from chunkweave_server.metrics import MetricSample
from chunkweave_server.requests import CompletionBody
from chunkweave_server.threads import TenantThreads


class Stage(StrEnum):
    """How far a server is."""

    LOADING_MODEL = "loading the model"
    STARTING_VLLM = "starting vLLM"
    OPENING_CORPORA = "opening corpora"
    READY = "ready"
    FAILED = "failed to start"
    STOPPING = "stopping"


Choice = dict[str, Any]
"""A choice of an answer, or a piece of one, as vLLM's completions have them.

`index` and `text`, and where there are any `finish_reason`, `stop_reason`, `logprobs` and `token_ids`.
"""

Event = Sequence[Choice]
"""Pieces of the choices of one answer."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that has passed all checks. `body` holds what only vLLM reads; the salt is the tenant's own."""

    request: EngineRequest
    method_request: MethodRequest
    body: CompletionBody
    arrived_s: float
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """What is known of an answer when its last piece has come.

    `shown` is the report as clients get it; `cached_tokens` of the prompt were not computed for it.
    """

    report: ReuseReport
    shown: Mapping[str, Any]
    cached_tokens: int
    finish_reason: str
    prefilled_s: float | None = None
    """When what was computed ahead of its search was ready, by `time.perf_counter`; None if that was nothing."""


class BackendAnswer(Protocol):
    """An answer as it comes. Leave it by `aclose`."""

    end: AnswerEnd | None
    """There after the last piece."""

    @property
    def begun(self) -> bool:
        """Whether there is, or was, a first piece to be read, or the reason why there is none."""

    @property
    def failed(self) -> bool:
        """Whether it has ended, or will as soon as it is read, without an answer."""

    def __aiter__(self) -> Self:
        """Itself."""

    async def __anext__(self) -> Event:
        """The next pieces.

        Raises:
            HttpError: the request was refused, or its server went away.
            ChunkweaveError: too many wait, the deadline has passed, or the backend stops.
        """

    def confirm(self) -> None:
        """A speculative request is wanted; harmless for others."""

    def abort(self) -> None:
        """End it now; whoever reads it gets `RequestAbortedError`."""

    async def aclose(self) -> None:
        """End it if it runs; a second time is harmless."""


@dataclass(frozen=True, slots=True)
class BackendParts:
    """What is known of a backend once it has started."""

    tokenizer: TextTokenizer
    calibrated: bool
    """Whether a request may name a quality."""
    most_tokens: int
    """No prompt, and so no question, with more tokens is answered."""
    replicas: int = 1
    """How many prefills may run beside each other for searches that have not ended."""
    speculate: bool = False
    """Whether to prefill for what a search has found so far."""


class CacheCommands(Protocol):
    """What `/v1/cache` does to the chunks that a backend has stored. A tenant's salt keeps its chunks apart."""

    @property
    def pins(self) -> bool:
        """Whether chunks can be pinned."""

    async def warm(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Compute chunks before a request needs them, behind all requests; returns how many were computed.

        Raises:
            ChunkweaveError, HttpError: one is too long, or was not computed; those before it are computed.
        """

    async def pin(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Pin what is stored of chunks; returns how many segments are.

        Raises:
            HttpError: 403, that and what the tenant has pinned is more than it may; 501, this backend pins nothing.
        """

    async def unpin(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Take pins back; returns how many chunks were pinned.

        Raises:
            HttpError: 501, this backend pins nothing.
        """

    async def forget(self, tenant: str, texts: Sequence[str], salt: str) -> int:
        """Remove the KV of chunks from every tier; returns how many copies of segments there were.

        It costs `tenant` one of its turns, and no running answer a step.

        Raises:
            NotRemovedError: copies are still there. What could be removed is.
        """

    async def clear(self) -> int:
        """Remove everything of all tenants; returns how many segments there were.

        Raises:
            NotRemovedError: copies are still there.
        """

    def stats(self) -> Mapping[str, Any]:
        """What `/v1/cache` shows admins; called in a thread."""


class Passthrough(Protocol):
    """Hands requests to the servers behind a backend as they are."""

    @property
    def router(self) -> APIRouter:
        """The paths of these servers that are handed on."""

    async def plain(self, request: Request) -> Response | None:
        """The answer to a completion request that says nothing of documents; None if it does.

        Raises:
            HttpError: 400, the body has more values than vLLM is handed.
        """


class Backend(Protocol):
    """Computes answers. Belongs to the event loop's thread; nothing but `start` and `stop` before and after these."""

    @property
    def name(self) -> str:
        """What clients call the model; never a path."""

    @property
    def first_stage(self) -> Stage:
        """What `start` does."""

    @property
    def passthrough(self) -> Passthrough | None:
        """What takes requests without documents and unknown paths; None if the server itself does."""

    @property
    def unavailable(self) -> str | None:
        """Why no request can be answered now; None if they can."""

    @property
    def shadow(self) -> ShadowMonitor | None:
        """What checks woven answers against full prefill, if anything does."""

    @property
    def cache(self) -> CacheCommands:
        """The chunks that are stored; there once it has started."""

    async def start(self, threads: TenantThreads) -> BackendParts:
        """Load or start everything. Requests are tokenized in `threads`.

        Raises:
            ChunkweaveError: it cannot start; what had been started is stopped again.
        """

    async def stop(self) -> None:
        """End what runs, write what is still to be written, and close everything; a no-op if it was not started."""

    def check(self, body: CompletionBody) -> None:
        """Hold a request against what this backend does.

        Raises:
            HttpError: a field or a model that the backend does not know, or it is not ready.
        """

    async def submit(self, submission: Submission, *, speculative: bool = False) -> BackendAnswer:
        """Tokenize a request and let it wait for its turn. A `speculative` one delays no other until it is confirmed.

        Raises:
            ChunkweaveError: the request is wrong, or too many wait.
        """

    def samples(self) -> Iterator[MetricSample]:
        """What its metrics are now; called in a thread."""

    async def metrics(self) -> bytes:
        """Metrics of other processes, in Prometheus's text format; empty where there are none."""
