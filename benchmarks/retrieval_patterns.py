"""Patterns of retrieval for the questions of a data set: which chunks recur, in which order, and with which others.

    python benchmarks/retrieval_patterns.py --dataset xquad.en.json --embedders hashed-ngrams,minilm --out patterns.json

Every different passage of the data set is a document of one corpus, and every question asks it once, in an order drawn
with the seed. The same figures as in the papers' motivation, each with the question's own retrieval and no model:

- how skewed access is: the share of all retrievals that goes to the most accessed documents (RAGCache Figures 5 and 6,
  Cache-Craft Figure 6a), and the same of ordered lists of `--top-k` (Figure 6c);
- what of a request was there before: for each length the share of requests whose beginning of that length an earlier
  request had (Cache-Craft Figure 6b), prefix and total overlap (CRAFT Figure 3), and how many earlier requests it takes
  at least to find all chunks of a request (Cache-Craft Figure 8a; found greedily, so it may say one too many);
- what exact prefixes save in each order of chunks (CRAFT Figure 12), with an unlimited cache;
- for an index with stages: after which one the final list is known (RAGCache §5.3).
"""

import argparse
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
from bench_program import parse, show, write
from docs_tables import markdown_table
from numpy.typing import NDArray

from chunkweave.retrieval.embedders import make_embedder
from chunkweave.retrieval.faiss_indexes import new_faiss_index
from chunkweave.retrieval.indexes import IndexConfig, IndexKind, SearchStage, VectorIndex
from chunkweave_lab.chunk_order import overlap_of, replay
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.simulator.trace import Arrival, Part
from chunkweave_lab.simulator.workloads import bundled_token_count

TOP = (0.01, 0.03, 0.05, 0.1, 0.2)
"""Shares of the documents, the most accessed first."""
ORDERS = ("original", "frequency", "tree-greedy")
INDEXES = ("faiss-flat", "ivf", "hnsw")


def made_index(kind: str, vectors: NDArray[np.float32]) -> VectorIndex:
    """An index of a kind over all vectors, its sizes chosen by their number; IVF searches half of its few lists."""
    config = IndexConfig(IndexKind(kind)).resolved(len(vectors))
    config = replace(config, probes=ceil(config.lists / 2))
    index = new_faiss_index(config, [vectors], vectors.shape[1])
    index.add(vectors)
    return index


def share_of_top(accesses: Counter[Hashable], of: int, share: float) -> float:
    """The part of all accesses that goes to the most accessed `share` of `of` things (at least one).

    >>> share_of_top(Counter({"a": 6, "b": 2, "c": 2}), of=10, share=0.1)
    0.6
    """
    most = sum(count for _, count in accesses.most_common(ceil(share * of)))
    return most / accesses.total()


def seen_beginnings(requests: Sequence[Sequence[Hashable]], longest: int) -> list[float]:
    """For lengths from 1 on the share of requests, the first left out, whose beginning an earlier request had.

    >>> seen_beginnings([[1, 2, 3], [1, 3, 2], [1, 2, 4]], 3)
    [1.0, 0.5, 0.0]
    """
    shares = []
    for length in range(1, longest + 1):
        seen: set[tuple[Hashable, ...]] = set()
        again = []
        for request in requests:
            beginning = tuple(request[:length])
            again.append(beginning in seen)
            seen.add(beginning)
        shares.append(fmean(again[1:]))
    return shares


def sources_of(requests: Sequence[Sequence[Hashable]]) -> Iterator[int | None]:
    """For each request the number of earlier ones (chosen greedily) that together have all its chunks; None if
    impossible.

    >>> list(sources_of([[1, 2], [3, 4], [1, 3], [1, 2], [2, 5]]))
    [None, None, 2, 1, None]
    """
    earlier: list[frozenset[Hashable]] = []
    for request in requests:
        missing, count = set(request), 0
        while missing and (best := max(earlier, key=lambda one: len(missing & one), default=frozenset())) & missing:
            missing -= best
            count += 1
        yield None if missing else count
        earlier.append(frozenset(request))


def final_stage(stages: Sequence[SearchStage]) -> int:
    """The first stage, from 1, from which on the rows stay those of the last."""
    number = len(stages)
    while number > 1 and stages[number - 2].hits.rows == stages[-1].hits.rows:
        number -= 1
    return number


def row(
    searched: Sequence[Sequence[SearchStage]], tokens: Sequence[int], exact: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Everything about one embedder and index; `tokens` are the documents', `exact` what comparing all finds."""
    requests = [list(stages[-1].hits.rows) for stages in searched]
    longest = max(map(len, requests))
    first, every, lists = (
        Counter[Hashable](names)
        for names in (
            [request[0] for request in requests],
            [one for request in requests for one in request],
            [tuple(request) for request in requests],
        )
    )
    sources = Counter("some are new" if one is None else str(one) for one in sources_of(requests))
    overlap = overlap_of(requests)
    arrivals = [
        Arrival(float(number), tuple(Part(str(one), tokens[one]) for one in request))
        for number, request in enumerate(requests)
    ]
    finals = Counter(final_stage(stages) for stages in searched)
    return {
        "recall": fmean(len({*ours} & {*best}) / len(best) for ours, best in zip(requests, exact, strict=True)),
        "first_to_top": {f"{share:g}": share_of_top(first, len(tokens), share) for share in TOP},
        "all_to_top": {f"{share:g}": share_of_top(every, len(tokens), share) for share in TOP},
        "different_lists": len(lists),
        "lists_to_top": {f"{share:g}": share_of_top(lists, len(lists), share) for share in TOP},
        "beginnings_seen": seen_beginnings(requests, longest),
        "sources": {name: count / len(requests) for name, count in sorted(sources.items())},
        "prefix_overlap": overlap.prefix,
        "total_overlap": overlap.total,
        "chunks_seen": overlap.seen,
        "saved": {order: replay(arrivals, order).saved_share for order in ORDERS},
        "stages": max(map(len, searched)),
        "final_at_stage": {str(stage): count / len(searched) for stage, count in sorted(finals.items())},
    }


def main() -> None:
    """Retrieve, count, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--embedders", default="hashed-ngrams")
    parser.add_argument("--indexes", default=",".join(INDEXES))
    parser.add_argument("--top-k", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    examples = load_dataset(arguments.dataset, squad_chunks=1)
    documents = list(dict.fromkeys(chunk.text for example in examples for chunk in example.chunks))
    questions = Random(arguments.seed).sample([example.question for example in examples], len(examples))
    count = bundled_token_count()
    tokens = [max(1, count(text)) for text in documents]
    rows = []
    for name in arguments.embedders.split(","):
        embedder = make_embedder(name)
        vectors = embedder.embed_documents(documents)
        asked = [embedder.embed_query(question) for question in questions]
        best = np.argsort(-(np.stack(asked) @ vectors.T), axis=1, kind="stable")[:, : arguments.top_k]
        for kind in arguments.indexes.split(","):
            index = made_index(kind, vectors)
            searched = [list(index.stages(vector, arguments.top_k)) for vector in asked]
            rows.append({"embedder": name, "index": kind, **row(searched, tokens, best.tolist())})
    _show(rows, f"{len(questions)} questions, {len(documents)} documents, top-{arguments.top_k}")
    config = {
        "dataset": arguments.dataset.name,
        "top_k": arguments.top_k,
        "questions": len(questions),
        "documents": len(documents),
        "document_tokens_mean": fmean(tokens),
        "question_tokens_mean": fmean(count(question) for question in questions),
    }
    write("retrieval-patterns", arguments, config, rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """Overlap with earlier requests, and the skew of retrievals; one line per embedder and index."""
    rows = result["rows"]
    named = [[f"`{one['embedder']}`, {one['index']}"] for one in rows]
    access = [
        [
            *name,
            *(f"{one[of][f'{share:g}']:.0%}" for of in ("first_to_top", "all_to_top") for share in (0.03, 0.05, 0.2)),
        ]
        for name, one in zip(named, rows, strict=True)
    ]
    again = [
        [
            *name,
            f"{one['recall']:.2f}",
            *(f"{one[overlap]:.1%}" for overlap in ("prefix_overlap", "total_overlap", "chunks_seen")),
            ", ".join(f"{share:.0%}" for share in one["beginnings_seen"]),
            ", ".join(f"{one['sources'].get(str(number), 0.0):.0%}" for number in range(1, 6)),
            ", ".join(f"{one['saved'][order]:.1%}" for order in ORDERS),
            ", ".join(f"{share:.0%}" for share in one["final_at_stage"].values()),
        ]
        for name, one in zip(named, rows, strict=True)
    ]
    heads = [
        "retriever",
        *(f"{what} to the top {share}" for what in ("first", "all") for share in ("3 %", "5 %", "20 %")),
    ]
    heads_again = [
        "retriever",
        "recall",
        "prefix overlap",
        "total overlap",
        "chunks seen",
        "beginnings seen, from 1 on",
    ]
    heads_again += ["found in 1, 2, 3, 4, 5 requests", "saved: given, frequency, tree-greedy", "final at stage"]
    return {"access": markdown_table(heads, access), "overlap": markdown_table(heads_again, again)}


def _show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    cells = []
    for one in rows:
        shares = (one["recall"], one["first_to_top"]["0.03"], one["all_to_top"]["0.05"])
        shares += (one["prefix_overlap"], one["total_overlap"])
        saved = " ".join(f"{share:.1%}" for share in one["saved"].values())
        cells.append([one["embedder"], one["index"], *(f"{share:.1%}" for share in shares), saved])
    show(("embedder", "index", "recall", "first to 3 %", "all to 5 %", "prefix", "total", "saved"), cells, title)


if __name__ == "__main__":
    main()
