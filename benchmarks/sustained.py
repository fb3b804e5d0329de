"""Does reuse last? Many queries over a corpus that the store cannot hold (what LMCache's users see decay to 1x).

    python benchmarks/sustained.py --engine own --out docs/results/sustained-own.json
    python benchmarks/sustained.py --engine vllm --model smollm2 --dataset musique_150.json --every 5 ...

`--queries` queries of `--chunks` distinct documents in random order, drawn by Zipf's law from `--documents` of
`--document-tokens` tokens; no query comes twice. The byte budget holds a quarter of them. The store begins empty, and
nothing is computed beforehand. One of `--every` queries is also prefilled in full, after its own answer: a TTFT ratio
is the median of these over a stretch of queries divided by the median of the queries' own. Each method has its own
engine and store.

Weights and tokens are random, or those of `--model` and `--dataset`: passages of a data set in a row, cut into
documents, and its questions. Then the first tokens of those queries are compared too: how often both are the same, and
the mean KL divergence.

*Kept* is the ratio over the last hundred queries over that of queries 21 to 100, *reuse* the share of the documents'
tokens that were found stored, the cold start included; Belady's rule, which knows the future, bounds it for any store
of that size. With vLLM it needs an environment that has it (`make test-vllm` makes one).
"""

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from pathlib import Path
from random import Random
from typing import Any

import torch
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track
from sustained_engines import FULL, FirstToken, Query, Sizes, opened

from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.models.gguf import checkpoint_folder
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.simulator.simulation import bounds_of
from chunkweave_lab.simulator.trace import Arrival, Part, build_trace
from chunkweave_server.vllm_backend.prepare import load_tokenizer

HEADS = ["method", "TTFT ratio, 21-100", "last 100", "kept", "reuse, 21-100", "last 100", "in all", "Belady bound"]
FIDELITY_HEADS = ["KL, 21-100", "last 100", "same token, 21-100", "last 100"]
_EARLY = slice(20, 100)
_LATE = slice(-100, None)


class Workload:
    """The corpus and the queries: of random tokens, or of a data set's."""

    def __init__(self, args: argparse.Namespace, sizes: Sizes) -> None:
        """Raises `UsageError` if the data set has too little text."""
        self._rng = Random(f"sustained {args.seed}")
        self._vocab = sizes.config().vocab_size
        if args.dataset is None:
            self.documents = [self._tokens(args.document_tokens) for _ in range(args.documents)]
            self._questions = iter(lambda: self._tokens(args.question_tokens), ())
        else:
            self.documents, questions = _read(args)
            self._questions = cycle(questions)
        weights = list(accumulate((rank + 1) ** -args.zipf for rank in range(args.documents)))
        self.drawn = [self._draw(args.chunks, weights) for _ in range(args.queries)]
        self.queries = [self._query(numbers) for numbers in self.drawn]

    def bound(self, budget_bytes: int, token_bytes: int) -> float:
        """Belady's hit rate over the documents; a document is the same object in every context."""
        names = [number for numbers in self.drawn for number in numbers]
        parts = [Part(str(number), len(self.documents[number])) for number in names]
        arrivals = [Arrival(float(place), (part,)) for place, part in enumerate(parts)]
        return bounds_of(build_trace("sustained", arrivals, token_bytes), budget_bytes).hit_rate

    def _draw(self, count: int, weights: Sequence[float]) -> list[int]:
        chosen: dict[int, None] = {}
        while len(chosen) < count:
            chosen[self._rng.choices(range(len(weights)), cum_weights=weights)[0]] = None
        return self._rng.sample(list(chosen), count)

    def _query(self, numbers: Sequence[int]) -> Query:
        return Query(tuple(self.documents[number] for number in numbers), next(self._questions))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(10, self._vocab) for _ in range(count))


def _read(args: argparse.Namespace) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The documents and the questions of a data set as tokens of the model's."""
    tokenizer = load_tokenizer(str(checkpoint_folder(args.model)), {})
    examples = load_dataset(args.dataset, seed=args.seed)
    texts = dict.fromkeys(chunk.text for example in examples for chunk in example.chunks)
    size, ids, documents = args.document_tokens, list[int](), list[tuple[int, ...]]()
    for text in texts:
        ids += tokenizer.encode(f"{text}\n\n")
        while len(ids) >= size and len(documents) < args.documents:
            documents.append(tuple(ids[:size]))
            del ids[:size]
    if len(documents) < args.documents:
        raise UsageError(
            f"{args.dataset.name} makes {len(documents)} documents only: give that to --documents, or less"
        )
    return documents, [tuple(tokenizer.encode(f"\nQuestion: {one.question}\nAnswer:")) for one in examples]


def measure(method: str, workload: Workload, sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """Run all queries through one engine; returns the row."""
    document_tokens = args.chunks * args.document_tokens
    found: list[FirstToken] = []
    full: dict[int, FirstToken] = {}
    most = document_tokens + max(len(query.question) for query in workload.queries)
    with opened(args.engine, sizes, most + 32, args.recompute_ratio) as engine:
        for _ in range(2):
            engine.first_token(workload.queries[0], FULL)
        for number, query in enumerate(track(workload.queries, method, console=Console(stderr=True))):
            found.append(engine.first_token(query, method))
            if number % args.every == 0:
                full[number] = engine.first_token(query, FULL)
    early, late = (_stretch(found, full, part, document_tokens) for part in (_EARLY, _LATE))
    return {
        "method": method,
        "early": early,
        "late": late,
        "kept": late["ttft_ratio"] / early["ttft_ratio"],
        "reuse": statistics.fmean(one.stored_tokens for one in found) / document_tokens,
        "ttft_s": [round(one.ttft_s, 6) for one in found],
        "full_ttft_s": [round(one.ttft_s, 6) for one in full.values()],
        "kl": [round(found[number].differs(one), 6) for number, one in full.items()],
        "agreement": [found[number].token == one.token for number, one in full.items()],
    }


def _stretch(
    found: Sequence[FirstToken], full: Mapping[int, FirstToken], part: slice, document_tokens: int
) -> dict[str, float]:
    numbers = range(len(found))[part]
    both = [(found[number], one) for number, one in full.items() if number in numbers]
    full_s = statistics.median(one.ttft_s for _, one in both)
    own_s = statistics.median(found[number].ttft_s for number in numbers)
    return {
        "full_ttft_s": full_s,
        "ttft_median_s": own_s,
        "ttft_ratio": full_s / own_s,
        "reuse": statistics.fmean(found[number].stored_tokens for number in numbers) / document_tokens,
        "kl": statistics.fmean(own.differs(one) for own, one in both),
        "agreement": statistics.fmean(own.token == one.token for own, one in both),
    }


def _heads(config: Mapping[str, Any]) -> list[str]:
    """The table's heads; without fidelity for random weights."""
    return [*HEADS, *(FIDELITY_HEADS if config.get("model") else ())]


def _cells(row: dict[str, Any], bound: float, config: Mapping[str, Any]) -> list[str]:
    early, late = row["early"], row["late"]
    fidelity = (
        [f"{part['kl']:.3f}" for part in (early, late)] + [f"{part['agreement']:.0%}" for part in (early, late)]
        if config.get("model")
        else []
    )
    return [
        f"`{row['method']}`",
        f"{early['ttft_ratio']:.2f}x",
        f"{late['ttft_ratio']:.2f}x",
        f"{row['kept']:.2f}",
        f"{early['reuse']:.1%}",
        f"{late['reuse']:.1%}",
        f"{row['reuse']:.1%}",
        f"{bound:.1%}",
        *fidelity,
    ]


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["own", "vllm"], default="own")
    parser.add_argument("--methods", nargs="+", default=["query", "cacheblend", "cachecraft", "prefix"])
    parser.add_argument("--recompute-ratio", type=float, default=0.05)
    parser.add_argument("--model", help="pretrained, in place of --shape and --layers with random weights")
    parser.add_argument("--dataset", type=Path, help="whose texts and questions are asked about, with --model")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="of so many queries one is prefilled in full too")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--document-tokens", type=int, default=128)
    parser.add_argument("--chunks", type=int, default=14)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--zipf", type=float, default=1.2)
    parser.add_argument("--budget-share", type=float, default=0.25, help="of the corpus's KV")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser)
    if args.queries < 200:
        parser.error("the first hundred queries are compared with the last: give --queries 200 or more")
    if (args.model is None) != (args.dataset is None):
        parser.error("--model and --dataset go together")
    if args.engine == "vllm":
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    torch.set_num_threads(args.threads)
    sizes = Sizes(args.model, args.shape, args.layers, args.dtype, 0, args.seed)
    token_bytes = sizes.bytes_per_token()
    budget = int(args.budget_share * args.documents * args.document_tokens * token_bytes)
    sizes = replace(sizes, budget_bytes=budget)
    try:
        workload = Workload(args, sizes)
    except ChunkweaveError as error:
        parser.error(str(error))
    bound = workload.bound(budget, token_bytes)
    rows = [measure(method, workload, sizes, args) for method in args.methods]
    config = settings(args)
    config["dataset"] = None if args.dataset is None else args.dataset.name
    cells = [_cells(row, bound, config) for row in rows]
    show(_heads(config), cells, f"{args.queries} queries, {args.engine}")
    write("sustained", args, config, rows, {"budget_bytes": budget, "belady_hit_rate": bound})


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    config = result["config"]
    cells = [_cells(row, result["belady_hit_rate"], config) for row in result["rows"]]
    return {
        f"sustained-{config['model']}" if config.get("model") else "sustained": markdown_table(_heads(config), cells)
    }


if __name__ == "__main__":
    main()
