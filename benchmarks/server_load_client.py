"""Requests to an OpenAI-compatible server as `load_generator.run_load` makes them: tokens as their events come in."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from load_generator import LoadResult, run_load

from chunkweave.errors import ChunkweaveError

FAILURES = (ChunkweaveError, httpx.HTTPError, json.JSONDecodeError)
"""What counts as a failed request."""


class RefusedError(ChunkweaveError):
    """The server answered with an error, at once or in mid-stream."""


class Asker:
    """Sends one of `bodies` (streamed chat or plain completions) for each number, and yields its tokens."""

    def __init__(self, client: httpx.AsyncClient, path: str, bodies: Sequence[dict[str, Any]]) -> None:
        self._client = client
        self._path = path
        self._bodies = bodies

    async def __call__(self, number: int) -> AsyncIterator[int]:
        """An event with text counts as a token; what it held more is added when the server has counted.

        Raises:
            RefusedError: the server says so.
        """
        seen, counted = 0, 0
        async with self._client.stream("POST", self._path, json=self._bodies[number]) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise RefusedError(f"status {response.status_code}")
            async for event in _events(response):
                if "error" in event:
                    raise RefusedError(str(event["error"].get("type", "error")))
                counted = (event.get("usage") or {}).get("completion_tokens", counted)
                if _has_text(event):
                    seen += 1
                    yield 1
        yield max(counted - seen, 0 if seen else 1)  # an answer without text has at least the token that ended it

    async def in_turn(self) -> LoadResult:
        """Every body, each when the one before has been answered: what an idle server does."""
        results = [await run_load(self._at(number), [0.0], errors=FAILURES) for number in range(len(self._bodies))]
        return LoadResult(
            tuple(one for result in results for one in result.requests), sum(r.duration_s for r in results)
        )

    def _at(self, offset: int) -> "Asker":
        return Asker(self._client, self._path, self._bodies[offset:])


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices") or [{}]
    return bool((choices[0].get("delta") or {}).get("content") or choices[0].get("text"))
