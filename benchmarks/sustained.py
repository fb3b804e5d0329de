"""Does reuse last? Many queries over a corpus that the store cannot hold (what LMCache's users see decay to 1x).

    python benchmarks/sustained.py --shape smollm2-135m --threads 1 --out docs/results/sustained-own.json

`--queries` queries of `--chunks` distinct documents in random order, drawn by Zipf's law from `--documents` of
`--document-tokens` random tokens; no query comes twice. The byte budget holds a quarter of them. The store begins
empty, and nothing is computed beforehand. One of `--every` queries is also prefilled in full, after its own answer: a
TTFT ratio is the median of these over a stretch of queries divided by the median of the queries' own. Each method has
its own engine and store. Weights are random.

*Kept* is the ratio over the last hundred queries over that of queries 21 to 100, *reuse* the share of the documents'
tokens that were found stored, the cold start included; Belady's rule, which knows the future, bounds it for any store
of that size.
"""

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import torch
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track

from chunkweave.config import ReuseConfig, StoreConfig
from chunkweave.engine.engine import Engine
from chunkweave.models.fingerprint import fingerprint_shape
from chunkweave.models.huggingface import HuggingFaceModel, geometry_of
from chunkweave.models.loading import LoadedModel, bundled_tokenizer, random_model, shape_config
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave_lab.simulator.simulation import bounds_of
from chunkweave_lab.simulator.trace import Arrival, Part, build_trace

HEADS = ["method", "TTFT ratio, 21-100", "last 100", "kept", "reuse, 21-100", "last 100", "in all", "Belady bound"]
FULL = "full"
_EARLY = slice(20, 100)
_LATE = slice(-100, None)
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds to the first token, and the document tokens whose KV was stored."""

    ttft_s: float
    stored_tokens: int


class Workload:
    """Documents of random tokens, and the queries over them."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self._rng = Random(f"sustained {args.seed}")
        self._vocab_size = vocab_size
        self.documents = [self._tokens(args.document_tokens) for _ in range(args.documents)]
        weights = list(accumulate((rank + 1) ** -args.zipf for rank in range(args.documents)))
        self.drawn = [self._draw(args.chunks, weights) for _ in range(args.queries)]
        self.prompts = [self._prompt(numbers, args.question_tokens) for numbers in self.drawn]

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

    def _prompt(self, numbers: Sequence[int], question_tokens: int) -> Prompt:
        texts = (self.documents[number] for number in numbers)
        chunks = (PromptPart(PartKind.CHUNK, ids, chunk_id("sustained", "", ids)) for ids in texts)
        return Prompt((*chunks, PromptPart(PartKind.QUESTION, self._tokens(question_tokens))))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(10, self._vocab_size) for _ in range(count))


def first_token(engine: Engine, prompt: Prompt, method: str, ratio: float) -> FirstToken:
    """Serve one query, and store its segments (`full` neither reuses nor stores)."""
    chosen = make_method(method, ReuseConfig(recompute_ratio=ratio))
    started = time.perf_counter()
    prefilled = engine.runner.prefill(prompt, chosen, capture=method != FULL)
    prefilled.logits.argmax().item()
    ttft_s = time.perf_counter() - started
    if method != FULL:
        engine.runner.store_new(prefilled)
    return FirstToken(ttft_s, prefilled.plan.tokens(KVSource.EXACT) + prefilled.plan.tokens(KVSource.REUSED))


def measure(
    method: str, workload: Workload, config: Any, args: argparse.Namespace, budget_bytes: int
) -> dict[str, Any]:
    """Run all queries through one engine; returns the row."""
    document_tokens = args.chunks * args.document_tokens
    model = random_model(config, dtype=getattr(torch, args.dtype), device="cpu", seed=args.seed)
    fingerprint = fingerprint_shape(config, args.dtype, args.seed)
    loaded = LoadedModel(HuggingFaceModel(model), bundled_tokenizer(), fingerprint, args.shape)
    served: list[FirstToken] = []
    full: dict[int, float] = {}
    with Engine(loaded, store=StoreConfig(budget_bytes)) as engine:
        for _ in range(2):
            first_token(engine, workload.prompts[0], FULL, args.recompute_ratio)
        for number, prompt in enumerate(track(workload.prompts, method, console=Console(stderr=True))):
            served.append(first_token(engine, prompt, method, args.recompute_ratio))
            if number % args.every == 0:
                full[number] = first_token(engine, prompt, FULL, args.recompute_ratio).ttft_s
        engine.store.check()
    early, late = (_stretch(served, full, part, document_tokens) for part in (_EARLY, _LATE))
    return {
        "method": method,
        "early": early,
        "late": late,
        "kept": late["ttft_ratio"] / early["ttft_ratio"],
        "reuse": statistics.fmean(one.stored_tokens for one in served) / document_tokens,
        "ttft_s": [round(one.ttft_s, 6) for one in served],
        "full_ttft_s": [round(seconds, 6) for seconds in full.values()],
    }


def _stretch(
    served: Sequence[FirstToken], full: Mapping[int, float], part: slice, document_tokens: int
) -> dict[str, float]:
    numbers = range(len(served))[part]
    full_s = statistics.median(seconds for number, seconds in full.items() if number in numbers)
    own_s = statistics.median(served[number].ttft_s for number in numbers)
    reuse = statistics.fmean(served[number].stored_tokens for number in numbers) / document_tokens
    return {"full_ttft_s": full_s, "ttft_median_s": own_s, "ttft_ratio": full_s / own_s, "reuse": reuse}


def _cells(row: Mapping[str, Any], bound: float) -> list[str]:
    early, late = row["early"], row["late"]
    return [
        f"`{row['method']}`",
        f"{early['ttft_ratio']:.2f}x",
        f"{late['ttft_ratio']:.2f}x",
        f"{row['kept']:.2f}",
        f"{early['reuse']:.1%}",
        f"{late['reuse']:.1%}",
        f"{row['reuse']:.1%}",
        f"{bound:.1%}",
    ]


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    cells = [_cells(row, result["belady_hit_rate"]) for row in result["rows"]]
    return {"sustained": markdown_table(HEADS, cells)}


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["query", "cacheblend", "cachecraft", "prefix"])
    parser.add_argument("--recompute-ratio", type=float, default=0.05)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, help="layers of the shape; default: all")
    parser.add_argument("--dtype", choices=list(_BYTES), default="bfloat16")
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
    torch.set_num_threads(args.threads)
    config = shape_config(args.shape)
    config.num_hidden_layers = args.layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    token_bytes = geometry_of(config).kv_elements_per_token() * _BYTES[args.dtype]
    budget = int(args.budget_share * args.documents * args.document_tokens * token_bytes)
    workload = Workload(args, config.vocab_size)
    bound = workload.bound(budget, token_bytes)
    rows = [measure(method, workload, config, args, budget) for method in args.methods]
    show(HEADS, [_cells(row, bound) for row in rows], f"{args.queries} queries")
    write("sustained", args, settings(args), rows, {"budget_bytes": budget, "belady_hit_rate": bound})


if __name__ == "__main__":
    main()
