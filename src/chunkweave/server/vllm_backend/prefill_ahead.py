"""Prefills on a replica for chunks that a search has not confirmed yet (RAGCache §5.3)."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from chunkweave.errors import ChunkweaveError, RequestAbortedError
from chunkweave.planning.method_choice import FIELD
from chunkweave.server.errors import HttpError
from chunkweave.server.vllm_backend.fleet import Fleet, Placed
from chunkweave.server.vllm_backend.prompting import Prepared, weave_params

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Where a prompt's KV is by now, and from when to when it was computed, by `time.perf_counter`."""

    placed: Placed
    began_s: float
    ended_s: float


class PrefillAhead:
    """A completion of one token, which nobody sees; its only event is `Prefilled`. A `PendingAnswer`; close it.

    It leaves the prompt's KV in vLLM's prefix cache, where only a request of the same tokens, chunks and method finds
    it: the question's own, if its search ends with these very chunks.
    """

    begun = False
    """It counts as pending until its search has ended."""

    def __init__(self, fleet: Fleet, prepare: Callable[[], Awaitable[Prepared]], *, model: str) -> None:
        """`prepare` makes the request, for an answer of one token; `model` is vLLM's name of the model."""
        self._fleet = fleet
        self._model = model
        self._task = asyncio.create_task(self._prefill(prepare), name="prefill ahead")

    @property
    def failed(self) -> bool:
        """Whether it has ended and nothing was computed."""
        return self._task.done() and (self._task.cancelled() or self._task.result() is None)

    def confirm(self) -> None:
        """Nothing to be done: vLLM takes no request for less than another."""

    async def __aiter__(self) -> AsyncIterator[Prefilled]:
        prefilled = await self._task
        if prefilled is None:
            raise RequestAbortedError("nothing was computed ahead")
        yield prefilled

    async def aclose(self) -> None:
        """End it if it runs; a second time is harmless."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _prefill(self, prepare: Callable[[], Awaitable[Prepared]]) -> Prefilled | None:
        try:
            prepared = await prepare()
            placed = await self._fleet.place(prepared, counted=False)
            try:
                began_s = time.perf_counter()
                stream = placed.replica.upstream.complete(self._body(placed), uuid.uuid4().hex)
                async with aclosing(stream):
                    async for _ in stream:
                        pass
                self._fleet.served(placed, cached_tokens=None)
            finally:
                self._fleet.leave(placed)
        except (ChunkweaveError, HttpError) as error:
            logger.debug("nothing is computed ahead: %s", error)
            return None
        except Exception:  # a speculation must not cost an answer
            logger.exception("nothing is computed ahead")
            return None
        return Prefilled(placed, began_s, time.perf_counter())

    def _body(self, placed: Placed) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(placed.prompt.token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
        }
        params = weave_params(placed.prompt, placed.prepared.choice)
        if params is not None:
            body["kv_transfer_params"] = {FIELD: params}
        if placed.prepared.salt:
            body["cache_salt"] = placed.prepared.salt
        return body
