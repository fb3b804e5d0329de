"""First tokens and their agreement with full prefill, as a server's users get them: a corpus over HTTP, top passages.

    python benchmarks/served_quality.py --dataset musique_150.json --folder served --out served-quality-musique.json

Starts a server (`--serve`, with any flags), ingests every different passage of the data set, computes the chunks that
the questions find beforehand, in one call of `POST /v1/cache/warm`, and asks each question by each of `--ways`, in
another order for each question: a calibrated quality, or `method=ratio`. A prompt is what the server retrieves for the
question. Its answer by `full` is the reference: `agreement` is the share of questions whose first token is that one's,
and `quotient` full prefill's time to the first token over that of the way, both measured at the client. A run that is
started again with the same `--folder` keeps the corpus, the caches and the questions that it has.
"""

import argparse
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

from chunkweave.calibration.results import QuestionLog
from chunkweave.calibration.summaries import median_interval
from chunkweave.cli.console import progress
from chunkweave_lab.datasets import load_dataset

HEADS = ["way", "recomputed", "first token", "quotient", "95 % interval", "same first token"]
CORPUS = "passages"
SERVE = "chunkweave serve --model smollm2 --threads 1 --host-budget 6GiB --max-documents 2000"
AT_A_TIME = 500
FULL = "full"


def ingest(client: httpx.Client, texts: Sequence[str]) -> None:
    """Ingest the texts that the corpus does not have."""
    if client.get(f"/v1/corpora/{CORPUS}").status_code != httpx.codes.OK:
        client.post("/v1/corpora", json={"name": CORPUS, "chunk_tokens": 512}).raise_for_status()
    for start in range(0, len(texts), AT_A_TIME):
        documents = [
            {"id": f"d{start + number}", "text": text} for number, text in enumerate(texts[start:][:AT_A_TIME])
        ]
        client.post(f"/v1/corpora/{CORPUS}/documents", json={"documents": documents, "update": True}).raise_for_status()


def found_by(client: httpx.Client, questions: Sequence[str], top_k: int) -> list[str]:
    """The different chunks that the questions find in the corpus."""
    found: dict[str, None] = {}
    for question in questions:
        reply = client.post(f"/v1/corpora/{CORPUS}/search", json={"query": question, "top_k": top_k})
        reply.raise_for_status()
        found.update((one["text"], None) for one in reply.json()["data"])
    return list(found)


def reuse_of(way: str) -> dict[str, Any]:
    """The `chunkweave` object of a way: `balanced`, `full`, or `query=0.05`."""
    method, _, ratio = way.partition("=")
    if ratio:
        return {"method": f"{method}:ratio={ratio}"}
    return {"method": method} if method in (FULL, "full-reuse") else {"quality": method}


def ask(client: httpx.Client, question: str, way: str, top_k: int) -> dict[str, Any]:
    """Time to the answer of one token at the client, that token, and what was recomputed."""
    # An answer stores the KV of its prompt, which later ways would reuse exactly.
    reuse = {**reuse_of(way), "order": "fixed", "corpus": CORPUS, "top_k": top_k, "cache": "read"}
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 1,
        "temperature": 0,
        "chunkweave": reuse,
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


def measure(client: httpx.Client, questions: Sequence[str], ways: Sequence[str], top_k: int, log: QuestionLog) -> None:
    """Ask each question that is not in `log` by each way."""
    for way in (FULL, *ways):
        ask(client, questions[0], way, top_k)
    with progress("questions") as report:
        for number, question in enumerate(questions):
            if number not in log:
                order = Random(number).sample((FULL, *ways), len(ways) + 1)
                log.add(number, {"by_way": {way: ask(client, question, way, top_k) for way in order}})
            report(number + 1, len(questions))


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
    parser.add_argument("--folder", type=Path, required=True, help="corpus, caches and samples, kept for another run")
    parser.add_argument("--serve", default=SERVE)
    parser.add_argument("--port", type=int, default=8977)
    parser.add_argument("--passages", type=int, help="ingest only the first so many")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--ways", nargs="+", default=["balanced", "query=0.15", "query=0.05", "full-reuse"])
    args = parse(parser)
    examples = load_dataset(args.dataset)
    passages = list(dict.fromkeys(chunk.text for example in examples for chunk in example.chunks))[: args.passages]
    questions = [example.question for example in islice(examples, args.questions)]
    args.folder.mkdir(parents=True, exist_ok=True)
    config = {**settings(args, "folder", "port", "questions"), "dataset": args.dataset.name}
    log = QuestionLog(args.folder / "asked.jsonl", config)
    url, root = f"http://127.0.0.1:{args.port}", args.folder
    command = f"{args.serve} --port {args.port} --data-dir {root / 'data'} --cache-dir {root / 'kv'}"
    with (
        serving(command, url, ready_path="/ready", log=root / "server.log"),
        httpx.Client(base_url=url, timeout=7200) as client,
    ):
        ingest(client, passages)
        found = found_by(client, questions, args.top_k)
        client.post("/v1/cache/warm", json={"documents": found}).raise_for_status()
        if log.found is None:
            log.begin({})
        measure(client, questions, args.ways, args.top_k, log)
    asked = log.of("by_way")[: len(questions)]
    rows = [row_of(way, asked) for way in (FULL, *args.ways)]
    show(HEADS, [cells(row) for row in rows])
    tokens = mean(one[FULL]["tokens"] for one in asked)
    more = {"passages": len(passages), "warmed": len(found), "tokens": tokens, "asked": asked}
    write("served-quality", args, config, rows, more)


if __name__ == "__main__":
    main()
