"""Requests to an OpenAI-compatible server for `load_generator.run_load`: yields tokens as their events arrive."""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
from load_generator import LoadResult, Usage, run_load

from chunkweave.errors import ChunkweaveError

FAILURES = (ChunkweaveError, httpx.HTTPError, json.JSONDecodeError)
"""Errors of a failed request."""


_METRIC = re.compile(r"^chunkweave:(?:store_)?(evictions|speculations)_total\{(.*)\} (\S+)$", re.MULTILINE)
_AT_A_TIME = 64
"""Documents per upload request."""


class RefusedError(ChunkweaveError):
    """The server answered with an error, at once or during the stream."""


class Asker:
    """Sends one of `bodies` (streamed chat or plain completions) for each number, and yields its tokens.

    `usages` are those of whole answers so far, if the server reports them, and `answers` their texts.
    """

    def __init__(self, client: httpx.AsyncClient, path: str, bodies: Sequence[dict[str, Any]]) -> None:
        self.usages: list[Usage] = []
        self.answers: list[str] = []
        self._client = client
        self._path = path
        self._bodies = bodies

    async def __call__(self, number: int) -> AsyncIterator[int]:
        """Send request `number`. An event with text counts as one token; the server's count corrects it at the end.

        Raises:
            RefusedError: the server refused it.
        """
        pieces, usage = list[str](), dict[str, Any]()
        async with self._client.stream("POST", self._path, json=self._bodies[number]) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise RefusedError(f"status {response.status_code}")
            async for event in events(response):
                if "error" in event:
                    raise RefusedError(str(event["error"].get("type", "error")))
                usage = event.get("usage") or usage
                if text := _text_of(event):
                    pieces.append(text)
                    yield 1
        if (cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens")) is not None:
            self.usages.append(Usage(usage["prompt_tokens"], cached))
        self.answers.append("".join(pieces))
        # An answer without text has at least its end token.
        yield max(usage.get("completion_tokens", 0) - len(pieces), 0 if pieces else 1)

    async def at_times(self, arrivals: Sequence[float], timeout_s: float) -> LoadResult:
        """Send every body at its time; the result includes the server's counts."""
        result = await run_load(self, arrivals, timeout_s=timeout_s, errors=FAILURES)
        return replace(result, usages=tuple(self.usages), answers=tuple(self.answers))

    async def in_turn(self) -> LoadResult:
        """Send every body after the previous answer, which measures an idle server."""
        results = [await run_load(self._at(number), [0.0], errors=FAILURES) for number in range(len(self._bodies))]
        requests = tuple(one for result in results for one in result.requests)
        duration_s = sum(result.duration_s for result in results)
        return LoadResult(requests, duration_s, tuple(self.usages), tuple(self.answers))

    def _at(self, offset: int) -> "Asker":
        asker = Asker(self._client, self._path, self._bodies[offset:])
        asker.usages, asker.answers = self.usages, self.answers
        return asker


async def upload(client: httpx.AsyncClient, corpus: str, texts: Sequence[str]) -> None:
    """Create a corpus of the server with a document for each text; existing documents are skipped.

    Raises:
        RefusedError: the server refused it.
    """
    made = await client.post("/v1/corpora", json={"name": corpus})
    if made.status_code not in (httpx.codes.CREATED, httpx.codes.CONFLICT):
        raise RefusedError(f"no corpus {corpus}: status {made.status_code}")
    documents = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
    for start in range(0, len(documents), _AT_A_TIME):
        some = {"documents": documents[start : start + _AT_A_TIME]}
        added = await client.post(f"/v1/corpora/{corpus}/documents", json=some)
        if added.is_error:
            raise RefusedError(f"documents for the corpus {corpus}: status {added.status_code}")


async def server_counts(client: httpx.AsyncClient) -> dict[str, int]:
    """Counters of a chunkweave server since its start: `evictions`, and speculations by outcome.

    Empty if there are no such metrics.
    """
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return {}
    counts: Counter[str] = Counter()
    for name, labels, value in _METRIC.findall(response.text if response.is_success else ""):
        label = re.search(r'event="(\w+)"', labels)
        counts[f"speculations_{label[1]}" if label else name] += int(float(value))
    return dict(counts)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer, without the end marker."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _text_of(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or choices[0].get("text") or ""
