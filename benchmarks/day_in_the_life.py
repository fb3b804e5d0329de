"""A day of a server in an hour: load and popularity change, conversations continue, the server stops and restarts.

    python benchmarks/day_in_the_life.py --serve "chunkweave serve --model reader ..." --requests 20000 --minutes 50

Requests arrive by a Poisson process whose rate follows a day: little at its ends, `--peak` times the mean at noon. Each
asks about `--chunks` documents, drawn by Zipf's law; over the day half of the documents come to the top and go, one by
one. Some are turns of conversations, which send their earlier messages along. At a third of the day the server is
stopped gracefully, at two thirds it is killed, and each time it is restarted over the same `--cache-dir`. Requests that
were running, or arrive meanwhile, are retried until they are answered; waiting counts in the time to the first token. A
few questions are asked exactly (`quality: exact`) before the day, after each restart and at the end: the answers must
not change. Exit code 1 if one changed, or if a request has no answer at the end. An interrupted run cannot be
continued.
"""

import argparse
import asyncio
import math
import os
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import httpx
from docs_tables import markdown_table
from load_generator import LoadedRequest, run_load
from server_load_client import FAILURES, RefusedError, events
from server_process import resident_bytes, serving
from world_corpus import make_corpus

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.calibration.summaries import percentile
from chunkweave.cli.console import write_json
from chunkweave.errors import ChunkweaveError
from chunkweave_lab.datasets import load_dataset

PARTS = 10
"""Parts of the day; one row each."""
_TALKING, _STARTING, _MOST_TURNS, _PAUSE = 0.3, 0.1, 5, 40
_DRIFT = 0.5
_PROBES = 12
_AGAIN_S, _MOST_AGAIN_S = 0.5, 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its documents, and the earlier request whose conversation it continues, if any."""

    question: str
    documents: tuple[str, ...]
    earlier: int | None = None


def arrivals(count: int, seconds: float, peak: float, seed: int) -> list[float]:
    """When `count` requests arrive in a day of `seconds`, at a rate of `1 - (peak - 1) cos(2 pi t)` of the mean.

    The day's rate is integrated, so that `count` uniform draws have exactly this rate.
    """
    rng, swing = Random(f"arrivals {seed}"), peak - 1
    return [seconds * _at_share(share, swing) for share in sorted(rng.random() for _ in range(count))]


def _at_share(share: float, swing: float) -> float:
    """The time, 0 to 1, at which this share of the day's requests has arrived; by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if middle - swing * math.sin(2 * math.pi * middle) / (2 * math.pi) < share:
            low = middle
        else:
            high = middle
    return high


def day(count: int, texts: Mapping[str, Sequence[str]], chunks: int, zipf: float, seed: int) -> list[Asked]:
    """The requests in their order, about `texts`, each with its questions: drifting, and some of them turns."""
    rng, order = Random(f"day {seed}"), list(texts)
    rng.shuffle(order)
    weights = list(accumulate((rank + 1) ** -zipf for rank in range(len(order))))
    made: list[Asked] = []
    open_talks: list[tuple[int, int]] = []
    for number in range(count):
        shift = int(number / count * _DRIFT * len(order))

        def draw(wanted: int, shift: int = shift) -> tuple[str, ...]:
            chosen: dict[int, None] = {}
            while len(chosen) < wanted:
                chosen[(rng.choices(range(len(order)), cum_weights=weights)[0] + shift) % len(order)] = None
            return tuple(order[place] for place in rng.sample(list(chosen), len(chosen)))

        kind = rng.random()
        if kind < _TALKING and open_talks and number - open_talks[0][0] > _PAUSE:
            last, left = open_talks.pop(0)
            asked = Asked(rng.choice(texts[made[last].documents[0]]), draw(1), last)
            left -= 1
        else:
            documents = draw(chunks)
            asked = Asked(rng.choice(texts[documents[0]]), documents)
            left = rng.randint(1, _MOST_TURNS - 1) if kind > 1 - _STARTING else 0
        if left:
            open_talks.append((number, left))
        made.append(asked)
    return made


@dataclass(slots=True)
class Answer:
    """The result of one request: the messages including its answer, its report, and the number of attempts."""

    messages: list[dict[str, str]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    sent: int = 0


class Clients:
    """Clients that retry until there is an answer; a turn waits for the answer before it."""

    def __init__(self, client: httpx.AsyncClient, asked: Sequence[Asked], new_tokens: int) -> None:
        self.answers = [Answer() for _ in asked]
        self._client = client
        self._asked = asked
        self._done = [asyncio.Event() for _ in asked]
        self._new_tokens = new_tokens

    async def __call__(self, number: int) -> AsyncIterator[int]:
        """Tokens of request `number`, for `run_load`.

        Raises:
            RefusedError: the request is invalid.
        """
        asked, answer = self._asked[number], self.answers[number]
        if asked.earlier is not None:
            await self._done[asked.earlier].wait()
        history = [] if asked.earlier is None else self.answers[asked.earlier].messages
        messages = [*history, {"role": "user", "content": asked.question}]
        try:
            while True:
                answer.sent += 1
                said: list[str] = []
                try:
                    async for text in self._stream(messages, asked.documents, answer):
                        said.append(text)
                        yield 1
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(min(_MOST_AGAIN_S, _AGAIN_S * 1.5 ** (answer.sent - 1)))
            if not said:
                yield 1
            answer.messages = [*messages, {"role": "assistant", "content": "".join(said) or "-"}]
        finally:
            self._done[number].set()

    async def exact(self, asked: Asked) -> str:
        """The whole answer with `quality: exact`."""
        reply = await self._client.post(
            "/v1/chat/completions",
            json={**self._body([{"role": "user", "content": asked.question}], asked.documents), "chunkweave": _EXACT},
        )
        reply.raise_for_status()
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    async def _stream(
        self, messages: Sequence[Mapping[str, str]], documents: Sequence[str], answer: Answer
    ) -> AsyncIterator[str]:
        """Pieces of text; raises `httpx.HTTPError` if the request can be retried."""
        body = {**self._body(messages, documents), "stream": True}
        ended = False
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code in (429, 500, 502, 503):
                raise httpx.ReadError(f"status {response.status_code}")
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise RefusedError(f"status {response.status_code}: {response.text[:200]}")
            async for event in events(response):
                if "error" in event:
                    raise httpx.ReadError(str(event["error"]))
                if "chunkweave" in event:
                    answer.report, ended = event["chunkweave"], True
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text
        if not ended:
            raise httpx.ReadError("the stream broke off")

    def _body(self, messages: Sequence[Mapping[str, str]], documents: Sequence[str]) -> dict[str, Any]:
        return {
            "messages": list(messages),
            "documents": list(documents),
            "max_tokens": self._new_tokens,
            "temperature": 0,
        }


_EXACT = {"quality": "exact"}


@dataclass(slots=True)
class Life:
    """The server: its process, its sizes, and its downtimes."""

    command: str
    url: str
    log: Path
    folder: Path
    pid: int = 0
    stack: ExitStack = field(default_factory=ExitStack)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)

    def start(self) -> None:
        """Start the server and wait until it is ready."""
        self.pid = self.stack.enter_context(serving(self.command, self.url, ready_path="/ready", log=self.log))

    def restart(self, how: signal.Signals) -> float:
        """Stop and restart the server; returns the downtime in seconds."""
        began = time.perf_counter()
        os.kill(self.pid, how)
        self.stack.close()
        self.start()
        return time.perf_counter() - began

    def look(self) -> dict[str, int]:
        """Sizes: resident memory, and files on disk."""
        on_disk = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return {"resident_bytes": resident_bytes(self.pid), "disk_bytes": on_disk}


async def live(args: argparse.Namespace, life: Life) -> dict[str, Any]:
    """Run the whole day; returns a JSON-able result."""
    texts, seconds = questions_by_text(args.dataset, args.worlds, args.seed), args.minutes * 60
    asked = day(args.requests, texts, args.chunks, args.zipf, args.seed)
    times = arrivals(args.requests, seconds, args.peak, args.seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    async with httpx.AsyncClient(base_url=life.url, timeout=args.timeout, limits=limits) as client:
        clients = Clients(client, asked, args.new_tokens)
        probes = asked[:: max(1, len(asked) // _PROBES)][:_PROBES]
        before = [await clients.exact(one) for one in probes]
        same: list[int] = []

        async def probe() -> None:
            after = [await clients.exact(one) for one in probes]
            same.append(sum(one == other for one, other in zip(before, after, strict=True)))

        async def rule() -> None:
            """Run the events at the ends of the day's parts."""
            for part in range(1, PARTS + 1):
                await asyncio.sleep(max(0.0, started + part * seconds / PARTS - time.perf_counter()))
                life.sizes.append(await asyncio.to_thread(life.look))
                done = sum(bool(one.report) for one in clients.answers)
                print(f"part {part} of {PARTS}: {done} of {len(asked)} answered, {life.sizes[-1]}", file=sys.stderr)
                if (how := _FALLS.get(part)) is not None:
                    down_s = await asyncio.to_thread(life.restart, how)
                    life.restarts.append({"after_part": part, "signal": how.name, "down_s": down_s})
                    await probe()

        started = time.perf_counter()
        ruling = asyncio.create_task(rule())
        result = await run_load(clients, times, timeout_s=args.timeout, errors=FAILURES)
        await ruling
        await probe()
    return {
        "rows": list(rows(result.requests, clients.answers, asked, life.sizes, seconds)),
        "duration_s": result.duration_s,
        "lost": sum(one.error is not None for one in result.requests),
        "errors": sorted({one.error for one in result.requests if one.error is not None})[:10],
        "sent_again": sum(one.sent - 1 for one in clients.answers),
        "restarts": life.restarts,
        "exact_answers": {"asked": len(probes), "same": same},
        "conversation_turns": sum(one.earlier is not None for one in asked),
        "documents": len(texts),
    }


_FALLS = {PARTS // 3: signal.SIGTERM, 2 * PARTS // 3: signal.SIGKILL}


def rows(
    requests: Sequence[LoadedRequest],
    answers: Sequence[Answer],
    asked: Sequence[Asked],
    sizes: Sequence[Mapping[str, int]],
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """One row per part of the day, over the requests that arrived in it."""
    for part in range(PARTS):
        mine = [n for n, one in enumerate(requests) if int(one.arrival_s * PARTS / seconds) == part]
        ttfts = [ttft for n in mine if (ttft := requests[n].ttft_s) is not None]
        tokens: Counter[str] = Counter()
        for number in mine:
            for chunk in answers[number].report.get("chunks", ()):
                reused = chunk["kv_source"] != "computed"
                tokens["all"] += chunk["tokens"]
                tokens["woven"] += chunk["tokens"] if chunk["kv_source"] == "reused" else 0
                tokens[chunk["tier"] if reused else "computed"] += chunk["tokens"]
        yield {
            "part": part + 1,
            "requests": len(mine),
            "turns": sum(asked[n].earlier is not None for n in mine),
            "sent_again": sum(max(0, answers[n].sent - 1) for n in mine),
            "ttft_p50_s": percentile(ttfts, 0.5) if ttfts else None,
            "ttft_p99_s": percentile(ttfts, 0.99) if ttfts else None,
            **{f"{tier}_share": tokens[tier] / max(1, tokens["all"]) for tier in ("host", "disk", "woven")},
            **sizes[part],
        }


def questions_by_text(dataset: Path | None, worlds: int, seed: int) -> dict[str, list[str]]:
    """Documents with questions about each: of a data set, or of generated worlds."""
    if dataset is None:
        passages = make_corpus(worlds, seed).passages
        return {one.text: [f"What do they say about {one.source}?"] for one in passages}
    found: dict[str, list[str]] = {}
    for example in load_dataset(dataset):
        for chunk in example.chunks:
            found.setdefault(chunk.text, []).append(example.question)
    return found


HEADS = [
    *("part", "requests", "turns", "TTFT p50", "p99", "sent again", "from host", "from disk", "computed"),
    *("resident", "on disk"),
]


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The day's parts, for the documentation."""
    cells = [
        [
            str(row["part"]),
            str(row["requests"]),
            str(row["turns"]),
            f"{row['ttft_p50_s']:.2f} s",
            f"{row['ttft_p99_s']:.2f} s",
            str(row["sent_again"]),
            f"{row['host_share']:.0%}",
            f"{row['disk_share']:.0%}",
            f"{1 - row['host_share'] - row['disk_share']:.0%}",
            f"{row['resident_bytes'] / 2**20:.0f} MiB",
            f"{row['disk_bytes'] / 2**20:.0f} MiB",
        ]
        for row in result["rows"]
    ]
    return {f"day-{result['config']['name']}": markdown_table(HEADS, cells)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the run, for its table")
    parser.add_argument("--serve", required=True, help="the server's command; --cache-dir and --port are added")
    parser.add_argument("--port", type=int, default=8331)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=50.0, help="how long the day lasts")
    parser.add_argument("--peak", type=float, default=1.5, help="the rate at noon, of the mean; up to 2")
    parser.add_argument("--dataset", type=Path, help="whose passages and questions, instead of generated worlds")
    parser.add_argument("--worlds", type=int, default=40)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a request is lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not 1 <= args.peak <= 2 or args.requests < 100:
        parser.error("--peak is between 1 and 2, and a day has at least 100 requests")
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        cache, log = Path(folder) / "cache", Path(folder) / "server.log"
        command = f"{args.serve} --port {args.port} --cache-dir {cache}"
        life = Life(command, f"http://127.0.0.1:{args.port}", log, cache)
        with life.stack:
            try:
                life.start()
                found = asyncio.run(live(args, life))
            except ChunkweaveError as error:
                sys.exit(f"{error}\n{log.read_text(errors='replace')[-2000:] if log.exists() else ''}")
    config = {name: value for name, value in vars(args).items() if name not in ("out", "port")}
    config["dataset"] = None if args.dataset is None else args.dataset.name
    found_rows = found.pop("rows")
    command = shlex.join(["python", *sys.argv])
    result = BenchmarkResult("day-in-the-life", command, args.seed, config, found_rows, found).as_dict()
    if args.out is not None:
        write_json(args.out, result)
    for table in tables(result).values():
        print(table)
    print({name: found[name] for name in ("lost", "errors", "sent_again", "restarts", "exact_answers")})
    sys.exit(bool(found["lost"]) or set(found["exact_answers"]["same"]) != {found["exact_answers"]["asked"]})


if __name__ == "__main__":
    main()
