"""Prefill beside the search: non-overlapping search time and TTFT with and without speculation (RAGCache Table 3).

    python benchmarks/speculation.py --index-file ivf.faiss --out speculation.json

A million synthetic vectors (clustered_index.py); vector n represents passage n modulo `--texts`, so fewer texts are
needed. Questions come one at a time, and both contenders answer each, alternating; each contender has its own engine
and store. Without speculation a search has no stages. The search ratio is the share of the lists that is searched.
Weights are random, so answers are meaningless.

Non-overlapping search time is the part of the search in which nothing was generated for its final result. TTFT counts
from the question to the first token. Under full load requests arrive, Poisson, at `--load` times the rate that the
engine can serve; both contenders get the same arrivals, in rounds that alternate.
"""

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_program import parse, settings, show, write
from clustered_index import World, at_ratio, open_index
from docs_tables import markdown_table
from load_generator import LoadResult, poisson_arrivals, run_load
from numpy.typing import NDArray
from passages import passages
from rich.console import Console
from rich.progress import Progress

from chunkweave import AsyncEngine, AsyncRagPipeline, Chunk, Engine, RagAnswer, SamplingParams, StoreConfig
from chunkweave.models.loading import load_shape
from chunkweave.retrieval.faiss_indexes import FaissIndex, import_faiss
from chunkweave.retrieval.indexes import Hits, timed_stages
from chunkweave.retrieval.retrievers import RetrievalStage, RetrievedChunk

WITH, WITHOUT = "speculation", "without"
LIST_HEADS = ["search ratio", "search", "not overlapped: with", "without", "less by", "TTFT with", "without", "sooner"]
LOAD_HEADS = ["round", "requests/s", "TTFT with", "without", "with / without", "started", "deferred"]


class VectorCorpus:
    """Vectors that represent passages; a question is the number of its vector."""

    def __init__(self, index: FaissIndex, questions: NDArray[np.float32], texts: Sequence[str]) -> None:
        self.index = index
        self._questions = questions
        self._texts = texts

    def __len__(self) -> int:
        return len(self.index)

    def embed_query(self, question: str) -> NDArray[np.float32]:
        return self._questions[int(question.split()[-1])]

    def search(self, question: NDArray[np.float32], k: int) -> tuple[RetrievedChunk, ...]:
        return self._retrieved(self.index.search(question, k))

    def search_stages(self, question: NDArray[np.float32], k: int) -> Iterator[RetrievalStage]:
        for stage, seconds in timed_stages(self.index, question, k):
            chunks = self._retrieved(stage.hits)
            yield RetrievalStage(chunks, stage.number, stage.last, seconds, stage.distances, stage.extra_distances)

    def _retrieved(self, hits: Hits) -> tuple[RetrievedChunk, ...]:
        found = zip(hits.rows, hits.scores, strict=True)
        return tuple(
            RetrievedChunk(Chunk(self._texts[row % len(self._texts)]), f"v{row}", 0, rank, score, "", {})
            for rank, (row, score) in enumerate(found, start=1)
        )


@dataclass
class Contender:
    """A pipeline with its own engine and store, and its answers one at a time."""

    name: str
    batching: AsyncEngine
    pipeline: AsyncRagPipeline
    sampling: SamplingParams
    method: str
    answers: list[RagAnswer] = field(default_factory=list)

    async def ask(self, question: int) -> RagAnswer:
        return await self.pipeline.answer(f"Which cargo is number {question}", **self._how)

    async def tokens(self, question: int) -> AsyncIterator[int]:
        """One for each piece of an answer."""
        async for event in self.pipeline.stream(f"Which cargo is number {question}", **self._how):
            if event.retrieved is None and event.answer is None:
                yield 1

    @property
    def _how(self) -> dict[str, Any]:
        return {"sampling": self.sampling, "method": self.method}


async def one_at_a_time(contenders: Sequence[Contender], questions: Sequence[int], progress: Progress) -> None:
    """Every question to every contender, alternating."""
    task = progress.add_task("one at a time", total=len(questions))
    for number, question in enumerate(questions):
        for turn in range(len(contenders)):
            one = contenders[(number + turn) % len(contenders)]
            one.answers.append(await one.ask(question))
        progress.advance(task)
    progress.remove_task(task)


def ratio_row(ratio: float, contenders: Sequence[Contender]) -> dict[str, Any]:
    """The row of one search ratio."""
    ours, plain = (list(one.answers) for one in contenders)
    row: dict[str, Any] = {"search_ratio": ratio, "questions": len(ours)}
    for name, answers in ((WITH, ours), (WITHOUT, plain)):
        row[name] = {
            "search_mean_s": statistics.fmean(answer.search_s for answer in answers),
            "non_overlapping_mean_s": statistics.fmean(answer.non_overlapping_search_s for answer in answers),
            "ttft_mean_s": statistics.fmean(answer.ttft_s for answer in answers),
            "ttft_median_s": statistics.median(answer.ttft_s for answer in answers),
            "prefill_mean_s": statistics.fmean(answer.report.ttft_s - answer.report.queue_s for answer in answers),
        }
    pipelined = [answer.pipelining for answer in ours if answer.pipelining is not None]
    row["matched"] = statistics.fmean(one.matched for one in pipelined)
    row["started"] = sum(one.started for one in pipelined)
    row["terminated"] = sum(one.terminated for one in pipelined)
    row["less_search"] = row[WITHOUT]["non_overlapping_mean_s"] / row[WITH]["non_overlapping_mean_s"]
    row["speedup"] = row[WITHOUT]["ttft_mean_s"] / row[WITH]["ttft_mean_s"]
    row["speedup_median"] = statistics.median(b.ttft_s / a.ttft_s for a, b in zip(ours, plain, strict=True))
    return row


def service_s(answers: Sequence[RagAnswer]) -> float:
    """Mean seconds that a request occupies the engine."""
    reports = [answer.report for answer in answers]
    return statistics.fmean(report.ttft_s - report.queue_s + report.decode_s for report in reports)


async def load_row(contenders: Sequence[Contender], turn: int, first: int, count: int, rate: float) -> dict[str, Any]:
    """One round under load: the same requests at the same times for both, one contender after the other."""
    arrivals = poisson_arrivals(count, rate, seed=turn)
    row: dict[str, Any] = {"round": turn + 1, "rate_per_s": rate, "requests": count}
    for place in range(len(contenders)):
        one = contenders[(turn + place) % len(contenders)]
        before = one.pipeline.counts
        result: LoadResult = await run_load(lambda number, one=one: one.tokens(first + number), arrivals)
        after = one.pipeline.counts
        row[one.name] = result.as_dict() | {
            "started": after.started - before.started,
            "deferred": after.deferred - before.deferred,
            "preempted": one.batching.stats.speculations_preempted,
        }
    row["with_of_without"] = row[WITH]["ttft_mean_s"] / row[WITHOUT]["ttft_mean_s"]
    return row


async def measure(arguments: argparse.Namespace, progress: Progress) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows, and those under load."""
    loaded = load_shape(arguments.shape, seed=arguments.seed)
    world = World("ivf", arguments.vectors, lists=arguments.lists, seed=arguments.seed)
    index = open_index(world, arguments.index_file).index
    in_all = arguments.warm_up + arguments.questions * len(arguments.ratios) + arguments.rounds * arguments.requests
    corpus = VectorCorpus(
        index, world.questions(in_all), passages(loaded.tokenizer, arguments.texts, arguments.chunk_tokens)
    )
    numbers = iter(range(in_all))
    engines = [Engine(loaded, store=StoreConfig(int(arguments.budget * 2**30))) for _ in (WITH, WITHOUT)]
    contenders = []
    for name, engine in zip((WITH, WITHOUT), engines, strict=True):
        batching = AsyncEngine(engine)
        pipeline = AsyncRagPipeline(
            batching,
            corpus,
            top_k=arguments.top_k,
            speculate=name == WITH,
            max_searches=arguments.searches,
        )
        sampling = SamplingParams(max_new_tokens=arguments.new_tokens)
        contenders.append(Contender(name, batching, pipeline, sampling, arguments.method))
    rows = []
    try:
        await one_at_a_time(contenders, [next(numbers) for _ in range(arguments.warm_up)], progress)
        for ratio in arguments.ratios:
            corpus.index = at_ratio(index, ratio, arguments.stages)
            for one in contenders:
                one.answers.clear()
            await one_at_a_time(contenders, [next(numbers) for _ in range(arguments.questions)], progress)
            rows.append(ratio_row(ratio, contenders))
        rate = arguments.load / service_s(contenders[1].answers)
        corpus.index = at_ratio(index, arguments.load_ratio, arguments.stages)
        loaded_rows = []
        task = progress.add_task("under load", total=arguments.rounds)
        for turn in range(arguments.rounds):
            first = in_all - (arguments.rounds - turn) * arguments.requests
            loaded_rows.append(await load_row(contenders, turn, first, arguments.requests, rate))
            progress.advance(task)
    finally:
        for one in contenders:
            one.batching.close()
    ratios = [row["with_of_without"] for row in loaded_rows]
    load = {"search_ratio": arguments.load_ratio, "load": arguments.load, "rows": loaded_rows}
    return rows, {"under_load": load | {"with_of_without_median": statistics.median(ratios)} if ratios else load}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--lists", type=int, default=1024)
    parser.add_argument("--index-file", type=Path, help="where the index is kept, and taken from")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=6, help="RAGCache §7: answers have 6 tokens on average")
    parser.add_argument("--method", default="prefix")
    parser.add_argument("--budget", type=float, default=1.0, help="GiB of each store")
    parser.add_argument("--warm-up", type=int, default=5, help="questions that do not count")
    parser.add_argument("--questions", type=int, default=25, help="at each search ratio")
    parser.add_argument("--load", type=float, default=1.3, help="of what the engine can serve")
    parser.add_argument("--load-ratio", type=float, default=0.25, help="search ratio under load")
    parser.add_argument("--requests", type=int, default=30, help="of a round under load")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--searches", type=int, default=1, help="at a time")
    parser.add_argument("--threads", type=int, default=1, help="of the model, and of a search")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    torch.set_num_threads(arguments.threads)
    import_faiss().omp_set_num_threads(arguments.threads)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows, more = asyncio.run(measure(arguments, progress))
    show(LIST_HEADS, _ratio_cells(rows))
    show(LOAD_HEADS, _load_cells(more["under_load"]))
    write("speculation", arguments, settings(arguments, "seed", "index_file"), rows, more)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation."""
    return {
        "speculation": markdown_table(LIST_HEADS, _ratio_cells(result["rows"])),
        "speculation-load": markdown_table(LOAD_HEADS, _load_cells(result["under_load"])),
    }


def _ratio_cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            f"{row['search_ratio']:.1%}",
            _ms(row[WITHOUT]["search_mean_s"]),
            _ms(row[WITH]["non_overlapping_mean_s"]),
            _ms(row[WITHOUT]["non_overlapping_mean_s"]),
            f"{row['less_search']:.1f}x",
            _ms(row[WITH]["ttft_mean_s"]),
            _ms(row[WITHOUT]["ttft_mean_s"]),
            f"{row['speedup']:.2f}x",
        ]
        for row in rows
    ]


def _load_cells(load: dict[str, Any]) -> list[list[str]]:
    return [
        [
            str(row["round"]),
            f"{row['rate_per_s']:.2f}",
            f"{row[WITH]['ttft_mean_s']:.2f} s",
            f"{row[WITHOUT]['ttft_mean_s']:.2f} s",
            f"{row['with_of_without']:.2f}",
            str(row[WITH]["started"]),
            str(row[WITH]["deferred"]),
        ]
        for row in load["rows"]
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    main()
