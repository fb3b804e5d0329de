"""Speculation in a server: a corpus over HTTP, questions in bursts, and how many speculations match.

    python benchmarks/served_speculation.py --dataset musique_150.json --out served-speculation.json

Starts a server (`--serve`: `chunkweave serve` or `vllm-serve`, with any flags) and ingests every different passage of
the data set over HTTP, and `--fillers` more, words of the passages in another order, so that a search takes as long as
over a corpus of that size. Questions come in bursts of `--burst` at once, the next burst when the last answer is there.
Each index is a corpus of its own, each order a round of its own over it. The figures are those that users see:
`pipelining` and `not_speculated` of each report, and `speculations_total` of /metrics.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
from bench_program import parse, settings, show, write
from docs_tables import command_block, markdown_table
from server_process import INDEXED_MAIN, serving

from chunkweave.errors import ChunkweaveError
from chunkweave_lab.datasets import load_dataset

HEADS = ["index", "order", "search", "started", "matched", "of started", "none started: why"]
_AT_A_TIME = 2000


def documents_of(texts: Sequence[str], fillers: int, seed: int) -> list[dict[str, str]]:
    """Every text, and `fillers` more of the words of two of them each, in another order."""
    random, made = Random(seed), list(texts)
    for _ in range(fillers):
        words = [word for text in random.sample(texts, 2) for word in text.split()]
        made.append(" ".join(random.sample(words, len(words) // 2)))
    return [{"id": f"d{number}", "text": text} for number, text in enumerate(made)]


def ingest(client: httpx.Client, index: str, documents: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Make a corpus that is called as its index; returns its chunks, and the seconds until it is searched by that."""
    began_s = time.perf_counter()
    client.post("/v1/corpora", json={"name": index, "index": index, "chunk_tokens": 512}).raise_for_status()
    for start in range(0, len(documents), _AT_A_TIME):
        body = {"documents": documents[start : start + _AT_A_TIME]}
        client.post(f"/v1/corpora/{index}/documents", json=body).raise_for_status()
    while (state := client.get(f"/v1/corpora/{index}").json())["searched_by"] != index:
        time.sleep(0.2)
    return {"chunks": state["chunks"], "ingest_s": time.perf_counter() - began_s}


async def bursts(url: str, questions: Sequence[str], burst: int, reuse: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The reports of all answers, `burst` questions at a time."""
    reports = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for start in range(0, len(questions), burst):
            asked = (
                {"messages": [{"role": "user", "content": one}], "max_tokens": 6, "temperature": 0, "chunkweave": reuse}
                for one in questions[start : start + burst]
            )
            replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in asked))
            for reply in replies:
                if reply.status_code != httpx.codes.OK:
                    raise ChunkweaveError(f"the server answered {reply.status_code}: {reply.text}")
                reports.append(reply.json()["chunkweave"])
    return reports


def speculations(client: httpx.Client) -> Counter[str]:
    """The counts of /metrics, by event."""
    lines = [
        line for line in client.get("/metrics").text.splitlines() if line.startswith("chunkweave:speculations_total{")
    ]
    return Counter({line.split('event="')[1].split('"')[0]: int(float(line.split()[-1])) for line in lines})


def row_of(index: str, order: str, reports: Sequence[Mapping[str, Any]], counted: Mapping[str, int]) -> dict[str, Any]:
    """One round's row of the table; `counted` is the increase of /metrics."""
    ahead = [report["pipelining"] for report in reports if "pipelining" in report]
    row = {
        "index": index,
        "order": order,
        "questions": len(reports),
        "search_mean_s": statistics.fmean(report["search_s"] for report in reports),
        "started": sum(one["started"] for one in ahead),
        "terminated": sum(one["terminated"] for one in ahead),
        "matched": sum(one["matched"] for one in ahead),
        "overlap_mean_s": statistics.fmean([one["overlap_s"] for one in ahead] or [0.0]),
        "not_speculated": Counter(report["not_speculated"] for report in reports if "not_speculated" in report),
        "metrics": dict(counted),
    }
    return row | {"matched_of_started": row["matched"] / row["started"] if row["started"] else None}


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each index and order."""
    examples = load_dataset(arguments.dataset)
    texts = list(dict.fromkeys(chunk.text for example in examples for chunk in example.chunks))
    documents = documents_of(texts, arguments.fillers, arguments.seed)
    questions = [example.question for example in examples][: arguments.questions]
    url, rows = f"http://127.0.0.1:{arguments.port}", []
    with tempfile.TemporaryDirectory() as folder:
        command, log = f"{arguments.serve} --port {arguments.port}", Path(folder) / "server.log"
        with (
            serving(command, url, ready_path="/ready", log=log),
            httpx.Client(base_url=url, timeout=3600) as client,
        ):
            for index in arguments.indexes:
                made = ingest(client, index, documents)
                for order in arguments.orders:
                    reuse = {"corpus": index, "top_k": arguments.top_k, "order": order, "method": arguments.method}
                    before = speculations(client)
                    reports = asyncio.run(bursts(url, questions, arguments.burst, reuse))
                    rows.append(row_of(index, order, reports, speculations(client) - before) | made)
                    print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, required=True)
    usual = f'{sys.executable} -c "{INDEXED_MAIN}" serve --model reader'
    parser.add_argument("--serve", default=usual, help="the server, but for its port")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--indexes", nargs="+", default=["ivf", "flat"])
    parser.add_argument("--orders", nargs="+", default=["fixed", "free"])
    parser.add_argument("--method", default="prefix")
    parser.add_argument("--fillers", type=int, default=0)
    parser.add_argument("--top-k", type=int, default=5)
    parser.add_argument("--questions", type=int, default=150)
    parser.add_argument("--burst", type=int, default=4, help="questions at once")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    rows = measure(arguments)
    show(HEADS, [_cells(row) for row in rows])
    write("served-speculation", arguments, settings(arguments, "port") | {"dataset": arguments.dataset.name}, rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table, and the command, for the documentation."""
    rows = markdown_table(HEADS, [_cells(row) for row in result["rows"]])
    return {"served-speculation": f"{command_block(result['command'])}\n\n{rows}"}


def _cells(row: Mapping[str, Any]) -> list[str]:
    share = row["matched_of_started"]
    why = "; ".join(f"{count}: {reason}" for reason, count in row["not_speculated"].items())
    counts = [str(row["started"]), str(row["matched"]), "" if share is None else f"{share:.0%}"]
    return [row["index"], row["order"], f"{row['search_mean_s'] * 1e3:.1f} ms", *counts, why]


if __name__ == "__main__":
    main()
