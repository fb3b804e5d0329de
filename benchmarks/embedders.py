"""How often an embedder finds the paragraph that a question was written about.

    python benchmarks/embedders.py --dataset xquad.en.json --embedders hashed-ngrams,minilm --out embedders.json

Every paragraph of a SQuAD 1.1 file is a candidate for every question; recall@k is the share of questions whose own
paragraph is among the k best. Seconds are for embedding all paragraphs and all questions.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from bench_program import parse, show, write
from docs_tables import markdown_table

from chunkweave.retrieval.embedders import make_embedder
from chunkweave_lab.datasets import load_dataset

RANKS = (1, 3, 6)


def measured(name: str, questions: list[str], own: list[int], paragraphs: list[str]) -> dict[str, Any]:
    """One embedder's row."""
    embedder = make_embedder(name)
    started = time.perf_counter()
    vectors = embedder.embed_documents(paragraphs)
    between = time.perf_counter()
    queries = np.stack([embedder.embed_query(question) for question in questions])
    finished = time.perf_counter()
    scores = queries @ vectors.T
    better = (scores > scores[np.arange(len(own)), own][:, np.newaxis]).sum(axis=1)
    recall = {f"recall_at_{rank}": float((better < rank).mean()) for rank in RANKS}
    seconds = {"paragraphs_s": between - started, "questions_s": finished - between}
    return {"embedder": name, "dimension": embedder.dimension, **recall, **seconds}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--embedders", default="hashed-ngrams")
    arguments = parse(parser)
    examples = load_dataset(arguments.dataset, squad_chunks=1)
    paragraphs = list(dict.fromkeys(example.chunks[0].text for example in examples))
    own = [paragraphs.index(example.chunks[0].text) for example in examples]
    questions = [example.question for example in examples]
    rows = [measured(name, questions, own, paragraphs) for name in arguments.embedders.split(",")]
    cells = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    show(list(rows[0]), cells, f"{len(questions)} questions, {len(paragraphs)} paragraphs")
    sizes = {"questions": len(questions), "paragraphs": len(paragraphs)}
    write("embedders", arguments, {"dataset": arguments.dataset.name, "embedders": arguments.embedders, **sizes}, rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    heads = ["embedder", "first", *(f"best {rank}" for rank in RANKS[1:])]
    cells = [[f"`{row['embedder']}`", *(f"{row[f'recall_at_{rank}']:.3f}" for rank in RANKS)] for row in result["rows"]]
    return {"embedders": markdown_table(heads, cells)}


if __name__ == "__main__":
    main()
