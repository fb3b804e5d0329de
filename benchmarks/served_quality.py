"""First tokens and their agreement with full prefill, as a server's users get them: a corpus over HTTP, top passages.

    python benchmarks/served_quality.py --dataset musique_150.json --out served-quality-musique.json

Starts a server (`--serve`, with any flags), ingests every different passage of the data set, computes the corpus
beforehand (`POST /v1/cache/warm`), and asks each question by each of `--ways` in turn, the first in another order for
each question: a calibrated quality, or `method=ratio`. A prompt is what the server retrieves for the question. Its
first answer by `full` is the reference: `agreement` is the share of questions whose first token is that one's, and
`quotient` the median of full prefill's time to the first token over that of the way, both measured at the client.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import httpx
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from server_process import serving

from chunkweave.calibration.summaries import median_interval
from chunkweave.cli.console import progress
from chunkweave_lab.datasets import load_dataset

HEADS = ["way", "recomputed", "first token", "quotient", "95 % interval", "same first token"]
CORPUS = "passages"
AT_A_TIME = 500
FULL = "full"


def prepare(client: httpx.Client, texts: Sequence[str]) -> dict[str, float]:
    """Ingest the texts and compute them beforehand; returns the seconds of both."""
    began_s = time.perf_counter()
    client.post("/v1/corpora", json={"name": CORPUS, "chunk_tokens": 512}).raise_for_status()
    for start in range(0, len(texts), AT_A_TIME):
        documents = [
            {"id": f"d{start + number}", "text": text} for number, text in enumerate(texts[start:][:AT_A_TIME])
        ]
        client.post(f"/v1/corpora/{CORPUS}/documents", json={"documents": documents}).raise_for_status()
    ingested_s = time.perf_counter()
    client.post("/v1/cache/warm", json={"corpus": CORPUS}).raise_for_status()
    return {"ingest_s": ingested_s - began_s, "warm_s": time.perf_counter() - ingested_s}


def reuse_of(way: str) -> dict[str, Any]:
    """The `chunkweave` object of a way: `balanced`, `full`, or `query=0.05`."""
    method, _, ratio = way.partition("=")
    if ratio:
        return {"method": method, "recompute_ratio": float(ratio)}
    return {"method": method} if method in (FULL, "full-reuse") else {"quality": method}


def ask(client: httpx.Client, question: str, way: str, top_k: int) -> dict[str, Any]:
    """Time to the answer of one token at the client, that token, and what was recomputed."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 1,
        "temperature": 0,
        "chunkweave": {**reuse_of(way), "order": "fixed", "corpus": CORPUS, "top_k": top_k},
    }
    began_s = time.perf_counter()
    reply = client.post("/v1/chat/completions", json=body)
    took_s = time.perf_counter() - began_s
    reply.raise_for_status()
    answer = reply.json()
    report = answer["chunkweave"]
    return {
        "took_s": took_s,
        "token": answer["choices"][0]["message"]["content"],
        "tokens": report["prompt_tokens"],
        "recomputed": report["recompute_fraction"] or 0.0,
        "method": report["method"],
    }


def measure(client: httpx.Client, questions: Sequence[str], ways: Sequence[str], top_k: int, seed: int) -> list[Any]:
    """For each question, each way's answer."""
    rng, asked = Random(seed), []
    for way in (FULL, *ways):
        ask(client, questions[0], way, top_k)
    with progress("questions") as report:
        for number, question in enumerate(questions, 1):
            order = rng.sample((FULL, *ways), len(ways) + 1)
            asked.append({way: ask(client, question, way, top_k) for way in order})
            report(number, len(questions))
    return asked


def row_of(way: str, asked: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Summary of a way."""
    quotient = median_interval([one[FULL]["took_s"] / one[way]["took_s"] for one in asked])
    return {
        "way": way,
        "methods": sorted({one[way]["method"] for one in asked}),
        "recomputed": mean(one[way]["recomputed"] for one in asked),
        "first_token_s": median(one[way]["took_s"] for one in asked),
        "quotient": quotient.mean,
        "quotient_low": quotient.low,
        "quotient_high": quotient.high,
        "agreement": mean(one[way]["token"] == one[FULL]["token"] for one in asked),
        "questions": len(asked),
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    return [
        str(row["way"]),
        f"{row['recomputed']:.0%}",
        f"{row['first_token_s']:.3f} s",
        f"{row['quotient']:.1f}x",
        f"{row['quotient_low']:.1f} to {row['quotient_high']:.1f}",
        f"{row['agreement']:.0%}",
    ]


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    return {"served-quality": markdown_table(HEADS, [cells(row) for row in result["rows"]])}


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--serve", default="chunkweave serve --model smollm2 --dtype bfloat16 --threads 1")
    parser.add_argument("--port", type=int, default=8977)
    parser.add_argument("--passages", type=int, help="ingest only the first so many")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--ways", nargs="+", default=["balanced", "query=0.15", "query=0.05", "full-reuse"])
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser)
    examples = load_dataset(args.dataset)
    passages = list(dict.fromkeys(chunk.text for example in examples for chunk in example.chunks))[: args.passages]
    questions = [example.question for example in islice(examples, args.questions)]
    url, root = f"http://127.0.0.1:{args.port}", Path(tempfile.mkdtemp(prefix="served-quality-"))
    command = f"{args.serve} --port {args.port} --data-dir {root / 'data'} --host-budget 8GiB"
    with (
        serving(command, url, ready_path="/ready", log=root / "server.log"),
        httpx.Client(base_url=url, timeout=7200) as client,
    ):
        prepared = prepare(client, passages)
        asked = measure(client, questions, args.ways, args.top_k, args.seed)
    rows = [row_of(way, asked) for way in (FULL, *args.ways)]
    show(HEADS, [cells(row) for row in rows])
    more = {"passages": len(passages), "tokens": mean(one[FULL]["tokens"] for one in asked), **prepared, "asked": asked}
    write("served-quality", args, settings(args, "port"), rows, more)


if __name__ == "__main__":
    main()
