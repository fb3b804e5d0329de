"""Requests to an OpenAI-compatible server under load, and what benchmarks of servers have in common."""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from docs_tables import read_result
from load_generator import LoadResult, Usage, poisson_arrivals, run_load
from rich.console import Console

from chunkweave.calibration.results import refuse_other_settings
from chunkweave.errors import ChunkweaveError
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.template import template_for
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave_server.vllm_backend.prepare import load_tokenizer

FAILURES = (ChunkweaveError, httpx.HTTPError, json.JSONDecodeError)
"""Errors of a failed request."""


_METRIC = re.compile(r"^chunkweave:(?:store_)?(evictions|speculations)_total\{(.*)\} (\S+)$", re.MULTILINE)
MODEL = "measured"
"""The name under which measured servers serve their model."""

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_AT_A_TIME = 64
"""Documents per upload request."""


console = Console(stderr=True)


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


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and how they are made."""

    url: str
    path: str
    timeout_s: float
    seed: int

    def client(self) -> httpx.AsyncClient:
        """A client without a limit on connections."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx.AsyncClient(base_url=self.url, timeout=httpx.Timeout(self.timeout_s), limits=limits)


class Contender:
    """One method's runs against one server."""

    def __init__(self, label: str, target: Target, client: httpx.AsyncClient, bodies: Iterator[dict[str, Any]]) -> None:
        self.label = label
        self._target = target
        self._client = client
        self._bodies = bodies
        self._runs = 0

    async def in_turn(self, requests: int) -> LoadResult:
        """One request after the other.

        Raises:
            ChunkweaveError: not every request was answered.
        """
        result = await self._asker(requests).in_turn()
        if result.error_rate:
            raise ChunkweaveError(
                f"{self.label}: the unloaded server fails: {[one.error for one in result.requests if one.error]}"
            )
        return result

    async def at_rate(self, rate_per_s: float, requests: int) -> LoadResult:
        """A run under load."""
        self._runs += 1
        times = poisson_arrivals(requests, rate_per_s, self._target.seed + self._runs)
        result = await self._asker(requests).at_times(times, self._target.timeout_s)
        figures = f"TTFT {result.ttft_mean_s:.3f} s, errors {result.error_rate:.0%}"
        console.print(f"{self.label} at {rate_per_s:.3g}/s: {figures}")
        return result

    def _asker(self, requests: int) -> Asker:
        return Asker(self._client, self._target.path, list(islice(self._bodies, requests)))


@dataclass(frozen=True, slots=True)
class Model:
    """The weights: their folder, bytes of KV per token, and the prompt builder."""

    folder: Path
    token_bytes: int
    tokenizer: TextTokenizer
    builder: PromptBuilder

    @staticmethod
    def of(model: str, dtype: str) -> "Model":
        """Of a model by name, file or folder."""
        from transformers import AutoConfig

        from chunkweave.models.gguf import checkpoint_folder
        from chunkweave.models.huggingface import geometry_of

        folder = checkpoint_folder(model)
        tokenizer = load_tokenizer(str(folder), {})
        elements = geometry_of(AutoConfig.from_pretrained(folder)).kv_elements_per_token()
        builder = PromptBuilder(tokenizer, template_for(tokenizer), "benchmark")
        return Model(folder, elements * _BYTES[dtype], tokenizer, builder)


def finished_rows(path: Path | None, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of contenders that a file already has.

    Raises:
        DocumentError: it cannot be read.
        UsageError: it was measured under other settings.
    """
    if path is None or not path.exists():
        return []
    result = read_result(path)
    refuse_other_settings(path, result["config"], json.loads(json.dumps(config)))
    return [row for row in result["rows"] if "runs" in row]


def environment(threads: int) -> dict[str, str]:
    """The environment of every server, including vLLM's."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def without_folder(word: str) -> str:
    """The name of a path without its folder, so that results do not contain this machine's folders."""
    return Path(word).name if word.startswith(("/", "..")) else word


def agreement(answers: Sequence[Sequence[int]], full: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of equal first tokens, and mean share of an answer's tokens before the first that differs.

    Answers of different length differ at the end of the shorter one.
    """
    first, whole = [], []
    for own, other in zip(answers, full, strict=True):
        longest = max(len(own), len(other))
        equal = next((n for n in range(longest) if own[n : n + 1] != other[n : n + 1]), longest)
        first.append(equal > 0 or longest == 0)
        whole.append(equal / longest if longest else 1.0)
    return {"first_token_agreement": fmean(first), "answer_agreement": fmean(whole)}
