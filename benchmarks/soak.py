"""Many small requests to a real server on loopback: memory must stay flat, and no descriptor may be left open.

Run: python benchmarks/soak.py [--requests 50000] [--out docs/results/soak.json] Exit code 1 otherwise.
"""

import argparse
import asyncio
import gc
import os
import random
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from server_process import resident_bytes
from server_thread import ServerThread

from chunkweave import Engine, ReuseConfig, StoreConfig
from chunkweave.calibration.results import BenchmarkResult
from chunkweave.cli.console import to_json, write_json
from chunkweave_server.backend import Stage
from chunkweave_server.engine_backend import EngineBackend
from chunkweave_server.service import Service
from chunkweave_server.settings import Settings, resolve

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.toys import toy_model

_PASSAGES = [f"Passage {number}: the ferry leaves pier {number} at nine and at noon." for number in range(400)]
_CLIENTS = 8
_STORE_BYTES = 4 << 20
_MOST_GROWTH = 0.05
_MOST_GROWTH_BYTES = 24 << 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def small_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of one of the kinds that a server sees; some are wrong on purpose."""
    documents = draw.sample(_PASSAGES, 2)
    body = {"documents": documents, "max_tokens": draw.randint(1, 3), "temperature": 0, "n": draw.choice((1, 1, 2))}
    kind = draw.random()
    if kind < 0.05:
        return "/v1/completions", {**body, "prompt": "When?", "top_p": 2}
    if kind < 0.5:
        return "/v1/completions", {**body, "prompt": "When does it leave?", "chunkweave": {"method": "full-reuse"}}
    messages = [{"role": "user", "content": f"When does ferry {draw.randint(0, 9)} leave?"}]
    return "/v1/chat/completions", {**body, "messages": messages, "stream": kind < 0.8}


async def one(client: httpx.AsyncClient, draw: random.Random) -> str:
    """Send a request; sometimes closes a stream early."""
    path, body = small_request(draw)
    async with client.stream("POST", path, json=body) as response:
        if body.get("stream") and draw.random() < 0.2:
            return "left"
        await response.aread()
        return str(response.status_code)


async def soak(url: str, requests: int, seed: int, sizes: list[dict[str, int]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    left = requests
    step = max(1, requests // 20)

    async def work(number: int) -> None:
        nonlocal left
        draw = random.Random(seed * 1000 + number)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            while left > 0:
                left -= 1
                if left % step == 0:
                    gc.collect()
                    sizes.append(
                        {
                            "requests": requests - left,
                            "bytes": resident_bytes(os.getpid()),
                            "descriptors": descriptors(),
                        }
                    )
                counts[await one(client, draw)] += 1

    await asyncio.gather(*(work(number) for number in range(_CLIENTS)))
    return counts


def settings() -> Settings:
    values = {"shape": "toy", "kv_tokens": 4096, "port": 0, "max_concurrent": 1000}
    return resolve(values, {}).settings


def engine() -> Engine:
    return Engine(toy_model("llama"), store=StoreConfig(host_budget_bytes=_STORE_BYTES), reuse=ReuseConfig())


def run(requests: int, seed: int) -> dict[str, Any]:
    """Run the whole soak; `ok` is whether it passed."""
    chosen = settings()
    backend = EngineBackend(chosen, lambda _: engine())
    service = Service(chosen, backend)
    sizes: list[dict[str, int]] = []
    before = descriptors()
    started = time.perf_counter()
    with ServerThread(service) as server:
        while service.stage is not Stage.READY:
            time.sleep(0.01)
        counts = asyncio.run(soak(server.url, requests, seed, sizes))
        parts = service.require_ready()
        while parts.answering.running or backend.batching.stats.running:
            time.sleep(0.01)
        backend.batching.check()
        blocks = backend.batching.stats.blocks_reserved
    gc.collect()
    settled = sizes[len(sizes) // 3 :] or sizes
    growth = settled[-1]["bytes"] - settled[0]["bytes"]
    flat = growth <= max(_MOST_GROWTH * settled[0]["bytes"], _MOST_GROWTH_BYTES)
    broken = sum(count for status, count in counts.items() if status.startswith("5"))
    after = descriptors()
    config = {"requests": requests, "clients": _CLIENTS, "store_bytes": _STORE_BYTES}
    more = {
        "seconds": time.perf_counter() - started,
        "answers": dict(sorted(counts.items())),
        "growth_bytes": growth,
        "descriptors_before": before,
        "descriptors_after": after,
        "ok": flat and not broken and not blocks and after <= before + 2,
    }
    return BenchmarkResult("soak", shlex.join(["python", *sys.argv]), seed, config, sizes, more).as_dict()


def main() -> None:
    options = arguments()
    result = run(options.requests, options.seed)
    if options.out is not None:
        write_json(options.out, result)
    print(to_json(result))
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
