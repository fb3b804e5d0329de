r"""Times of a quiet tenant's first token and whole answer beside each kind of loud tenant.

    python benchmarks/quiet_tenant.py --out docs/results/quiet-tenant.json \
        [--serve "chunkweave serve --model reader --port 8125"] [--minutes 10] [--kinds prompts,aborts,uploads,answers]

The server has one core, all clients another one. `quiet` asks at random times, over two documents of some 500 tokens
each that were never sent before, and gets 32 tokens as a stream. Both tenants have weight 1. `loud` sends one of:

- `prompts`: long prompts, at twice the rate that the server computes them at;
- `aborts`: 8 clients, each of which closes its stream after one to four tokens and asks again;
- `uploads`: 4 clients that ingest documents, 4 whose bodies of nearly 4 MiB are refused;
- `answers`: 8 clients that ask for answers of 512 tokens.

A round is a slice of `quiet` alone and one beside each kind, so that changes of the machine affect all equally. Each
finished slice is written to OUT.partial.jsonl; the same command continues from there.

Exit code 1 if beside any kind the p99 of the whole answer is above 2.5 times that of alone, that of the first token
above 2.2 times, or if a request of `quiet` fails.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import httpx
from docs_tables import markdown_table
from load_generator import LoadedRequest, poisson_arrivals, run_load
from rich.console import Console
from server_client import FAILURES, Asker, RefusedError, events
from server_process import api_keys, serving
from tenant_timing import SENTENCES, text_of

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.calibration.summaries import percentile
from chunkweave.cli.console import check_writable, to_json, write_json
from chunkweave.errors import UsageError

MOST = {"ttft": 2.2, "total": 2.5}
"""Limits on the p99 of the first token and of the whole answer, relative to `quiet` alone."""
ANSWER_TOKENS, LONG_ANSWER_TOKENS = 32, 512
CLIENTS = 8
TIMES_CAPACITY = 2.0
SETTLE_S = 3.0
"""Seconds that a loud tenant runs before `quiet` starts, and idle seconds afterwards."""
REFUSED_BYTES = 4_000_000
ALONE = "alone"

console = Console(stderr=True)


def body(draw: Random, *, documents: int = 2, tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    """A question over documents of some 500 tokens each that were never sent, and an answer of so many tokens."""
    return {
        "messages": [{"role": "user", "content": "What is written down?"}],
        "documents": [text_of(draw, len(SENTENCES) // 2) for _ in range(documents)],
        "max_tokens": tokens,
        "temperature": 2,
        "seed": draw.randrange(1 << 30),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tenant asks, and how often `loud` sends long prompts."""

    url: str
    key: str
    prompts_per_s: float = 0.0

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx.AsyncClient(
            base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=600, limits=limits
        )


Work = Callable[[httpx.AsyncClient, Random, Counter[str]], Awaitable[None]]


async def _repeated(work: Work, client: httpx.AsyncClient, draw: Random, counts: Counter[str]) -> None:
    while True:
        try:
            await work(client, draw, counts)
        except FAILURES:
            counts["failed"] += 1


async def _prompt(client: httpx.AsyncClient, draw: Random, counts: Counter[str]) -> None:
    """A long prompt, read to its end."""
    async for _ in _pieces(client, body(draw, documents=6, tokens=4)):
        pass
    counts["answered"] += 1


async def _abort(client: httpx.AsyncClient, draw: Random, counts: Counter[str]) -> None:
    """A stream that is closed after a few tokens."""
    left = draw.randint(1, 4)
    async for _ in _pieces(client, body(draw, tokens=LONG_ANSWER_TOKENS)):
        left -= 1
        if not left:
            break
    counts["aborted"] += 1


async def _answer(client: httpx.AsyncClient, draw: Random, counts: Counter[str]) -> None:
    """A long answer, read to its end."""
    async for _ in _pieces(client, body(draw, tokens=LONG_ANSWER_TOKENS)):
        counts["tokens"] += 1
    counts["answered"] += 1


async def _ingest(client: httpx.AsyncClient, draw: Random, counts: Counter[str]) -> None:
    """A corpus with 8 times 16 documents, which is removed again."""
    name = f"notes-{draw.randrange(1 << 40)}"
    (await client.post("/v1/corpora", json={"name": name})).raise_for_status()
    for part in range(8):
        documents = [{"id": f"{part}-{one}", "text": text_of(draw, len(SENTENCES))} for one in range(16)]
        added = await client.post(f"/v1/corpora/{name}/documents", json={"documents": documents})
        added.raise_for_status()
        counts["ingested"] += len(documents)
    (await client.delete(f"/v1/corpora/{name}")).raise_for_status()


async def _refused(client: httpx.AsyncClient, draw: Random, counts: Counter[str]) -> None:
    """A large body that is wrong: one string for all documents, or many small ones in their place."""
    wrong = "x" * REFUSED_BYTES if draw.random() < 0.5 else ["x"] * (REFUSED_BYTES // 5)
    response = await client.post("/v1/chat/completions", json={**body(draw), "documents": wrong})
    if response.is_success:
        raise RefusedError("a wrong body was answered")
    counts["refused"] += 1


LOUD: Mapping[str, tuple[Work, ...]] = {
    "prompts": (),
    "aborts": (_abort,) * CLIENTS,
    "uploads": (_ingest, _refused) * (CLIENTS // 2),
    "answers": (_answer,) * CLIENTS,
}
"""The repeated request of each client of a loud tenant; long prompts arrive at planned times."""


async def _pieces(client: httpx.AsyncClient, asked: dict[str, Any]) -> AsyncIterator[str]:
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        if response.status_code != httpx.codes.OK:
            raise RefusedError(f"status {response.status_code}")
        async for event in events(response):
            if "error" in event:
                raise RefusedError(str(event["error"]))
            if event["choices"] and (text := event["choices"][0]["delta"].get("content")):
                yield text


async def be_loud(target: Target, kind: str, seed: str, counts: Counter[str]) -> None:
    """Run a loud tenant of a kind until cancelled."""
    draw = Random(seed)
    async with target.client() as client, asyncio.TaskGroup() as group:
        for number, work in enumerate(LOUD[kind]):
            group.create_task(_repeated(work, client, Random(f"{seed} {number}"), counts))
        while kind == "prompts":
            await asyncio.sleep(draw.expovariate(target.prompts_per_s))
            group.create_task(_once(_prompt(client, Random(f"{seed} {draw.random()}"), counts), counts))


async def _once(work: Awaitable[None], counts: Counter[str]) -> None:
    try:
        await work
    except FAILURES:
        counts["failed"] += 1


def _loud_process(target: Target, kind: str, seed: str, pipe: Connection) -> None:
    """Run a loud tenant in a separate process until the pipe signals; sends back its counts."""
    counts: Counter[str] = Counter()

    async def run() -> None:
        task = asyncio.create_task(be_loud(target, kind, seed, counts))
        while not pipe.poll():
            await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    pipe.send(dict(counts))


@contextmanager
def loud(target: Target, kind: str, seed: str) -> Iterator[Callable[[], dict[str, int]]]:
    """Context with a running loud tenant; the yielded function stops it and returns its counts."""
    if kind == ALONE:
        yield dict
        return
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_loud_process, args=(target, kind, seed, there), daemon=True)
    process.start()
    there.close()

    def stop() -> dict[str, int]:
        here.send(None)
        return dict(here.recv())

    try:
        time.sleep(SETTLE_S)
        yield stop
    finally:
        process.join(30)
        process.kill()
        time.sleep(SETTLE_S)


async def ask_quietly(target: Target, rate_per_s: float, seconds: float, seed: str) -> list[LoadedRequest]:
    """The requests of `quiet` over `seconds`."""
    draw = Random(seed)
    arrivals = poisson_arrivals(max(1, round(rate_per_s * seconds)), rate_per_s, draw.randrange(1 << 30))
    async with target.client() as client:
        asker = Asker(client, "/v1/chat/completions", [body(draw) for _ in arrivals])
        return list((await run_load(asker, arrivals, timeout_s=120, errors=FAILURES)).requests)


@dataclass(frozen=True, slots=True)
class Slice:
    """The measurements of one slice of a round; `did` are the loud tenant's counts."""

    round: int
    kind: str
    requests: list[dict[str, Any]]
    did: dict[str, int]


def capacity_per_s(target: Target) -> float:
    """Long prompts a second that the server computes, one after the other."""

    async def some() -> float:
        counts: Counter[str] = Counter()
        async with target.client() as client:
            await _prompt(client, Random("first"), counts)
            started = time.perf_counter()
            for number in range(5):
                await _prompt(client, Random(f"long {number}"), counts)
        return 5 / (time.perf_counter() - started)

    return asyncio.run(some())


def earlier(path: Path | None, config: Mapping[str, Any]) -> tuple[float | None, list[Slice]]:
    """The rate of long prompts and the slices of an interrupted run with the same settings.

    Raises:
        UsageError: the file is of other settings.
    """
    if path is None or not path.exists():
        return None, []
    first, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if first["config"] != dict(config):
        raise UsageError(f"{path} is of a run with other settings: remove it, or use them again")
    return first["prompts_per_s"], [Slice(**line) for line in lines]


def write_line(path: Path | None, line: Mapping[str, Any]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def row_of(kind: str, slices: list[Slice], alone: Mapping[str, Any] | None) -> dict[str, Any]:
    """The row of `quiet` over all slices of a kind, compared with `quiet` alone."""
    requests = [one for part in slices if part.kind == kind for one in part.requests]
    whole = [one for one in requests if one["error"] is None]
    row: dict[str, Any] = {"kind": kind, "requests": len(requests), "failed": len(requests) - len(whole)}
    for name in MOST:
        times = [one[f"{name}_s"] for one in whole] or [math.inf]
        row |= {f"{name}_p{percent}_s": percentile(times, percent / 100) for percent in (50, 99)}
    row["tokens_mean"] = sum(one["tokens"] for one in whole) / max(1, len(whole))
    row["loud_did"] = dict(sum((Counter(part.did) for part in slices if part.kind == kind), Counter[str]()))
    if alone is not None:
        row |= {f"{name}_p99_over_alone": row[f"{name}_p99_s"] / alone[f"{name}_p99_s"] for name in MOST}
        row |= {f"{name}_p50_over_alone": row[f"{name}_p50_s"] / alone[f"{name}_p50_s"] for name in MOST}
    kept = alone is None or all(row[f"{name}_p99_over_alone"] <= most for name, most in MOST.items())
    return {**row, "ok": kept and not row["failed"]}


def rows_of(slices: list[Slice], kinds: list[str]) -> list[dict[str, Any]]:
    """A row for `quiet` alone, and one for each kind."""
    alone = row_of(ALONE, slices, None)
    return [alone, *(row_of(kind, slices, alone) for kind in kinds)]


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """p99 of the first token and of the whole answer beside each kind; in brackets, over that of alone."""
    heads = ["beside", "requests", "first token p50", "p99", "whole answer p50", "p99"]
    lines = []
    for row in result["rows"]:
        cells = [row["kind"], str(row["requests"])]
        for name in MOST:
            for percent in (50, 99):
                times = row.get(f"{name}_p{percent}_over_alone")
                cells.append(f"{row[f'{name}_p{percent}_s']:.3f} s" + ("" if times is None else f" ({times:.2f}x)"))
        lines.append(cells)
    return {"quiet-tenant": markdown_table(heads, lines)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="chunkweave serve --model reader --host-budget 512MiB --port 8125")
    parser.add_argument("--url", default="http://127.0.0.1:8125")
    parser.add_argument("--minutes", type=float, default=10.0, help="beside each kind, and alone")
    parser.add_argument("--slice-s", type=float, default=120.0, help="of each kind in a round")
    parser.add_argument("--rate", type=float, default=0.6, help="requests of `quiet` a second")
    parser.add_argument("--kinds", default=",".join(LOUD), help="of the loud tenant, separated by commas")
    parser.add_argument("--cores", default="0,1", help="of the server, and of the clients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.kinds.split(",")) - LOUD.keys()):
        parser.error(f"no such kinds: {', '.join(unknown)}")
    if chosen.out is not None:
        check_writable(chosen.out)
    return chosen


def measure(options: argparse.Namespace, config: Mapping[str, Any], partial: Path | None) -> tuple[float, list[Slice]]:
    """All slices of all rounds, and the rate of long prompts."""
    prompts_per_s, done = earlier(partial, config)
    server_core, client_core = (int(core) for core in options.cores.split(","))
    keys, cores = api_keys("quiet", "loud"), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {server_core})  # the server is started with it
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(options.serve, options.url, ready_path="/ready", log=Path(folder) / "log"),
    ):
        os.sched_setaffinity(0, {client_core})
        if prompts_per_s is None:
            prompts_per_s = TIMES_CAPACITY * capacity_per_s(Target(options.url, keys["loud"]))
            write_line(partial, {"config": config, "prompts_per_s": prompts_per_s})
        quiet, noisy = Target(options.url, keys["quiet"]), Target(options.url, keys["loud"], prompts_per_s)
        asyncio.run(ask_quietly(quiet, options.rate, SETTLE_S, "warm-up"))
        for number in range(math.ceil(60 * options.minutes / options.slice_s)):
            for kind in (ALONE, *config["kinds"]):
                if any((one.round, one.kind) == (number, kind) for one in done):
                    continue
                seed = f"{options.seed} {number} {kind} {len(done)}"
                with loud(noisy, kind, seed) as stop:
                    requests = asyncio.run(ask_quietly(quiet, options.rate, options.slice_s, seed))
                    did = stop()
                done.append(Slice(number, kind, [asdict(one) for one in requests], did))
                write_line(partial, asdict(done[-1]))
                console.print(f"round {number}, {kind}: {to_json(row_of(kind, done[-1:], None))}")
    os.sched_setaffinity(0, cores)
    return prompts_per_s, done


def main() -> None:
    options = arguments()
    partial = None if options.out is None else options.out.with_suffix(".partial.jsonl")
    kinds = options.kinds.split(",")
    config = {
        "serve": options.serve,
        "minutes": options.minutes,
        "slice_s": options.slice_s,
        "rate_per_s": options.rate,
    }
    config |= {"kinds": kinds, "cores": options.cores, "seed": options.seed}
    prompts_per_s, slices = measure(options, config, partial)
    rows = rows_of(slices, kinds)
    ok = all(row["ok"] for row in rows)
    command = shlex.join(["python", *sys.argv])
    result = BenchmarkResult(
        "quiet-tenant", command, options.seed, {**config, "prompts_per_s": prompts_per_s}, rows, {"ok": ok}
    ).as_dict()
    if options.out is not None:
        write_json(options.out, result)
        assert partial is not None
        partial.unlink()
    print(to_json({"ok": ok, "rows": rows}))
    console.print(tables(result)["quiet-tenant"])
    sys.exit(not ok)


if __name__ == "__main__":
    main()
