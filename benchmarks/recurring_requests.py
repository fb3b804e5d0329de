"""Requests that recur by Zipf's law, over passages of generated worlds or of a data set. Imports no torch."""

from pathlib import Path
from random import Random

from chunkweave.calibration.questions import Example
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.simulator.workloads import recurring
from chunkweave_lab.worlds.world import world_requests

_CANDIDATES = 8
"""Passages that a retrieval would rank for a question about a world, of which it returns k."""


def world_questions(k: int, *, questions: int, worlds: int, seed: int) -> list[Example]:
    """`questions` different questions about `worlds` generated worlds in turn; needed passages rank first."""
    rng = Random(f"ranks {seed}")
    examples = []
    for request in world_requests(questions, max(k, _CANDIDATES), seed=seed, worlds=worlds):
        others = [place for place in range(len(request.chunks)) if place not in request.needed]
        ranked = [*request.needed, *rng.sample(others, len(others))]
        chunks = tuple(request.chunks[place] for place in ranked)
        examples.append(Example(request.question, chunks, request.answers, str(request.kind)))
    return examples


def zipf_worlds(count: int, k: int, *, questions: int, worlds: int, exponent: float, seed: int) -> list[Example]:
    """`count` requests over `k` passages of generated worlds, of `questions` that come again by Zipf's law."""
    examples = world_questions(k, questions=questions, worlds=worlds, seed=seed)
    return list(recurring(examples, count, top_k=k, exponent=exponent, seed=seed))


def dataset_requests(file: Path, count: int, k: int, *, exponent: float, seed: int) -> list[Example]:
    """`count` requests over `k` passages of a data set's questions, which come again by Zipf's law."""
    return list(recurring(load_dataset(file, seed=seed), count, top_k=k, exponent=exponent, seed=seed))
