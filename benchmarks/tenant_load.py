r"""What a tenant that behaves notices of another one that asks for twice what the server can do.

    python benchmarks/tenant_load.py --serve "chunkweave serve --model reader --port 8124 {weights}" \
        --url http://127.0.0.1:8124 [--minutes 30] [--alone-minutes 15] [--out docs/results/tenant-load.json]

First the rate that one tenant sustains is looked for (mean TTFT within five times the unloaded server's). Then `quiet`
asks at a tenth of it: alone; while `loud` asks at twice of it, both with weight 1; and with weight 4 to 1. Each run has
a fresh server, arrivals are Poisson's, and every prompt is some 1000 tokens that nobody has sent before.

Exit code 1 if a request of `quiet` fails, or its p99 TTFT is above 2.2 times that of when it is alone (1.5 times with
weight 4).
"""

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
from docs_tables import markdown_table
from load_generator import LoadResult, poisson_arrivals, run_load, sustainable_rate
from rich.console import Console
from server_load_client import FAILURES, Asker
from server_process import api_keys, serving
from tenant_timing import SENTENCES, text_of

from chunkweave.eval.results import BenchmarkResult, check_writable, to_json, write_json

WITHIN = 5.0
LOUD, QUIET = 2.0, 0.1
"""Shares of the sustainable rate that the two ask at."""
MOST = {1: 2.2, 4: 1.5}
"""By the weight of `quiet`: how many times longer its p99 TTFT may be than when it is alone."""

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Server:
    """How it is started, and who may ask."""

    command: str
    url: str
    keys: Mapping[str, str]
    folder: Path

    @contextmanager
    def running(self, weight: int = 1) -> Iterator[None]:
        """A fresh one, where `quiet` has this weight."""
        weights = "" if weight == 1 else f"--tenant-weight quiet={weight}"
        command = self.command.replace("{weights}", weights)
        with serving(command, self.url, ready_path="/ready", log=self.folder / "log"):
            yield

    async def load(self, name: str, rate_per_s: float, seconds: float, seed: int) -> LoadResult:
        """One tenant asks so often for so long."""
        requests = max(1, round(rate_per_s * seconds))
        draw = Random(f"{name} {seed}")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(
            base_url=self.url, headers={"authorization": f"Bearer {self.keys[name]}"}, timeout=600, limits=limits
        ) as client:
            asker = Asker(client, "/v1/chat/completions", [body(draw) for _ in range(requests)])
            arrivals = poisson_arrivals(requests, rate_per_s, seed)
            return await run_load(asker, arrivals, timeout_s=600, errors=FAILURES)


def body(draw: Random) -> dict[str, Any]:
    """A question over two documents of some 500 tokens each that nobody has sent."""
    return {
        "messages": [{"role": "user", "content": "What is written down?"}],
        "documents": [text_of(draw, len(SENTENCES) // 2) for _ in range(2)],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def rate_of(server: Server, trial_s: float, seed: int) -> tuple[float, float]:
    """The rate that one tenant sustains, and its mean TTFT where nothing else runs."""
    seeds = count(seed + 1)  # other texts in every trial: none may find what one before has stored
    unloaded = await server.load("loud", 0.5, 20, next(seeds))
    mean_s = unloaded.ttft_mean_s
    console.print(f"unloaded: TTFT {mean_s:.3f} s")

    async def run(rate: float) -> LoadResult:
        result = await server.load("loud", rate, trial_s, next(seeds))
        console.print(f"{rate:.2f}/s: TTFT {result.ttft_mean_s:.3f} s, errors {result.error_rate:.0%}")
        return result

    found = await sustainable_rate(run, WITHIN * mean_s, low_per_s=0.0, high_per_s=1.0 / mean_s, trials=5)
    return found.rate_per_s, mean_s


async def together(server: Server, rate: float, seconds: float, seed: int) -> tuple[LoadResult, LoadResult]:
    """Both at the same time."""
    quiet, loud = await asyncio.gather(
        server.load("quiet", QUIET * rate, seconds, seed), server.load("loud", LOUD * rate, seconds, seed)
    )
    return quiet, loud


def measure(
    server: Server, seconds: float, alone_s: float, trial_s: float, seed: int, rate: float | None
) -> tuple[float, list[dict[str, Any]]]:
    """The sustainable rate, looked for unless it is given, and a row a run."""
    if rate is None:
        with server.running():
            rate, _ = asyncio.run(rate_of(server, trial_s, seed))
        console.print(f"sustained: {rate:.2f}/s")
    with server.running():
        alone = asyncio.run(server.load("quiet", QUIET * rate, alone_s, seed))
    rows: list[dict[str, Any]] = [{"run": "alone", "weight": 1, "quiet": alone.as_dict(), "loud": None}]
    for weight, most in MOST.items():
        with server.running(weight):
            quiet, loud = asyncio.run(together(server, rate, seconds, seed))
        times = quiet.ttft_s(99) / alone.ttft_s(99)
        row = {"run": "together", "weight": weight, "quiet": quiet.as_dict(), "loud": loud.as_dict()}
        rows.append({**row, "p99_over_alone": times, "ok": times <= most and quiet.error_rate == 0.0})
        median = quiet.ttft_s(50) / alone.ttft_s(50)
        console.print(f"weight {weight}: p50 {median:.2f}, p99 {times:.2f} times that of alone")
    return rate, rows


def tables(result: dict[str, Any]) -> dict[str, str]:
    """What `quiet` sees in each run."""
    heads = [
        "",
        "weight",
        "its TTFT p50",
        "p99",
        "over alone",
        "at most",
        "its errors",
        "`loud`: answered/s",
        "refused",
    ]
    lines = []
    for row in result["rows"]:
        quiet, loud = row["quiet"], row["loud"]
        lines.append(
            [
                row["run"],
                f"{row['weight']} : 1" if loud else "-",
                f"{quiet['ttft_p50_s']:.3f} s",
                f"{quiet['ttft_p99_s']:.3f} s",
                f"{row['p99_over_alone']:.2f}x" if loud else "-",
                f"{MOST[row['weight']]}x" if loud else "-",
                f"{quiet['error_rate']:.1%}",
                f"{loud['requests_per_s']:.2f}/s" if loud else "-",
                f"{loud['error_rate']:.0%}" if loud else "-",
            ]
        )
    return {"tenant-load": markdown_table(heads, lines)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="chunkweave serve --model reader --port 8124 {weights}")
    parser.add_argument("--url", default="http://127.0.0.1:8124")
    parser.add_argument("--minutes", type=float, default=30.0, help="of each run of both")
    parser.add_argument("--alone-minutes", type=float, default=15.0, help="of the run in which nobody else asks")
    parser.add_argument("--rate", type=float, help="requests a second that one tenant sustains; None: looked for first")
    parser.add_argument("--trial-s", type=float, default=60.0, help="of each rate that is tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.out is not None:
        check_writable(chosen.out)
    return chosen


def main() -> None:
    options = arguments()
    keys = api_keys("quiet", "loud")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(options.serve, options.url, keys, Path(folder))
        rate, rows = measure(
            server, 60 * options.minutes, 60 * options.alone_minutes, options.trial_s, options.seed, options.rate
        )
    minutes = {"minutes": options.minutes, "alone_minutes": options.alone_minutes}
    config = {"serve": options.serve, **minutes, "sustainable_per_s": rate}
    ok = all(row.get("ok", row["quiet"]["error_rate"] == 0.0) for row in rows)
    command = shlex.join(["python", *sys.argv])
    result = BenchmarkResult("tenant-load", command, options.seed, config, rows, {"ok": ok}).as_dict()
    if options.out is not None:
        write_json(options.out, result)
    print(to_json({"ok": ok, **config, "rows": rows}))
    sys.exit(not ok)


if __name__ == "__main__":
    main()
