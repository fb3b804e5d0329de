"""Routing of requests to replicas: affinity against least-loaded and round-robin, under skewed load.

    python benchmarks/vllm_routing.py --out vllm-routing-simulated.json
    python benchmarks/vllm_routing.py --real --model reader --out vllm-routing.json -- --max-model-len 4096

Without `--real` replicas are simulated, seconds in all: the policies, the queue and the mirror are those that the front
runs; a replica prefills one request after the other, at a cost per token that is computed, over its own store; the
mirror knows the store's budget but not its contents. With `--real` the front and its vLLM servers are started once for
each policy, and get the same requests at the same times; what follows `--` goes to vLLM.

Documents occur with related ones, by Zipf's law, in random order. A token counts as found if it was in the store,
recomputed or not.
"""

import argparse
import asyncio
import heapq
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from bench_program import parse, write
from docs_tables import markdown_table
from rich.console import Console
from rich.table import Table

from chunkweave.scheduling.queue import CacheAwareQueue, waiting_path
from chunkweave.scheduling.routing import ROUTING, Candidate, ReplicaContents, make_routing
from chunkweave.types import ChunkId

SYSTEM_TOKENS, QUESTION_TOKENS = 32, 32


@dataclass(frozen=True)
class Workload:
    """`requests` at `rate` a second (Poisson), each over `top_k` of `documents` documents of `tokens` tokens.

    The first document is drawn by Zipf's law, the others from the `neighbours` next to it, as retrieval finds related
    ones; without neighbours each is drawn independently.
    """

    requests: int
    rate: float
    documents: int
    top_k: int
    neighbours: int
    tokens: int
    exponent: float
    seed: int

    def arrivals(self) -> Iterator[tuple[float, list[int]]]:
        """Time in seconds, and the numbers of the documents."""
        rng, at = Random(self.seed), 0.0
        weights = [1 / rank**self.exponent for rank in range(1, self.documents + 1)]
        places = rng.sample(range(self.documents), self.documents)  # popular documents are not adjacent
        for _ in range(self.requests):
            at += rng.expovariate(self.rate)
            first = places[rng.choices(range(self.documents), weights)[0]]
            chosen = {first: None}
            while len(chosen) < self.top_k:
                if self.neighbours:
                    chosen.setdefault((first + rng.randint(1, self.neighbours)) % self.documents)
                else:
                    chosen.setdefault(places[rng.choices(range(self.documents), weights)[0]])
            documents = list(chosen)
            rng.shuffle(documents)
            yield at, documents


@dataclass(frozen=True)
class Machine:
    """A simulated replica: seconds a computed token and a request, the share of reused tokens computed again, and the
    tokens that its store holds. At most `at_once` requests are given to it before it has answered.
    """

    token_s: float
    request_s: float
    recompute: float
    store_tokens: int
    at_once: int


@dataclass(frozen=True)
class Outcome:
    """The result of one policy; `share` is the busiest replica's part of the computed tokens."""

    policy: str
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    share: float


class Store:
    """The actual store of a simulated replica: chunks under LRU."""

    def __init__(self, budget_tokens: int) -> None:
        self._budget_tokens = budget_tokens
        self._chunks: OrderedDict[ChunkId, int] = OrderedDict()
        self._tokens = 0

    def take(self, chunks: Sequence[ChunkId], tokens: int) -> int:
        """Use chunks of `tokens` tokens each, storing what is missing; returns the tokens that were there."""
        found = 0
        for chunk in chunks:
            if chunk in self._chunks:
                found += tokens
                self._chunks.move_to_end(chunk)
                continue
            self._chunks[chunk] = tokens
            self._tokens += tokens
            while self._tokens > self._budget_tokens:
                self._tokens -= self._chunks.popitem(last=False)[1]
        return found


class Simulated:
    """One replica: its store, the front's mirror of it, its queue, and its running request."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.store = Store(machine.store_tokens)
        self.contents = ReplicaContents(machine.store_tokens)
        self.queue: CacheAwareQueue[int] = CacheAwareQueue(self.contents)
        self.given = 0
        self.outstanding = 0
        self.free_s = 0.0
        self.computed = 0.0


def simulate(policy: str, imbalance: float, workload: Workload, machine: Machine, replicas: int) -> Outcome:
    """The whole workload under one policy."""
    routing = make_routing(policy, imbalance)
    fleet = [Simulated(f"replica-{number}", machine) for number in range(replicas)]
    by_name = {one.name: one for one in fleet}
    events: list[tuple[float, int, str, int]] = []
    requests = list(workload.arrivals())
    for number, (at, _) in enumerate(requests):
        heapq.heappush(events, (at, number, "arrives", number))
    paths = [[ChunkId(f"document-{one:026d}") for one in documents] for _, documents in requests]
    sizes = [workload.tokens] * workload.top_k
    fixed = SYSTEM_TOKENS + QUESTION_TOKENS
    work: dict[int, tuple[Simulated, int]] = {}
    ttfts: list[float] = []
    found_tokens = 0

    def release(replica: Simulated, now: float) -> None:
        nonlocal found_tokens
        while replica.given < machine.at_once and (waiting := replica.queue.pop()) is not None:
            number = waiting.request
            found = replica.store.take(paths[number], workload.tokens)
            found_tokens += found
            missing = sum(sizes) - found + fixed
            computed = missing + machine.recompute * found
            begun = max(now, replica.free_s)
            replica.free_s = begun + machine.request_s + machine.token_s * computed
            replica.given += 1
            replica.computed += computed
            heapq.heappush(events, (replica.free_s, len(requests) + number, "first token", number))

    while events:
        now, _, what, number = heapq.heappop(events)
        if what == "arrives":
            candidates = [
                Candidate(
                    one.name,
                    one.outstanding,
                    one.contents.cached_tokens(paths[number], sizes, weaves=True),
                    one.contents.tokens,
                )
                for one in fleet
            ]
            total = sum(sizes) + fixed
            chosen = routing.choose(total, candidates)
            replica, load = by_name[chosen.name], total - chosen.cached_tokens
            work[number] = (replica, load)
            replica.outstanding += load
            replica.queue.submit(number, waiting_path(paths[number], weaves=True), total)
        else:
            replica, load = work.pop(number)
            replica.outstanding -= load
            replica.given -= 1
            replica.contents.note(paths[number], sizes, weaves=True)
            ttfts.append(now - requests[number][0])
        release(replica, now)
    prompt_tokens = len(requests) * sum(sizes)
    share = max(one.computed for one in fleet) / sum(one.computed for one in fleet)
    return Outcome(policy, found_tokens / prompt_tokens, quantile(ttfts, 0.5), quantile(ttfts, 0.99), share)


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def measure(policy: str, workload: Workload, args: argparse.Namespace) -> Outcome:
    """Run the workload with real servers, started for this policy."""
    from chunkweave_server.vllm_backend.process import free_port

    port = free_port()
    start = "import sys; sys.argv[0] = 'chunkweave'; from chunkweave.cli.app import main; main()"
    command = [sys.executable, "-c", start, "vllm-serve", args.model, "--port", str(port), "--routing", policy]
    command += ["--replicas", str(args.replicas), "--imbalance", str(args.imbalance), "--method", "cacheblend"]
    command += ["--recompute-ratio", str(args.recompute), "--order", "fixed", "--max-body", "64MiB", *args.vllm]
    with Path(os.devnull).open("wb") as nowhere:
        front = subprocess.Popen(command, stdout=nowhere, stderr=nowhere if args.quiet else None)  # noqa: S603
    try:
        return asyncio.run(drive(policy, workload, f"http://127.0.0.1:{port}", front))
    finally:
        front.send_signal(signal.SIGTERM)
        front.wait(120)


async def drive(policy: str, workload: Workload, url: str, front: "subprocess.Popen[bytes]") -> Outcome:
    """Send all requests when they are due, regardless of how many are running."""
    import httpx

    words = document_words(workload)
    async with httpx.AsyncClient(base_url=url, timeout=900, limits=httpx.Limits(max_connections=None)) as client:
        while not await is_ready(client):
            if front.poll() is not None:
                raise SystemExit(f"the front ended with {front.returncode}")
            await asyncio.sleep(1)
        started = time.perf_counter()

        async def one(at: float, documents: list[int]) -> dict[str, Any]:
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - started)))
            body = {
                "messages": [{"role": "user", "content": "Which is it?"}],
                "documents": [words[number] for number in documents],
                "max_tokens": 2,
                "temperature": 0,
            }
            reply = await client.post("/v1/chat/completions", json=body)
            reply.raise_for_status()
            report: dict[str, Any] = reply.json()["chunkweave"]
            return report

        reports = await asyncio.gather(*(one(at, documents) for at, documents in workload.arrivals()))
    ttfts = [report["ttft_s"] for report in reports]
    found = sum(one["prefix_exact_tokens"] + one["reused_tokens"] + one["recomputed_tokens"] for one in reports)
    computed: dict[str, int] = {}
    for report in reports:
        mine = report["computed_tokens"] + report["recomputed_tokens"]
        computed[report["replica"]] = computed.get(report["replica"], 0) + mine
    hit_rate = found / sum(report["prompt_tokens"] for report in reports)
    share = max(computed.values()) / sum(computed.values())
    return Outcome(policy, hit_rate, quantile(ttfts, 0.5), quantile(ttfts, 0.99), share)


async def is_ready(client: Any) -> bool:
    """Whether the front answers requests."""
    import httpx

    try:
        return bool((await client.get("/ready")).status_code == 200)
    except httpx.HTTPError:
        return False


def document_words(workload: Workload) -> list[str]:
    """A text for each document, of about as many tokens as given, no two alike."""
    rng = Random(workload.seed + 1)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u")]

    def word() -> str:
        return "".join(rng.choice(syllables) for _ in range(2))

    return [" ".join(word() for _ in range(max(1, workload.tokens // 3))) for _ in range(workload.documents)]


HEADS = ["routing", "tokens found", "TTFT p50", "TTFT p99", "busiest replica's share"]


def table(outcomes: Sequence[Outcome]) -> Table:
    shown = Table(*HEADS)
    for one in outcomes:
        shown.add_row(*_cells(asdict(one)))
    return shown


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    return {"vllm-routing": markdown_table(HEADS, [_cells(row) for row in result["rows"]])}


def _cells(row: Mapping[str, Any]) -> list[str]:
    times = [f"{row[name]:.3f} s" for name in ("ttft_p50_s", "ttft_p99_s")]
    return [f"`{row['policy']}`", f"{row['hit_rate']:.1%}", *times, f"{row['share']:.1%}"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--real", action="store_true", help="start vLLM servers instead of simulating them")
    parser.add_argument("--model", default="reader", help="with --real")
    parser.add_argument("--quiet", action="store_true", help="with --real, do not show what the servers say")
    parser.add_argument("--policies", default=",".join(ROUTING))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--imbalance", type=float, default=1.25)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=2.5, help="requests a second")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--neighbours", type=int, default=12, help="documents that come up with one; 0: no relation")
    parser.add_argument("--tokens", type=int, default=512, help="of a document")
    parser.add_argument("--exponent", type=float, default=1.0, help="Zipf's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--token-ms", type=float, default=0.25, help="simulated milliseconds a computed token")
    parser.add_argument("--request-ms", type=float, default=20.0)
    parser.add_argument("--recompute", type=float, default=0.15, help="share of reused tokens computed again")
    parser.add_argument("--store-tokens", type=int, default=100_000, help="of each simulated replica")
    parser.add_argument("--at-once", type=int, default=4, help="requests that a simulated replica is given at once")
    parser.add_argument("vllm", nargs="*", help="with --real, flags of vLLM behind --")
    return parse(parser)


def main() -> None:
    args = arguments()
    workload = Workload(
        args.requests, args.rate, args.documents, args.top_k, args.neighbours, args.tokens, args.exponent, args.seed
    )
    machine = Machine(args.token_ms / 1000, args.request_ms / 1000, args.recompute, args.store_tokens, args.at_once)
    outcomes = [
        measure(policy, workload, args)
        if args.real
        else simulate(policy, args.imbalance, workload, machine, args.replicas)
        for policy in args.policies.split(",")
    ]
    Console().print(table(outcomes))
    config: dict[str, Any] = {"simulated": not args.real, "replicas": args.replicas, "imbalance": args.imbalance}
    config |= {"workload": asdict(workload), "replica": None if args.real else asdict(machine)}
    write("vllm-routing", args, config, [asdict(one) for one in outcomes])


if __name__ == "__main__":
    main()
